"""Plans for when nodes are lost, as a table that an operator follows at night."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.configuration import config_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.training.replanning.replan import Replanned

_COLUMNS = (
    Column(key="lost", title="Lost"),
    Column(key="plan", title="Plan"),
    Column(key="config", title="Choices"),
    Column(key="step", title="Step"),
    Column(key="speed", title="Speed"),
    Column(key="do", title="Do"),
)


def replan_report(made: Plan, rows: Sequence[Replanned], *, width: int) -> str:
    """The table, and for each row where its states come from."""
    table: list[Row] = [
        {
            "lost": counted(len(one.lost), "node"),
            "plan": "none" if one.plan is None else one.plan.plan_id,
            "config": one.why_not if one.plan is None else config_text(one.plan.config),
            "step": "" if one.plan is None else format_duration(one.plan.predicted["iteration_s"].value),
            "speed": percent(one.speed),
            "do": advice(one),
        }
        for one in rows
    ]
    step = format_duration(made.predicted["iteration_s"].value)
    head = paragraph(f"Plan {made.plan_id}: {config_text(made.config)}, {step} a step. Without nodes:", width)
    told = [paragraph(_states(one), width) for one in rows if one.moves is not None]
    return head + rendered_rows(table, _COLUMNS, Format.TABLE, width=width) + "".join(told)


def advice(one: Replanned) -> str:
    """What to do, in a word or two."""
    if one.plan is None:
        return "wait for a node"
    if one.uses_spares:
        return "start on the spares"
    if not one.decision.goes_on:
        return f"wait, unless repair takes over {format_duration(one.decision.from_s)}"
    return f"go on, if repair takes over {format_duration(one.decision.from_s)}"


def _states(one: Replanned) -> str:
    taken = one.moves
    if taken is None:
        return ""
    name = ", ".join(f"node {node}" for node in one.lost)
    if taken.lost:
        return (
            f"Without {name}: {format_bytes(taken.lost)} of states are held nowhere else, so all load the last "
            f"checkpoint, {format_bytes(taken.needed)} with copies, {format_duration(one.move_s)} from the store."
        )
    return (
        f"Without {name}: the live states survive; {format_bytes(taken.moved)} move, at most "
        f"{format_bytes(taken.most_in)} into one device, {format_duration(one.move_s)}."
    )
