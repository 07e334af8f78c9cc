"""``meshplan calibrate``: fit the estimator's named constants to measured runs, and print the held-out error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption
from meshplan.cli.render import Format

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.cli.observed import Observed
    from meshplan.cli.reports.calibration import FittedSets
    from meshplan.planner.serving.measured.prediction import PreparedRun
    from meshplan.planner.training.measured.observations import ObservedRun

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class HoldOut(StrEnum):
    """What is left out together."""

    RUN = "run"
    LAYOUT = "layout"


@app.command()
def calibrate(
    observations: Annotated[
        list[Path], typer.Argument(metavar="OBSERVATIONS...", help="Measured runs, one JSON object per line.")
    ],
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch", help="Fit all sets anew from the literature's constants; default: refine the catalog's."
        ),
    ] = False,
    traces: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Traces that serving runs replayed, named TYPE.csv[.gz].", show_default=False),
    ] = None,
    hold_out: Annotated[
        HoldOut, typer.Option(help="What of your own serving runs is left out together when errors are taken.")
    ] = HoldOut.RUN,
    free: Annotated[
        str | None,
        typer.Option(
            "--constants",
            metavar="NAME,…",
            help="Serving constants that your own runs may move. Default: all.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the errors; do not store the constants.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="Also write the constants; those of serving to serving_FILE.yaml.",
            show_default=False,
        ),
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Fit the named constants (efficiencies, overlaps, host overheads, memory) and print the error on held-out runs.

    Training runs and serving runs may be in the same files; one measured serving run is enough to refine its engine's
    constants.
    """
    from meshplan.cli.observed import serving_runs, training_runs
    from meshplan.planner.validation.machines import read_rows

    catalog = open_catalog(db)
    rows = [row for path in observations for row in read_rows(path)]
    served = serving_runs(rows, catalog, traces)
    if served.runs:
        own = None if from_scratch else OwnRuns(hold_out=hold_out.value, free=_serving_constants(free))
        _finish(_serving(served, catalog, own), served.source, catalog, form, dry_run=dry_run, export=export)
    if not served.runs or any(row.get("task") != "serving" for row in rows):
        trained = training_runs(rows, catalog)
        fitted = _training(trained, catalog, from_scratch=from_scratch)
        _finish(fitted, trained.source, catalog, form, dry_run=dry_run, export=export)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRuns:
    """How serving constants are adapted to a user's own runs.

    Args:
        hold_out: what is left out together when errors are taken.
        free: constants that may move.
    """

    hold_out: str
    free: Sequence[str]


def _serving_constants(text: str | None) -> Sequence[str]:
    """Names of serving constants in a list with commas; all of them for None.

    Raises:
        SpecError: an unknown name.
    """
    from meshplan.catalogs.errors import Problem, SpecError
    from meshplan.planner.serving.measured.constants_fit import FITTED

    names = tuple(FITTED) if text is None else tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in FITTED]
    if unknown:
        message = f"no serving constant is called {', '.join(map(repr, unknown))}: they are {', '.join(FITTED)}"
        raise SpecError([Problem(path="--constants", message=message)])
    return names


def _serving(served: Observed[PreparedRun], catalog: Catalog, own: OwnRuns | None) -> FittedSets:
    """Constants of serving engines, fitted from scratch or adapted to own runs."""
    from meshplan.cli.reports.calibration import serving_sets
    from meshplan.planner.serving.measured.calibrate import calibrate_serving, refine_serving
    from meshplan.planner.serving.resolve import serving_calibration

    def note(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    if own is None:
        result = calibrate_serving(served.runs, source=served.source, log=note)
    else:
        result = refine_serving(
            served.runs,
            lambda *key: serving_calibration(catalog, *key),
            source=served.source,
            hold_out=own.hold_out,
            free=own.free,
        )
    return serving_sets(result, own=own is not None)


def _training(trained: Observed[ObservedRun], catalog: Catalog, *, from_scratch: bool) -> FittedSets:
    """Constants of training frameworks, fitted from scratch or adapted to own runs.

    Raises:
        SpecError: there is no run.
    """
    from meshplan.catalogs.errors import Problem, SpecError
    from meshplan.cli.reports.calibration import training_sets
    from meshplan.planner.training.measured.calibrate import calibrate, refine
    from meshplan.planner.training.resolve import calibration_for

    if not trained.runs:
        raise SpecError([Problem(path="", message="no run in these files that can be priced")])
    if from_scratch:
        return training_sets(calibrate(trained.runs, source=trained.source))
    return training_sets(refine(trained.runs, lambda *key: calibration_for(catalog, *key), source=trained.source))


def _finish(
    fitted: FittedSets, source: str, catalog: Catalog, form: Format, *, dry_run: bool, export: Path | None
) -> None:
    """Export, store and show the constants."""
    from meshplan.cli.render import show_document, show_rows

    if export is not None:
        fitted.export(export, source)
    if not dry_run:
        for name, document in zip(fitted.names, fitted.documents, strict=True):
            catalog.put_calibration(
                name, document["architecture"], document, source=document["source"], date=document["date"]
            )
    if form in (Format.JSON, Format.YAML):
        tables = {table.key: table.rows for table in fitted.tables}
        show_document({**tables, "calibrations": fitted.documents}, form)
        return
    for table in fitted.tables:
        if table.rows or not table.is_optional:
            show_rows(table.rows, table.columns, form, title=table.title)
    if not dry_run:
        sys.stderr.write(f"stored {len(fitted.documents)} sets of {fitted.title} in the catalog\n")
