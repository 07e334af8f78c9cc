"""Plans side by side: only the choices that differ, what that changes, and why; and a plan against its measurement.

The first plan is the reference. The order of two predictions is certain only where their intervals are disjoint;
the comparison reports which are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from meshplan.catalogs.errors import SpecError, StoreError
from meshplan.catalogs.units import format_duration
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.measurable import measurable
from meshplan.planner.core.plan import Interval, Plan

# Parts of the step whose change is below this share of the reference's step are not worth naming.
NAMED_SHARE = 0.005
# Parts named in a reason: as many that grew, as many that shrank.
NAMED_PARTS = 2
# Sections of a comparison that list fields which differ.
SECTIONS = ("question", "rests_on", "proof", "choices")
# What an answer says of its proof.
_PROOF = ("status", "gap", "stopped", "kept", "admitted_by", "binding_constraint")
# Parts of the provenance that are results, or the model, which the question names.
_NO_INPUT = ("share_of_time_by_evidence", "model")
CATALOG_ENTRIES, _SHOWN_DIGITS = "catalog entries", 12
_TOKENS_OF_REASON = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field in which the plans differ.

    Args:
        field: dotted path.
        values: one per plan; None where a plan has no such field.
    """

    field: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """One predicted metric of every plan.

    Args:
        metric: name with its unit.
        predicted: one per plan; None where a plan does not predict it.
        changes: relative to the first plan; None where either has none.
        apart: whether the interval is disjoint from the first plan's, so that the order is certain.
    """

    metric: str
    predicted: tuple[Interval | None, ...]
    changes: tuple[float | None, ...]
    apart: tuple[bool | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs between plans.

    Args:
        plan_ids: of the plans, the reference first.
        question: fields of the spec that differ.
        rests_on: inputs besides the spec that differ: meshplan's version, constants, sources; and the digest of the
            catalog's entries where the question is the same, since of other questions other entries are looked up.
        proof: how sure the answers are, where that differs: status, gap, why a search ended.
        choices: fields of the configuration that differ.
        metrics: every predicted metric.
        reasons: one sentence for every plan but the first.
    """

    plan_ids: tuple[str, ...]
    question: tuple[Difference, ...]
    rests_on: tuple[Difference, ...]
    proof: tuple[Difference, ...]
    choices: tuple[Difference, ...]
    metrics: tuple[MetricDifference, ...]
    reasons: tuple[str, ...]

    def to_document(self) -> dict[str, Any]:
        """The comparison as plain JSON."""
        return {
            "plans": list(self.plan_ids),
            **{
                section: [{"field": item.field, "values": list(item.values)} for item in getattr(self, section)]
                for section in SECTIONS
            },
            "metrics": [
                {
                    "metric": item.metric,
                    "predicted": [None if one is None else _interval(one) for one in item.predicted],
                    "changes": list(item.changes),
                    "apart": list(item.apart),
                }
                for item in self.metrics
            ],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMetric:
    """A prediction and its measurement.

    Args:
        metric: name with its unit.
        predicted: with its interval.
        measured: value.
        error: predicted over measured, less one.
        inside: the measured value lies in the interval.
    """

    metric: str
    predicted: Interval
    measured: float
    error: float
    inside: bool

    def to_document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "metric": self.metric,
            "predicted": _interval(self.predicted),
            "measured": self.measured,
            "error": self.error,
            "inside": self.inside,
        }


def compare_plans(plans: Sequence[Plan]) -> Comparison:
    """Compare two plans or more of one kind.

    Raises:
        StoreError: fewer than two, of different kinds, or one without an answer.
    """
    if len(plans) <= 1:
        raise StoreError("a comparison needs two plans or more")
    kinds = {plan.kind for plan in plans}
    if len(kinds) > 1:
        raise StoreError(f"plans of different kinds cannot be compared: {', '.join(sorted(kinds))}")
    question = _differences([_question(plan) for plan in plans])
    return Comparison(
        plan_ids=tuple(plan.plan_id for plan in plans),
        question=question,
        rests_on=_differences(_of_one_machine([_inputs(plan, same_question=not question) for plan in plans])),
        proof=_differences([{key: plan.solution[key] for key in _PROOF if key in plan.solution} for plan in plans]),
        choices=_differences(_unlike([plan.config or _scalars(plan.answer) for plan in plans])),
        metrics=tuple(_metric_difference(name, plans) for name in _metric_names(plans)),
        reasons=tuple(reason(plans[0], other) for other in plans[1:]),
    )


def compare_measured(plan: Plan, measured: Mapping[str, Any]) -> tuple[MeasuredMetric, ...]:
    """A plan's predictions and what was measured; metrics in the plan's order."""
    return tuple(
        MeasuredMetric(
            metric=name,
            predicted=interval,
            measured=float(measured[name]),
            error=interval.value / float(measured[name]) - 1.0,
            inside=interval.low <= float(measured[name]) <= interval.high,
        )
        for name, interval in {**predictions(plan), **measurable(plan)}.items()
        if name in measured
    )


def predictions(plan: Plan) -> Mapping[str, Interval]:
    """Predicted metrics of a plan; for a stand-alone problem its objective, which is exact."""
    objective = plan.solution.get("objective")
    if plan.predicted or objective is None:
        return plan.predicted
    return {"objective": Interval(value=objective, low=objective, high=objective)}


def reason(first: Plan, other: Plan) -> str:
    """Why ``other`` is slower or faster than ``first``: the parts of the step that changed most."""
    before, after = predictions(first).get("iteration_s"), predictions(other).get("iteration_s")
    if before is None or after is None:
        return ""
    scales = [_TOKENS_OF_REASON / _tokens_per_step(plan) for plan in (first, other)]
    same_step = scales[0] == scales[1]
    if same_step:
        scales = [1.0, 1.0]
    parts = [
        {str(row["name"]): float(row["seconds"]) * scale for row in plan.breakdown}
        for plan, scale in zip((first, other), scales, strict=True)
    ]
    start, end = before.value * scales[0], after.value * scales[1]
    deltas = {name: parts[1].get(name, 0.0) - parts[0].get(name, 0.0) for name in dict.fromkeys([*parts[0], *parts[1]])}
    named = _largest(deltas, NAMED_SHARE * start)
    what = "a step" if same_step else "a million tokens"
    change = end / start - 1.0
    if not change and not named:
        return f"{what} takes {format_duration(start)} in both plans"
    word = "more" if change >= 0 else "less"
    apart = _apart(_scaled(before, scales[0]), _scaled(after, scales[1]))
    doubt = "" if apart else "; the intervals overlap, so the order is not certain"
    detail = f": {', '.join(named)}" if named else ""
    return f"{what} takes {abs(change):.1%} {word} time than in {first.plan_id}{detail}{doubt}"


def _largest(deltas: Mapping[str, float], least: float) -> list[str]:
    """The parts that grew most, then those that shrank most."""
    grown = sorted((name for name in deltas if deltas[name] > least), key=lambda name: -deltas[name])
    shrunk = sorted((name for name in deltas if deltas[name] < -least), key=lambda name: deltas[name])
    return [
        f"{name} {'+' if deltas[name] > 0 else '−'}{format_duration(abs(deltas[name]))}"
        for name in (*grown[:NAMED_PARTS], *shrunk[:NAMED_PARTS])
    ]


def _tokens_per_step(plan: Plan) -> float:
    return float(plan.config["global_batch_size"] * plan.config["sequence_length"])


def _metric_names(plans: Sequence[Plan]) -> list[str]:
    return list(dict.fromkeys(name for plan in plans for name in predictions(plan)))


def _metric_difference(name: str, plans: Sequence[Plan]) -> MetricDifference:
    found = tuple(predictions(plan).get(name) for plan in plans)
    first = found[0]
    return MetricDifference(
        metric=name,
        predicted=found,
        changes=tuple(
            None if first is None or one is None or not first.value else one.value / first.value - 1.0 for one in found
        ),
        apart=tuple(None if first is None or one is None else _apart(first, one) for one in found),
    )


def _scaled(interval: Interval, factor: float) -> Interval:
    return Interval(value=interval.value * factor, low=interval.low * factor, high=interval.high * factor)


def _apart(first: Interval, other: Interval) -> bool:
    return first.high < other.low or other.high < first.low


def _differences(documents: Sequence[Mapping[str, Any]]) -> tuple[Difference, ...]:
    flat = [dict(_flattened(document)) for document in documents]
    names = list(dict.fromkeys(name for document in flat for name in document))
    rows = [Difference(field=name, values=tuple(document.get(name) for document in flat)) for name in names]
    return tuple(row for row in rows if any(value != row.values[0] for value in row.values))


def _flattened(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        elif _is_of_parts(value):
            yield from _flattened(_named(value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _is_of_parts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _named(parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Parts of a configuration by their role, numbered where several have it (``mixed_1``), else by their place."""
    roles = [str(part.get("role", place)) for place, part in enumerate(parts)]
    names = [
        role if roles.count(role) == 1 else f"{role}_{roles[: at + 1].count(role)}" for at, role in enumerate(roles)
    ]
    return {
        name: {key: value for key, value in part.items() if key != "role"}
        for name, part in zip(names, parts, strict=True)
    }


def _unlike(documents: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Configurations without what all parts (pools, stages) of all of them have alike, where their parts have other
    names: a prefill and a decode pool in place of a mixed one differ from it in their degrees, and not in each setting
    that all three share.
    """
    lists = [key for key, value in documents[0].items() if all(_is_of_parts(one.get(key)) for one in documents)]
    unlike = [dict(document) for document in documents]
    for key in lists:
        parts = [{name: dict(_flattened(part)) for name, part in _named(one[key]).items()} for one in documents]
        if all(own.keys() == parts[0].keys() for own in parts):
            continue
        each = [part for own in parts for part in own.values()]
        alike = {name for name in each[0] if all(name in part and part[name] == each[0][name] for part in each)}
        for document, own in zip(unlike, parts, strict=True):
            document[key] = {
                name: {leaf: value for leaf, value in part.items() if leaf not in alike} for name, part in own.items()
            }
    return unlike


def _question(plan: Plan) -> Mapping[str, Any]:
    """The spec with its defaults written out, so that leaving one out is no difference."""
    written_out = KINDS[plan.kind].offers("written_out") if plan.kind in KINDS else None
    if written_out is None:
        return plan.spec
    try:
        return cast("Mapping[str, Any]", written_out(plan.spec))
    except SpecError:  # a spec of another version of meshplan: as it was written
        return plan.spec


def _inputs(plan: Plan, *, same_question: bool) -> dict[str, Any]:
    """What the numbers of a plan rest on besides its spec."""
    catalog = {CATALOG_ENTRIES: plan.catalog_digest[:_SHOWN_DIGITS]} if same_question else {}
    parts = {key: value for key, value in plan.provenance.items() if key not in _NO_INPUT}
    sources = parts.pop("sources", {})
    return {**catalog, **parts, "source": sources}


def _of_one_machine(inputs: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Constants of serving without the node type that they are of, where each plan has those of one: the question says
    which, and what differs then stands in one line.
    """
    own = [one.get("calibration", {}) for one in inputs]
    if not all(len(one) == 1 and all(isinstance(part, Mapping) for part in one.values()) for one in own):
        return inputs
    return [{**one, "calibration": next(iter(one["calibration"].values()))} for one in inputs]


def _scalars(answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """The single values of a stand-alone answer; tables are left out of comparisons."""
    return {key: value for key, value in (answer or {}).items() if not isinstance(value, list | tuple)}


def _interval(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}
