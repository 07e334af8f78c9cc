"""What a device run measured as facts of a catalog device: level ``measured here``, which rules over every other.

GEMM curves, for the training estimator, and scales of operators, for the serving estimator. The memory bandwidth of a
device stays the peak of the datasheet, from which calibrated shares are taken; a measured copy rate in its place would
count what is lost twice. It moves the scale of memory instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshplan.catalogs.efficiency import (
    ATTENTION_CLASSES,
    BANDWIDTH_FIELD,
    GEMM_PRECISIONS,
    RATE_FIELD,
    SATURATION_FIELD,
    SCALE_FIELD,
)
from meshplan.catalogs.facts import FIELDS, Fact
from meshplan.catalogs.hardware import Evidence, EvidenceLevel
from meshplan.catalogs.measurements.types import Fit, ProfileRun, Spread

CURVE_MODEL = "gemm_curve."
# A curve that misses half of the products left out by more than this says less of a device than its datasheet does.
MOST_HELD_OUT_ERROR = 0.25
_COEFFICIENTS = {
    RATE_FIELD: "rate_flops_per_s",
    BANDWIDTH_FIELD: "bandwidth_bytes_per_s",
    SATURATION_FIELD: "inner_saturation",
}


def gemm_facts(run: ProfileRun, fits: Iterable[Fit]) -> tuple[list[Fact], tuple[str, ...]]:
    """Three facts per precision that a run has a curve for, and the curves that predict too badly to be used."""
    facts: list[Fact] = []
    bad = []
    for fit in fits:
        precision = fit.model.removeprefix(CURVE_MODEL)
        if not fit.model.startswith(CURVE_MODEL) or precision not in GEMM_PRECISIONS:
            continue
        if fit.held_out_median > MOST_HELD_OUT_ERROR:
            bad.append(f"the curve of {precision} products: half of those left out are {fit.held_out_median:.0%} off")
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
    return facts, tuple(bad)


def scale_facts(
    run: ProfileRun, scales: Mapping[str, Spread], *, with_attention: bool
) -> tuple[list[Fact], tuple[str, ...]]:
    """One fact per class of operators, and the classes whose scale no device of that name could have.

    Args:
        run: the run that measured them.
        scales: result of :func:`meshplan.catalogs.surfaces.operator_scales.operator_scales`.
        with_attention: attention too, whose probe is torch's kernel and not the engine's.
    """
    sane = {field.name: field for field in FIELDS["device"]}
    facts, absurd = [], []
    for name, scale in scales.items():
        field = f"{SCALE_FIELD}.{name}"
        if name in ATTENTION_CLASSES and not with_attention:
            continue
        if not sane[field].low <= scale.value <= sane[field].high:
            absurd.append(f"{name}: {scale.value:.3g} times the predicted time")
            continue
        evidence = Evidence(
            level=EvidenceLevel.MEASURED,
            source=f"meshplan profile device, run {run.run_id} on {run.host}; over the times of the shipped surfaces",
            date=run.started_at[:10],
            num_samples=scale.n,
            low=scale.low,
            high=scale.high,
        )
        facts.append(Fact(field=field, value=scale.value, evidence=evidence))
    return facts, tuple(absurd)
