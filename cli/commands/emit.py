"""``meshplan emit``: the launcher files of a finished plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from meshplan.cli.completion import complete_target
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption, PlanArgument, ScriptOption
from meshplan.cli.render import Column, Format

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_RESOURCE = re.compile(r"[A-Za-z0-9.-]+/[A-Za-z0-9._-]+")
_COLUMNS = (Column(key="path", title="File", wrap=False), Column(key="bytes", title="Bytes", right=True))


PodResourceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pod-resource",
        metavar="NAME=COUNT",
        help="What each Kubernetes pod asks for besides devices: rdma/ib=8.",
        show_default=False,
    ),
]
ImageOption = Annotated[
    str, typer.Option("--image", metavar="NAME", help="Container image, for targets that need one.", show_default=False)
]
ModelPathOption = Annotated[
    str,
    typer.Option(
        "--model-path", metavar="PATH", help="Checkpoint to serve. Default: as published.", show_default=False
    ),
]


FrameworkVersionOption = Annotated[
    str,
    typer.Option(
        "--framework-version",
        metavar="RELEASE",
        help="Release of the framework or engine that runs the files. Default: the one that was checked.",
        show_default=False,
    ),
]


@app.command()
def emit(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the files.", show_default=False)],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="NAME",
            help="What launches the plan (meshplan catalog support). Default: the plan's constraints.target.",
            autocompletion=complete_target,
            show_default=False,
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework", metavar="NAME", help="Framework that an orchestrator target launches.", show_default=False
        ),
    ] = None,
    framework_version: FrameworkVersionOption = "",
    script: ScriptOption = "",
    image: ImageOption = "",
    model_path: ModelPathOption = "",
    pod_resource: PodResourceOption = None,
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write the launcher files of PLAN: all of them or none, never over files that are not offered with --force."""
    from meshplan.catalogs.errors import EmitError
    from meshplan.cli.render import show_rows, show_text, terminal_width
    from meshplan.cli.reports.parts import paragraph
    from meshplan.cli.stored import load_plan
    from meshplan.planner.emit.writer import write_artifacts
    from meshplan.planner.service import emit_plan, plan_target

    catalog = open_catalog(db, or_shipped=True)
    made = load_plan(plan, catalog)
    wanted = target or plan_target(made)
    if wanted is None:
        raise EmitError(f"plan {made.plan_id} is of the kind {made.kind!r}: its answer is plans show --format json")
    emitted = emit_plan(
        made,
        wanted,
        catalog,
        framework=framework,
        framework_version=framework_version,
        script=script,
        image=image,
        model_path=model_path,
        pod_resources=_pod_resources(pod_resource or []),
    )
    files = write_artifacts(emitted.artifacts, out, force=force)
    rows = [{"path": str(path), "bytes": path.stat().st_size} for path in files]
    show_rows(rows, _COLUMNS, form, title=f"Plan {made.plan_id} for {emitted.target}")
    if form is Format.TABLE and emitted.notes:
        show_text("\n" + "".join(paragraph(f"note: {note}", terminal_width()) for note in emitted.notes))


def _pod_resources(pairs: list[str]) -> dict[str, int]:
    """NAME=COUNT → counts by name; names as Kubernetes writes them: ``rdma/ib``, ``vpc.amazonaws.com/efa``."""
    found: dict[str, int] = {}
    for pair in pairs:
        name, _, count = pair.partition("=")
        if not _RESOURCE.fullmatch(name) or not (count.isascii() and count.isdigit() and int(count[:6]) > 0):
            raise typer.BadParameter(f"--pod-resource {pair!r}: write NAME=COUNT, such as rdma/ib=8")
        found[name] = int(count[:6])
    return found
