"""How well the shipped models predict kernel times that they have not seen, beside a naive roofline.

    python tests/benchmarks/kernel_fits.py gemm.csv.gz nccl.csv.gz

Each model is fitted to a random 80 % of the products of a device and kernel and asked for the rest; under "new m", "new
n" and "new k" to all but every fifth size of one direction and asked for those sizes. The roofline is
max(FLOPs/peak, bytes/bandwidth) from the datasheet. Collectives: each of the 21 sizes of a curve is predicted from
the other 20, by an alpha-beta line, by interpolating between its neighbours, by a smooth curve (what ships), and by
bytes over the bus bandwidth.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.importers.kernel_tables import read_collective_table
from meshplan.catalogs.surfaces.gemm import GemmSurface
from meshplan.profiler.fitting.curve_fit import left_out_error
from meshplan.profiler.fitting.gemm_model import HELD_OUT_FRACTION, OUTPUT_BYTES, GemmSamples, fit_gemm
from meshplan.profiler.fitting.least_squares import RelativeError, held_out, relative_error
from meshplan.profiler.fitting.lines import fit_alpha_beta
from meshplan.profiler.shipped.fit_efficiency import load
from meshplan.profiler.shipped.fit_gemm import ELEMENT_BYTES, fit_surface

PEAK = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int8_wo": "bf16", "int4_wo": "bf16",
        "sq": "int8"}  # fmt: skip

EVERY_FIFTH = slice(2, -1, 5)


def main(gemm: Path, nccl: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(f"{folder}/catalog.sqlite")
        print_gemm(catalog, gemm)
        print_collectives(nccl)


def print_gemm(catalog: Catalog, path: Path) -> None:
    print("Matrix products, held-out error median / 90th percentile in %")
    print(f"{'device':16}{'kernel':10}{'products':>9} | {'roofline':>13}{'surface':>13} | m, n, k >= 256 and >= 20 us: "
          f"{'3 parameters':>13}{'surface':>13} | {'new m':>13}{'new n':>13}{'new k':>13}{'cpu s':>7}")  # fmt: skip
    for (device, kernel), samples in sorted(load(path).items()):
        begin = time.process_time()
        hidden = samples.where(held_out(len(samples), fraction=HELD_OUT_FRACTION, seed=0))
        seen = samples.where(~held_out(len(samples), fraction=HELD_OUT_FRACTION, seed=0))
        surface = fit_surface(seen, device=device, kernel=kernel)
        peaks = catalog.device(device).peak_flops_per_s
        if PEAK[kernel] in peaks:
            bandwidth = catalog.device(device).memory_bandwidth_bytes_per_s
            roofline = shown(relative_error(naive(hidden, peaks[PEAK[kernel]], bandwidth, kernel), hidden.time_s))
        else:
            roofline = "no peak"
        large = hidden.training_size()
        three = fit_gemm(samples, element_bytes=ELEMENT_BYTES[kernel])
        print(
            f"{device:16}{kernel:10}{len(samples):9} | {roofline:>13}{shown(error(surface, hidden)):>13} | "
            f"{'':29}{shown(three.held_out_error):>13}{shown(error(surface, large)):>13} | "
            + "".join(f"{shown(new_sizes_error(samples, axis, device, kernel)):>13}" for axis in ("m", "n", "k"))
            + f"{time.process_time() - begin:7.1f}",
            flush=True,
        )


def error(surface: GemmSurface, samples: GemmSamples) -> RelativeError:
    return relative_error(surface.time_s(samples.m, samples.n, samples.k), samples.time_s)


def new_sizes_error(samples: GemmSamples, axis: str, device: str, kernel: str) -> RelativeError:
    """Error at sizes of one direction that a fit has not seen; the first and the last size stay."""
    sizes = getattr(samples, axis)
    hidden = np.isin(sizes, np.unique(sizes)[EVERY_FIFTH])
    return error(fit_surface(samples.where(~hidden), device=device, kernel=kernel), samples.where(hidden))


def naive(samples: GemmSamples, peak: float, bandwidth: float, kernel: str) -> np.ndarray:
    width = ELEMENT_BYTES[kernel]
    moved = width * (samples.m * samples.k + samples.k * samples.n) + OUTPUT_BYTES * samples.m * samples.n
    return np.maximum(2.0 * samples.m * samples.n * samples.k / peak, moved / bandwidth)


def print_collectives(path: Path) -> None:
    curves = defaultdict(list)
    for row in read_collective_table(path):
        key = (row["device"], row["collective"], row["num_devices"], row["dtype"])
        curves[key].append((row["size_bytes"], row["time_s"]))
    errors: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (device, collective, num_devices, dtype), points in curves.items():
        sizes, times = np.array(sorted(points), dtype=float).T
        subject = f"{device} {collective} {num_devices} {dtype}"
        fit = fit_alpha_beta(subject, sizes, times, source="nccl table")
        row = errors[device, collective]
        row["alpha-beta"].append(fit.held_out_median)
        middle = range(1, len(sizes) - 1)
        between = [np.exp(np.interp(np.log(sizes[i]), np.log(np.delete(sizes, i)), np.log(np.delete(times, i))))
                   for i in middle]  # fmt: skip
        row["interpolated"].append(relative_error(np.array(between), times[1:-1]).median)
        row["smooth"].append(left_out_error(sizes, times).median)
        row["naive"].append(relative_error(sizes * times[-1] / sizes[-1], times).median)
    print("\nCollectives of one node, held-out median error in %, mean over group sizes and dtypes")
    print(f"{'device':18}{'collective':16}{'curves':>7}{'bytes/bandwidth':>17}{'alpha-beta':>12}{'interpolated':>14}"
          f"{'smooth':>8}{'worst':>8}")  # fmt: skip
    for (device, collective), row in sorted(errors.items()):
        cells = [100 * float(np.mean(row[name])) for name in ("naive", "alpha-beta", "interpolated", "smooth")]
        worst = 100 * max(row["smooth"])
        print(f"{device:18}{collective:16}{len(row['naive']):7}{cells[0]:17.1f}{cells[1]:12.1f}{cells[2]:14.1f}"
              f"{cells[3]:8.1f}{worst:8.1f}")  # fmt: skip


def shown(value: RelativeError) -> str:
    return f"{100 * value.median:.1f} / {100 * value.p90:.1f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
