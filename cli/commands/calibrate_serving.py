"""The serving half of ``meshplan calibrate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.cli.observed import ServedRuns
from meshplan.cli.render import Column, Format

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.serving.measured.calibrate import Calibrated, HeldOut


def _percent(value: float) -> str:
    return f"{value:.1%}"


ERRORS = (
    Column(key="set", title="Serving constants of"),
    Column(key="metric", title="Metric"),
    Column(key="runs", title="runs", right=True),
    Column(key="median", title="median", right=True, text=_percent),
    Column(key="mean", title="mean", right=True, text=_percent),
    Column(key="p90", title="p90", right=True, text=_percent),
    Column(key="signed", title="signed", right=True, text=lambda value: f"{value:+.1%}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRuns:
    """How constants are adapted to a user's own runs.

    Args:
        hold_out: what is left out together when errors are taken.
        free: constants that may move.
    """

    hold_out: str
    free: Sequence[str]


def free_constants(text: str | None) -> Sequence[str]:
    """Names of constants in a list with commas; all of them for None.

    Raises:
        SpecError: a name that is none.
    """
    from meshplan.catalogs.errors import Problem, SpecError
    from meshplan.planner.serving.measured.constants_fit import FITTED

    names = tuple(FITTED) if text is None else tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in FITTED]
    if unknown:
        message = f"no serving constant is called {', '.join(map(repr, unknown))}: they are {', '.join(FITTED)}"
        raise SpecError([Problem(path="--constants", message=message)])
    return names


def calibrate_serving_runs(
    served: ServedRuns, catalog: Catalog, form: Format, *, own: OwnRuns | None, dry_run: bool, export: Path | None
) -> None:
    """Fit, store, export and show the constants of serving engines: from scratch, or adapted to own runs."""
    from meshplan.cli.render import show_document, show_rows
    from meshplan.planner.serving.measured.calibrate import calibrate_serving, refine_serving
    from meshplan.planner.serving.resolve import serving_calibration

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    if own is None:
        result = calibrate_serving(served.runs, source=served.source, say=say)
    else:
        result = refine_serving(
            served.runs,
            lambda *key: serving_calibration(catalog, *key),
            source=served.source,
            hold_out=own.hold_out,
            free=own.free,
        )
    if export is not None:
        _export(result, export.with_name(f"serving_{export.name}"), served.source)
    if not dry_run:
        for item in result.calibrations:
            catalog.put_calibration(
                item.engine, item.architecture, item.to_document(), source=item.source, date=item.date
            )
    errors = error_rows(result, own=own is not None)
    if form in (Format.JSON, Format.YAML):
        constants = [item.to_document() for item in result.calibrations]
        show_document({"held_out": errors, "calibrations": constants}, form)
        return
    show_rows(errors, ERRORS, form, title="|error| on held-out serving runs")
    if not dry_run:
        sys.stderr.write(f"stored {len(result.calibrations)} sets of serving constants in the catalog\n")


def error_rows(result: Calibrated, *, own: bool = False) -> list[dict[str, Any]]:
    """Held-out errors: over all, by source and by set of constants, of own runs by group, too; one row a metric."""
    sets: dict[tuple[str, str], list[HeldOut]] = {}
    for item in result.held_out:
        source, _, model = item.group.partition("|")
        names = ["all", f"source {source}", f"{item.key[0]} on {item.key[1]}"]
        if own:  # few enough to be told apart
            names.append(f"source {source}: {model.replace('|', ', ')}")
        for name in names:
            sets.setdefault((name, item.metric), []).append(item)
    order = {"all": 0, "source": 1}
    keys = sorted(sets, key=lambda key: (order.get(key[0].split(" ", maxsplit=1)[0], 2), key))
    return [_error_row(name, metric, sets[name, metric]) for name, metric in keys]


def _error_row(name: str, metric: str, items: Sequence[HeldOut]) -> dict[str, Any]:
    import numpy as np

    errors = np.array([item.error for item in items])
    return {
        "set": name,
        "metric": metric,
        "runs": len(errors),
        "median": float(np.median(np.abs(errors))),
        "mean": float(np.mean(np.abs(errors))),
        "p90": float(np.quantile(np.abs(errors), 0.9)),
        "signed": float(np.median(errors)),
    }


def _export(result: Calibrated, path: Path, source: str) -> None:
    import yaml

    from meshplan.catalogs.errors import EmitError

    dropped = ("source", "date")
    content = {
        "source": source,
        "date": result.calibrations[0].date,
        "calibrations": [
            {key: value for key, value in item.to_document().items() if key not in dropped}
            for item in result.calibrations
        ],
    }
    header = (
        "# Constants of serving engines, fitted per engine and hardware generation: see\n"
        "# planner/serving/measured/calibrate.py. Made by\n"
        "# `meshplan calibrate OBSERVATIONS... --from-scratch --export FILE`; do not edit by hand.\n"
    )
    try:
        path.write_text(header + yaml.safe_dump(content, sort_keys=False, width=110), encoding="utf-8")
    except OSError as error:
        raise EmitError(f"cannot write {path}: {error}") from error
