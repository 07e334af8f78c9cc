"""How well the shipped surfaces of serving kernels predict times that a fit has not seen, beside a naive roofline.

    python tests/benchmarks/serving_kernels.py FOLDER_OF_AICONFIGURATOR_CORE [DEVICE]

Each line is one table: its held-out error (stored by the fit; of experts also on a random fifth of the shapes) and the
error of max(FLOPs/peak, bytes/bandwidth) from the datasheet, on all measurements. Collectives: each point from the
others, beside bytes over the bandwidth of the largest message. Then one line of Markdown per family and device.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.importers.perf_tables import SYSTEMS, data_folder
from meshplan.catalogs.surfaces.attention import PHASES, attention_formula, attention_surface
from meshplan.catalogs.surfaces.collectives import shipped_curves
from meshplan.catalogs.surfaces.experts import ELEMENT_BYTES, ExpertSurface, expert_formula, expert_surface
from meshplan.catalogs.surfaces.files import FRAMEWORKS
from meshplan.catalogs.surfaces.latent_attention import FRAMEWORKS as LATENT_FRAMEWORKS
from meshplan.catalogs.surfaces.latent_attention import latent_attention_surface, latent_formula
from meshplan.profiler.fitting.least_squares import relative_error
from meshplan.profiler.shipped.fit_attention import attention_points, attention_samples, latent_samples
from meshplan.profiler.shipped.fit_experts import shipped_samples

PEAK = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "w4a16_mxfp4": "bf16",
        "w4a8_mxfp4_mxfp8": "fp8", "int4_wo": "bf16"}  # fmt: skip
NO_LAUNCH = 1e-12


# Of the issue: median below 5 % and 90th percentile below 15 %; collectives below 10 % in the median.
GOAL_MEDIAN, GOAL_P90, GOAL_COLLECTIVE = 0.05, 0.15, 0.10
Summary = dict[tuple[str, str], list[tuple[float, float, float]]]  # roofline's median, held-out median and p90
SUMMARY: Summary = defaultdict(list)


def main(folder: Path, wanted: str | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        catalog = Catalog.open(f"{place}/catalog.sqlite")
        print(f"{'table':78}{'points':>8} | {'roofline':>13}{'surface':>13}{'new shapes':>13}   median / p90 in %")
        for system, device in sorted(SYSTEMS.items()):
            if wanted in (None, device):
                facts = catalog.device(device)
                print_attention(folder, system, device, facts)
                print_latent(folder, system, device, facts)
        print_experts(catalog, folder, wanted)
        print_collectives(wanted)
    print_summary()


def print_experts(catalog: Catalog, folder: Path, wanted: str | None) -> None:
    for device, framework, quantization, samples in shipped_samples(folder):
        if wanted not in (None, device):
            continue
        found = expert_surface(device, quantization, framework)
        assert isinstance(found, ExpertSurface)
        facts = catalog.device(device)
        peak = facts.peak_flops_per_s.get(PEAK[quantization], facts.peak_flops_per_s["bf16"])
        naive = np.array([peak, facts.memory_bandwidth_bytes_per_s, NO_LAUNCH, NO_LAUNCH, NO_LAUNCH])
        times = expert_formula(naive, samples.features(), element_bytes=ELEMENT_BYTES[quantization])
        row(f"experts {device} {framework} {quantization}", times, samples.time_s, found,
            shown(found.new_shape_median_error, found.new_shape_p90_error))  # fmt: skip


def print_collectives(wanted: str | None) -> None:
    for (device, collective, num_devices, library), curve in sorted(shipped_curves().items()):
        if wanted in (None, device):
            sizes, times = np.array(curve.sizes_bytes), np.array(curve.times_s)
            roofline = relative_error(sizes * times[-1] / sizes[-1], times).median
            SUMMARY[f"{library} {collective}", device].append((roofline, curve.median_error, 0.0))
            name = f"collective {library} {collective} {device} x{num_devices}"
            print(f"{name:78}{len(times):8} | {100 * roofline:13.1f}{100 * curve.median_error:13.1f}")


def print_summary() -> None:
    print("\n| family | device | tables | roofline | held-out median (worst) | p90 (worst) | meet the goal |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for (family, device), rows in SUMMARY.items():
        roofline, median, p90 = np.array(rows).T
        is_collective = not p90.any()
        met = median < GOAL_COLLECTIVE if is_collective else (median < GOAL_MEDIAN) & (p90 < GOAL_P90)
        tail = "" if is_collective else f"{100 * np.median(p90):.1f} ({100 * p90.max():.1f})"
        held_out = f"{100 * np.median(median):.1f} ({100 * median.max():.1f})"
        naive, met_text = f"{100 * np.median(roofline):.0f}", f"{met.sum()} of {len(rows)}"
        print("|", " | ".join((family, device, str(len(rows)), naive, held_out, tail, met_text)), "|")


def print_attention(folder: Path, system: str, device: str, facts: Device) -> None:
    for phase in PHASES:
        for framework in FRAMEWORKS:
            for (kv_dtype, windowed), _, columns in attention_samples(folder, system, phase, framework):
                found = attention_surface(device, phase, framework)
                assert found is not None
                naive = np.array([facts.memory_bandwidth_bytes_per_s, facts.peak_flops_per_s["bf16"], NO_LAUNCH])
                times = attention_formula(phase, kv_dtype)(naive, attention_points(columns, phase))
                name = f"attention {phase} {device} {framework} {kv_dtype}{' windowed' if windowed else ''}"
                row(name, times, columns["time_s"], found.tables[kv_dtype, windowed])


def print_latent(folder: Path, system: str, device: str, facts: Device) -> None:
    for phase in PHASES:
        for framework in LATENT_FRAMEWORKS:
            for dtype, _, columns in latent_samples(folder, system, phase, framework):
                found = latent_attention_surface(device, phase, framework)
                assert found is not None
                length = columns["isl"] + (columns["step"] if phase == "decode" else 0)
                naive = np.array([facts.memory_bandwidth_bytes_per_s, facts.peak_flops_per_s["bf16"], NO_LAUNCH])
                times = latent_formula(phase, dtype)(naive, (columns["batch_size"], columns["num_heads"], length))
                name = f"latent {phase} {device} {framework} {dtype}"
                row(name, times, columns["time_s"], found.tables[dtype])


def row(name: str, naive: np.ndarray, measured: np.ndarray, surface: Any, new_shapes: str = "") -> None:
    roofline = relative_error(naive, measured)
    family, *_ = name.split()
    device = next(device for device in SYSTEMS.values() if f" {device} " in name)
    phase = "" if family == "experts" else f" {name.split()[1]}"
    SUMMARY[family + phase, device].append((roofline.median, surface.median_error, surface.p90_error))
    held_out = shown(surface.median_error, surface.p90_error)
    beside = shown(roofline.median, roofline.p90)
    print(f"{name:78}{len(measured):8} | {beside:>13}{held_out:>13}{new_shapes:>13}", flush=True)


def shown(median: float, p90: float) -> str:
    return f"{100 * median:.1f} / {100 * p90:.1f}"


if __name__ == "__main__":
    main(data_folder(Path(sys.argv[1])), sys.argv[2] if len(sys.argv) > 2 else None)
