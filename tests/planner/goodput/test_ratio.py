"""The share of a run that trains, against a run that is played event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from run_cases import drawn, simulated_ratio

from meshplan.planner.goodput.checkpoints import best_interval, daly_interval, efficiency
from meshplan.planner.goodput.conditions import Checkpoints, Interruptions
from meshplan.planner.goodput.spares import erlang_b, waiting_share

# Interruptions that one simulated run meets: its scatter is then about a third of the error allowed.
MANY = 30_000
WITHIN = 0.02


@pytest.mark.parametrize("seed", range(12))
def test_the_ratio_is_what_a_simulated_run_gets(seed: int) -> None:
    stops, costs, interval = drawn(seed)
    predicted = float(efficiency(interval, stops, costs)) * (1.0 - waiting_share(stops))
    measured = simulated_ratio(stops, costs, interval, seed=seed, many=MANY)
    assert predicted == pytest.approx(measured, rel=WITHIN)


def test_without_uploads_it_is_dalys_exact_model() -> None:
    rate, restart, block, interval = 1e-4, 300.0, 20.0, 900.0
    stops, costs = Interruptions(per_s=rate, restart_s=restart), Checkpoints(block_s=block)
    segment_s = np.exp(rate * restart) * np.expm1(rate * (interval + block)) / rate
    assert float(efficiency(interval, stops, costs)) == pytest.approx(interval / segment_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_no_interval_of_an_exhaustive_search_is_better(seed: int) -> None:
    stops, costs, _ = drawn(seed)
    found = best_interval(stops, costs)
    least = max(1.0, costs.durable_s - costs.block_s)
    every = np.geomspace(least, max(2.0 * found.interval_s, 20.0 / stops.per_s), 20_000)
    assert found.efficiency >= float(efficiency(every, stops, costs).max()) * (1.0 - 1e-5)


def test_dalys_formula_is_near_where_interruptions_are_rare() -> None:
    stops, costs = Interruptions(per_s=1e-6, restart_s=60.0), Checkpoints(block_s=10.0)
    assert best_interval(stops, costs).interval_s == pytest.approx(daly_interval(stops, costs), rel=0.01)


@pytest.mark.parametrize("change", ["per_s", "restart_s", "broken_share", "repair_s", "late_share"])
def test_worse_conditions_never_help(change: str) -> None:
    stops = Interruptions(
        per_s=2e-5, restart_s=600.0, broken_share=0.5, repair_s=50_000.0, late_share=0.02, late_s=1000.0
    )
    worse = replace(stops, **{change: 1.5 * getattr(stops, change)})
    costs = Checkpoints(block_s=30.0, durable_s=60.0)

    def ratio(one: Interruptions) -> float:
        return best_interval(one, costs).efficiency * (1.0 - waiting_share(one))

    assert ratio(worse) < ratio(stops)


def test_a_spare_never_hurts() -> None:
    stops = Interruptions(per_s=1e-5, restart_s=600.0, broken_share=0.7, repair_s=86_400.0)
    waits = [waiting_share(stops, spares) for spares in range(10)]
    assert waits == sorted(waits, reverse=True)


def test_without_interruptions_only_checkpoints_take_time() -> None:
    stops, costs = Interruptions(per_s=0.0, restart_s=600.0), Checkpoints(block_s=1.0)
    assert float(efficiency(999.0, stops, costs)) == pytest.approx(0.999)
    assert waiting_share(stops) == 0.0


@pytest.mark.parametrize("in_the_age", [1.0, 100.0, 1000.0, 20_000.0])
def test_rare_damage_that_is_found_after_many_interruptions_has_a_ratio(in_the_age: float) -> None:
    """e^λL overflowed where more than 700 interruptions fall into the age of silent damage: the ratio was no number."""
    rate, interval, share = 1e-4, 1200.0, 1e-5
    late_s = in_the_age / rate
    stops = Interruptions(per_s=rate, restart_s=60.0, late_share=share, late_s=late_s)
    # Checkpoints that are given up: P(X < L − jT) of each, added up.
    steps = np.arange(np.ceil(late_s / interval))
    given_up = float(-np.expm1(-rate * (late_s - steps * interval)).sum())
    gained, late = (np.exp(-rate * (wait + interval)) / -np.expm1(-rate * interval) for wait in (0.0, late_s))
    secured = (1.0 - share) * gained + share * (late - given_up)
    expected = interval * secured * rate * np.exp(-rate * stops.restart_s)
    with np.errstate(all="raise", under="ignore"):
        found = float(efficiency(interval, stops, Checkpoints(block_s=0.0)))
    assert found == pytest.approx(max(0.0, expected), rel=1e-9)


def test_erlangs_formula_by_its_definition() -> None:
    load, servers = 2.5, 4
    terms = [load**k / np.prod(np.arange(1, k + 1)) for k in range(servers + 1)]
    assert erlang_b(servers, load) == pytest.approx(terms[-1] / sum(terms))
