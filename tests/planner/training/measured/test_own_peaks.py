"""A user's own peaks: the bound of other plans of the cluster holds as many of them as before, and none of the own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from planted_memory import FRAMEWORK, PLANTED, calibrated, exceeding, measured

from meshplan.catalogs.constants.training import MemoryConstants
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.memory.own_peaks import adapt_memory
from meshplan.planner.training.measured.memory.peaks import LITERATURE, PRIOR, Peak, SafeFactors
from meshplan.planner.training.measured.memory.spread import PUBLISHED_SPREAD, PeakSpread, moved_factor, peak_spread
from meshplan.planner.training.measured.observations import ObservedRun

STRANGER = dict(zip(PRIOR, LITERATURE.tolist(), strict=True))
SPREAD = PeakSpread(bias=-0.1, source=0.12, model=0.05, plan=0.07)
HELD = 2.326  # standard deviations above the mean of a normal distribution under which 99 % lie


def own(runs: Sequence[ObservedRun], start: MemoryConstants, spread: PeakSpread = SPREAD) -> MemoryConstants:
    """The constants that own runs make of the catalog's."""
    return adapt_memory(runs, lambda *_: start, spread)[FRAMEWORK].constants


def times(run: ObservedRun, factor: float) -> ObservedRun:
    return replace(run, measured={"peak_memory_bytes": run.measured["peak_memory_bytes"] * factor})


def safe_bytes(run: ObservedRun, constants: MemoryConstants) -> float:
    return price(replace(run.problem, calibration=calibrated(constants)), run.config).safe_bytes


def work_share(run: ObservedRun) -> float:
    parts = Peak(run).parts(LITERATURE)
    return parts.work / (parts.work + parts.states)


