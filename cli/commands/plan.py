"""``meshplan plan``: solve, store, optionally write the launcher files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshplan.catalogs.errors import EXIT_INFEASIBLE, EXIT_SOLVER
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption, OutOption, SeedOption, SpecArgument
from meshplan.cli.render import Format

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _finite(value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value} is not a number of seconds above 0")
    return value


@app.command()
def plan(
    spec: SpecArgument,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, max=1000, help="Candidates to show and keep.")] = 5,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="S",
            callback=_finite,
            help="Seconds after which the best so far is taken, with its gap.",
            show_default=False,
        ),
    ] = None,
    seed: SeedOption = 0,
    certify: Annotated[
        bool, typer.Option("--certify", help="Check the answer again by a second, independent way.")
    ] = False,
    out: OutOption = None,
    force: ForceOption = False,
    store: Annotated[bool, typer.Option("--store/--no-store", help="Keep the plan in the database.")] = True,
    name: Annotated[str, typer.Option("--name", help="What you call the plan.", show_default=False)] = "",
    tag: Annotated[
        str | None, typer.Option("--tag", help="Unique handle; moves here from another plan.", show_default=False)
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Find the best plan for SPEC, prove how good it is, store it, and write its launcher files where --out is given.

    Exit code 3 when no plan exists; the answer then names the binding constraint and the least change. Exit code 5
    when --certify finds that the second way disagrees.
    """
    from meshplan.cli.progress import progress_line
    from meshplan.cli.reports.plan import is_infeasible, show_plan, stored_text
    from meshplan.planner.core.certificate import disagrees
    from meshplan.planner.core.documents import read_document
    from meshplan.planner.service import make_plan

    document = read_document(spec)
    catalog = open_catalog(db)
    with progress_line() as on_progress:
        made = make_plan(
            document,
            catalog,
            base=spec.parent,
            seed=seed,
            top=top,
            time_limit_s=time_limit,
            on_progress=on_progress,
            certify=certify,
        )
    stored = store and not is_infeasible(made)
    if stored:
        _save(made, catalog, name, tag)
    files: Sequence[Path] = ()
    try:
        if out is not None and not is_infeasible(made):
            files = _write(made, catalog, out, force=force)
    finally:
        # A plan may have taken long to find: it is shown even where its files could not be written.
        show_plan(made, form, footer=stored_text(made, stored=stored, db=db, files=files, out=out))
    if disagrees(made.certificate):
        raise typer.Exit(EXIT_SOLVER)
    if is_infeasible(made):
        raise typer.Exit(EXIT_INFEASIBLE)


def _save(made: Plan, catalog: Catalog, name: str, tag: str | None) -> None:
    from meshplan.catalogs.database.plan_rows import PlanRows
    from meshplan.planner import store

    store.save(made, PlanRows(catalog.engine), name=name, tag=tag)


def _write(made: Plan, catalog: Catalog, out: Path, *, force: bool) -> tuple[Path, ...]:
    from meshplan.planner.emit.artifact import plan_artifact
    from meshplan.planner.emit.writer import write_artifacts
    from meshplan.planner.service import emit_plan, plan_target

    target = plan_target(made)
    artifacts = (plan_artifact(made),) if target is None else emit_plan(made, target, catalog).artifacts
    return write_artifacts(artifacts, out, force=force)
