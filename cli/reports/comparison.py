"""Plans side by side, and a prediction beside its measurement, as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import (
    interval_text,
    metric_text,
    metric_title,
    percent,
    short_interval_text,
    signed_percent,
)

OTHER_CATALOG = (
    "The same question was answered from other catalog entries (prices, devices, constants): "
    "meshplan catalog history lists what was imported, meshplan catalog diff what two catalogs have different."
)
# Of a text in a cell; programs get all of it.
_LONGEST_TEXT = 60

if TYPE_CHECKING:
    from meshplan.planner.compare import Comparison, Difference, MetricDifference
    from meshplan.planner.core.plan import Plan


def comparison_report(comparison: Comparison, *, width: int = TABLE_WIDTH) -> str:
    """What was asked differently, what else the numbers rest on, what is chosen differently, what that changes, why."""
    plans = comparison.plan_ids
    listed = (("Question", comparison.question), ("Rests on", comparison.rests_on), ("Proof", comparison.proof))
    sections = [
        rendered_rows([_difference_row(item) for item in items], _columns(heading, plans), Format.TABLE, width=width)
        for heading, items in listed
        if items
    ]
    from meshplan.planner.compare import CATALOG_ENTRIES  # start-up: as in the functions below

    if any(item.field == CATALOG_ENTRIES for item in comparison.rests_on):
        sections.append(paragraph(OTHER_CATALOG, width))
    sections.append(choices_section(comparison, width) or "The plans make the same choices.\n")
    sections.append(metrics_section(comparison, width))
    reasons = zip(plans[1:], comparison.reasons, strict=True)
    sections.append("".join(paragraph(f"{plan}: {why}", width) for plan, why in reasons if why))
    return "\n".join(section for section in sections if section)


def choices_section(comparison: Comparison, width: int) -> str:
    """The choices that differ."""
    rows = [_difference_row(item) for item in comparison.choices]
    return rendered_rows(rows, _columns("Choice", comparison.plan_ids), Format.TABLE, width=width) if rows else ""


def metrics_section(comparison: Comparison, width: int) -> str:
    """Every predicted metric; for two plans with the change in a column of its own, and each interval below its value.

    The intervals of more plans do not fit a line: whether they overlap is said, and programs get them.
    """
    is_pair = len(comparison.plan_ids) == 2  # noqa: PLR2004 - a pair is two
    rows = [row for item in comparison.metrics for row in _metric_rows(item, is_pair=is_pair)]
    columns = (
        *_columns("Predicted", comparison.plan_ids),
        Column(key="change", title="change", right=True, optional=True, wrap=False),
        Column(key="verdict", title="intervals", optional=True, wrap=False),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width)


def _columns(heading: str, plans: tuple[str, ...]) -> tuple[Column, ...]:
    values = (Column(key=f"plan{place}", title=plan, right=True) for place, plan in enumerate(plans))
    return (Column(key="field", title=heading), *values)


def _difference_row(item: Difference) -> Row:
    shown = {f"plan{place}": shown_value(item.field, value) for place, value in enumerate(item.values)}
    return {"field": item.field, **shown}


def shown_value(field: str, value: Any) -> Any:
    """A value of a field that differs, as people read it."""
    return percent(value) if field == "gap" and value is not None else short_value(value)


def short_value(value: Any) -> Any:
    """Long lists, such as the layers of each chunk, by their runs; of long texts, such as sources, the beginning.

    >>> short_value([2, 2, 2, 1])
    '3×2, 1'
    """
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[: _LONGEST_TEXT - 1].rstrip()}…"
    if not isinstance(value, list):
        return value
    runs: list[tuple[Any, int]] = []
    for item in value:
        if runs and runs[-1][0] == item:
            runs[-1] = (item, runs[-1][1] + 1)
        else:
            runs.append((item, 1))
    return ", ".join(f"{count}×{item}" if count > 1 else str(item) for item, count in runs)


def _metric_rows(item: MetricDifference, *, is_pair: bool) -> list[Row]:
    """A metric's values, and below those of a pair their intervals and whether these are disjoint."""
    row = _metric_row(item, is_pair=is_pair)
    if not is_pair:
        return [row]
    verdict = row.pop("verdict", None)
    ends = [
        "" if one is None else short_interval_text(item.metric, {"low": one.low, "high": one.high})
        for one in item.predicted
    ]
    if not any(ends):
        return [row]
    between = {"field": "between", **{f"plan{place}": text for place, text in enumerate(ends) if text}}
    return [row, between if verdict is None else {**between, "change": verdict}]


def _metric_row(item: MetricDifference, *, is_pair: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"field": metric_title(item.metric)}
    for place, (interval, change) in enumerate(zip(item.predicted, item.changes, strict=True)):
        if interval is None:
            continue
        text = metric_text(item.metric, interval.value)
        if place and change is not None:
            if is_pair:
                row["change"] = signed_percent(change)
            else:
                text = f"{text} ({signed_percent(change)})"
        row[f"plan{place}"] = text
    changed = [place for place, change in enumerate(item.changes) if change]
    if changed:
        row["verdict"] = "disjoint" if all(item.apart[place] for place in changed) else "overlap"
    return row


def measured_rows(plan: Plan, measured: Mapping[str, Any]) -> list[Row]:
    """Prediction and measurement of every metric that was measured."""
    from meshplan.planner.compare import compare_measured

    return [item.to_document() for item in compare_measured(plan, measured)]


def measured_columns() -> tuple[Column, ...]:
    """Columns for :func:`measured_rows`."""
    return (
        Column(key="metric", title="Metric", text=metric_title, wrap=False),
        Column(
            key="predicted",
            title="predicted",
            right=True,
            derive=lambda row: metric_text(row["metric"], row["predicted"]["value"]),
        ),
        Column(key="", title="between", derive=lambda row: interval_text(row["metric"], row["predicted"])),
        Column(
            key="measured",
            title="measured",
            right=True,
            derive=lambda row: metric_text(row["metric"], row["measured"]),
        ),
        Column(key="error", title="error", right=True, text=signed_percent),
        Column(key="inside", title="inside", derive=_inside_text),
    )


def _inside_text(row: Row) -> str:
    """Whether a measurement lies in its interval; nothing of what is sent or paid, which has none."""
    is_point = row["predicted"]["low"] == row["predicted"]["high"]
    return "–" if is_point else "yes" if row["inside"] else "no"
