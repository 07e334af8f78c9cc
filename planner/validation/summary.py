"""Rows that were predicted and measured: errors by metric, interval coverage, ranking quality.

A row's error is predicted / measured − 1. Ranking is judged inside groups of the same model, machine and workload: do
predictions order the plans as the measurements do, and what does picking the predicted best cost (regret)?
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.plan import Interval

# Plans whose measured times differ by less are equal for all purposes (run-to-run noise).
RANKED_GAP = 0.05
MIN_GROUP = 3
# What plans are ranked by, larger is better: the first that a row has.
RANKED_BY = ("tokens_per_s_per_device", "output_tokens_per_s_per_device")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRow:
    """One observation and what was predicted for it.

    Args:
        id: of the observation.
        group: near-duplicates share it.
        question: model, machine and workload: plans of one question can be ranked.
        labels: model, device, framework, strategy: what summaries are made by.
        status: ``ok``, ``unsupported``, ``infeasible``, ``excluded`` (predicted, but left out of the error), or
            ``given`` (the constants were adapted to it).
        reason: why it is not ``ok``.
        predicted: metric → interval; of memory the upper end is the safe bound.
        measured: metric → value, derived ones included.
        error: metric → predicted / measured − 1.
        filled: choices that the observation left out.
        unused: keys of what it says that nothing here reads → the keys that they may mean.
        oom: the safe bound is beyond the device's memory.
        admitted: by which figure a run that worked would have been admitted as a plan; empty where that is not asked.
        breakdown_s: parts of the predicted step.
    """

    id: str
    group: str
    question: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    status: str
    reason: str = ""
    predicted: Mapping[str, Interval] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    error: Mapping[str, float] = field(default_factory=dict)
    filled: tuple[str, ...] = ()
    unused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    oom: bool = False
    admitted: str = ""
    breakdown_s: Mapping[str, float] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "id": self.id,
            "group": self.group,
            "status": self.status,
            "reason": self.reason,
            "labels": dict(self.labels),
            "predicted": {
                name: {"value": item.value, "low": item.low, "high": item.high} for name, item in self.predicted.items()
            },
            "measured": dict(self.measured),
            "error": dict(self.error),
            "filled": list(self.filled),
            "unused": list(self.unused),
            "meant": {key: list(meant) for key, meant in self.unused.items() if meant},
            "oom": self.oom,
            "admitted": self.admitted,
            "breakdown_s": dict(self.breakdown_s),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """Errors of one metric over a group of rows; fractions.

    Args:
        group: ``label=value``, or ``all``.
        metric: name.
        n: rows.
        mape: mean absolute error.
        median_ape: median absolute error.
        signed_median: median error with its sign.
        p90_ape: 90th percentile of the absolute error.
        interval_coverage: share of measurements inside the predicted interval.
        spearman: rank correlation of predicted and measured; None below :data:`MIN_GROUP` rows.
    """

    group: str
    metric: str
    n: int
    mape: float
    median_ape: float
    signed_median: float
    p90_ape: float
    interval_coverage: float
    spearman: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingSummary:
    """How well predictions order measured plans, pooled over groups of alike questions.

    Args:
        num_groups: groups with at least two plans.
        num_pairs: pairs whose measured times differ by more than :data:`RANKED_GAP`.
        pair_order: share of these that the prediction orders as measured; pairs predicted alike count half.
        mean_regret: mean over groups of measured best / measured(predicted best) − 1, over all predicted alike.
        worst_regret: the largest of these.
    """

    num_groups: int
    num_pairs: int
    pair_order: float
    mean_regret: float
    worst_regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The result of a validation.

    Args:
        rows: every observation.
        summary: by metric, over all rows and by label.
        ranking: over groups of alike questions; None where there are none.
        coverage: share of observations answered, those that are not to be judged by included.
    """

    rows: tuple[ValidatedRow, ...]
    summary: tuple[MetricSummary, ...]
    ranking: RankingSummary | None
    coverage: float


