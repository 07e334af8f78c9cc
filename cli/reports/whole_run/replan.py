"""Plans for when nodes are lost, as a table, and the runbook that an operator follows."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.configuration import config_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.training.replanning.replan import FOREVER_S, Replanned

_COLUMNS = (
    Column(key="lost", title="Nodes"),
    Column(key="plan", title="Plan"),
    Column(key="config", title="Choices"),
    Column(key="step", title="Step"),
    Column(key="speed", title="Speed"),
    Column(key="do", title="Do"),
)


def replan_report(made: Plan, rows: Sequence[Replanned], *, width: int) -> str:
    """The table, and for each row where its states come from."""
    table = _table(rows)
    step = format_duration(made.predicted["iteration_s"].value)
    head = paragraph(f"Plan {made.plan_id}: {config_text(made.config)}, {step} a step. On other nodes:", width)
    moved = [paragraph(_states(one), width) for one in rows if one.moves is not None]
    return head + rendered_rows(table, _COLUMNS, Format.TABLE, width=width) + "".join(moved)


def _table(rows: Sequence[Replanned]) -> list[Row]:
    return [
        {
            "lost": change_text(one),
            "plan": "none" if one.plan is None else one.plan.plan_id,
            "config": one.why_not if one.plan is None else config_text(one.plan.config),
            "step": "" if one.plan is None else format_duration(one.plan.predicted["iteration_s"].value),
            "speed": percent(one.speed),
            "do": advice(one),
        }
        for one in rows
    ]


def change_text(one: Replanned) -> str:
    """How many nodes less or more."""
    return f"{one.gained} more" if one.gained else f"{len(one.lost)} less"


def runbook_text(made: Plan, rows: Sequence[Replanned], plans: Sequence[Plan]) -> str:
    """What an operator does when, beside the files of an elastic job."""
    hosts = [len({host for host, _ in plan.rank_table or ()}) for plan in plans]
    table = rendered_rows(_table(rows), _COLUMNS, Format.MARKDOWN)
    return _RUNBOOK.format(
        plan=made.plan_id,
        least=hosts[0],
        most=hosts[-1],
        table=table,
        states="\n".join(f"- {_loads(one)}" for one in rows if one.moves is not None),
    )


_RUNBOOK = """# When nodes go or come

Start: on every host `RDZV_ENDPOINT=HOST:PORT SAVE_DIR=FOLDER ./elastic.sh` (or `./elastic_nvrx.sh`, whose agents end
hung ranks as well; the program must send heartbeats then). {least} to {most} hosts train, whatever is there.

- A process dies: the agents start all of them again by themselves, from the last checkpoint.
- A host dies: the others meet again and go on with the plan for their number. Nothing is to be done.
- A host comes or comes back: run the same line on it. All stop, meet, and go on with the larger plan; the table says
  for how long it must stay for that to pay.
- Fewer than {least} hosts: the agents wait.
- To wait for a repair rather than go on with fewer (column "Do"): stop the agents; start them again when it is back.

Plan {plan} runs; beside it:

{table}
{states}

Every number of nodes has its own folder, `nodes-N`, with the files of its plan and its own README.
Which host becomes which node rank is not planned here: hosts must be alike.
"""


def advice(one: Replanned) -> str:
    """What to do, in a word or two."""
    if one.is_idle:
        return "nothing: no rank is on it" if len(one.lost) == 1 else "nothing: no rank is on them"
    if one.plan is None:
        return "none fits" if one.gained else "wait for a node"
    if one.gained:
        if one.join_s > FOREVER_S:
            return "leave them"
        return f"join, if they stay over {format_duration(one.join_s)}"
    if one.uses_spares:
        return "start on the spares"
    if not one.decision.goes_on:
        return f"wait, unless repair takes over {format_duration(one.decision.from_s)}"
    return f"go on, if repair takes over {format_duration(one.decision.from_s)}"


def _start(one: Replanned) -> str:
    name = ", ".join(f"node {node}" for node in one.lost)
    return f"With {counted(one.gained, 'node')} more" if one.gained else f"Without {name}"


def _loads(one: Replanned) -> str:
    """What the processes of an elastic job do, which start anew: no live states survive."""
    needed = 0.0 if one.moves is None else one.moves.needed
    return (
        f"{_start(one)}: all load the last checkpoint, {format_bytes(needed)} with copies, "
        f"{format_duration(one.load_s)} from the store."
    )


def _states(one: Replanned) -> str:
    taken = one.moves
    if taken is None:
        return ""
    start = _start(one)
    if one.is_idle:
        return f"{start}: the job runs on, since none of its ranks is there."
    if taken.lost:
        return (
            f"{start}: {format_bytes(taken.lost)} of states are held nowhere else, so all load the last "
            f"checkpoint, {format_bytes(taken.needed)} with copies, {format_duration(one.move_s)} from the store."
        )
    return (
        f"{start}: the live states survive; {format_bytes(taken.moved)} move, at most "
        f"{format_bytes(taken.most_in)} into one device, {format_duration(one.move_s)}."
    )
