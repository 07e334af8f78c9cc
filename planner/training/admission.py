"""Which figures of the memory a plan states, and by which of them it is admitted.

A search takes only what stays within the device's memory by the *safe* bound, which no measured run exceeded. Whoever
pins choices may know that they run: where nothing with his pins stays within the bound, what stays within it by the
*typical* figure, the expected peak, is admitted, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Any

from meshplan.catalogs.units import format_bytes
from meshplan.planner.core.plan import Interval
from meshplan.planner.training.estimator.priced import Priced
from meshplan.planner.training.problem.problem import TrainingProblem

# Of 363 measured peaks, each source held out, 5 % lay below this share of the typical figure (1 % below 0.68). Since
# the moments of a step are told apart it is 5 % below 0.84 (`tests/benchmarks/training_memory.py`); the wider is kept.
PEAK_AT_LEAST = 0.82


class Admission(StrEnum):
    """Which figure of the memory stays within the limit."""

    SAFE = "safe bound"
    TYPICAL = "typical figure"
    NONE = "neither"


# How a measured run is admitted whose row leaves its recompute unsaid, and that only recompute lets in.
WITH_RECOMPUTE = "recompute that the row leaves unsaid"


def peak_interval(typical_bytes: float, safe_bytes: float) -> Interval:
    """The expected peak of the fullest rank, and the range in which it is measured, up to the safe bound."""
    return Interval(value=typical_bytes, low=typical_bytes * PEAK_AT_LEAST, high=safe_bytes)


def admission(problem: TrainingProblem, priced: Priced) -> Admission:
    """The strictest figure by which every rank stays within the problem's limit."""
    return strictest([(priced.safe_bytes, priced.typical_bytes, problem.limits.memory_bytes)])


def strictest(ranks: Iterable[tuple[float, float, float]]) -> Admission:
    """The strictest figure by which every rank stays within its own limit.

    Args:
        ranks: safe bound, typical figure and limit of each that differs, bytes.
    """
    ranks = list(ranks)
    if all(safe <= limit for safe, _, limit in ranks):
        return Admission.SAFE
    return Admission.TYPICAL if all(typical <= limit for _, typical, limit in ranks) else Admission.NONE


def pinned_report(figure: Admission, *, safe_bytes: float, limit_bytes: float) -> dict[str, Any]:
    """The ``solution`` of a plan whose choices are all pinned.

    Args:
        figure: by which it fits.
        safe_bytes: bound of the rank that comes closest to its limit.
        limit_bytes: of that rank.
    """
    fits = figure is not Admission.NONE
    report = {"status": "feasible" if fits else "infeasible", "solver": "none: one configuration", "oom": not fits}
    if not fits:
        report["binding_constraint"] = f"device memory: {shortage_text(safe_bytes, limit_bytes)}"
    return report | admitted_by(figure)


def shortage_text(safe_bytes: float, limit_bytes: float) -> str:
    """By how much the worst rank exceeds its device: ``106.3 GiB more than 78.4 GiB on the worst rank``."""
    return f"{format_bytes(safe_bytes - limit_bytes)} more than {format_bytes(limit_bytes)} on the worst rank"


def admitted_by(figure: Admission) -> dict[str, str]:
    """What a plan says where its pins stay within the memory by the typical figure alone."""
    return {"admitted_by": figure.value} if figure is Admission.TYPICAL else {}


def by_typical_figure(problem: TrainingProblem) -> TrainingProblem:
    """The same question with the expected peak for the safe bound."""
    calibration = problem.calibration
    memory = replace(calibration.memory, safe_factor=1.0, activation_safe_factor=None, safe_fixed_bytes=0.0)
    return replace(problem, calibration=replace(calibration, memory=memory))
