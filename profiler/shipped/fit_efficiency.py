"""Makes ``catalogs/seed/efficiency.yaml`` from a published table of matrix products.

Run by hand when the table or the model changes (the table is not part of meshplan)::

    python -m meshplan.profiler.shipped.fit_efficiency gemm.csv.gz catalogs/seed

The table has the columns ``device,dtype,m,n,k,time_s`` of :mod:`meshplan.catalogs.importers.kernel_tables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from meshplan.catalogs.importers.kernel_tables import read_gemm_table
from meshplan.profiler.fitting.gemm_model import FittedGemm, GemmSamples, fastest, fit_gemm
from meshplan.profiler.shipped.command import write_files

# Precision → (kernels of the table that compute it, bytes of one operand element). NVFP4 keeps one fp8 scale for each
# 16 elements: 0.5 + 1/16 bytes.
KERNELS: Mapping[str, tuple[tuple[str, ...], float]] = {
    "bf16": (("bfloat16",), 2.0),
    "fp8": (("fp8", "fp8_block"), 1.0),
    "nvfp4": (("nvfp4",), 0.5625),
}
# Below this the curve does not see k₀ at all.
_MIN_SATURATION = 0.5

HEADER = """\
# Efficiency of matrix products by device and precision, fitted to published kernel times (see NOTICE).
# Made by `python -m meshplan.profiler.shipped.fit_efficiency gemm.csv.gz catalogs/seed`; the model is described in
# profiler/fitting/gemm_model.py: time = ((2·⌈m⌉·⌈n⌉·(k + inner_saturation)/rate)⁴ + (bytes/bandwidth)⁴)^¼, for m, n, k
# ≥ 256 and times ≥ 20 µs. The bandwidth is a parameter of this model, not the memory's: it also pays for what small
# products waste. fp8 is the faster of per-tensor and 128×128-block scaled kernels for each shape, as a library would
# choose. Errors are |predicted/measured − 1| on a random fifth of the products, which the fit had not seen.

sources:
  aiconfigurator-gemm:
    level: fitted to published measurements
    date: 2026-11-21
    citation: >-
      Fitted to the GEMM times of TensorRT-LLM kernels published with AIConfigurator
      (https://github.com/ai-dynamo/aiconfigurator, Apache-2.0)

# A precision that shares the kernels of another one.
same_kernels: {fp16: bf16, mxfp8: fp8}

# Devices with the same compute dies as a measured one; memory and power differ.
same_silicon:
  a100-sxm-40gb: a100-sxm-80gb
  a800-sxm-80gb: a100-sxm-80gb
  gh200: h100-sxm-80gb
  h100-sxm-96gb: h100-sxm-80gb

# Of these, boards with a lower power limit than the measured one: rate × √(limit/limit of the measured board), because
# dynamic power goes with clock × voltage² and voltage can follow the clock only part of the way (500 W of 700 W).
power_limited:
  h100-sxm-96gb: 0.845

gemm_curves:
"""


def files(gemm_table: Path) -> dict[str, str]:
    """Efficiency of matrix products by device and precision, from a CSV of products."""
    tables = load(gemm_table)
    lines = []
    for device in sorted({device for device, _ in tables}):
        lines.append(f"  {device}:\n")
        for precision, (kernels, element_bytes) in KERNELS.items():
            found = [tables[device, kernel] for kernel in kernels if (device, kernel) in tables]
            if found:
                samples = fastest(*found) if len(found) > 1 else found[0]
                lines.append(f"    {precision}: {_row(fit_gemm(samples, element_bytes=element_bytes))}\n")
    return {"efficiency.yaml": HEADER + "".join(lines)}


def load(path: Path) -> dict[tuple[str, str], GemmSamples]:
    """(device, dtype) → measured products."""
    columns: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for row in read_gemm_table(path):
        columns.setdefault((row["device"], row["dtype"]), []).append((row["m"], row["n"], row["k"], row["time_s"]))
    tables = {}
    for key, rows in columns.items():
        m, n, k, time_s = np.array(rows, dtype=float).T
        tables[key] = GemmSamples(m=m, n=n, k=k, time_s=time_s)
    return tables


def _row(fit: FittedGemm) -> str:
    saturation = fit.inner_saturation if fit.inner_saturation >= _MIN_SATURATION else 0.0
    error = fit.held_out_error
    return (
        f"{{rate: {fit.rate_flops_per_s / 1e12:.4g} TFLOP/s, bandwidth: {fit.bandwidth_bytes_per_s / 1e9:.4g} GB/s, "
        f"inner_saturation: {saturation:.0f}, num_samples: {fit.num_samples}, "
        f"median_error: {error.median:.3f}, p90_error: {error.p90:.3f}}}"
    )


if __name__ == "__main__":
    write_files(files)
