"""``meshplan calibrate``: fit the estimator's named constants to measured runs, and print the held-out error."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshplan.cli.database import open_catalog
from meshplan.cli.observed import log
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption, TracesOption
from meshplan.cli.render import Format

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.cli.observed import Observed
    from meshplan.cli.reports.measured.calibration import FittedSets
    from meshplan.planner.serving.measured.prediction import PreparedRun
    from meshplan.planner.training.measured.observations import ObservedRun

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class HoldOut(StrEnum):
    """What is left out together."""

    SOURCE = "source"
    FRAMEWORK = "framework"
    DEVICE = "device"
    GENERATION = "generation"
    KERNELS = "kernels"
    GROUP = "group"
    RUN = "run"
    LAYOUT = "layout"


# What can be left out of the runs that all sets are fitted to, and of a user's own; the default first.
OF_ALL_RUNS = (
    *(HoldOut.SOURCE, HoldOut.FRAMEWORK, HoldOut.DEVICE, HoldOut.GENERATION),
    *(HoldOut.KERNELS, HoldOut.GROUP),
)
OF_OWN_RUNS = (HoldOut.RUN, HoldOut.LAYOUT, HoldOut.GROUP)


# Of recorded runs; these and the files of runs exclude each other.
RecordedOption = Annotated[
    bool,
    typer.Option(
        "--recorded",
        help="Adapt the constants of each cluster to what 'meshplan plans record' stored of plans on it; plans on "
        "other clusters stay as they are.",
    ),
]
AcceptOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PLAN",
        help="With --recorded: believe this plan's runs although they are outliers; repeatable.",
        show_default=False,
    ),
]
UndoOption = Annotated[bool, typer.Option("--undo", help="With --recorded: take the constants of all clusters away.")]
FilesArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[OBSERVATIONS...]", help="Measured runs, one JSON object per line.", show_default=False),
]
FreeOption = Annotated[
    str | None,
    typer.Option(
        "--constants",
        metavar="NAME,…",
        help="Serving constants that your own runs may move. Default: all.",
        show_default=False,
    ),
]
PowerOption = Annotated[
    bool,
    typer.Option(
        "--power",
        help="Fit the power of serving devices by load instead, from scratch; it ships with meshplan, so that only "
        "--export keeps it.",
    ),
]


ScratchOption = Annotated[
    bool,
    typer.Option(
        "--from-scratch", help="Fit all sets anew from the literature's constants; default: refine the catalog's."
    ),
]
HoldOutOption = Annotated[
    HoldOut | None,
    typer.Option(
        help="What is left out together when errors are taken: of your own runs run (default), layout or group; "
        "from scratch, source (default), framework, device, generation, kernels or group.",
        show_default=False,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the errors; do not store the constants.")]
ExportOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.yaml",
        help="Also write the constants; those of serving to serving_FILE.yaml, of power to power_FILE.yaml.",
        show_default=False,
    ),
]


@app.command()
def calibrate(
    observations: FilesArgument = None,
    recorded: RecordedOption = False,
    accept: AcceptOption = None,
    undo: UndoOption = False,
    from_scratch: ScratchOption = False,
    traces: TracesOption = None,
    hold_out: HoldOutOption = None,
    free: FreeOption = None,
    power: PowerOption = False,
    dry_run: DryRunOption = False,
    export: ExportOption = None,
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Fit the named constants (efficiencies, overlaps, host overheads, memory) and print the error on held-out runs.

    Training runs and serving runs may be in the same files; one measured serving run is enough to refine its engine's
    constants. Constants from --recorded belong to one cluster; 'meshplan catalog remove' takes one set away.
    """
    from meshplan.cli.observed import believed, different, serving_runs, training_runs
    from meshplan.planner.validation.machines import read_rows

    catalog = open_catalog(db)
    _one_way(observations, recorded=recorded, accept=bool(accept), undo=undo)
    if recorded:
        _others_unused(
            from_scratch=from_scratch, traces=traces, hold_out=hold_out, free=free, power=power, export=export
        )
        _recorded(catalog, form, accept or (), undo=undo, dry_run=dry_run)
        return
    rows = different(row for path in observations or () for row in read_rows(path))
    if not from_scratch and not power:
        rows = believed(rows, catalog, traces)
    together = _held_out(hold_out, from_scratch=from_scratch)
    served = serving_runs(rows, catalog, traces)
    if power:
        fitted = _power(served, catalog, has_choices=hold_out is not None or from_scratch or free is not None)
        _finish(fitted, catalog, form, dry_run=True, export=export, force=force)
        return
    if served.runs:
        fitted = _serving(served, catalog, together, _serving_constants(free), from_scratch=from_scratch)
        _finish(fitted, catalog, form, dry_run=dry_run, export=export, force=force)
    if not served.runs or any(row.get("task") != "serving" for row in rows):
        fitted = _training(training_runs(rows, catalog), catalog, together, from_scratch=from_scratch)
        _finish(fitted, catalog, form, dry_run=dry_run, export=export, force=force)


