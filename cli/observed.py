"""Measured serving runs as the commands take them: rows of observation files with their recorded traces."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.serving.measured.prediction import PreparedRun
    from meshplan.planner.serving.problem.requests import Requests


TRACE_SUFFIXES = (".csv.gz", ".csv")


def read_traces(rows: Iterable[Mapping[str, Any]], folder: Path | None) -> dict[str, Requests]:
    """The traces that rows name, by their type; those whose file is not in the folder are left out.

    A file is TYPE.csv, or any that has the type in its name.
    """
    from meshplan.planner.serving.problem.trace import read_trace

    if folder is None:
        return {}
    workloads = [row.get("workload") for row in rows]
    wanted = {str(w["trace_type"]) for w in workloads if isinstance(w, dict) and w.get("trace_type")}
    files = sorted(path for path in folder.iterdir() if path.name.endswith(TRACE_SUFFIXES)) if folder.is_dir() else []
    found = {}
    for kind in sorted(wanted):
        matching = [path for path in files if kind in path.name]
        if matching:
            found[kind] = read_trace(matching[0])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRuns:
    """Serving runs that can be simulated.

    Args:
        runs: them.
        source: what to call them.
    """

    runs: Sequence[PreparedRun]
    source: str


def serving_runs(rows: Sequence[Mapping[str, Any]], catalog: Catalog, traces: Path | None) -> ServedRuns:
    """The serving runs among observations, without those that are not to be judged by."""
    from meshplan.cli.observed import read_traces
    from meshplan.planner.serving.measured.exclusions import exclusions
    from meshplan.planner.serving.measured.observations import served_run
    from meshplan.planner.serving.measured.prediction import PreparedRun
    from meshplan.planner.validation.fields import UnsupportedError
    from meshplan.planner.validation.machines import MachineReader

    reader, excluded, replayed = MachineReader(catalog), exclusions(rows), read_traces(rows, traces)
    runs, titles, refused = [], set(), 0
    for row in rows:
        if row.get("task") != "serving" or row.get("id") in excluded:
            continue
        try:
            run = served_run(row, reader, replayed)
        except UnsupportedError:
            refused += 1
            continue
        if not run.config.is_disaggregated:
            runs.append(PreparedRun(run))
            titles.add(str(row.get("source", {}).get("title", "unnamed runs")))
    if refused:
        sys.stderr.write(f"note: {refused} serving runs cannot be simulated; see meshplan validate\n")
    return ServedRuns(runs=runs, source=f"{len(runs)} serving runs: {'; '.join(sorted(titles))}")
