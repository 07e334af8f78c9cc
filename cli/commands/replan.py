"""``meshplan replan``: plans for when nodes are lost."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from meshplan.catalogs.errors import EXIT_INFEASIBLE, Problem, SpecError
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption, PlanArgument
from meshplan.cli.progress import progress_line
from meshplan.cli.render import Format, show_document, show_text, terminal_width

if TYPE_CHECKING:
    from meshplan.planner.core.plan import Plan

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_NUMBERED = re.compile(r"(?:node[ _-]?)?(\d{1,7})")


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
    store: Annotated[bool, typer.Option("--store/--no-store", help="Keep the plans in the database.")] = True,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Plan PLAN again without some of its nodes: the best plan on what is left, the bytes to move, wait or go on.

    The pins of PLAN's question hold; its spare nodes take over first. Each plan is stored, so that `meshplan emit`
    writes its files. Exit code 3 where no plan is left.
    """
    from meshplan.cli.stored import load_plan, save_plan
    from meshplan.planner.core.kinds import Question, offered
    from meshplan.planner.training.replanning.replan import replan_document

    catalog = open_catalog(db, or_shipped=True)
    made = load_plan(plan, catalog)
    answer = offered(made, "replan", "plan without some of its nodes")
    gone = _named(made, without)
    with progress_line() as on_progress:
        question = Question(document=made.spec, catalog=catalog, on_progress=on_progress)
        rows = answer(question, made, without=gone, fewer=fewer)
    if form is Format.TABLE:
        from meshplan.cli.reports.whole_run.replan import replan_report

        show_text(replan_report(made, rows, width=terminal_width()))
    else:
        show_document(replan_document(made, rows), form)
    for row in rows:
        if store and row.plan is not None:
            save_plan(row.plan, catalog)
    if all(row.plan is None for row in rows):
        raise typer.Exit(EXIT_INFEASIBLE)


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
            raise SpecError(
                [Problem(path="--without", message=f"no node is called {name!r}: give numbers, such as 3,7")]
            )
    return sorted(set(found))
