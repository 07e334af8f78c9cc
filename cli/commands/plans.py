"""``meshplan plans``: the stored plans and what was measured for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from meshplan.cli.database import note, open_catalog, warn
from meshplan.cli.options import DatabaseOption, FormatOption, PlanArgument
from meshplan.cli.render import Column, Format, Row, show_document, show_rows, terminal_width

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="Stored plans and what was measured for them.",
)


def _answer_or_status(row: Row) -> str:
    """The answer, and how sure it is where it is not optimal."""
    parts = (row["answer"], "" if row["status"] == "optimal" else row["status"])
    return ", ".join(part for part in parts if part)


_LIST_COLUMNS = (
    Column(key="plan_id", title="Plan", wrap=False),
    Column(key="kind", title="Kind"),
    Column(key="question", title="Question"),
    Column(key="answer", title="Answer", derive=_answer_or_status),
    Column(key="tag", title="Tag", optional=True),
    Column(key="name", title="Name", optional=True),
    Column(key="created_at", title="Stored", text=lambda text: text[:10], wrap=False),
)


@app.command("list")
def list_plans(
    kind: Annotated[str | None, typer.Option("--kind", help="Only plans of this kind.", show_default=False)] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """List the stored plans, newest first."""
    from meshplan.cli.answers.plans import listed_plan
    from meshplan.cli.stored import plan_rows

    rows = [listed_plan(row) for row in plan_rows(open_catalog(db)).list(kind=kind)]
    show_rows(rows, _LIST_COLUMNS, form)


@app.command()
def show(plan: PlanArgument, db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show a stored plan, or one of a file, as 'meshplan plan' printed it."""
    from meshplan.cli.reports.plan import show_plan
    from meshplan.cli.stored import load_plan

    show_plan(load_plan(plan, open_catalog(db)), form)


@app.command()
def tag(
    plan: PlanArgument,
    name: Annotated[str | None, typer.Argument(metavar="[TAG]", help="Unique handle.", show_default=False)] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the plan's tag away.")] = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Give a stored plan a tag, taking it from any other plan; or take its tag away."""
    from meshplan.cli.stored import plan_rows

    if (name is None) != remove:
        raise typer.BadParameter("give either a tag or --remove", param_hint="TAG")
    row = plan_rows(open_catalog(db)).tag(plan, name)
    show_document({"plan_id": row.plan_id, "tag": row.tag}, form)


@app.command()
def delete(plan: PlanArgument, db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Remove a stored plan with what was measured for it."""
    from meshplan.cli.stored import plan_rows

    row = plan_rows(open_catalog(db)).delete(plan)
    show_document({"plan_id": row.plan_id, "deleted": True}, form)


@app.command()
def record(
    plan: PlanArgument,
    measured: Annotated[
        Path | None, typer.Argument(metavar="[MEASURED]", help='{"iteration_s": 61.2}', show_default=False)
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="LOG",
            help="Result of vllm bench serve, sglang.bench_serving, genai-perf or aiperf; log of Megatron-LM or "
            "TorchTitan; what torch.cuda.memory_stats() or memory_summary() print.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="LOG",
            help="CSV of time_s,event,tokens[,nodes]: when a run trained (event train, stop, now), and its progress.",
            show_default=False,
        ),
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Attach what was measured to a stored plan: a JSON or YAML file of metric and value, or a tool's own output.

    --run shows the forecast of the plan's run beside what happened, and what to ask for the rest of it.
    """
    from meshplan.cli.reports.comparison import measured_columns, measured_rows
    from meshplan.cli.stored import load_plan, plan_rows
    from meshplan.planner import store
    from meshplan.planner.core.reading.documents import read_document
    from meshplan.planner.imports.measured.logs import read_log

    if sum(given is not None for given in (measured, log, run)) != 1:
        raise typer.BadParameter("give a file of metrics, --from LOG or --run LOG", param_hint="MEASURED")
    catalog = open_catalog(db)
    rows, made = plan_rows(catalog), load_plan(plan, catalog)
    if run is not None:
        document = _of_a_run(made, run)
    else:
        document = read_document(measured) if measured is not None else read_log(cast("Path", log), made)
    store.record(plan, document, rows)
    show_rows(measured_rows(made, document), measured_columns(), form)
    _doubt_units(made, document)
    _say_whether_it_counts(made, document, catalog)


def _of_a_run(made: Plan, log: Path) -> dict[str, float]:
    """Figures of a run's log; what it says of the rest of the run goes to stderr.

    Raises:
        SpecError: a malformed log, or a plan that was not asked about its run.
    """
    from meshplan.catalogs.errors import SpecError
    from meshplan.cli.reports.whole_run.happened import happened_text
    from meshplan.planner.goodput.run_log import read_run_log

    if made.run is None:
        message = "the plan says nothing of its run: ask again with run: in its spec"
        raise SpecError.at("--run", message)
    found = read_run_log(log, nodes=len({host for host, _ in made.rank_table or ()}))
    typer.echo(happened_text(made, found, width=terminal_width()), err=True, nl=False)
    return {"tokens_per_s": found.tokens_per_s, "effective_training_time_ratio": found.ratio}


def _doubt_units(made: Plan, document: Mapping[str, Any]) -> None:
    """On stderr: figures that were taken, though they look like milliseconds or another unit."""
    from meshplan.planner.validation.recorded import in_another_unit

    for name, value in document.items():
        why = in_another_unit(float(value), made.predicted[name]) if name in made.predicted else ""
        if why:
            warn(f"recorded, but {name} = {why}; SI units are meant")


def _say_whether_it_counts(made: Plan, document: Mapping[str, Any], catalog: Catalog) -> None:
    """On stderr: whether ``calibrate --recorded`` will adapt constants to these figures, and if not, why."""
    from meshplan.catalogs.units import now
    from meshplan.planner import recorded
    from meshplan.planner.validation.fields import UnsupportedError
    from meshplan.planner.validation.recorded import Recording

    if not recorded.adapts(made.kind):
        return
    latest = Recording(plan_id=made.plan_id, number=1, date=now()[:10], figures=document)
    try:
        recorded.judged(made, latest, catalog)
    except UnsupportedError as error:
        warn(f"recorded, but no constant will be adapted to it: {error}")
        return
    note("plans on this cluster learn from it: meshplan calibrate --recorded")
