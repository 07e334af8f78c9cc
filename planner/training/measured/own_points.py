"""What one or three measured runs of a cluster that nobody knows bring to its other plans, and to their intervals.

Every source of published runs is taken for a stranger's cluster: the constants to start from, with their intervals and
their bound of the memory, are fitted to the *other* sources. Some runs are drawn as if they were all that the user had
measured, the set is adapted to them (:func:`~meshplan.planner.training.measured.own_runs.refine`, the code of
``meshplan calibrate``), and other runs are predicted. No run is judged by itself.

Points are drawn in two ways: from all runs of a cluster – source, framework, device and links –, whatever their model,
and from those of one model on it, as for a user who tunes the layout of one job. The errors of both are told apart.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Basis, Calibration
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.calibrate import LITERATURE, Evidence, evidence
from meshplan.planner.training.measured.constants_fit import Row, key_of
from meshplan.planner.training.measured.memory.fit import calibrate_memory, unseen_bounds
from meshplan.planner.training.measured.memory.spread import PeakSpread, peak_spread
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.measured.own_runs import refine
from meshplan.planner.training.measured.unseen import TOGETHER, sets_without
from meshplan.planner.training.measured.validate import validate_run
from meshplan.planner.validation.held_out import Key
from meshplan.planner.validation.points import PointsResult, memory_safety
from meshplan.planner.validation.summary import ValidatedRow, summarise, summed_up

GIVEN = "measured point: the constants were adapted to it"
# Draws of points from each group of runs: with one, which run happened to be drawn decides the figures.
DRAWS = 3
JUDGED = ("iteration_s", "peak_memory_bytes")  # other metrics of a run are these in other units


def cluster_of(run: ObservedRun) -> Hashable:
    """What stands for the cluster that published runs come from."""
    machine = run.problem.machine
    links = machine.devices_per_host, machine.scale_up_bytes_per_s, machine.scale_out_bytes_per_s
    return run.source, key_of(run), machine.device.slug, links


# What points are drawn from, in words → runs that share it.
DRAWN_FROM: Mapping[str, Callable[[ObservedRun], Hashable]] = {
    "clusters": cluster_of,
    "models on a cluster": lambda run: (cluster_of(run), run.problem.shape.name),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    points: tuple[ObservedRun, ...]
    rest: tuple[ObservedRun, ...]
    start: Calibration
    spread: PeakSpread


def predict_from_points(
    runs: Iterable[ObservedRun],
    *,
    num_points: int = 1,
    seed: int = 0,
    sample: int | None = None,
    num_processes: int = 1,
    draws: int = DRAWS,
    log: Callable[[str], None] = lambda _: None,
) -> tuple[PointsResult, ...]:
    """Leave every source out, draw points of it, adapt the constants to them, predict its other runs.

    Args:
        runs: measured training runs.
        num_points: runs of a group that are given; groups without more are left out.
        seed: seed of the draws; the points of a group do not depend on which other groups there are.
        sample: groups that are drawn at random; None for all.
        num_processes: processes that share the groups.
        draws: times that points are drawn from each group.
        log: called with a line on what is being done.

    Returns:
        One result for each of :data:`DRAWN_FROM`; none where no group has more runs than points.
    """
    observed = list(runs)
    drawn = {words: _large(_grouped(observed, label), num_points) for words, label in DRAWN_FROM.items()}
    if not any(drawn.values()):
        return ()
    start = starting_sets(observed, log=log)
    spread = cache(lambda source: peak_spread(run for run in observed if run.source != source))
    results = []
    for words, groups in drawn.items():
        used = _sampled(groups, sample, seed)
        splits = [
            _split(group, num_points, _random(group, seed, draw), start(group[0]), spread(group[0].source))
            for group in used
            for draw in range(draws)
        ]
        log(f"{len(used)} {words}, {sum(len(split.rest) for split in splits)} runs to predict")
        rows, without = _predicted(splits, num_processes)
        safety = {"with points": memory_safety(rows), "without": memory_safety(without)}
        results.append(
            PointsResult(
                validation=summed_up(rows, answered=("ok", "given")),
                without=tuple(item for item in summarise(without) if item.group == "all"),
                num_curves=len(used),
                started_from=(f"these {len(observed)} runs without the source of the points",),
                drawn_from=words,
                memory={name: found for name, found in safety.items() if found is not None},
            )
        )
    return tuple(results)


def starting_sets(
    observed: Sequence[ObservedRun], *, log: Callable[[str], None] = lambda _: None
) -> Callable[[ObservedRun], Calibration]:
    """Run → the set that its cluster would start from, fitted without its source."""
    everything = evidence(observed, source="published runs", log=log)
    by_source = sets_without(everything.rows, everything.linear, LITERATURE, TOGETHER["source"])

    @cache
    def without(source: str) -> tuple[Evidence, Callable[[Row | None], tuple[FloatArray, Basis]]]:
        log(f"without {source}")
        kept = [run for run in observed if run.source != source]
        frameworks = {key_of(run)[0] for run in observed if run.source == source}
        sets = by_source(source)
        left = replace(
            everything,
            rows=[row for row in everything.rows if row.source != source],
            overall=sets.overall,
            folds={name: tuple(i for i in items if i.source != source) for name, items in everything.folds.items()},
            memory=calibrate_memory(run for run in kept if key_of(run)[0] in frameworks),
            unseen=unseen_bounds(kept),
        )
        return left, lambda row: (sets.overall, Basis.ANY) if row is None else sets.of(row)

    rows = {row.run.id: row for row in everything.rows}

    @cache
    def start(source: str, key: Key, run_id: str | None) -> Calibration:
        left, of = without(source)
        theta, basis = of(None if run_id is None else rows[run_id])
        members = [row for row in left.rows if row.key == key] if basis is Basis.FRAMEWORK else left.rows
        made = left.set_of(key, theta, members, basis)
        return made.for_generation(key[1]) if basis is Basis.ANY else made

    first: dict[tuple[str, Key], str | None] = {}
    for run in observed:
        place = run.source, key_of(run)
        if first.get(place) is None:
            first[place] = run.id if run.id in rows else None
    return lambda run: start(run.source, key_of(run), first[run.source, key_of(run)])


def _grouped(runs: Iterable[ObservedRun], label: Callable[[ObservedRun], Hashable]) -> list[list[ObservedRun]]:
    """Runs that can be judged by their label, the groups in the order of their names."""
    groups: dict[Hashable, list[ObservedRun]] = defaultdict(list)
    for run in runs:
        if any(run.measured.get(name) for name in JUDGED):
            groups[label(run)].append(run)
    return sorted((sorted(group, key=lambda run: run.id) for group in groups.values()), key=lambda group: group[0].id)


def _large(groups: Iterable[list[ObservedRun]], num_points: int) -> list[list[ObservedRun]]:
    return [group for group in groups if len(group) > num_points]


def _sampled(groups: Sequence[list[ObservedRun]], sample: int | None, seed: int) -> Sequence[list[ObservedRun]]:
    if sample is None or sample >= len(groups):
        return groups
    chosen = np.random.default_rng(seed).choice(len(groups), sample, replace=False)
    return [groups[i] for i in sorted(chosen)]


def _random(group: Sequence[ObservedRun], seed: int, draw: int) -> np.random.Generator:
    """Where points of a group are drawn from, whatever other groups there are."""
    return np.random.default_rng([seed, draw, zlib.crc32(group[0].id.encode())])


def _split(
    group: Sequence[ObservedRun], num_points: int, random: np.random.Generator, start: Calibration, spread: PeakSpread
) -> _Split:
    chosen = set(random.choice(len(group), num_points, replace=False).tolist())
    return _Split(
        points=tuple(run for i, run in enumerate(group) if i in chosen),
        rest=tuple(run for i, run in enumerate(group) if i not in chosen),
        start=start,
        spread=spread,
    )


def _predicted(splits: Sequence[_Split], num_processes: int) -> tuple[list[ValidatedRow], list[ValidatedRow]]:
    """All rows with adapted constants, and the judged ones with the constants that the adaptation started from."""
    if num_processes > 1 and len(splits) > 1:
        with ProcessPoolExecutor(num_processes) as pool:
            found = list(pool.map(_of_split, splits, chunksize=8))
    else:
        found = [_of_split(split) for split in splits]
    return [row for rows, _ in found for row in rows], [row for _, rows in found for row in rows if row.status == "ok"]


def _of_split(split: _Split) -> tuple[list[ValidatedRow], list[ValidatedRow]]:
    found = refine(split.points, lambda *_: split.start, source="own points", peak_spread=split.spread)
    made = found.calibrations
    adapted = made[0] if made else split.start
    given = [replace(_validated(run, adapted), status="given", reason=GIVEN) for run in split.points]
    rest = [_validated(run, adapted) for run in split.rest]
    return given + rest, [_validated(run, split.start) for run in split.rest]


def _validated(run: ObservedRun, calibration: Calibration) -> ValidatedRow:
    """One run against a prediction with a set, by the metrics that are not others in another unit.

    Frameworks that share constants do not share how they lay out a step: that stays the run's own.
    """
    own = replace(calibration, recipe=recipe_named(run.framework).recipe)
    found = validate_run(replace(run, problem=run.problem.with_calibration(own)))
    return replace(found, error={name: size for name, size in found.error.items() if name in JUDGED})
