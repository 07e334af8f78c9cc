"""Fitting the serving constants to measured runs, and saying how well they carry over.

The model and its solver are in :mod:`meshplan.planner.serving.measured.constants_fit`. *Published runs* give the sets
that ship; *error:* leave one (model, device) group out, solve for all parts without it and simulate its runs anew. That
error, not the error of the fit, becomes the interval. *A user's own runs* adapt the set of their engine, however few
they are.
"""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.serving import ServingCalibration, ServingConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.measured.constants_fit import (
    FITTED,
    NOISE,
    OWN_NOISE,
    OWN_SPREAD,
    Key,
    Linear,
    Row,
    constants_of,
    linearised,
    most_probable,
    solve,
    theta_of,
)
from meshplan.planner.serving.measured.prediction import PreparedRun

ITERATIONS, OWN_ITERATIONS = 3, 2
MAX_MOVE = 1.0  # of a constant in one iteration, in the logarithm
FEWEST_FOR_P90 = 8
FIXED = 1e12  # precision of a constant that may not move
# What intervals are given for → the metric whose error they take.
INTERVALS = {"ttft": ("ttft_s",), "tpot": ("tpot_s",), "throughput": ("output_tokens_per_s", "latency_s")}
ANY_ENGINE, ANY = "any-engine", "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One metric of a run, predicted by constants fitted without the run's group.

    Args:
        id: of the run.
        group: left out.
        key: engine and generation.
        metric: name.
        error: predicted / measured − 1.
    """

    id: str
    group: str
    key: Key
    metric: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The result of a calibration.

    Args:
        calibrations: the global set first, then engines on any generation, then on those that were seen.
        held_out: every metric of every run, predicted without its group.
    """

    calibrations: tuple[ServingCalibration, ...]
    held_out: tuple[HeldOut, ...]


# --- published runs -------------------------------------------------------------------------------------------------


