"""``meshplan plan``: solve, store, optionally write the launcher files."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.catalogs.errors import EXIT_INFEASIBLE, EXIT_SOLVER, MeshplanError
from meshplan.catalogs.units import Dimension, parse_quantity
from meshplan.cli.asking import (
    Asked,
    BatchOption,
    ConcurrencyOption,
    GpusOption,
    LengthsOption,
    ModelOption,
    ObjectiveOption,
    RateOption,
    SequenceOption,
    SloOption,
    TargetOption,
    TokensOption,
)
from meshplan.cli.database import note, open_catalog
from meshplan.cli.options import (
    DatabaseOption,
    ForceOption,
    FormatOption,
    OutOption,
    ScriptOption,
    SeedOption,
    SpecOrOptions,
    server_of,
)
from meshplan.cli.question import SetOption, question
from meshplan.cli.render import Format

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _finite(value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value} is not a number of seconds above 0")
    return value


def _size(text: str) -> str:
    try:
        size = parse_quantity(text, Dimension.BYTES)
    except (ValueError, MeshplanError) as error:
        raise typer.BadParameter(f"{text!r} is not an amount of memory such as '2 GiB'") from error
    if not size > 0:
        raise typer.BadParameter(f"{text!r} is not an amount of memory above 0")
    return text


TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="S",
        callback=_finite,
        help="Seconds after which the best so far is taken, with its gap.",
        show_default=False,
    ),
]
MEMORY_LIMIT = "2 GiB"
MemoryLimitOption = Annotated[
    str,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        callback=_size,
        help="Memory of the process, as in '2 GiB', from which on the same happens.",
    ),
]
# Processor time of an answer, s, from which on a remark says how it would come sooner.
LONG_S = 5.0
CertifyOption = Annotated[bool, typer.Option("--certify", help="Check the answer again by a second, independent way.")]
StoreOption = Annotated[bool, typer.Option("--store/--no-store", help="Keep the plan in the database.")]
NameOption = Annotated[str, typer.Option("--name", help="What you call the plan.", show_default=False)]
TagOption = Annotated[
    str | None, typer.Option("--tag", help="Unique handle; moves here from another plan.", show_default=False)
]
DownloadOption = Annotated[
    bool,
    typer.Option("--download", help="Fetch the config.json of a Hugging Face id that is not known here."),
]
FullOption = Annotated[bool, typer.Option("--full", help="The whole report, not the first screen alone.")]


@app.command()
def plan(
    context: typer.Context,
    spec: SpecOrOptions = None,
    *,
    model: ModelOption = None,
    gpus: GpusOption = None,
    lengths: LengthsOption = None,
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    slo: SloOption = None,
    sequence_length: SequenceOption = None,
    batch: BatchOption = None,
    tokens: TokensOption = None,
    objective: ObjectiveOption = None,
    target: TargetOption = None,
    settings: SetOption = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, max=1000, help="Candidates to show and keep.")] = 5,
    time_limit: TimeLimitOption = None,
    memory_limit: MemoryLimitOption = MEMORY_LIMIT,
    seed: SeedOption = 0,
    certify: CertifyOption = False,
    download: DownloadOption = False,
    out: OutOption = None,
    script: ScriptOption = "",
    force: ForceOption = False,
    store: StoreOption = True,
    name: NameOption = "",
    tag: TagOption = None,
    full: FullOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Find the best plan for SPEC, prove how good it is, store it, and write its launcher files where --out is given.

    Without SPEC, --model and --gpus with a load (--rate, --slo …) or a batch (--batch …) ask the question.

    Exit code 3 when no plan exists; the answer then names the binding constraint and the least change. Exit code 5
    when --certify finds that the second way disagrees.
    """
    from meshplan.cli.reports.plan import is_infeasible
    from meshplan.planner.core.certificate import disagrees

    catalog = open_catalog(db, or_shipped=True)
    document, base = question(spec, Asked.of(context), settings or (), catalog)
    service = server_of(context)
    if download:
        _fetch_model(document, catalog, base, service)
    keep = Keep(store=store, name=name, tag=tag, out=out, script=script, force=force, db=db)
    options: dict[str, Any] = {"seed": seed, "top": top, "time_limit_s": time_limit, "certify": certify}
    _check_kept(document, catalog, base, keep)
    if service is None:
        made = _answered_here(document, catalog, base, memory_limit, options)
    else:
        made = _asked_elsewhere(service, document, keep, memory_limit, options)
        keep = replace(keep, store=False, service=service)
    _show_and_keep(made, catalog, keep, form, full=full)
    if disagrees(made.certificate):
        raise typer.Exit(EXIT_SOLVER)
    if is_infeasible(made):
        raise typer.Exit(EXIT_INFEASIBLE)


