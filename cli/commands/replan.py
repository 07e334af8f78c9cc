"""``meshplan replan``: plans for when nodes are lost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.catalogs.errors import EXIT_INFEASIBLE, SpecError
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption, PlanArgument, ScriptOption
from meshplan.cli.progress import progress_line
from meshplan.cli.render import Format, show_document, show_text, terminal_width

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.training.replanning.replan import Replanned

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_NUMBERED = re.compile(r"(?:node[ _-]?)?(\d{1,7})")


MoreOption = Annotated[
    int, typer.Option("--more", min=0, max=64, help="Also plans for one to so many nodes more, should capacity come.")
]
FilesOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Write launcher files of an elastic job: a plan for each number of nodes, agents that choose.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="NAME", help="With --out: what launches it. Default: as for PLAN.", show_default=False
    ),
]


@app.command()
def replan(
    plan: PlanArgument,
    without: Annotated[
        str,
        typer.Option(
            metavar="NODES",
            help="Nodes that are gone: their numbers, node3,node7, or the host names of a profiled cluster.",
            show_default=False,
        ),
    ] = "",
    fewer: Annotated[
        int, typer.Option(min=1, max=64, help="Without --without: plans for one to so many nodes less.")
    ] = 3,
    more: MoreOption = 0,
    out: FilesOption = None,
    target: TargetOption = None,
    script: ScriptOption = "",
    force: ForceOption = False,
    store: Annotated[bool, typer.Option("--store/--no-store", help="Keep the plans in the database.")] = True,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Plan PLAN again on other nodes: the best plan on what is there, the bytes to move, wait, go on or join.

    The pins of PLAN's question hold; its spare nodes take over first. Each plan is stored, so that `meshplan emit`
    writes its files; --out writes all of them as one elastic job. Exit code 3 where no plan is left.
    """
    from meshplan.cli.stored import load_plan, save_plan
    from meshplan.planner.core.kinds import Question, offered
    from meshplan.planner.training.replanning.replan import replan_document

    catalog = open_catalog(db, or_shipped=True)
    made = load_plan(plan, catalog)
    _refuse_servers(made)
    answer = offered(made, "replan", "plan without some of its nodes")
    gone = _named(made, without)
    with progress_line() as on_progress:
        question = Question(document=made.spec, catalog=catalog, on_progress=on_progress)
        rows = answer(question, made, without=gone, fewer=fewer, more=more)
    if form is Format.TABLE:
        from meshplan.cli.reports.whole_run.replan import replan_report

        show_text(replan_report(made, rows, width=terminal_width()))
    else:
        show_document(replan_document(made, rows), form)
    for row in rows:
        if store and row.plan is not None:
            save_plan(row.plan, catalog)
    if out is not None:
        _write(made, rows, catalog, out, target=target, script=script, force=force)
    if all(row.plan is None for row in rows):
        raise typer.Exit(EXIT_INFEASIBLE)


def _write(
    made: Plan, rows: Sequence[Replanned], catalog: Catalog, out: Path, *, target: str | None, script: str, force: bool
) -> None:
    """The launcher files of the job on every number of nodes that has a plan.

    Raises:
        EmitError: one number of nodes alone, or a target that no elastic agent can stand over.
    """
    from meshplan.cli.reports.whole_run.replan import runbook_text
    from meshplan.planner.service import emit_elastic, plan_target, write_files
    from meshplan.planner.training.replanning.replan import elastic_plans

    plans = elastic_plans(made, rows)
    runbook = runbook_text(made, rows, plans)
    files = emit_elastic(plans, target or plan_target(made) or "", catalog, runbook, script=script)
    written = write_files(files, out, force=force)
    numbers = [len({host for host, _ in plan.rank_table or ()}) for plan in plans]
    typer.echo(f"{len(written)} files for {numbers[0]} to {numbers[-1]} hosts in {out}; see OPERATOR.md", err=True)


def _refuse_servers(made: Plan) -> None:
    """Servers have no state to move: what is left of them is a question of its own.

    Raises:
        SpecError: the plan serves.
    """
    if made.kind != "serving":
        return
    fewer = _one_node_less(made.spec["cluster"])
    if fewer is None:
        message = (
            f"plan {made.plan_id} serves from its only node: without it no request is answered, and nothing has to "
            f"move. The same files start it on another node: meshplan emit {made.plan_id} --out DIR. Replicas to spare "
            "are planned by kind: gpu-allocation with constraints.min_spare_replicas: 1"
        )
    else:
        message = (
            f"plan {made.plan_id} serves: with a node go its requests, and nothing has to move. For what is left ask "
            f"its question again: meshplan plan SPEC {fewer}"
        )
    raise SpecError.at("", message, of="the question")


def _one_node_less(cluster: Mapping[str, Any]) -> str | None:
    """How to ask a question on one node less; None where no other node is left."""
    described = cluster.get("devices")
    if described:
        nodes = int(described["nodes"])
        return f"--set cluster.devices.nodes={nodes - 1}" if nodes > 1 else None
    counts = [int(group["count"]) for group in cluster.get("nodes") or ()]
    for place, count in enumerate(counts):
        if count > 1:
            return f"--set cluster.nodes.{place}.count={count - 1}"
    return "without the entry of cluster.nodes that is gone" if len(counts) > 1 else None


def _named(made: Plan, without: str) -> list[int]:
    """The numbers of the nodes in the text.

    Raises:
        SpecError: a name that no node has.
    """
    mapping = made.mapping or {}
    names = [str(name) for name in [*mapping.get("hosts", ()), *mapping.get("node_names", ())]]
    found = []
    for name in filter(None, re.split(r"[,\s]+", without.strip())):
        numbered = _NUMBERED.fullmatch(name)
        if name in names:
            found.append(names.index(name) % max(1, len(mapping.get("node_names", names))))
        elif numbered is not None:
            found.append(int(numbered.group(1)))
        else:
            raise SpecError.at("--without", f"no node is called {name!r}: give numbers, such as 3,7")
    return sorted(set(found))