def _one_way(observations: Sequence[Path] | None, *, recorded: bool, accept: bool, undo: bool) -> None:
    """Either files or recordings.

    Raises:
        SpecError: neither, both, or an option of recordings that has no use here.
    """
    from meshplan.catalogs.errors import SpecError

    if bool(observations) == recorded:
        message = "give either OBSERVATIONS or --recorded (what 'meshplan plans record' stored)"
        raise SpecError.at("OBSERVATIONS", message)
    if (accept or undo) and not recorded:
        raise SpecError.at("--accept, --undo", "go with --recorded")
    if accept and undo:
        raise SpecError.at("--accept", "has no use with --undo, which believes no run")


def _others_unused(**options: object) -> None:
    """Refuse options that recordings have no use for.

    Raises:
        SpecError: one is given.
    """
    from meshplan.catalogs.errors import SpecError

    names = {"free": "--constants"}
    given = [names.get(name, f"--{name.replace('_', '-')}") for name, value in options.items() if value]
    if given:
        message = "goes with OBSERVATIONS, not with --recorded ('meshplan catalog export' writes all sets)"
        raise SpecError.at(", ".join(given), message)


def _recorded(catalog: Catalog, form: Format, accept: Sequence[str], *, undo: bool, dry_run: bool) -> None:
    """Constants of clusters from recorded runs, or without them again."""
    from meshplan.cli.reports.measured.calibration import show_own_sets, show_undone
    from meshplan.cli.stored import plan_rows
    from meshplan.planner import recorded

    if undo:
        removed = recorded.stored_sets(catalog) if dry_run else recorded.undo(catalog)
        if removed or form is not Format.TABLE:
            show_undone(removed, form)
        if not removed:
            log("note: no constants of a cluster are stored")
        return
    rows = plan_rows(catalog)
    found = recorded.gathered(rows, catalog, accepted=[rows.get(handle).plan_id for handle in accept])
    made = recorded.own_sets(found)
    stale = sorted(set(recorded.stored_sets(catalog)) - {own.subject for own in made})
    if not dry_run:
        for own in made:
            recorded.keep(own, catalog)
    show_own_sets(made, found.left_out, form)
    if not made and not found.left_out:
        log("note: no run is recorded: meshplan plans record PLAN, of a plan that 'meshplan plans list' shows")
    for subject in stale:
        log(f"note: {subject} is stored, and no recorded run is behind it any more: meshplan catalog remove {subject}")
    if made and not dry_run and form not in (Format.JSON, Format.YAML):
        log("stored; plans on these clusters use them from now on")


def _held_out(asked: HoldOut | None, *, from_scratch: bool) -> str:
    """What is left out together.

    Raises:
        SpecError: it cannot be left out of these runs.
    """
    from meshplan.catalogs.errors import SpecError

    possible = OF_ALL_RUNS if from_scratch else OF_OWN_RUNS
    if asked is not None and asked not in possible:
        runs = "a fit from scratch" if from_scratch else "your own runs (without --from-scratch)"
        message = f"{asked.value} cannot be left out of {runs}: choose {', '.join(item.value for item in possible)}"
        raise SpecError.at("--hold-out", message)
    return (asked or possible[0]).value


