"""The result of ``meshplan validate --from-points``: what a few measured runs of one's own bring to other plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshplan.planner.validation.summary import MetricSummary, ValidatedRow, Validation

PEAK = "peak_memory_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointsResult:
    """The errors with and without the points.

    Args:
        validation: rows predicted with adapted constants; the points themselves have the status ``given``.
        without: the same rows' errors with the constants that the adaptation started from.
        num_curves: groups of runs that points were drawn from.
        started_from: the sets of constants that the adaptation started from, with their sources.
        drawn_from: what such a group is, in words.
        memory: how safe the bound of the memory is with and without the points; empty where no peak was judged.
    """

    validation: Validation
    without: tuple[MetricSummary, ...]
    num_curves: int
    started_from: tuple[str, ...]
    drawn_from: str = "curves"
    memory: Mapping[str, Safety] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """The safe bound of the memory against measured peaks.

    Args:
        num_runs: peaks that were judged.
        safe: share of them that the bound holds.
        over: mean of bound over measured, minus 1.
    """

    num_runs: int
    safe: float
    over: float


def memory_safety(rows: Iterable[ValidatedRow]) -> Safety | None:
    """How safe the bound of the judged rows is; None where no peak was measured."""
    pairs = [(row.predicted[PEAK].high, row.measured[PEAK]) for row in rows if row.status == "ok" and PEAK in row.error]
    if not pairs:
        return None
    return Safety(
        num_runs=len(pairs),
        safe=sum(measured <= bound for bound, measured in pairs) / len(pairs),
        over=sum(bound / measured - 1.0 for bound, measured in pairs) / len(pairs),
    )
