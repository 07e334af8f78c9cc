"""Measured GEMM curves as facts of a catalog device: level ``measured here``, which rules over every other.

Only the curves are handed on. The memory bandwidth of a device means the peak of the datasheet, from which calibrated
shares are taken; a measured copy rate in its place would count what is lost twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshplan.catalogs.efficiency import BANDWIDTH_FIELD, GEMM_PRECISIONS, RATE_FIELD, SATURATION_FIELD
from meshplan.catalogs.facts import Fact
from meshplan.catalogs.hardware import Evidence, EvidenceLevel
from meshplan.catalogs.measured import Fit, ProfileRun

CURVE_MODEL = "gemm_curve."
_COEFFICIENTS = {
    RATE_FIELD: "rate_flops_per_s",
    BANDWIDTH_FIELD: "bandwidth_bytes_per_s",
    SATURATION_FIELD: "inner_saturation",
}


def gemm_facts(run: ProfileRun, fits: Iterable[Fit]) -> list[Fact]:
    """Three facts per precision that a run has a curve for."""
    facts = []
    for fit in fits:
        precision = fit.model.removeprefix(CURVE_MODEL)
        if not fit.model.startswith(CURVE_MODEL) or precision not in GEMM_PRECISIONS:
            continue
        evidence = Evidence(
            level=EvidenceLevel.MEASURED,
            source=f"meshplan profile device, run {run.run_id} on {run.host}; held-out error median "
            f"{fit.held_out_median:.1%}, 90th percentile {fit.held_out_p90:.1%}",
            date=run.started_at[:10],
            num_samples=fit.num_points,
        )
        facts += [
            Fact(field=f"{field}.{precision}", value=fit.coefficients[name], evidence=evidence)
            for field, name in _COEFFICIENTS.items()
        ]
    return facts
