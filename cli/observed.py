"""Measured runs as the commands take them: the rows of observation files that a kind can predict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.serving.measured.prediction import PreparedRun
    from meshplan.planner.training.measured.observations import ObservedRun

Run = TypeVar("Run")


def log(text: str) -> None:
    """One line on stderr: what a long fit is doing, and what it left out."""
    sys.stderr.write(f"{text}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Generic[Run]):
    """Measured runs of one kind.

    Args:
        runs: those that can be predicted.
        source: what to call them.
    """

    runs: Sequence[Run]
    source: str


def different(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows, equal ones once, as where a file is named twice: the copy of a run that is held out would be fitted to."""
    import json

    stated = list(rows)
    once = {json.dumps(row, sort_keys=True): row for row in stated}
    if len(once) < len(stated):
        log(f"note: {len(stated) - len(once)} rows are equal to another one and count once")
    return list(once.values())


def believed(rows: Sequence[Mapping[str, Any]], catalog: Catalog, traces: Path | None) -> list[Mapping[str, Any]]:
    """Rows whose measurements may be in the units of their names; the others are told and left out.

    Args:
        rows: observations.
        catalog: devices, links and the constants that a measurement is held against.
        traces: folder of the recorded requests that runs replayed; None where there is none.
    """
    from meshplan.planner.validate import validate_rows
    from meshplan.planner.validation.recorded import in_another_unit

    kept = []
    for row, found in zip(rows, validate_rows(rows, catalog, traces=traces).rows, strict=True):
        wrong = {name: in_another_unit(found.measured[name], found.predicted[name]) for name in found.error}
        if name := next((name for name, reason in wrong.items() if reason), ""):
            log(f"note: {found.id} is left out: {name} {wrong[name]}")
        else:
            kept.append(row)
    return kept


def training_runs(rows: Iterable[Mapping[str, Any]], catalog: Catalog) -> Observed[ObservedRun]:
    """The training runs among observations, without those that are excluded from errors."""
    from meshplan.planner.training.measured.exclusions import exclusion
    from meshplan.planner.training.measured.observations import ObservationReader

    reader = ObservationReader(catalog)

    def read(row: Mapping[str, Any]) -> ObservedRun | None:
        run = reader.training_run(row)
        return None if exclusion(run.problem, run.config, run.measured) else run

    training = [row for row in rows if row.get("task") == "training"]
    return _readable(training, read, name="runs", verb="priced")


def serving_runs(rows: Sequence[Mapping[str, Any]], catalog: Catalog, traces: Path | None) -> Observed[PreparedRun]:
    """The aggregated serving runs among observations, without those that are excluded from errors.

    Args:
        rows: observations.
        catalog: devices and links.
        traces: folder of the recorded requests that runs replayed; None where there is none.
    """
    from meshplan.planner.serving.measured.exclusions import exclusions
    from meshplan.planner.serving.measured.observations import served_run
    from meshplan.planner.serving.measured.prediction import PreparedRun
    from meshplan.planner.serving.measured.workloads import recorded_traces
    from meshplan.planner.validation.machines import MachineReader

    reader, excluded, recorded = MachineReader(catalog), exclusions(rows), recorded_traces(rows, traces)

    def prepared(row: Mapping[str, Any]) -> PreparedRun | None:
        run = served_run(row, reader, recorded)
        return None if run.config.is_disaggregated else PreparedRun(run)

    serving = [row for row in rows if row.get("task") == "serving" and row.get("id") not in excluded]
    return _readable(serving, prepared, name="serving runs", verb="simulated")


def _readable(
    rows: Iterable[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Run | None], *, name: str, verb: str
) -> Observed[Run]:
    """What ``read`` makes of the rows, where it is not None; the number of refused rows goes to stderr."""
    from meshplan.planner.validation.fields import Section, UnsupportedError

    runs, titles, refused = [], set(), 0
    for row in rows:
        try:
            run = read(row)
            title = str(Section(row, "source", required=False).values.get("title", "unnamed runs"))
        except UnsupportedError:
            refused += 1
            continue
        if run is not None:
            runs.append(run)
            titles.add(title)
    if refused:
        log(f"note: {refused} {name} cannot be {verb}; see meshplan validate")
    return Observed(runs=runs, source=f"{len(runs)} {name}: {'; '.join(sorted(titles))}")
