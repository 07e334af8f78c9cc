"""Plans side by side, and a prediction beside its measurement, as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import interval_text, metric_text, metric_title, signed_percent

if TYPE_CHECKING:
    from meshplan.planner.compare import Comparison, Difference, MetricDifference
    from meshplan.planner.core.plan import Plan


def comparison_report(comparison: Comparison, *, width: int = TABLE_WIDTH) -> str:
    """What was asked differently, chosen differently, what that changes, and why."""
    plans = comparison.plan_ids
    sections = []
    if comparison.question:
        asked = [_difference_row(item) for item in comparison.question]
        sections.append(rendered_rows(asked, _columns("Question", plans), Format.TABLE, width=width))
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
    """Every predicted metric; for two plans with the change in a column of its own."""
    is_pair = len(comparison.plan_ids) == 2  # noqa: PLR2004 - a pair is two
    rows = [_metric_row(item, is_pair=is_pair) for item in comparison.metrics]
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
    return {"field": item.field, **{f"plan{place}": short_value(value) for place, value in enumerate(item.values)}}


def short_value(value: Any) -> Any:
    """Long lists, such as the layers of each chunk, by their runs.

    >>> short_value([2, 2, 2, 1])
    '3×2, 1'
    """
    if not isinstance(value, list):
        return value
    runs: list[tuple[Any, int]] = []
    for item in value:
        if runs and runs[-1][0] == item:
            runs[-1] = (item, runs[-1][1] + 1)
        else:
            runs.append((item, 1))
    return ", ".join(f"{count}×{item}" if count > 1 else str(item) for item, count in runs)


def _metric_row(item: MetricDifference, *, is_pair: bool) -> Row:
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
        Column(key="inside", title="inside"),
    )
