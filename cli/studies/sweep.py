"""``meshplan sweep``: many questions that differ in a few fields, answered side by side and kept as a study."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from meshplan.catalogs.errors import EXIT_SOLVER, EXIT_SPEC
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption
from meshplan.cli.render import Column, Format, show_document, show_rows, show_text, terminal_width

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.sweep.runners.runner import Runner
    from meshplan.planner.sweep.study import Study

LOCAL = "local"


class RunsByDefault(TyperGroup):
    """``meshplan sweep FILE`` is ``meshplan sweep run FILE``."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in front of what is no sub-command."""
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=RunsByDefault,
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="Answer many specs that differ in a few fields, as a study; 'meshplan sweep FILE' runs one.",
)

StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="Its id or the beginning of it, its name, or 'latest'.")
]
_LIST_COLUMNS = (
    Column(key="study_id", title="Study", wrap=False),
    Column(key="name", title="Name"),
    Column(key="kind", title="Kind", wrap=False),
    Column(key="varies", title="Varies", derive=lambda row: ", ".join(row["varies"])),
    Column(key="finished", title="Answered", right=True, derive=lambda row: f"{row['finished']}/{row['points']}"),
    Column(key="failed", title="Failed", right=True),
    Column(key="created_at", title="Begun", text=lambda text: text[:16].replace("T", " ")),
)


@app.command()
def run(
    sweep: Annotated[
        Path, typer.Argument(metavar="SWEEP", help="YAML or JSON file with 'kind: sweep'.", show_default=False)
    ],
    *,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="WHERE",
            help="local: processes of this machine; a Ray cluster: ray://HOST:PORT, auto (this machine's), local-ray "
            "(started for the sweep).",
        ),
    ] = LOCAL,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", "-n", min=1, max=10_000, help="Points at once; default: one a core.", show_default=False
        ),
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Answer again what has failed.")] = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Answer every point of SWEEP that has no answer yet, store the plans, and compare them.

    Run it again after Ctrl-C, a crash or a change of the file: what is answered stays answered, also by another sweep,
    as long as the spec, its files, the catalog and meshplan's version are the same. Several may run at once.

    A point without a plan is an answer. Exit code 5 where points have failed, 2 where no answer has the metric that the
    sweep compares them by.
    """
    from meshplan.cli.progress import status_line
    from meshplan.cli.studies.report import progress_line_text
    from meshplan.planner.sweep.study import Loop, open_study, progress_of, retried, rows_of
    from meshplan.planner.sweep.table import unknown_metrics

    catalog = open_catalog(db)
    study = open_study(sweep, catalog)
    if retry_failed:
        retried(study, catalog)
    runner = _runner(on, study, catalog, processes)
    loop = Loop(study, catalog, runner)
    with status_line() as show:
        loop.tell = lambda progress: show(lambda elapsed_s: progress_line_text(progress, runner.where, elapsed_s))
        try:
            done = loop.run()
        except KeyboardInterrupt:
            stored = progress_of(study.document, catalog)  # what was stored last may not have been counted yet
            left = f"{stored.finished} of {stored.total} points are answered and stored"
            raise KeyboardInterrupt(f"{left}; go on with the same command") from None
    rows = rows_of(study.document, catalog)
    _show(study.study_id, study.name, study.document, rows, form)
    if done.failed:
        sys.stderr.write(f"{done.failed} of {done.total} points have failed; try them again: --retry-failed\n")
        raise typer.Exit(EXIT_SOLVER)
    if unknown_metrics(study.document, rows):
        raise typer.Exit(EXIT_SPEC)


@app.command()
def show(study: StudyArgument, db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show a study as it stands now, also while it runs."""
    from meshplan.planner.sweep.study import find_study, rows_of

    catalog = open_catalog(db)
    found = find_study(study, catalog)
    _show(found.study_id, found.name, found.document, rows_of(found.document, catalog), form)


@app.command("list")
def list_studies(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """List the stored studies, newest first."""
    from meshplan.planner.sweep.study import listed

    show_rows(listed(open_catalog(db)), _LIST_COLUMNS, form)


def _runner(on: str, study: Study, catalog: Catalog, processes: int | None) -> Runner:
    from meshplan.planner.sweep.runners.local import LocalRunner
    from meshplan.planner.sweep.runners.ray import RayRunner, is_ray
    from meshplan.planner.sweep.study import setting_of

    if is_ray(on):
        return RayRunner(on, setting_of(study, catalog, travels=True), processes)
    if on != LOCAL:
        raise typer.BadParameter(f"{on!r} is none of local, local-ray, auto, ray://HOST:PORT", param_hint="--on")
    return LocalRunner(setting_of(study, catalog, travels=False), processes or len(os.sched_getaffinity(0)))


def _show(study_id: str, name: str, document: Mapping[str, Any], rows: list[dict[str, Any]], form: Format) -> None:
    from meshplan.cli.studies.report import sweep_report

    if form in (Format.JSON, Format.YAML):
        show_document({"study_id": study_id, "name": name, **document, "points": rows}, form)
    elif form is not Format.TABLE:
        show_rows(rows, [Column(key=key, title=key) for key in dict.fromkeys(key for row in rows for key in row)], form)
    else:
        show_text(sweep_report(document, rows, width=terminal_width()))
        best = list(dict.fromkeys(row["plan_id"] for row in rows if row["best"] and row.get("plan_id")))
        compare = f"\n  meshplan compare {' '.join(best)}" if len(best) > 1 else ""
        plan = f"\n  meshplan plans show {best[0]}" if best else ""
        show_text(f"\nStudy {study_id} ({name}):\n  meshplan sweep show {study_id} --format csv{plan}{compare}\n")
