"""Fits a :class:`~meshplan.catalogs.gemm_surfaces.GemmSurface` to measured products, and makes the shipped ones.

First the four parameters of the formula, then the corrections (:mod:`meshplan.profiler.surface_fit`).

Run by hand to make the shipped file::

    python -m meshplan.profiler.gemm_surface gemm.csv.gz AICONFIGURATOR_CORE > catalogs/seed/gemm_surfaces.json

The folder adds the devices that the CSV has not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshplan.catalogs.gemm_surfaces import GemmSurface, base_time_s, surface_row
from meshplan.catalogs.importers.perf_tables import SYSTEMS, data_folder, fastest, newest_table, read_perf_table, where
from meshplan.profiler.fit_shipped import load
from meshplan.profiler.gemm_model import HELD_OUT_FRACTION, GemmSamples
from meshplan.profiler.least_squares import FloatArray, fit_positive, held_out, relative_error
from meshplan.profiler.surface_fit import fit_grid

# Bytes of an element that moves: weights of the weight-only kernels are smaller than their 16-bit activations, and
# in small products, where bytes decide, weights are most of them.
ELEMENT_BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
    "int8_wo": 1.0,
    "int4_wo": 0.5,
    "sq": 1.0,
}
SOURCE = (
    "Fitted to the GEMM times of TensorRT-LLM kernels published with AIConfigurator "
    "(https://github.com/ai-dynamo/aiconfigurator, Apache-2.0)"
)
KNOTS_PER_OCTAVE = 1.0
_START = (2e12, 60.0, 3e-6)  # B, k₀, t₀; R starts from the fastest products


def fit_surface(samples: GemmSamples, *, device: str, kernel: str, seed: int = 0) -> GemmSurface:
    """Fit a surface, and say how well a fit predicts the fifth of the products that it has not seen.

    Args:
        samples: measured products of any size, at least two values in each direction.
        device: slug.
        kernel: name of the kernel, a key of :data:`ELEMENT_BYTES`.
        seed: of the random fifth.
    """
    hidden = held_out(len(samples), fraction=HELD_OUT_FRACTION, seed=seed)
    seen, unseen = samples.where(~hidden), samples.where(hidden)
    trial = _fitted(seen, samples, device, kernel)
    error = relative_error(trial.time_s(unseen.m, unseen.n, unseen.k), unseen.time_s)
    final = _fitted(samples, samples, device, kernel)
    return GemmSurface(
        device=device,
        kernel=kernel,
        element_bytes=final.element_bytes,
        base=final.base,
        knots=final.knots,
        corrections=final.corrections,
        num_samples=len(samples),
        median_error=error.median,
        p90_error=error.p90,
        source=SOURCE,
    )


def _fitted(samples: GemmSamples, grid: GemmSamples, device: str, kernel: str) -> GemmSurface:
    element_bytes = ELEMENT_BYTES[kernel]

    def base(parameters: FloatArray) -> FloatArray:
        return base_time_s(parameters, samples.m, samples.n, samples.k, element_bytes=element_bytes)

    start = np.array([float(np.quantile(samples.flops_per_s, 0.95)), *_START])
    parameters = fit_positive(base, samples.time_s, start)
    knots = (_knots(grid.m), _knots(grid.n), _knots(grid.k))
    residuals = np.log(samples.time_s / base(parameters))
    rate, bandwidth, saturation, launch_s = (float(parameter) for parameter in parameters)
    return GemmSurface(
        device=device,
        kernel=kernel,
        element_bytes=element_bytes,
        base=(rate, bandwidth, saturation, launch_s),
        knots=knots,
        corrections=fit_grid(knots, (samples.m, samples.n, samples.k), residuals)[0],
        num_samples=len(samples),
        median_error=0.0,
        p90_error=0.0,
        source=SOURCE,
    )


def _knots(values: FloatArray) -> FloatArray:
    """The measured values thinned to one per octave, with the value one above each where it was measured.

    The table has pairs such as 256 and 257: both sides of a tile's edge, where the time jumps.
    """
    distinct = np.unique(values)
    chosen = [distinct[0]]
    for value in distinct[1:]:
        if np.log2(value / chosen[-1]) >= 1.0 / KNOTS_PER_OCTAVE - 1e-9:
            chosen.append(value)
    if chosen[-1] != distinct[-1]:
        chosen.append(distinct[-1])
    beyond = np.intersect1d(np.array(chosen) + 1.0, distinct)
    return np.union1d(chosen, beyond)


def wheel_tables(folder: Path) -> dict[tuple[str, str], GemmSamples]:
    """(device, kernel) → products of TensorRT-LLM in the wheel's tables."""
    tables = {}
    for system, device in SYSTEMS.items():
        path = newest_table(folder, system, "gemm", "trtllm", "gemm_perf")
        if path is None:
            continue
        columns = read_perf_table(path, texts=("gemm_dtype",), counts=("m", "n", "k"))
        for kernel in ELEMENT_BYTES:
            found = where(columns, columns["gemm_dtype"] == kernel)
            if len(found["time_s"]):
                found = fastest(found, ("m", "n", "k"))
                tables[device, kernel] = GemmSamples(m=found["m"], n=found["n"], k=found["k"], time_s=found["time_s"])
    return tables


def main(arguments: Sequence[str]) -> None:
    """Write the JSON text to standard output."""
    tables = load(Path(arguments[0]))
    known = {device for device, _ in tables}
    newer = wheel_tables(data_folder(Path(arguments[1])))
    tables |= {key: samples for key, samples in newer.items() if key[0] not in known}
    rows = [
        surface_row(fit_surface(samples, device=device, kernel=kernel))
        for (device, kernel), samples in sorted(tables.items())
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    sys.stdout.write(f'{{"source": {json.dumps(SOURCE)},\n"surfaces": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
