"""Plans side by side on a page: what differs, by how much, and why; and a plan against its recorded runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.cli.answers.plans import Compared, Instead
from meshplan.cli.reports.comparison import measured_columns, shown_value
from meshplan.cli.reports.plan import report_of
from meshplan.cli.reports.quantities import metric_text, metric_title, signed_percent
from meshplan.cli.web.pages.views import charts
from meshplan.cli.web.pages.views.tables import table
from meshplan.planner.compare import Comparison, Difference, MetricDifference
from meshplan.planner.core.plan import Plan

# Where less is better; of the other metrics more is.
_COSTS = ("usd", "energy", "peak_memory", "power", "ttft", "tpot", "itl", "e2e", "iteration", "run_time")

# A smaller relative change is none that anybody would act on.
_SAME = 0.005


def comparison_view(plans: Sequence[Plan], compared: Compared) -> dict[str, Any]:
    """What the page of several plans shows; of one plan its recorded runs."""
    comparison = compared.comparison
    return {
        "plans": [_named(plan) for plan in plans],
        "differences": None if comparison is None else differences(comparison),
        "measured": [
            table(
                run["metrics"],
                measured_columns(),
                caption=f"Plan {run['plan_id']}, recorded {str(run['recorded_at'])[:16].replace('T', ' ')}",
            )
            for run in compared.measured
        ],
    }


def instead_view(made: Plan, found: Instead) -> dict[str, Any]:
    """What the page of another choice shows; where none fits, why."""
    choices = {str(name): str(value) for name, value in found.choices.items()}
    label = ", ".join(f"{name}={value}" for name, value in choices.items())
    spec = {**made.spec, "fixed": {**made.spec.get("fixed", {}), **found.choices}}
    return {
        "plan": _named(made),
        "label": label,
        "reason": found.reason,
        "exists": found.other is not None,
        "plans": [{**_named(made), "label": "the plan"}, {"label": f"with {label}"}],
        "differences": None
        if found.comparison is None
        else {**differences(found.comparison), "reasons": [], "question": [], "rests_on": [], "proof": []},
        "spec": spec,
    }


def _named(plan: Plan) -> dict[str, Any]:
    spec: Mapping[str, Any] = plan.spec
    return {
        "plan_id": plan.plan_id,
        "kind": plan.kind,
        "question": report_of(plan.kind).describe(spec),
        "status": str(plan.solution["status"]),
        "label": plan.plan_id,
    }


def differences(comparison: Comparison) -> dict[str, Any]:
    """Question, choices and figures that differ, and one sentence for every plan but the first."""
    reasons = zip(comparison.plan_ids[1:], comparison.reasons, strict=True)
    return {
        "question": [_row(item) for item in comparison.question],
        "rests_on": [_row(item) for item in comparison.rests_on],
        "proof": [_row(item) for item in comparison.proof],
        "choices": [_row(item) for item in comparison.choices],
        "metrics": [_metric(item) for item in comparison.metrics],
        "reasons": [{"plan_id": plan_id, "words": words} for plan_id, words in reasons if words],
    }


def _row(item: Difference) -> dict[str, Any]:
    return {"field": item.field, "values": [_cell(item.field, value) for value in item.values]}


def _cell(field: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(shown_value(field, value))


def _metric(item: MetricDifference) -> dict[str, Any]:
    most = max((one.high for one in item.predicted if one is not None), default=0.0) * 1.04
    less_is_better = item.metric.startswith(_COSTS)
    cells: list[dict[str, Any] | None] = []
    for one, change, apart in zip(item.predicted, item.changes, item.apart, strict=True):
        if one is None:
            cells.append(None)
            continue
        shown = "" if not change else signed_percent(change)
        better = "" if not change else ("better" if (change < 0) == less_is_better else "worse")
        if change and abs(change) < _SAME:
            better = "about the same"
        cells.append(
            {
                "text": metric_text(item.metric, one.value),
                "change": shown,
                "verdict": better,
                "certain": bool(apart),
                "value_at": charts.share(one.value, most),
                "low_at": charts.share(one.low, most),
                "high_at": charts.share(one.high, most),
                "between": f"{metric_text(item.metric, one.low)} to {metric_text(item.metric, one.high)}",
            }
        )
    return {"title": metric_title(item.metric), "cells": cells}