def clusters(random: np.random.Generator, runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    """The runs on a cluster drawn from :data:`SPREAD`."""
    source = SPREAD.bias + random.normal(0.0, SPREAD.source)
    models = {run.problem.shape.slug: random.normal(0.0, SPREAD.model) for run in runs}
    drawn = [source + models[run.problem.shape.slug] + random.normal(0.0, SPREAD.plan) for run in runs]
    return [times(run, float(np.exp(size))) for run, size in zip(runs, drawn, strict=True)]


@pytest.mark.parametrize("num_points", [1, 3])
def test_the_bound_holds_as_many_other_plans_after_own_peaks_as_before(num_points: int) -> None:
    """Of drawn clusters, and with less room: the peaks of one move together, so that a per cent is left to chance."""
    random, runs = np.random.default_rng(num_points), measured(STRANGER)
    peaks = [Peak(run) for run in runs]
    unknown = SPREAD.unknown()
    factor = float(np.exp(unknown.mean + HELD * np.sqrt(unknown.variance)))
    start = MemoryConstants(**STRANGER, safe_factor=factor, safe_fixed_bytes=0.0)
    before, after = [], []
    for _ in range(100):
        cluster = clusters(random, runs)
        points = random.choice(len(runs), num_points, replace=False)
        found = own([cluster[index] for index in points], start)
        theta = np.array([getattr(found, name) for name in PRIOR])
        moved = SafeFactors(states=found.safe_factor, work=found.safe_activation_factor)
        for index in set(range(len(runs))) - set(points.tolist()):
            needed = cluster[index].measured["peak_memory_bytes"]
            before.append(peaks[index].parts(LITERATURE).bound(SafeFactors(states=factor, work=factor)) / needed)
            after.append(peaks[index].parts(theta).bound(moved) / needed)
    held_before, held = (float(np.mean(np.array(bounds) >= 1.0)) for bounds in (before, after))
    assert held_before > 0.97  # less than 0.99, because no factor is on what is fixed
    assert held == pytest.approx(held_before, abs=0.01)
    assert np.mean(after) < np.mean(before) - 0.05


@pytest.mark.parametrize("index", range(0, 19, 3))
def test_own_peaks_above_the_estimate_do_not_lower_the_bound_of_other_plans(index: int) -> None:
    """They lifted the estimate until it reached the catalog's bound, and the bound of all other plans sank to it."""
    start, runs = MemoryConstants(**STRANGER, safe_factor=1.23, safe_fixed_bytes=0.3e9), measured(STRANGER)
    constants = own([times(runs[index], 1.2)], start, PUBLISHED_SPREAD)
    for run in runs:
        assert safe_bytes(run, constants) > 0.99 * safe_bytes(run, start)


def test_a_run_of_few_activations_says_nothing_of_the_bound_of_activations() -> None:
    start = MemoryConstants(**STRANGER, safe_factor=1.05, activation_safe_factor=1.4, safe_fixed_bytes=0.3e9)
    constants = own([min(measured(STRANGER), key=work_share)], start)
    assert constants.safe_activation_factor > 1.3
    assert constants.safe_factor < 1.15


def test_own_peaks_take_no_bias_from_constants_that_were_fitted_to_peaks() -> None:
    (run, *_) = measured(PLANTED)
    unbiased = replace(SPREAD, bias=0.0)
    expected = moved_factor(1.5, unbiased.unknown(), unbiased.after({"one": 1}))
    assert own([run], MemoryConstants(**PLANTED, safe_factor=1.5)).safe_factor == pytest.approx(expected, abs=1e-3)
    assert expected < 1.5


def test_own_peaks_narrow_a_wide_bound_the_more_of_them_there_are() -> None:
    runs = measured(STRANGER)
    start = MemoryConstants(**STRANGER, safe_factor=1.6)
    factors = [own(runs[:count], start).safe_factor for count in (1, 2, 5, 10)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 1.4


def test_own_peaks_that_differ_more_than_expected_widen_the_bound() -> None:
    runs, start = measured(STRANGER)[:6], MemoryConstants(**STRANGER, safe_factor=1.3)
    unlike = [times(run, 1.25 if index % 2 else 0.8) for index, run in enumerate(runs)]
    assert own(unlike, start).safe_factor > 1.1 * own(runs, start).safe_factor


def test_repeats_of_a_plan_say_no_more_of_other_plans_than_one_run() -> None:
    (run, *_) = measured(STRANGER)
    start = MemoryConstants(**STRANGER, safe_factor=1.3)
    above = times(run, 1.2)
    once, often = (own([replace(above, id=str(number)) for number in range(count)], start) for count in (1, 5))
    assert often.safe_factor == pytest.approx(once.safe_factor, abs=0.01)
    assert often.activation_factor == pytest.approx(once.activation_factor, abs=0.01)


def test_peaks_beyond_the_bound_widen_it_at_once() -> None:
    (run, *_) = measured({**PLANTED, "activation_factor": 4.0})
    constants = own([run], MemoryConstants(safe_factor=1.05))
    assert constants.safe_factor > 1.05
    assert exceeding([run], constants) == []


def test_own_runs_without_a_peak_leave_the_bound_as_it_was() -> None:
    (run, *_) = measured(PLANTED)
    untold = replace(run, measured={"iteration_s": 1.0})
    fit = adapt_memory([untold], lambda *_: MemoryConstants(safe_factor=2.0), SPREAD)[FRAMEWORK]
    assert fit.constants.safe_factor == 2.0
    assert fit.basis == ""


def test_the_parts_of_the_spread_come_back() -> None:
    """Somewhat small: sources far out count for no more than twice the median one, and each has two models only."""
    random, runs = np.random.default_rng(1), measured(STRANGER)
    drawn = [
        replace(run, group=f"source-{number}|{run.group}") for number in range(30) for run in clusters(random, runs)
    ]
    found = peak_spread(drawn)
    assert found.bias == pytest.approx(SPREAD.bias, abs=0.05)
    assert found.plan == pytest.approx(SPREAD.plan, rel=0.1)
    assert 0.6 * SPREAD.source < found.source < 1.2 * SPREAD.source
    assert 0.4 * SPREAD.model < found.model < 1.2 * SPREAD.model


def test_two_sources_do_not_say_how_sources_differ() -> None:
    def runs(name: str) -> list[ObservedRun]:
        return [replace(run, group=name) for run in measured(STRANGER)]

    assert peak_spread([*runs("one|"), *runs("other|")]) == PUBLISHED_SPREAD
    assert peak_spread([*runs("one|"), *runs("other|"), *runs("third|")]).bias == pytest.approx(0.0, abs=1e-3)
