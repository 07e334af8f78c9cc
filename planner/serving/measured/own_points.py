"""How well a few measured runs of a server predict its other loads: what ``calibrate`` gains a user with few runs.

A *curve* is one server under several loads: runs of one model, device, engine, layout, formats and lengths whose
concurrency or rate differs. From every curve some runs are drawn as if they were all that the user had measured; the
constants of the catalog are adapted to them (:func:`~meshplan.planner.serving.measured.calibrate.refine_serving`, the
code of ``meshplan calibrate``), and the other runs of the curve are predicted. No run is judged by itself. The errors
with the catalog's constants alone are given for comparison; both look better if these were fitted to the same runs.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.serving import ServingCalibration
from meshplan.planner.serving.measured.calibrate import refine_serving
from meshplan.planner.serving.measured.fit.parts import FITTED
from meshplan.planner.serving.measured.fit.rows import OWN_NOISE, Row
from meshplan.planner.serving.measured.fit.solution import OWN_ITERATIONS
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.measured.validate import ServingCalibrationOf, validated_run
from meshplan.planner.serving.simulation.compiled import choice as machine_code
from meshplan.planner.validation.points import PointsResult
from meshplan.planner.validation.summary import ValidatedRow, summarise, summed_up

GIVEN = "measured point of its curve: the constants were adapted to it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    points: tuple[PreparedRun, ...]
    rest: tuple[PreparedRun, ...]
    start: ServingCalibration


def curves_of(runs: Iterable[PreparedRun]) -> list[list[PreparedRun]]:
    """The runs of each curve, by load; runs without a metric that constants are fitted to are left out."""
    curves: dict[tuple[object, ...], list[PreparedRun]] = defaultdict(list)
    for run in runs:
        row = Row(run, OWN_NOISE)
        if row.metrics:
            curves[row.curve].append(run)
    return [sorted(members, key=_load) for members in curves.values()]


def _load(run: PreparedRun) -> tuple[float, str]:
    workload = run.run.workload
    return float(workload.concurrency or workload.request_rate_per_s or 0.0), run.run.id


def predict_from_points(
    runs: Iterable[PreparedRun],
    shipped: ServingCalibrationOf,
    *,
    num_points: int = 1,
    seed: int = 0,
    sample: int | None = None,
    num_processes: int = 1,
    log: Callable[[str], None] = lambda _: None,
) -> PointsResult:
    """Draw points, adapt the constants to them, predict the rest of each curve.

    Args:
        runs: measured serving runs.
        shipped: (engine, generation) → the catalog's set.
        num_points: runs of a curve that are given; curves without more are left out.
        seed: seed of the draws; the points of a curve do not depend on which other curves there are.
        sample: curves that are drawn at random; None for all.
        num_processes: processes that share the curves.
        log: called with a line on what is being done.
    """
    curves = sorted((curve for curve in curves_of(runs) if len(curve) > num_points), key=_name)
    if sample is not None and sample < len(curves):
        chosen = np.random.default_rng(seed).choice(len(curves), sample, replace=False)
        curves = [curves[i] for i in sorted(chosen)]
    splits = [_split(curve, shipped, num_points, seed) for curve in curves]
    # That a point is simulated, twice for a slope and once between; the others of its curve twice, for less.
    times = OWN_ITERATIONS * (2 * len(FITTED) + 1) + 2
    machine_code.expect(times * sum(run.run.workload.num_requests or 0 for split in splits for run in split.points))
    log(f"{len(splits)} curves, {sum(len(split.rest) for split in splits)} runs to predict")
    rows, without = _predicted(splits, num_processes)
    starts = {(split.start.engine, split.start.architecture): split.start for split in splits}
    return PointsResult(
        validation=summed_up(rows, answered=("ok", "given")),
        without=tuple(item for item in summarise(without) if item.group == "all"),
        num_curves=len(splits),
        started_from=tuple(
            f"{engine} on {generation} ({item.num_runs} runs, {item.date or 'no date'}: {item.source})"
            for (engine, generation), item in sorted(starts.items())
        ),
    )


def _name(curve: Sequence[PreparedRun]) -> str:
    return min(member.run.id for member in curve)


def _split(curve: Sequence[PreparedRun], shipped: ServingCalibrationOf, num_points: int, seed: int) -> _Split:
    draws = np.random.default_rng([seed, zlib.crc32(_name(curve).encode())])
    chosen = set(draws.choice(len(curve), num_points, replace=False).tolist())
    return _Split(
        points=tuple(member for i, member in enumerate(curve) if i in chosen),
        rest=tuple(member for i, member in enumerate(curve) if i not in chosen),
        start=shipped(*curve[0].key),
    )


def _predicted(splits: Sequence[_Split], num_processes: int) -> tuple[list[ValidatedRow], list[ValidatedRow]]:
    """All rows with adapted constants, and the judged ones with the constants that the adaptation started from."""
    if num_processes > 1 and len(splits) > 1:
        with ProcessPoolExecutor(num_processes) as pool:
            found = list(pool.map(_of_curve, splits))
    else:
        found = [_of_curve(split) for split in splits]
    return [row for rows, _ in found for row in rows], [row for _, rows in found for row in rows if row.status == "ok"]


def _of_curve(split: _Split) -> tuple[list[ValidatedRow], list[ValidatedRow]]:
    refined = refine_serving(split.points, lambda *_: split.start, source="own points").calibrations[0]
    given = [replace(validated_run(run, refined), status="given", reason=GIVEN) for run in split.points]
    return given + [validated_run(run, refined) for run in split.rest], [
        validated_run(run, split.start) for run in split.rest
    ]
