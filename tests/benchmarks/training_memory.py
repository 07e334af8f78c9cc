"""Predicted against measured peaks of training, source by source: the typical figure and the safe bound.

    python tests/benchmarks/training_memory.py OBSERVATIONS.jsonl... [--rows]

Two ways of holding out: a whole *source* (constants of the literature, factors of the other frameworks: what a
framework that nobody has measured gets) and a *group* (model and device within a source; constants and factors from
the other groups). ``above`` counts peaks above the safe bound, each of which is listed; ``over`` is how much more than
was measured the bound asks for, on the mean. ``admitted``: of the runs that worked, those that the shipped constants
let in at their exact size, by the safe bound and by the typical figure; without ``unsaid`` those that need recompute
which their row does not state. ``--rows`` prints every peak. Takes about a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshplan.cli.database import open_catalog
from meshplan.planner.training.measured.exclusions import exclusion
from meshplan.planner.training.measured.memory.fit import calibrate_memory, without_source
from meshplan.planner.training.measured.memory.spread import peak_spread
from meshplan.planner.training.measured.observations import ObservationReader, ObservedRun
from meshplan.planner.training.measured.pools import is_pooled
from meshplan.planner.training.measured.validate import validate_run
from meshplan.planner.training.resolve import calibration_for
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import read_rows

Errors = Mapping[str, tuple[float, float]]
HEAD = f"{'':26}{'runs':>5}{'typical: mean':>15}{'median':>8}{'signed':>8}{'above':>7}{'over':>8}"
ALL = "all"
# Share of the peaks that a plan's interval leaves out below.
BELOW = 0.05


def line(name: str, errors: Iterable[tuple[float, float]]) -> str:
    typical, safe = np.array(list(errors)).T
    size = np.abs(typical)
    return (
        f"{name:26}{len(size):5}{size.mean():15.1%}{np.median(size):8.1%}{np.median(typical):+8.1%}"
        f"{np.mean(safe < 0.0):7.1%}{safe.mean():8.1%}"
    )


def table(title: str, errors: Errors, sources: Mapping[str, str], *, rows: bool) -> None:
    print(f"\n{title}\n{HEAD}")
    by_source: dict[str, list[tuple[float, float]]] = {}
    for name, error in errors.items():
        by_source.setdefault(sources[name], []).append(error)
    for source, found in sorted(by_source.items()):
        print(line(source, found))
    print(line(ALL, errors.values()))
    least = np.quantile([1.0 / (1.0 + typical) for typical, _ in errors.values()], BELOW)
    print(f"{BELOW:.0%} of the peaks lie below {least:.2f} of the typical figure")
    means = np.array(
        [[np.mean(np.abs(np.array(found)[:, 0])), np.mean(np.array(found)[:, 1])] for found in by_source.values()]
    )
    print(f"{'sources weighing the same':26}{'':5}{means[:, 0].mean():15.1%}{'':23}{means[:, 1].mean():8.1%}")
    for name, (typical, safe) in errors.items():
        if rows or safe < 0.0:
            print(f"  {'above' if safe < 0.0 else '':6}{name}: typical {typical:+.1%}, bound {safe:+.1%}")


def admissions(runs: Iterable[ObservedRun]) -> None:
    catalog, counts = open_catalog(None), Counter[str]()
    for run in runs:
        calibration = calibration_for(catalog, run.framework, run.architecture)
        row = validate_run(replace(run, problem=replace(run.problem, calibration=calibration)))
        if row.admitted:
            counts[row.admitted] += 1
            if row.admitted == "neither":
                print(f"  not admitted: {run.id}")
    total = sum(counts.values())
    print("; ".join(f"{name} {count} ({count / total:.1%})" for name, count in counts.most_common()), f"of {total}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured peaks of training.")
    parser.add_argument("observations", type=Path, nargs="+")
    parser.add_argument("--rows", action="store_true", help="print every peak")
    given = parser.parse_args()
    reader, runs, left_out = ObservationReader(open_catalog(None)), [], Counter[str]()
    for row in (row for path in given.observations for row in read_rows(path)):
        if row.get("task") != "training" or is_pooled(row):
            continue
        try:
            run = reader.training_run(row)
        except UnsupportedError as error:
            left_out[str(error)] += 1
            continue
        if not exclusion(run.problem, run.config, run.measured):
            runs.append(run)
        if run.peak_left_out:
            left_out[f"{run.id}: {run.peak_left_out}"] += 1
    sources = {run.id: run.source for run in runs}
    table("whole source held out", without_source(runs), sources, rows=given.rows)
    fits = calibrate_memory(runs).values()
    group = {name: (fit.typical_error[name], fit.safe_error[name]) for fit in fits for name in fit.typical_error}
    table("group held out", group, sources, rows=False)
    parts = peak_spread(runs)
    print(
        f"ln(measured/typical) at constants of the literature: bias {parts.bias:+.3f}; standard deviations of sources "
        f"{parts.source:.3f}, of models {parts.model:.3f}, of plans {parts.plan:.3f}"
    )
    for reason, count in left_out.items():
        print(f"  left out: {reason}" + f" ({count} rows)" * (count > 1))
    print("\nruns that worked, with the shipped constants")
    admissions(run for run in runs if not run.expects_oom)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
