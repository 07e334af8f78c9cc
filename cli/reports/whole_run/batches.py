"""Global batches side by side: what each runs, how many tokens it needs, when it is done."""

from __future__ import annotations

from meshplan.catalogs.units import SECONDS_PER_DAY
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.configuration import config_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import TICK, signed_percent
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
            "best": TICK if row is best else "",
            "batch": f"{row.batch:,}",
            "config": config_text(row.plan.config) if row.plan.config else "no plan",
            "rate": "" if row.run_s is None else f"{row.tokens / row.run_s:,.0f}",
            "tokens": f"{row.tokens:.3g}",
            "days": "" if row.run_s is None else f"{row.run_s / SECONDS_PER_DAY:,.2f}",
        }
        for row in study.rows
    ]
    told = f"The best fixed batch is {best.batch:,} tokens"
    if own is not None and own.run_s is not None and own is not best:
        told += f": {signed_percent(schedule.fixed_s / own.run_s - 1.0)} time beside your {own.batch:,}"
    table = rendered_rows(rows, _COLUMNS, Format.TABLE, title="The same loss at every batch", width=width)
    return table + paragraph(f"{told}.", width) + paragraph(_schedule_text(study), width)


def _schedule_text(study: BatchStudy) -> str:
    schedule, planned = study.schedule, study.planned
    if schedule is None or len(schedule.parts) == 1:
        return "No schedule of these batches is faster than one of them throughout."
    parts = ", ".join(f"{planned[part.option].batch:,} up to {part.end:.0%} of the progress" for part in schedule.parts)
    gain = signed_percent(schedule.seconds / schedule.fixed_s - 1.0)
    return f"A schedule changes the best fixed batch's time by {gain}, restarts between included: {parts}."
