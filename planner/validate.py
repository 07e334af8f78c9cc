"""Predicted against measured: every observation priced, errors by metric, interval coverage, ranking quality.

A row's error is predicted / measured − 1. Memory: ``value`` is the typical figure and ``high`` the safe bound. Ranking
is judged inside groups of the same model, machine and workload: do predictions order the plans as the measurements do,
and what does picking the predicted best cost (regret)?
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from meshplan.catalogs.calibration import Calibration
from meshplan.planner.estimators.compute import peak_flops_per_s
from meshplan.planner.estimators.memory import ZERO_PARAMETERS
from meshplan.planner.estimators.priced import Priced, price
from meshplan.planner.observation_fields import UnsupportedError
from meshplan.planner.observations import ObservationReader, ObservedRun
from meshplan.planner.plan import Interval
from meshplan.planner.problems.training import TrainingProblem

if TYPE_CHECKING:
    from meshplan.catalogs.repository import Catalog

# Plans whose measured times differ by less are equal for all purposes (run-to-run noise).
RANKED_GAP = 0.05
MIN_GROUP = 3
TIME_METRICS = ("iteration_s", "tokens_per_s_per_device", "samples_per_s")
MEMORY_METRICS = ("peak_memory_bytes",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRow:
    """One observation and what was predicted for it.

    Args:
        id: of the observation.
        group: see :class:`~meshplan.planner.observations.ObservedRun`.
        question: model, machine and workload: plans of one question can be ranked.
        labels: model, device, framework, strategy: what summaries are made by.
        status: ``ok``, ``unsupported`` or ``infeasible``.
        reason: why it is not ``ok``.
        predicted: metric → interval.
        measured: metric → value, derived ones included.
        error: metric → predicted / measured − 1.
        filled: choices that the observation left out.
        oom: the safe bound is beyond the device's memory.
        breakdown_s: parts of the predicted step.
    """

    id: str
    group: str
    question: str = ""
    labels: Mapping[str, str]
    status: str
    reason: str = ""
    predicted: Mapping[str, Interval]
    measured: Mapping[str, float]
    error: Mapping[str, float]
    filled: tuple[str, ...] = ()
    oom: bool = False
    breakdown_s: Mapping[str, float]

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
            "oom": self.oom,
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
        coverage: share of observations answered.
    """

    rows: tuple[ValidatedRow, ...]
    summary: tuple[MetricSummary, ...]
    ranking: RankingSummary | None
    coverage: float


Metric = Callable[[ObservedRun, Priced], float]


def _tokens_per_s(run: ObservedRun, priced: Priced) -> float:
    return run.problem.workload.tokens_per_step / priced.step_s


def _model_rate(run: ObservedRun, priced: Priced) -> float:
    return priced.model_flops / priced.step_s / run.problem.machine.num_devices


def _peak(run: ObservedRun) -> float:
    return peak_flops_per_s(run.problem.machine.device, run.problem.workload.precision)


def _component(*names: str) -> Metric:
    return lambda _, priced: sum(priced.stages[0].components[name] for name in names)


# Every metric of the observation format that a training estimate can predict.
METRICS: Mapping[str, Metric] = {
    "iteration_s": lambda _, priced: priced.step_s,
    "tokens_per_s_per_device": lambda run, p: _tokens_per_s(run, p) / run.problem.machine.num_devices,
    "samples_per_s": lambda run, p: run.problem.workload.global_batch_size / p.step_s,
    "model_flops_per_s_per_device": _model_rate,
    "hardware_flops_per_s_per_device": lambda run, p: _model_rate(run, p) * (1.0 + p.recompute_flops_share),
    "mfu": lambda run, p: _model_rate(run, p) / _peak(run),
    "hfu": lambda run, p: _model_rate(run, p) * (1.0 + p.recompute_flops_share) / _peak(run),
    "gradient_reduce_s": lambda _, priced: priced.gradient_reduce_s,
    "peak_memory_bytes": lambda _, priced: priced.typical_bytes,
    "activation_bytes": _component("activations"),
    "params_and_optimizer_bytes": _component("weights", "gradients", "optimizer"),
    "weights_and_gradients_bytes": _component("weights", "gradients"),
    "optimizer_bytes": _component("optimizer"),
    "total_memory_bytes": lambda _, priced: priced.typical_bytes,
}


def interval_of(problem: TrainingProblem, metric: str, priced: Priced, value: float) -> Interval:
    """The interval of one predicted metric."""
    if metric in ("peak_memory_bytes", "total_memory_bytes"):
        return Interval(value=value, low=value / 1.1, high=priced.safe_bytes)
    spread = 1.0 + problem.calibration.error_p90(is_moe=problem.shape.moe is not None)
    return Interval(value=value, low=value / spread, high=value * spread)


