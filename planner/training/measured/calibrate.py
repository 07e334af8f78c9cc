"""Fitting the estimator's named constants to measured training runs, and saying how well they carry over.

*Published runs* give the sets that ship: a global one, whose prior is the literature, and one for each framework on a
hardware generation, whose prior is the global one. *Error:* every group is predicted by global and local constants that
were both fitted without it; starting from the constants of all rows, the fit without the group is first solved with all
rows linearised. *A user's own runs* adapt the catalog's set, however few they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, MemoryConstants, TimeConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.constants_fit import (
    LOCAL_SPREAD,
    LOSS,
    MAX_MOVE,
    PARAMETERS,
    REFINED_SPREAD,
    SPREAD,
    Row,
    fit,
    key_of,
    linearised,
    weights_of,
)
from meshplan.planner.training.measured.memory_fit import UNMEASURED_SAFE_FACTOR, calibrate_memory
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.validation.fitting import Linear, Prior, most_probable
from meshplan.planner.validation.held_out import (
    Calibrated,
    HeldOut,
    Key,
    by_key,
    leave_one_out,
    p90,
    refined_sets,
    today,
)

FEWEST_FOR_P90 = 5
# When a group is left out, the constants of all rows are moved as far as the linearised rows say; what moves farther
# than FAR, in fit units, is fitted again from there.
LINEAR_ROUNDS = 6
WARM_ITERATIONS = 2
FAR = 0.6
# Half-width where nothing at all could be held out: two frameworks are needed to predict one from the other.
UNJUDGED_P90 = 0.5
UNMEASURED = MemoryConstants(safe_factor=UNMEASURED_SAFE_FACTOR)


def _without(rows: Sequence[Row], linear: Linear, is_left_out: Callable[[Row], bool], prior: Prior) -> FloatArray:
    """Most probable constants for the other rows, as far as the linearised rows tell."""
    kept = [index for index, row in enumerate(rows) if not is_left_out(row)]
    others = replace(linear.only(kept), weight=weights_of([rows[index] for index in kept]))
    return most_probable(others, prior, LOSS, rounds=LINEAR_ROUNDS, max_step=MAX_MOVE)


def calibrate(runs: Iterable[ObservedRun], *, source: str, date: str | None = None) -> Calibrated[Calibration]:
    """Fit all sets and their held-out errors.

    Args:
        runs: measured training runs; those without ``iteration_s`` serve the memory constants only.
        source: what the observations are, stored with every set.
        date: day of the fit, ISO 8601; None for today.
    """
    observed = list(runs)
    rows = [Row(run) for run in observed if run.measured.get("iteration_s")]
    literature = Prior(mean=PARAMETERS.vector(TimeConstants()), spread=SPREAD)
    overall = fit(rows, literature)
    linear = linearised(rows, overall)
    sets = by_key(rows)
    fitted = {key: fit(members, _local(overall)) for key, members in sorted(sets.items())}
    held_out = [
        item for key, members in sets.items() for item in _held_out(members, fitted[key], rows, linear, literature)
    ]
    unseen = _unseen(rows, linear, literature)
    memory = calibrate_memory(observed)

    def made(key: Key, theta: FloatArray, members: Sequence[Row], own: Sequence[HeldOut]) -> Calibration:
        framework, architecture = key
        samples = (own, held_out, unseen)
        return Calibration(
            framework=framework,
            architecture=architecture,
            time=PARAMETERS.replaced(TimeConstants(), theta),
            memory=memory[framework].constants if framework in memory else UNMEASURED,
            recipe=recipe_named(framework).recipe,
            num_runs=len(members),
            source=source,
            date=date or today(),
            time_error_p90=_p90(samples, is_moe=False),
            moe_time_error_p90=_p90(samples, is_moe=True),
        )

    local = [
        made(key, theta, sets[key], [item for item in held_out if item.key == key]) for key, theta in fitted.items()
    ]
    return Calibrated(
        calibrations=(made(("any", "any"), overall, rows, unseen), *local),
        held_out=tuple(held_out),
        unseen=tuple(unseen),
        memory=memory,
    )


def _local(overall: FloatArray) -> Prior:
    return Prior(mean=overall, spread=LOCAL_SPREAD)


def _sizes(errors: Sequence[HeldOut], *, is_moe: bool) -> list[float]:
    return [abs(item.error) for item in errors if item.is_moe == is_moe]


def _p90(samples: Iterable[Sequence[HeldOut]], *, is_moe: bool) -> float:
    sizes = (_sizes(sample, is_moe=is_moe) for sample in samples)
    return p90(sizes, fewest=FEWEST_FOR_P90, otherwise=UNJUDGED_P90)


def _judged(row: Row, theta: FloatArray) -> list[HeldOut]:
    error = float(np.exp(row.log_predicted(theta[None])[0] - row.log_measured) - 1.0)
    return [
        HeldOut(
            id=row.run.id,
            group=row.group,
            key=row.key,
            metric="iteration_s",
            error=error,
            strategy=row.run.strategy,
            is_moe=row.run.problem.shape.moe is not None,
        )
    ]


def _held_out(
    members: Sequence[Row], fitted: FloatArray, rows: Sequence[Row], linear: Linear, literature: Prior
) -> list[HeldOut]:
    """Each group of a set predicted by a global set and a local set that were both fitted without it."""
    local = linearised(members, fitted)

    def without(group: str) -> FloatArray:
        theta = _without(rows, linear, lambda row: row.group == group, literature)
        if np.max(np.abs(theta - linear.at)) > FAR:
            kept = [row for row in rows if row.group != group]
            theta = fit(kept, literature, start=linear.at, iterations=WARM_ITERATIONS)
        others = [row for row in members if row.group != group]
        if not others:
            return theta
        start = _without(members, local, lambda row: row.group == group, _local(theta))
        return fit(others, _local(theta), start=start, iterations=WARM_ITERATIONS)

    by_group = sorted(members, key=lambda row: row.group)
    return leave_one_out(by_group, lambda row: row.group, without, _judged)


def _unseen(rows: Sequence[Row], linear: Linear, literature: Prior) -> list[HeldOut]:
    """Each framework predicted by the global set of all the others."""

    def without(framework: str) -> FloatArray:
        others = [row for row in rows if row.key[0] != framework]
        if not others:
            return literature.mean
        start = _without(rows, linear, lambda row: row.key[0] == framework, literature)
        return fit(others, literature, start=start, iterations=WARM_ITERATIONS)

    by_framework = sorted(rows, key=lambda row: row.key[0])
    return leave_one_out(by_framework, lambda row: row.key[0], without, _judged)


def refine(
    runs: Iterable[ObservedRun],
    shipped: Callable[[str, str], Calibration],
    *,
    source: str,
    date: str | None = None,
) -> Calibrated[Calibration]:
    """Adapt the catalog's constants to a user's own runs, however few.

    Every set starts from the one in the catalog, which is also the prior, so three runs move the constants that they
    depend on and leave the rest. Held out: every run in turn.

    Args:
        runs: measured training runs of the user.
        shipped: (framework, architecture) → the catalog's set.
        source: what the runs are.
        date: day of the fit, ISO 8601; None for today.
    """
    observed = list(runs)
    rows = [Row(run, shipped(*key_of(run)).time) for run in observed if run.measured.get("iteration_s")]
    memory = calibrate_memory(observed)

    def adapted(members: Sequence[Row], start: Calibration) -> tuple[Calibration, list[HeldOut]]:
        prior = Prior(mean=PARAMETERS.vector(start.time), spread=REFINED_SPREAD)

        def without(left_out: Row) -> FloatArray:
            others = [row for row in members if row is not left_out]
            return fit(others, prior) if others else prior.mean

        found = leave_one_out(members, lambda row: row, without, _judged)
        framework = members[0].key[0]
        made = replace(
            start,
            framework=framework,
            time=PARAMETERS.replaced(start.time, fit(members, prior)),
            memory=memory[framework].constants if framework in memory else start.memory,
            time_error_p90=_refined_p90(found, start, is_moe=False),
            moe_time_error_p90=_refined_p90(found, start, is_moe=True),
        )
        return made, found

    return replace(refined_sets(rows, shipped, adapted, source=source, date=date), memory=memory)


def _refined_p90(found: Sequence[HeldOut], start: Calibration, *, is_moe: bool) -> float:
    """The user's own held-out error where there are enough runs; else never narrower than the catalog's."""
    sizes = _sizes(found, is_moe=is_moe)
    own = p90([sizes], fewest=1, otherwise=0.0)
    return own if len(sizes) >= FEWEST_FOR_P90 else max(own, start.error_p90(is_moe=is_moe))
