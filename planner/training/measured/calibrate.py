"""Fitting the estimator's named constants to measured training runs, and saying how well they carry over.

*Published runs* give the sets that ship: a global one, whose prior is the literature, and one for each framework on a
hardware generation, whose prior is the global one. *Error:* every group is predicted by global and local constants that
were both fitted without it; starting from the constants of all rows, the fit without the group is first solved with all
rows linearised. *A user's own runs* adapt the catalog's set, however few they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, MemoryConstants, TimeConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.constants_fit import (
    LOCAL_SPREAD,
    LOSS,
    MAX_MOVE,
    REFINED_SPREAD,
    SPREAD,
    Row,
    constants_of,
    fit,
    key_of,
    linearised,
    theta_of,
    weights_of,
)
from meshplan.planner.training.measured.memory_fit import UNMEASURED_SAFE_FACTOR, calibrate_memory
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.validation.fitting import Linear, Prior, most_probable
from meshplan.planner.validation.held_out import Calibrated, HeldOut, Key, leave_one_out, p90, today

FEWEST_FOR_P90 = 5
# When a group is left out, the constants of all rows are moved as far as the linearised rows say; what moves farther
# than FAR, in fit units, is fitted again from there.
LINEAR_ROUNDS = 6
WARM_ITERATIONS = 2
FAR = 0.6
# Half-width where nothing at all could be held out: two frameworks are needed to predict one from the other.
UNJUDGED_P90 = 0.5
UNMEASURED = MemoryConstants(safe_factor=UNMEASURED_SAFE_FACTOR)


@dataclass(frozen=True, slots=True)
class _Linearised:
    """Rows linearised once, for fits without some of them."""

    rows: Sequence[Row]
    linear: Linear

    @classmethod
    def at(cls, theta: FloatArray, rows: Sequence[Row]) -> _Linearised:
        return cls(rows, linearised(rows, theta))

    def fitted_to(self, is_kept: Callable[[Row], bool], prior: Prior) -> FloatArray:
        """Most probable constants for some of the rows, as far as the linearisation tells."""
        kept = [index for index, row in enumerate(self.rows) if is_kept(row)]
        linear = replace(self.linear.only(kept), weight=weights_of([self.rows[index] for index in kept]))
        return most_probable(linear, prior, LOSS, rounds=LINEAR_ROUNDS, max_step=MAX_MOVE)


def calibrate(runs: Iterable[ObservedRun], *, source: str, date: str | None = None) -> Calibrated[Calibration]:
    """Fit all sets and their held-out errors.

    Args:
        runs: measured training runs; those without ``iteration_s`` serve the memory constants only.
        source: what the observations are, stored with every set.
        date: day of the fit, ISO 8601; None for today.
    """
    observed = list(runs)
    rows = [Row(run) for run in observed if run.measured.get("iteration_s")]
    day = date or today()
    literature = Prior(mean=theta_of(TimeConstants()), spread=SPREAD)
    overall = fit(rows, literature)
    sets: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        sets[row.key].append(row)
    fitted = {key: fit(members, _local(overall)) for key, members in sorted(sets.items())}
    everything = _Linearised.at(overall, rows)
    held_out = [
        item for key, members in sets.items() for item in _held_out(members, fitted[key], everything, literature)
    ]
    unseen = _unseen(everything, literature)
    memory = calibrate_memory(observed)

    def made(key: Key, theta: FloatArray, members: Sequence[Row], own: Sequence[HeldOut]) -> Calibration:
        framework, architecture = key
        samples = (own, held_out, unseen)
        return Calibration(
            framework=framework,
            architecture=architecture,
            time=constants_of(theta),
            memory=memory[framework].constants if framework in memory else UNMEASURED,
            recipe=recipe_named(framework).recipe,
            num_runs=len(members),
            source=source,
            date=day,
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


def _held_out(members: Sequence[Row], fitted: FloatArray, everything: _Linearised, literature: Prior) -> list[HeldOut]:
    """Each group of a set predicted by a global set and a local set that were both fitted without it."""
    overall, local = everything.linear.at, _Linearised.at(fitted, members)

    def without(group: str) -> FloatArray:
        theta = everything.fitted_to(lambda row: row.group != group, literature)
        if np.max(np.abs(theta - overall)) > FAR:
            kept = [row for row in everything.rows if row.group != group]
            theta = fit(kept, literature, start=overall, iterations=WARM_ITERATIONS)
        others = [row for row in members if row.group != group]
        if not others:
            return theta
        prior = _local(theta)
        start = local.fitted_to(lambda row: row.group != group, prior)
        return fit(others, prior, start=start, iterations=WARM_ITERATIONS)

    by_group = sorted(members, key=lambda row: row.group)
    return leave_one_out(by_group, lambda row: row.group, without, _judged)


def _unseen(everything: _Linearised, literature: Prior) -> list[HeldOut]:
    """Each framework predicted by the global set of all the others."""

    def without(framework: str) -> FloatArray:
        others = [row for row in everything.rows if row.key[0] != framework]
        if not others:
            return literature.mean
        start = everything.fitted_to(lambda row: row.key[0] != framework, literature)
        return fit(others, literature, start=start, iterations=WARM_ITERATIONS)

    by_framework = sorted(everything.rows, key=lambda row: row.key[0])
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
    sets: dict[Key, list[ObservedRun]] = defaultdict(list)
    for run in observed:
        if run.measured.get("iteration_s"):
            sets[key_of(run)].append(run)
    memory = calibrate_memory(observed)
    made, held_out = [], []
    for key, members in sorted(sets.items()):
        start = shipped(*key)
        time, found = _refined([Row(run, start.time) for run in members], start)
        held_out += found
        made.append(
            replace(
                start,
                framework=key[0],
                architecture=key[1],
                time=time,
                memory=memory[key[0]].constants if key[0] in memory else start.memory,
                time_error_p90=_refined_p90(found, start, is_moe=False),
                moe_time_error_p90=_refined_p90(found, start, is_moe=True),
                num_runs=len(members),
                source=f"{source}; starting from: {start.source}",
                date=date or today(),
            )
        )
    return Calibrated(calibrations=tuple(made), held_out=tuple(held_out), memory=memory)


def _refined(rows: Sequence[Row], start: Calibration) -> tuple[TimeConstants, list[HeldOut]]:
    """One set adapted to its runs, and the error on every run in turn."""
    prior = Prior(mean=theta_of(start.time), spread=REFINED_SPREAD)

    def without(left_out: Row) -> FloatArray:
        others = [row for row in rows if row is not left_out]
        return fit(others, prior) if others else prior.mean

    held_out = leave_one_out(rows, lambda row: row, without, _judged)
    return constants_of(fit(rows, prior), start.time), held_out


def _refined_p90(found: Sequence[HeldOut], start: Calibration, *, is_moe: bool) -> float:
    """The user's own held-out error where there are enough runs; else never narrower than the catalog's."""
    sizes = _sizes(found, is_moe=is_moe)
    own = p90([sizes], fewest=1, otherwise=0.0)
    return own if len(sizes) >= FEWEST_FOR_P90 else max(own, start.error_p90(is_moe=is_moe))