def validate_run(run: ObservedRun) -> ValidatedRow:
    """Price one run and hold it against its measurement."""
    priced = price(run.problem, run.config)
    measured = {
        name: float(value)
        for name, value in {**run.derived, **run.measured}.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    predicted = {}
    for name in dict.fromkeys(["iteration_s", "peak_memory_bytes", *measured]):
        if name in METRICS:
            predicted[name] = interval_of(run.problem, name, priced, METRICS[name](run, priced))
    error = {name: predicted[name].value / measured[name] - 1.0 for name in predicted if measured.get(name)}
    return ValidatedRow(
        id=run.id,
        group=run.group,
        question=_question(run),
        labels=_labels(run),
        status="ok",
        predicted=predicted,
        measured=measured,
        error=error,
        filled=run.filled,
        oom=priced.safe_bytes > run.problem.limits.memory_bytes,
        breakdown_s=priced.breakdown_s,
    )


def _question(run: ObservedRun) -> str:
    problem = run.problem
    return (
        f"{run.framework}: {problem.shape.name} on {problem.machine.num_devices} × {problem.machine.device.slug}, "
        f"{problem.workload.global_batch_size} × {problem.workload.sequence_length} {problem.workload.precision}"
    )


def _labels(run: ObservedRun) -> dict[str, str]:
    config, shape = run.config, run.problem.shape
    if shape.moe is not None:
        strategy = "MoE"
    elif run.problem.workload.phase.value == "lora":
        strategy = "LoRA"
    elif config.zero_stage >= ZERO_PARAMETERS:
        strategy = "dense FSDP"
    elif config.pipeline_parallel > 1:
        strategy = "dense pipeline"
    else:
        strategy = "dense data/tensor"
    return {
        "framework": run.framework,
        "device": run.problem.machine.device.slug,
        "model": shape.name,
        "strategy": strategy,
    }


def validate_rows(rows: Iterable[Mapping[str, Any]], catalog: Catalog, calibrate: CalibrationOf) -> Validation:
    """Validate observations.

    Args:
        rows: observations.
        catalog: devices and links.
        calibrate: which constants a run is priced with.
    """
    reader = ObservationReader(catalog)
    validated = [_validated(row, reader, calibrate) for row in rows]
    answered = [row for row in validated if row.status == "ok"]
    return Validation(
        rows=tuple(validated),
        summary=tuple(summarise(answered)),
        ranking=rank_quality(answered),
        coverage=len(answered) / len(validated) if validated else 0.0,
    )


CalibrationOf = Callable[[str, str], Calibration]
_PLACEHOLDER = Calibration(framework="any", architecture="any")


def _validated(row: Mapping[str, Any], reader: ObservationReader, calibrate: CalibrationOf) -> ValidatedRow:
    def refused(reason: str) -> ValidatedRow:
        return ValidatedRow(
            id=str(row.get("id", "?")),
            group=str(row.get("group", "")),
            labels={},
            status="unsupported",
            reason=reason,
            predicted={},
            measured={},
            error={},
            breakdown_s={},
        )

    if row.get("task") != "training":
        return refused(f"task {row.get('task')!r} is not answered yet")
    try:
        run = reader.training_run(row, _PLACEHOLDER)
    except UnsupportedError as error:
        return refused(str(error))
    calibration = calibrate(run.framework, run.architecture)
    return validate_run(replace(run, problem=replace(run.problem, calibration=calibration)))


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
    errors = np.array([row.error[metric] for row in rows])
    measured = np.array([row.measured[metric] for row in rows])
    low = np.array([row.predicted[metric].low for row in rows])
    high = np.array([row.predicted[metric].high for row in rows])
    predicted = np.array([row.predicted[metric].value for row in rows])
    return MetricSummary(
        group=group,
        metric=metric,
        n=len(rows),
        mape=float(np.mean(np.abs(errors))),
        median_ape=float(np.median(np.abs(errors))),
        signed_median=float(np.median(errors)),
        p90_ape=float(np.quantile(np.abs(errors), 0.9)),
        interval_coverage=float(np.mean((measured >= low) & (measured <= high))),
        spearman=spearman(predicted, measured) if len(rows) >= MIN_GROUP else None,
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


def rank_quality(rows: Sequence[ValidatedRow], *, metric: str = "tokens_per_s_per_device") -> RankingSummary | None:
    """Pair order and regret inside groups of alike questions, by ``metric`` (larger is better)."""
    groups: dict[str, list[ValidatedRow]] = defaultdict(list)
    for row in rows:
        if metric in row.error:
            groups[row.question].append(row)
    ordered, pairs = 0.0, 0
    regrets = []
    for members in groups.values():
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
