"""Fitting the serving constants to measured runs, and saying how well they carry over.

The model is in :mod:`meshplan.planner.serving.measured.constants_fit`. *Published runs* give the sets that ship.
*Error:* one (model, device) group is left out, all parts are solved for without it, and its runs are simulated anew.
*A user's own runs* adapt the set of their engine, however few they are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshplan.catalogs.constants.serving import ServingCalibration, ServingConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.measured.constants_fit import (
    FITTED,
    MAX_MOVE,
    NOISE,
    OWN_NOISE,
    Row,
    constants_of,
    linearised,
    refined,
    solve,
    theta_of,
)
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.resolve import ANY, ANY_ENGINE
from meshplan.planner.validation.fitting import limited
from meshplan.planner.validation.held_out import Calibrated, HeldOut, Key, leave_one_out, p90, today

ITERATIONS = 3
FEWEST_FOR_P90 = 8
UNJUDGED_P90 = 1.0  # where no sample has enough runs
# What intervals are given for → the metric whose error they take.
INTERVALS = {"ttft": ("ttft_s",), "tpot": ("tpot_s",), "throughput": ("output_tokens_per_s", "latency_s")}


# --- published runs -------------------------------------------------------------------------------------------------


def calibrate_serving(
    runs: Iterable[PreparedRun],
    *,
    source: str,
    date: str | None = None,
    start: Callable[[Key], ServingConstants] | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Calibrated[ServingCalibration]:
    """Fit all sets and their held-out errors.

    Args:
        runs: measured serving runs.
        source: what they are, stored with every set.
        date: day of the fit, ISO 8601; None for today.
        start: where the iteration begins: other constants than the literature's.
        log: called with a line per step: a fit simulates every run some twenty times.
    """
    rows = [row for row in (Row(run, NOISE) for run in runs) if row.metrics]
    prior = theta_of(ServingConstants())
    theta: Callable[[Key], FloatArray] = (lambda _: prior) if start is None else (lambda key: theta_of(start(key)))
    for step in range(ITERATIONS):
        log(f"fit {step + 1} of {ITERATIONS}: {len(rows)} runs")
        linear = linearised(rows, theta)
        theta = _limited(theta, solve(linear, np.ones(len(linear.group), dtype=bool), prior))
    log("held out")
    groups = np.array(linear.group)
    # The runs that are left out are simulated, not linear.
    held_out = leave_one_out(
        sorted(rows, key=lambda row: row.group),
        lambda row: row.group,
        lambda group: _limited(theta, solve(linear, groups != group, prior)),
        lambda row, without: row.held_out(without(row.key)),
    )
    return Calibrated(
        calibrations=_sets(rows, theta, held_out, source=source, date=date or today()), held_out=tuple(held_out)
    )


def _limited(old: Callable[[Key], FloatArray], new: Callable[[Key], FloatArray]) -> Callable[[Key], FloatArray]:
    return lambda key: limited(old(key), new(key), MAX_MOVE)


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
    """90th percentile of |ln(predicted/measured)| in the first sample with enough runs."""
    sizes = (
        [float(abs(np.log1p(max(item.error, -0.999)))) for item in sample if item.metric in metrics]
        for sample in samples
    )
    return p90(sizes, fewest=FEWEST_FOR_P90, otherwise=UNJUDGED_P90)


# --- a user's own runs ----------------------------------------------------------------------------------------------


# What is left out together of a user's own runs: one run, or a whole layout, as for a user who plans to change it.
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
    sets: dict[Key, list[Row]] = defaultdict(list)
    for run in runs:
        row = Row(run, OWN_NOISE)
        if row.metrics:
            sets[row.key].append(row)
    made, held_out = [], []
    for key, members in sorted(sets.items()):
        start = shipped(*key)
        constants, own = _refined(members, start.constants, together, free)
        held_out += own
        made.append(
            replace(
                start,
                engine=key[0],
                architecture=key[1],
                constants=constants,
                error_p90={
                    name: _p90(metrics, own) if len(own) >= FEWEST_FOR_P90 else start.error_p90[name]
                    for name, metrics in INTERVALS.items()
                },
                num_runs=len(members),
                source=f"{source}; starting from: {start.source}",
                date=date or today(),
            )
        )
    return Calibrated(calibrations=tuple(made), held_out=tuple(held_out))


def _refined(
    rows: Sequence[Row], start: ServingConstants, together: Callable[[Row], Hashable], free: Sequence[str]
) -> tuple[ServingConstants, list[HeldOut]]:
    """One set adapted to its runs, and the error on what is left out together, in turn."""

    def without(left_out: Hashable) -> FloatArray:
        others = [row for row in rows if together(row) != left_out]
        return theta_of(refined(others, start, free) if others else start)

    held_out = leave_one_out(rows, together, without, lambda row, theta: row.held_out(theta))
    return refined(rows, start, free), held_out