def _fetch_model(document: dict[str, Any], catalog: Catalog, base: Path, service: str | None) -> None:
    """Fetch the configuration of the question's model, unless the catalog or this machine has it."""
    from meshplan.catalogs.models.download import download_config
    from meshplan.planner.cluster.lookup import config_path

    if service is not None:
        raise typer.BadParameter("the service knows its own models: leave --download out, or import the model there")
    model = str(document.get("model", ""))
    if config_path(model, catalog, base) is None and catalog.model_name(model) is None:
        sys.stderr.write(f"fetched: {download_config(model)}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What becomes of a plan that was found: the options of that name."""

    store: bool
    name: str
    tag: str | None
    out: Path | None
    script: str
    force: bool
    db: str | None
    service: str | None = None


def _check_kept(document: dict[str, Any], catalog: Catalog, base: Path, keep: Keep) -> None:
    """Whether what is to become of a plan can be done, before it is looked for."""
    from meshplan.cli.stored import check_tag
    from meshplan.planner.service import check_files

    check_tag(keep.tag, catalog)
    if keep.out is not None:
        check_files(document, catalog, base=base, script=keep.script)


def _answered_here(
    document: dict[str, Any], catalog: Catalog, base: Path, memory_limit: str, options: dict[str, Any]
) -> Plan:
    """The answer of this process."""
    from meshplan.cli.progress import progress_line
    from meshplan.planner.service import make_plan

    limits: dict[str, Any] = {
        "memory_limit_bytes": parse_quantity(memory_limit, Dimension.BYTES),
        "since_start": True,
    }
    with progress_line() as on_progress:
        made = make_plan(document, catalog, base=base, on_progress=on_progress, **limits, **options)
    _name_machine_code(made)
    return made


def _name_machine_code(made: Plan) -> None:
    """What would make long simulations of arrivals shorter, where it is not installed."""
    is_simulated = made.kind == "serving" and "request_rate_per_s" in made.spec["workload"]
    if is_simulated and made.solution.get("cpu_s", 0.0) > LONG_S and find_spec("numba") is None:
        note("pip install 'meshplan[fast]' simulates such loads in machine code, with the same figures")


def _asked_elsewhere(
    service: str, document: dict[str, Any], keep: Keep, memory_limit: str, options: dict[str, Any]
) -> Plan:
    """The answer of a service, which stores it."""
    from meshplan.cli.client import Client
    from meshplan.cli.progress import progress_line

    if keep.name or keep.tag or not keep.store:
        raise typer.BadParameter("the service stores its plans: leave --name, --tag and --no-store out")
    if memory_limit != MEMORY_LIMIT:
        raise typer.BadParameter("the service has its own limit of memory: leave --memory-limit out")
    with progress_line() as on_progress:
        return Client(service).plan(document, on_progress=on_progress, **options)


def _show_and_keep(made: Plan, catalog: Catalog, keep: Keep, form: Format, *, full: bool) -> None:
    """Show a plan before anything that can fail, since it may have taken long to find; then store and write it."""
    from meshplan.cli.client import Client
    from meshplan.cli.render import show_text
    from meshplan.cli.reports.plan import is_infeasible, show_plan, stored_text
    from meshplan.cli.stored import save_plan

    files: Sequence[Path] = ()
    stored = False
    try:
        show_plan(made, form, full=full)
    finally:
        try:
            stored = keep.store and not is_infeasible(made) and save_plan(made, catalog, name=keep.name, tag=keep.tag)
            if keep.out is not None and not is_infeasible(made):
                files = _write(made, catalog, keep.out, script=keep.script, force=keep.force)
        finally:
            if form is Format.TABLE:
                where = None if keep.service is None else Client(keep.service).url
                text = stored_text(made, catalog, stored=stored, db=keep.db, files=files, out=keep.out, service=where)
                show_text(f"\n{text}")


def _write(made: Plan, catalog: Catalog, out: Path, *, script: str, force: bool) -> tuple[Path, ...]:
    from meshplan.planner.emit.artifact import plan_artifact
    from meshplan.planner.emit.writer import write_artifacts
    from meshplan.planner.service import emit_plan, plan_target

    target = plan_target(made)
    artifacts = (plan_artifact(made),) if target is None else emit_plan(made, target, catalog, script=script).artifacts
    return write_artifacts(artifacts, out, force=force)
