"""What was recorded for stored plans beside what they predicted, and how the error moves over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from meshplan.catalogs.database.plan_rows import PlanRow, RecordedRun
from meshplan.catalogs.errors import MeshplanError
from meshplan.cli.answers.plans import listed_plan
from meshplan.cli.reports.comparison import measured_rows
from meshplan.cli.reports.quantities import metric_text, metric_title, percent, signed_percent
from meshplan.planner.core.text import counted
from meshplan.planner.store import plan_from_document

# A metric needs this many runs in each half for a word on drift.
_LEAST_OF_HALF = 3
_FULL = 100.0
# Half the height of the drawing stands for an error of this size, at least.
_LEAST_SPAN = 0.1


def runs_view(recorded: Sequence[tuple[PlanRow, Sequence[RecordedRun]]]) -> dict[str, Any]:
    """Every recorded metric, the newest first, and a picture of the errors of each metric over time.

    Args:
        recorded: stored plans with what was recorded for them.
    """
    rows = sorted((row for plan, runs in recorded for row in _rows(plan, runs)), key=lambda row: row["at"])
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    return {
        "rows": [_shown(row) for row in reversed(rows)],
        "drift": [_drift(name, [row for row in rows if row["metric"] == name]) for name in metrics],
    }


def _rows(plan: PlanRow, runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    try:
        made = plan_from_document(plan.document, name=f"stored plan {plan.plan_id}")
    except MeshplanError:  # damaged, or of a later version: the list of plans says so
        return []
    question = str(listed_plan(plan)["question"])
    return [
        {"plan_id": plan.plan_id, "question": question, "at": run.recorded_at, **row}
        for run in runs
        for row in measured_rows(made, run.document)
    ]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    predicted = row["predicted"]
    return {
        "plan_id": row["plan_id"],
        "question": row["question"],
        "at": str(row["at"])[:16].replace("T", " "),
        "metric": metric_title(row["metric"]),
        "predicted": metric_text(row["metric"], predicted["value"]),
        "low": metric_text(row["metric"], predicted["low"]),
        "high": metric_text(row["metric"], predicted["high"]),
        "measured": metric_text(row["metric"], row["measured"]),
        "error": signed_percent(row["error"]),
        "inside": bool(row["inside"]),
    }


def _drift(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of one metric in the order of their recording."""
    errors = [float(row["error"]) for row in rows]
    span = max([_LEAST_SPAN, *map(abs, errors)])
    inside = sum(bool(row["inside"]) for row in rows)
    return {
        "title": metric_title(name),
        "words": f"{counted(len(rows), 'run')}: median error {signed_percent(median(errors))}, {inside} within the "
        f"predicted interval. {drift_text(errors)}",
        "span": percent(span),
        "points": [
            {
                "x": round((place + 0.5) / len(errors) * _FULL, 2),
                "y": round(_FULL / 2 * (1 - error / span) * 0.9 + _FULL * 0.05, 2),
                "inside": bool(row["inside"]),
                "hint": f"{str(row['at'])[:16].replace('T', ' ')}: {signed_percent(error)}, plan {row['plan_id']}",
            }
            for place, (error, row) in enumerate(zip(errors, rows, strict=True))
        ],
    }


def drift_text(errors: Sequence[float]) -> str:
    """Whether later runs err otherwise than earlier ones: the medians of both halves.

    >>> drift_text([0.0, 0.1, 0.0, 0.2, 0.3, 0.2])
    'The median error moved from +0.0% in the first half to +20.0% in the second.'
    """
    half = len(errors) // 2
    if half < _LEAST_OF_HALF:
        return f"Fewer than {2 * _LEAST_OF_HALF} runs say nothing about drift."
    first, second = signed_percent(median(errors[:half])), signed_percent(median(errors[-half:]))
    return f"The median error moved from {first} in the first half to {second} in the second."
