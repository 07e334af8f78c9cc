"""The fits of a device run: a GEMM curve per precision, and a latency–bandwidth line for host transfers.

Copies inside one memory get no line: their rate steps down at each cache, which two parameters cannot say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from meshplan.catalogs.measurements.types import Fit, Measurement
from meshplan.profiler.fitting.gemm_model import FittedGemm, GemmSamples, fit_gemm
from meshplan.profiler.fitting.lines import fit_alpha_beta

ELEMENT_BYTES = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
# Probes whose time is a latency plus bytes over a bandwidth.
LINE_PROBES = ("host_to_device", "device_to_host")


def device_fits(measurements: Iterable[Measurement]) -> list[Fit]:
    """Every fit that the measurements of one device are enough for."""
    found = list(measurements)
    return [*_gemm_fits(found), *_line_fits(found)]


def _gemm_fits(measurements: list[Measurement]) -> Iterator[Fit]:
    for dtype in dict.fromkeys(row.dtype for row in measurements if row.probe == "gemm"):
        rows = [row for row in measurements if row.probe == "gemm" and row.dtype == dtype]
        m, n, k, rate = np.array(
            [[*(row.parameters[name] for name in ("m", "n", "k")), row.spread.value] for row in rows], dtype=float
        ).T
        samples = GemmSamples(m=m, n=n, k=k, time_s=2.0 * m * n * k / rate)
        try:
            fit = fit_gemm(samples, element_bytes=ELEMENT_BYTES[dtype or "fp32"])
        except ValueError:
            continue  # a quick run has too few products
        yield _gemm_fit(rows[0].device or "", dtype or "", fit)


def _gemm_fit(device: str, dtype: str, fit: FittedGemm) -> Fit:
    return Fit(
        subject=device,
        model=f"gemm_curve.{dtype}",
        coefficients={
            "rate_flops_per_s": fit.rate_flops_per_s,
            "bandwidth_bytes_per_s": fit.bandwidth_bytes_per_s,
            "inner_saturation": fit.inner_saturation,
        },
        residual_median=fit.residual.median,
        residual_p90=fit.residual.p90,
        held_out_median=fit.held_out_error.median,
        held_out_p90=fit.held_out_error.p90,
        num_points=fit.num_samples,
        source="gemm probe, products of at least 256 in every direction",
    )


def _line_fits(measurements: list[Measurement]) -> Iterator[Fit]:
    for probe in LINE_PROBES:
        rows = [row for row in measurements if row.probe == probe]
        sizes = [float(row.parameters["size_bytes"]) for row in rows]
        times = [size / row.spread.value for size, row in zip(sizes, rows, strict=True)]
        fit = fit_alpha_beta(
            rows[0].device or "" if rows else "", sizes, times, source=f"{probe} probe", model=f"alpha_beta.{probe}"
        )
        if fit is not None:
            yield fit
