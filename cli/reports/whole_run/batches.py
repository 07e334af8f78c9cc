"""Global batches side by side: what each runs, how many tokens it needs, when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshplan.catalogs.units import SECONDS_PER_DAY
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.configuration import config_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import TICK, signed_percent, tokens_text
from meshplan.planner.core.plan import Plan

if TYPE_CHECKING:
    from meshplan.planner.batch_size.study import BatchStudy

_COLUMNS = (
    Column(key="best", title=""),
    Column(key="batch", title="Batch, tokens"),
    Column(key="config", title="Plan"),
    Column(key="rate", title="Tokens/s"),
    Column(key="tokens", title="Tokens needed"),
    Column(key="days", title="Days"),
)


def batches_report(study: BatchStudy, *, width: int) -> str:
    """The table, the best fixed batch, the best schedule."""
    schedule, planned = study.schedule, study.planned
    if schedule is None:
        return paragraph("No plan exists at any of these batches: try `meshplan plan` at one of them.", width)
    best = planned[schedule.fixed]
    own = next((row for row in planned if row.batch == study.reference), None)
    rows: list[Row] = [
        {
            "best": TICK if row is best else " ",
            "batch": f"{row.batch:,}",
            "config": config_text(row.plan.config) if row.plan.config else "no plan",
            "rate": "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            "tokens": tokens_text(row.tokens),
            "days": "" if row.run_s is None else f"{row.run_s / SECONDS_PER_DAY:,.2f}",
        }
        for row in study.rows
    ]
    summary = f"The best fixed batch is {best.batch:,} tokens"
    if own is not None and own.run_s is not None and own is not best:
        summary += f": {signed_percent(schedule.fixed_s / own.run_s - 1.0)} time beside your {own.batch:,}"
    table = rendered_rows(rows, _COLUMNS, Format.TABLE, title="The same loss at every batch", width=width)
    return table + paragraph(f"{summary}.", width) + paragraph(_schedule_text(study), width)


def batch_section(plan: Plan, width: int) -> str:
    """The batches that a plan with an open batch was chosen from, and the schedule beside the best of them."""
    found = (plan.answer or {}).get("batches")
    if found is None:
        return ""
    rows: list[Row] = [
        {
            "best": TICK if row["batch_tokens"] == found["best_fixed_batch_tokens"] else " ",
            "batch": f"{row['batch_tokens']:,}",
            "config": "no plan" if row["config"] is None else config_text(row["config"]),
            "rate": "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
            "tokens": tokens_text(row["tokens"]),
            "days": "" if row["run_s"] is None else f"{row['run_s'] / SECONDS_PER_DAY:,.2f}",
        }
        for row in found["rows"]
    ]
    table = rendered_rows(rows, _COLUMNS, Format.TABLE, title="The same loss at every batch", width=width)
    parts = [(part["batch_tokens"], part["to_progress"]) for part in found["schedule"]]
    return table + paragraph(_schedule_words(parts, found["schedule_s"], found["best_fixed_s"]), width)


def _schedule_text(study: BatchStudy) -> str:
    schedule, planned = study.schedule, study.planned
    if schedule is None or len(schedule.parts) == 1:
        return "No schedule of these batches is faster than one of them throughout."
    parts = [(planned[part.option].batch, part.end) for part in schedule.parts]
    return _schedule_words(parts, schedule.seconds, schedule.fixed_s)


def _schedule_words(found: Sequence[tuple[int, float]], seconds: float, fixed_s: float) -> str:
    """(batch, end of its part) of a schedule in words, and its gain."""
    if len(found) == 1:
        return "No schedule of these batches is faster than one of them throughout."
    parts = ", ".join(f"{batch:,} up to {end:.0%} of the progress" for batch, end in found)
    gain = signed_percent(seconds / fixed_s - 1.0)
    return f"A schedule changes the best fixed batch's time by {gain}, restarts between included: {parts}."
