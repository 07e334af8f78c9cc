"""Fitting the serving constants to measured runs, and saying how well they carry over.

The model is in :mod:`meshplan.planner.serving.measured.fit`. *Published runs* give the sets that ship.
*Error:* a whole source is left out, all parts are solved for without it, and its runs are simulated anew; likewise one
(model, device) group, one engine, one engine on one generation (:mod:`~meshplan.planner.serving.measured.evidence`).
*A user's own runs* adapt the set of their engine, however few they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from meshplan.catalogs.constants.serving import OwnLoad, ServingCalibration, ServingConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.measured.evidence import (
    INTERVALS,
    TOGETHER,
    Folds,
    evidence_for,
    half_width,
    with_coverage,
)
from meshplan.planner.serving.measured.fit.parts import FITTED, PARAMETERS
from meshplan.planner.serving.measured.fit.rows import NOISE, OWN_NOISE, Row, linearised
from meshplan.planner.serving.measured.fit.solution import MAX_MOVE, refined, solve
from meshplan.planner.serving.measured.prediction import TAIL_METRICS, PreparedRun
from meshplan.planner.serving.resolve import ANY, ANY_ENGINE
from meshplan.planner.serving.simulation.compiled import choice as machine_code
from meshplan.planner.validation.between_sources import log_size
from meshplan.planner.validation.fitting import limited
from meshplan.planner.validation.held_out import Calibrated, HeldOut, Key, leave_one_out, p90, refined_sets, today

# Linearisations: from the literature's constants to where they hardly move, by small differences; then once by secants,
# which take a run twice as often, about what is left.
ITERATIONS, SECANTS = 3, 1
FEWEST_OWN = 8  # held-out errors of own runs from which intervals are taken
OWN_RUNS = "own runs"


# --- published runs -------------------------------------------------------------------------------------------------


def calibrate_serving(
    runs: Iterable[PreparedRun],
    *,
    source: str,
    date: str | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Calibrated[ServingCalibration]:
    """Fit all sets and their held-out errors.

    Args:
        runs: measured serving runs.
        source: what they are, stored with every set.
        date: day of the fit, ISO 8601; None for today.
        log: called with a line per step: a fit simulates every run some fifty times.
    """
    rows = [row for row in (Row(run, NOISE) for run in runs) if row.metrics]
    times = (ITERATIONS + 2 * SECANTS) * len(FITTED) + len(TOGETHER)  # that a run is simulated
    machine_code.expect(times * sum(row.prepared.run.workload.num_requests or 0 for row in rows))
    prior = PARAMETERS.vector(ServingConstants())
    theta = _always(prior)
    for step in range(ITERATIONS + SECANTS):
        log(f"fit {step + 1} of {ITERATIONS + SECANTS}: {len(rows)} runs")
        linear, owners = linearised(rows, theta, is_secant=step >= ITERATIONS)
        theta = _limited(theta, solve(linear, owners, prior))
    folds: dict[str, list[HeldOut]] = {}
    for name, together in TOGETHER.items():
        log(f"{name} held out")
        folds[name] = _left_out(rows, together, lambda kept: solve(linear, owners, prior, kept=kept))
    return Calibrated(
        calibrations=_sets(rows, theta, folds, source=source, date=date or today()),
        folds={name: with_coverage(items, folds) for name, items in folds.items()},
    )


def _left_out(
    rows: Sequence[Row],
    together: Callable[[Row], Hashable],
    solved: Callable[[Callable[[Row], bool]], Callable[[Key], FloatArray]],
) -> list[HeldOut]:
    """Every row predicted by what was solved for without those that are left out together with it.

    The problem stays linearised where all rows led, but the solution is not held near theirs: that would tell what the
    rows that are left out say. These are simulated, not linear.
    """

    def without(left: Hashable) -> tuple[Callable[[Key], FloatArray], set[Key]]:
        remaining = {row.key for row in rows if together(row) != left}
        return solved(lambda row: together(row) != left), remaining

    return leave_one_out(
        sorted(rows, key=lambda row: row.group),
        together,
        without,
        lambda row, fitted: row.held_out(fitted[0](row.key), evidence_for(row.key, fitted[1])),
    )


def _always(theta: FloatArray) -> Callable[[Key], FloatArray]:
    return lambda _: theta


def _limited(old: Callable[[Key], FloatArray], new: Callable[[Key], FloatArray]) -> Callable[[Key], FloatArray]:
    return lambda key: limited(old(key), new(key), MAX_MOVE)


def _sets(
    rows: Sequence[Row], theta: Callable[[Key], FloatArray], folds: Folds, *, source: str, date: str
) -> tuple[ServingCalibration, ...]:
    seen = Counter(row.key for row in rows)
    engines = sorted({engine for engine, _ in seen})
    generations = sorted({generation for _, generation in seen})
    every = [(engine, generation) for engine in engines for generation in generations]
    keys = [("", ""), *((engine, "") for engine in engines), *every]

    def made(key: Key) -> ServingCalibration:
        engine, generation = key
        widths = {name: half_width(name, key, evidence_for(key, seen), folds) for name in INTERVALS}
        return ServingCalibration(
            engine=engine or ANY_ENGINE,
            architecture=generation or ANY,
            constants=PARAMETERS.replaced(ServingConstants(), theta(key)),
            error_p90={name: width for name, (width, _) in widths.items()},
            basis={name: basis for name, (_, basis) in widths.items()},
            num_runs=sum(count for (e, g), count in seen.items() if engine in ("", e) and generation in ("", g)),
            source=source,
            date=date,
        )

    return tuple(made(key) for key in keys)


# --- a user's own runs ----------------------------------------------------------------------------------------------


def _name(load: OwnLoad) -> str:
    return load.name


# What is left out together of a user's own runs: one run, a whole layout, as for a user who plans to change
# it, or all runs of a model on a device.
HELD_OUT_TOGETHER: Mapping[str, Callable[[Row], Hashable]] = {
    "run": lambda row: row.prepared.run.id,
    "layout": lambda row: row.prepared.run.config.pools[-1].layout,
    "group": lambda row: row.group,
}


def refine_serving(
    runs: Iterable[PreparedRun],
    shipped: Callable[[str, str], ServingCalibration],
    *,
    source: str,
    date: str | None = None,
    hold_out: str = "run",
    free: Sequence[str] = tuple(FITTED),
) -> Calibrated[ServingCalibration]:
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

    def adapted(members: Sequence[Row], start: ServingCalibration) -> tuple[ServingCalibration, list[HeldOut]]:
        def without(left_out: Hashable) -> Callable[[OwnLoad], FloatArray]:
            others = [row for row in members if together(row) != left_out]
            return cache(lambda load: PARAMETERS.vector(constants_for(load, others)))

        def constants_for(load: OwnLoad, rows: Sequence[Row]) -> ServingConstants:
            before = start.for_load(load).constants
            return refined(rows, before, free, of=load) if rows else before

        found = leave_one_out(members, together, without, lambda row, theta_for: row.held_out(theta_for(row.load)))
        loads = sorted({load for row in members for load in (row.load, OwnLoad(row.load.model))}, key=_name)
        is_enough = sum(item.metric not in TAIL_METRICS for item in found) >= FEWEST_OWN
        own = {
            name: p90(
                [[log_size(item) for item in found if item.metric in metrics]],
                fewest=FEWEST_OWN,
                otherwise=start.error_p90[name],
            )
            for name, metrics in INTERVALS.items()
        }
        made = replace(
            start,
            engine=members[0].key[0],
            constants=refined(members, start.constants, free),
            model_constants={**start.model_constants, **{load.name: constants_for(load, members) for load in loads}},
            error_p90={name: own[name] if is_enough else start.error_p90[name] for name in INTERVALS},
            basis=dict.fromkeys(INTERVALS, OWN_RUNS) if is_enough else start.basis,
        )
        return made, found

    rows = [row for row in (Row(run, OWN_NOISE, is_own=True) for run in runs) if row.metrics]
    return refined_sets(rows, shipped, adapted, source=source, date=date, hold_out=hold_out)