def summed_up(rows: Sequence[ValidatedRow], *, answered: Sequence[str] = ("ok", "excluded")) -> Validation:
    """The validation of rows: errors and ranking of those with the status ``ok``.

    Args:
        rows: every observation.
        answered: statuses that count as answered in the coverage.
    """
    judged = [row for row in rows if row.status == "ok"]
    return Validation(
        rows=tuple(rows),
        summary=tuple(summarise(judged)),
        ranking=rank_quality(judged),
        coverage=sum(row.status in answered for row in rows) / len(rows) if rows else 0.0,
    )


# --- summaries ----------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[ValidatedRow]) -> list[MetricSummary]:
    """Errors by metric, over all rows and by every label."""
    groups: dict[str, list[ValidatedRow]] = {"all": list(rows)}
    for row in rows:
        for label, value in row.labels.items():
            groups.setdefault(f"{label}={value}", []).append(row)
    metrics = list(dict.fromkeys(name for row in rows for name in row.error))
    summaries = []
    for group, members in groups.items():
        for metric in metrics:
            having = [row for row in members if metric in row.error]
            if having:
                summaries.append(_summary(group, metric, having))
    return summaries


def _summary(group: str, metric: str, rows: Sequence[ValidatedRow]) -> MetricSummary:
    predicted = [row.predicted[metric] for row in rows]
    return errors_summary(
        group,
        metric,
        errors=np.array([row.error[metric] for row in rows]),
        measured=np.array([row.measured[metric] for row in rows]),
        predicted=np.array([interval.value for interval in predicted]),
        low=np.array([interval.low for interval in predicted]),
        high=np.array([interval.high for interval in predicted]),
    )


def errors_summary(
    group: str,
    metric: str,
    *,
    errors: FloatArray,
    measured: FloatArray,
    predicted: FloatArray,
    low: FloatArray,
    high: FloatArray,
) -> MetricSummary:
    """The summary of [n] predictions, at least one: their errors, measured values, and intervals from low to high."""
    return MetricSummary(
        group=group,
        metric=metric,
        n=len(errors),
        mape=float(np.mean(np.abs(errors))),
        median_ape=float(np.median(np.abs(errors))),
        signed_median=float(np.median(errors)),
        p90_ape=float(np.quantile(np.abs(errors), 0.9)),
        interval_coverage=float(np.mean((measured >= low) & (measured <= high))),
        spearman=spearman(predicted, measured) if len(errors) >= MIN_GROUP else None,
    )


def spearman(first: ArrayLike, second: ArrayLike) -> float | None:
    """Rank correlation, ties at their mean rank; None where either is constant.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0])
    0.5
    """
    ranks = [_mean_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 12)


def _mean_ranks(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((2 * ends - counts - 1) / 2.0)[inverse]


def rank_quality(rows: Sequence[ValidatedRow], *, metrics: Sequence[str] = RANKED_BY) -> RankingSummary | None:
    """Pair order and regret inside groups of alike questions, by the first of ``metrics`` that a row has."""
    groups: dict[tuple[str, str], list[ValidatedRow]] = defaultdict(list)
    for row in rows:
        metric = next((name for name in metrics if name in row.error), None)
        if metric is not None:
            groups[row.question, metric].append(row)
    ordered, pairs = 0.0, 0
    regrets = []
    for (_, metric), members in groups.items():
        if len(members) <= 1:  # no pair to order
            continue
        best = max(members, key=lambda row: row.measured[metric])
        highest = max(row.predicted[metric].value for row in members)
        # Any of the plans that are predicted best may be picked.
        picked = [row for row in members if row.predicted[metric].value == highest]
        regrets.append(float(np.mean([best.measured[metric] / row.measured[metric] - 1.0 for row in picked])))
        for a, b in itertools.combinations(members, 2):
            gap = a.measured[metric] / b.measured[metric]
            if max(gap, 1.0 / gap) > 1.0 + RANKED_GAP:
                pairs += 1
                change = a.predicted[metric].value - b.predicted[metric].value
                ordered += 0.5 if change == 0.0 else float((change > 0.0) == (gap > 1.0))
    if not regrets:
        return None
    return RankingSummary(
        num_groups=len(regrets),
        num_pairs=pairs,
        pair_order=ordered / pairs if pairs else 1.0,
        mean_regret=float(np.mean(regrets)),
        worst_regret=float(np.max(regrets)),
    )