def calibrate_serving(
    runs: Iterable[PreparedRun],
    *,
    source: str,
    date: str | None = None,
    start: Callable[[Key], ServingConstants] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Calibrated:
    """Fit all sets and their held-out errors.

    Args:
        runs: measured serving runs.
        source: what they are, stored with every set.
        date: day of the fit, ISO 8601; None for today.
        start: where the iteration begins: other constants than the literature's.
        say: told what is being done: a fit simulates every run some twenty times.
    """
    rows = [row for row in (Row(run, NOISE) for run in runs) if row.metrics]
    prior = theta_of(ServingConstants())
    theta = _always(prior) if start is None else _started(start)
    for step in range(ITERATIONS):
        say(f"fit {step + 1} of {ITERATIONS}: {len(rows)} runs")
        linear = linearised(rows, theta)
        solved = solve(linear, np.ones(len(linear.target), dtype=bool), prior)
        theta = _damped(theta, solved)
    say("held out")
    held_out = _held_out(rows, linear, theta, prior)
    return Calibrated(
        calibrations=_sets(rows, theta, held_out, source=source, date=date or _today()), held_out=tuple(held_out)
    )


def _always(theta: FloatArray) -> Callable[[Key], FloatArray]:
    return lambda _: theta


def _started(start: Callable[[Key], ServingConstants]) -> Callable[[Key], FloatArray]:
    return lambda key: theta_of(start(key))


def _damped(old: Callable[[Key], FloatArray], new: Callable[[Key], FloatArray]) -> Callable[[Key], FloatArray]:
    return lambda key: old(key) + np.clip(new(key) - old(key), -MAX_MOVE, MAX_MOVE)


def _held_out(
    rows: Sequence[Row], linear: Linear, theta: Callable[[Key], FloatArray], prior: FloatArray
) -> list[HeldOut]:
    """Each group predicted by constants solved for without it; its runs are simulated, not linear."""
    groups = np.array(linear.group)
    found = []
    for group in sorted({row.group for row in rows}):
        without = _damped(theta, solve(linear, groups != group, prior))
        for row in rows:
            if row.group == group:
                errors = np.exp(row.log_predicted(without(row.key)) - row.log_measured) - 1.0
                found += [
                    HeldOut(id=row.prepared.run.id, group=group, key=row.key, metric=name, error=float(error))
                    for name, error in zip(row.metrics, errors, strict=True)
                    if np.isfinite(error)
                ]
    return found


def _sets(
    rows: Sequence[Row], theta: Callable[[Key], FloatArray], held_out: Sequence[HeldOut], *, source: str, date: str
) -> tuple[ServingCalibration, ...]:
    seen = Counter(row.key for row in rows)
    engines = sorted({engine for engine, _ in seen})
    generations = sorted({generation for _, generation in seen})
    every = [(engine, generation) for engine in engines for generation in generations]
    keys = [("", ""), *((engine, "") for engine in engines), *every]

    def made(key: Key) -> ServingCalibration:
        engine, generation = key
        of_engine = [item for item in held_out if not engine or item.key[0] == engine]
        own = [item for item in of_engine if not generation or item.key[1] == generation]
        return ServingCalibration(
            engine=engine or ANY_ENGINE,
            architecture=generation or ANY,
            constants=constants_of(theta(key)),
            error_p90={name: _p90(metrics, own, of_engine, held_out) for name, metrics in INTERVALS.items()},
            num_runs=sum(count for (e, g), count in seen.items() if engine in ("", e) and generation in ("", g)),
            source=source,
            date=date,
        )

    return tuple(made(key) for key in keys)


def _p90(metrics: Sequence[str], *samples: Sequence[HeldOut]) -> float:
    """90th percentile of |ln(predicted/measured)| in the first sample with enough runs; each group counts alike."""
    for sample in samples:
        errors = [abs(np.log1p(max(item.error, -0.999))) for item in sample if item.metric in metrics]
        if len(errors) >= FEWEST_FOR_P90:
            return round(float(np.quantile(errors, 0.9)), 4)
    return 1.0


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


# --- a user's own runs ----------------------------------------------------------------------------------------------


def refined(rows: Sequence[Row], start: ServingConstants, free: Sequence[str] = tuple(FITTED)) -> ServingConstants:
    """Constants of one server adapted to its own runs, however few: one measured point moves what it can see.

    Args:
        rows: runs of one engine on one generation, with the scatter of a single server.
        start: the catalog's, which is also the prior.
        free: constants that may move.
    """
    prior = theta_of(start)
    theta = prior
    precision = np.where([name in free for name in FITTED], 1.0 / OWN_SPREAD**2, FIXED)
    for _ in range(OWN_ITERATIONS):
        linear = linearised(rows, _always(theta))
        ones = np.ones_like(linear.target)
        move = most_probable(linear.slope, linear.target, linear.scale, ones, prior, precision, lets_go=False)
        theta = theta + np.clip(move - theta, -MAX_MOVE, MAX_MOVE)
    return constants_of(theta)


# What own runs are left out together: themselves, or all of a layout, as before a user moves to one never measured.
HELD_OUT_TOGETHER: Mapping[str, Callable[[Row], Hashable]] = {
    "run": lambda row: row.prepared.run.id,
    "layout": lambda row: row.prepared.run.config.pools[-1].layout,
}


def refine_serving(
    runs: Iterable[PreparedRun],
    shipped: Callable[[str, str], ServingCalibration],
    *,
    source: str,
    date: str | None = None,
    hold_out: str = "run",
    free: Sequence[str] = tuple(FITTED),
) -> Calibrated:
    """Adapt the catalog's constants to a user's own runs; held out: every run, or every layout, in turn.

    Args:
        runs: measured serving runs of the user.
        shipped: (engine, generation) → the catalog's set.
        source: what the runs are.
        date: day of the fit, ISO 8601; None for today.
        hold_out: what is left out together when errors are taken; one of :data:`HELD_OUT_TOGETHER`.
        free: constants that may move.
    """
    together = HELD_OUT_TOGETHER[hold_out]
    sets: dict[Key, list[Row]] = defaultdict(list)
    for run in runs:
        row = Row(run, OWN_NOISE)
        if row.metrics:
            sets[row.key].append(row)
    made, held_out = [], []
    for key, members in sorted(sets.items()):
        prior = shipped(*key)
        own, without = [], {}
        for left_out in dict.fromkeys(together(row) for row in members):
            others = [other for other in members if together(other) != left_out]
            without[left_out] = refined(others, prior.constants, free) if others else prior.constants
        for row in members:
            constants = without[together(row)]
            errors = np.exp(row.log_predicted(theta_of(constants)) - row.log_measured) - 1.0
            own += [
                HeldOut(id=row.prepared.run.id, group=row.group, key=key, metric=name, error=float(error))
                for name, error in zip(row.metrics, errors, strict=True)
                if np.isfinite(error)
            ]
        held_out += own
        p90 = {
            name: _p90(metrics, own) if len(own) >= FEWEST_FOR_P90 else prior.error_p90[name]
            for name, metrics in INTERVALS.items()
        }
        made.append(
            replace(
                prior,
                engine=key[0],
                architecture=key[1],
                constants=refined(members, prior.constants, free),
                error_p90=p90,
                num_runs=len(members),
                source=f"{source}; starting from: {prior.source}",
                date=date or _today(),
            )
        )
    return Calibrated(calibrations=tuple(made), held_out=tuple(held_out))
