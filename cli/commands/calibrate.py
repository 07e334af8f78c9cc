"""``meshplan calibrate``: fit the estimator's named constants to measured runs, and print the held-out error."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption
from meshplan.cli.render import Column, Format

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.training.measured.calibrate import Calibrated
    from meshplan.planner.training.measured.observations import ObservedRun

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class HoldOut(StrEnum):
    """What is left out together."""

    RUN = "run"
    LAYOUT = "layout"


def _percent(value: float) -> str:
    return f"{value:.1%}"


_ERRORS = (
    Column(key="set", title="Constants of"),
    Column(key="runs", title="runs", right=True),
    Column(key="median", title="median", right=True, text=_percent),
    Column(key="mean", title="mean", right=True, text=_percent),
    Column(key="p90", title="p90", right=True, text=_percent),
    Column(key="signed", title="signed", right=True, text=lambda value: f"{value:+.1%}"),
)
_MEMORY = (
    Column(key="set", title="Memory of"),
    Column(key="runs", title="runs", right=True),
    Column(key="typical_mape", title="typical, mean error", right=True, text=_percent),
    Column(key="safe_mean", title="safe over measured, mean", right=True, text=_percent),
    Column(key="safe_least", title="least", right=True, text=_percent),
)


@app.command()
def calibrate(
    observations: Annotated[
        list[Path], typer.Argument(metavar="OBSERVATIONS...", help="Measured runs, one JSON object a line.")
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
    from meshplan.cli.commands.calibrate_serving import OwnRuns, calibrate_serving_runs, free_constants
    from meshplan.cli.observed import serving_runs
    from meshplan.cli.render import show_document, show_rows
    from meshplan.planner.training.measured.calibrate import calibrate as fit_all
    from meshplan.planner.training.measured.calibrate import refine
    from meshplan.planner.training.resolve import calibration_for
    from meshplan.planner.validation.machines import read_rows

    catalog = open_catalog(db)
    rows = [row for path in observations for row in read_rows(path)]
    served = serving_runs(rows, catalog, traces)
    if served.runs:
        own = OwnRuns(hold_out=hold_out.value, free=free_constants(free))
        calibrate_serving_runs(served, catalog, form, own=None if from_scratch else own, dry_run=dry_run, export=export)
    if all(row.get("task") == "serving" for row in rows) and served.runs:
        return
    runs, source = _runs(rows, catalog)
    if from_scratch:
        result = fit_all(runs, source=source)
    else:
        result = refine(runs, lambda *key: calibration_for(catalog, *key), source=source)
    if export is not None:
        _export(result, export, source)
    if not dry_run:
        for item in result.calibrations:
            catalog.put_calibration(
                item.framework, item.architecture, _stored(item.to_document()), source=item.source, date=item.date
            )
    errors, memory = _error_rows(result), _memory_rows(result)
    if form in (Format.JSON, Format.YAML):
        constants = [_stored(item.to_document()) for item in result.calibrations]
        show_document({"held_out": errors, "memory": memory, "calibrations": constants}, form)
        return
    show_rows(errors, _ERRORS, form, title="|error| of the step time on held-out runs")
    if memory:
        show_rows(memory, _MEMORY, form, title="\nPeak memory on held-out runs")
    if not dry_run:
        sys.stderr.write(f"stored {len(result.calibrations)} sets of constants in the catalog\n")


def _runs(rows: Sequence[Mapping[str, Any]], catalog: Catalog) -> tuple[list[ObservedRun], str]:
    """The training runs that can be priced, and what to call them."""
    from meshplan.catalogs.constants.training import Calibration
    from meshplan.catalogs.errors import Problem, SpecError
    from meshplan.planner.training.measured.observations import ObservationReader
    from meshplan.planner.validation.fields import UnsupportedError

    reader = ObservationReader(catalog)
    placeholder = Calibration(framework="any", architecture="any")
    runs, titles, refused = [], set(), 0
    for row in rows:
        if row.get("task") != "training":
            continue
        try:
            runs.append(reader.training_run(row, placeholder))
            titles.add(str(row.get("source", {}).get("title", "unnamed runs")))
        except UnsupportedError:
            refused += 1
    if not runs:
        raise SpecError([Problem(path="", message="no run in these files that can be priced")])
    if refused:
        sys.stderr.write(f"note: {refused} runs cannot be priced; see meshplan validate\n")
    return runs, f"{len(runs)} runs: {'; '.join(sorted(titles))}"


def _stored(document: dict[str, Any]) -> dict[str, Any]:
    """Constants without the recipe, which the framework's documentation decides."""
    return {key: value for key, value in document.items() if key != "recipe"}


def _error_row(name: str, errors: Sequence[float]) -> dict[str, Any]:
    import numpy as np

    size = np.abs(errors)
    return {
        "set": name,
        "runs": len(errors),
        "median": float(np.median(size)),
        "mean": float(np.mean(size)),
        "p90": float(np.quantile(size, 0.9)),
        "signed": float(np.median(errors)),
    }


def _error_rows(result: Calibrated) -> list[dict[str, Any]]:
    sets: dict[str, list[float]] = {}
    for item in result.held_out:
        sets.setdefault(f"{item.framework} on {item.architecture}", []).append(item.error)
    rows = [_error_row("all, group held out", [item.error for item in result.held_out])] if result.held_out else []
    if result.unseen:
        rows.append(_error_row("all, framework never seen", [item.error for item in result.unseen]))
    kinds: dict[str, list[float]] = {}
    for item in result.held_out:
        kinds.setdefault(item.strategy, []).append(item.error)
    rows += [_error_row(f"{name}, group held out", errors) for name, errors in sorted(kinds.items())]
    return rows + [_error_row(name, errors) for name, errors in sorted(sets.items())]


def _memory_rows(result: Calibrated) -> list[dict[str, Any]]:
    import numpy as np

    return [
        {
            "set": name,
            "runs": len(fit.typical_error),
            "typical_mape": float(np.mean(np.abs(list(fit.typical_error.values())))),
            "safe_mean": float(np.mean(list(fit.safe_error.values()))),
            "safe_least": float(min(fit.safe_error.values())),
        }
        for name, fit in sorted(result.memory.items())
        if fit.typical_error
    ]


def _export(result: Calibrated, path: Path, source: str) -> None:
    import yaml

    from meshplan.catalogs.errors import EmitError

    content = {
        "source": source,
        "date": result.calibrations[0].date,
        "calibrations": [
            {key: value for key, value in _stored(item.to_document()).items() if key not in ("source", "date")}
            for item in result.calibrations
        ],
    }
    header = (
        "# Constants of the estimator, fitted per framework and hardware generation: see\n"
        "# planner/training/measured/calibrate.py.\n"
        "# Made by `meshplan calibrate OBSERVATIONS... --from-scratch --export FILE`; do not edit by hand.\n"
    )
    try:
        path.write_text(header + yaml.safe_dump(content, sort_keys=False, width=110), encoding="utf-8")
    except OSError as error:
        raise EmitError(f"cannot write {path}: {error}") from error