def _serving_constants(text: str | None) -> Sequence[str]:
    """Names of serving constants in a list with commas; all of them for None.

    Raises:
        SpecError: an unknown name.
    """
    from meshplan.catalogs.errors import SpecError
    from meshplan.planner.serving.measured.fit.parts import FITTED

    names = tuple(FITTED) if text is None else tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in FITTED]
    if unknown:
        message = f"no serving constant is called {', '.join(map(repr, unknown))}: they are {', '.join(FITTED)}"
        raise SpecError.at("--constants", message)
    return names


def _serving(
    served: Observed[PreparedRun], catalog: Catalog, hold_out: str, free: Sequence[str], *, from_scratch: bool
) -> FittedSets:
    """Constants of serving engines, fitted from scratch or adapted to own runs.

    Raises:
        SpecError: what is to be left out is nothing that serving runs are told apart by.
    """
    from meshplan.catalogs.errors import SpecError
    from meshplan.cli.reports.measured.calibration import serving_sets
    from meshplan.planner.serving.measured.calibrate import calibrate_serving, refine_serving
    from meshplan.planner.serving.measured.evidence import TOGETHER
    from meshplan.planner.serving.resolve import serving_calibration

    if from_scratch and hold_out not in TOGETHER:
        message = f"{hold_out} is not left out of serving runs: choose {', '.join(TOGETHER)}"
        raise SpecError.at("--hold-out", message)
    if from_scratch:
        result = calibrate_serving(served.runs, source=served.source, log=log)
        return serving_sets(result.headed_by(hold_out), served.source)
    result = refine_serving(
        served.runs,
        lambda *key: serving_calibration(catalog, *key),
        source=served.source,
        hold_out=hold_out,
        free=free,
    )
    return serving_sets(result, served.source)


def _power(served: Observed[PreparedRun], catalog: Catalog, *, has_choices: bool) -> FittedSets:
    """Constants of the power curve, from the serving runs whose power was measured.

    Raises:
        SpecError: there is none, or the command line has choices of other fits.
    """
    from meshplan.catalogs.errors import SpecError
    from meshplan.cli.reports.measured.calibration import power_sets
    from meshplan.planner.serving.measured.power_fit import calibrate_power, measured_share, power_rows
    from meshplan.planner.serving.resolve import serving_calibration

    if has_choices:
        message = "goes with none of --from-scratch, --hold-out and --constants: it leaves out all in turn"
        raise SpecError.at("--power", message)
    runs = [run for run in served.runs if measured_share(run) is not None]
    rows = power_rows(runs, lambda run: serving_calibration(catalog, *run.key).constants)
    if not rows:
        raise SpecError.at("", "no serving run in these files has a measured power")
    titles = served.source.partition(": ")[2]
    source = f"{len(rows)} serving runs with measured power of: {titles}"
    return power_sets(calibrate_power(rows, source=source), source)


def _training(trained: Observed[ObservedRun], catalog: Catalog, hold_out: str, *, from_scratch: bool) -> FittedSets:
    """Constants of training frameworks, fitted from scratch or adapted to own runs.

    Raises:
        SpecError: there is no run.
    """
    from meshplan.catalogs.errors import SpecError
    from meshplan.cli.reports.measured.calibration import training_sets
    from meshplan.planner.training.measured.calibrate import calibrate
    from meshplan.planner.training.measured.own_runs import refine
    from meshplan.planner.training.resolve import calibration_for

    if not trained.runs:
        raise SpecError.at("", "no run in these files that can be priced", of="the measured rows")
    if from_scratch:
        result = calibrate(trained.runs, source=trained.source, log=log).headed_by(hold_out)
    else:
        result = refine(
            trained.runs, lambda *key: calibration_for(catalog, *key), source=trained.source, hold_out=hold_out
        )
    return training_sets(result, trained.source)


def _finish(
    fitted: FittedSets, catalog: Catalog, form: Format, *, dry_run: bool, export: Path | None, force: bool
) -> None:
    """Export, store and show the constants."""
    if export is not None:
        fitted.export(export, force=force)
    if not dry_run:
        for name, document in zip(fitted.names, fitted.documents, strict=True):
            architecture, source, date = (document[key] for key in ("architecture", "source", "date"))
            catalog.put_calibration(name, architecture, document, source=source, date=date)
    fitted.show(form)
    if not dry_run and form not in (Format.JSON, Format.YAML):
        log(f"stored {len(fitted.documents)} sets of {fitted.title} in the catalog")
