"""Copies of the states that restart apart: against a run event by event, and what can only make it worse."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.goodput.conditions import Interruptions
from meshplan.planner.goodput.copies import away_s, batch_share

HOUR = 3600.0


def simulated(stops: Interruptions, copies: int, stall_s: float, seed: int, events: int = 40_000) -> float:
    """Batches trained over those of an undisturbed run, with nothing of the formulas.

    Each copy lives and is away by a clock of its own; a stall of the others stops the work, not the clocks of failures,
    and begins anew where another copy leaves meanwhile.
    """
    draw = random.Random(seed)
    queue = [(draw.expovariate(stops.per_s / copies), copy, "leaves") for copy in range(copies)]
    heapq.heapify(queue)
    there, clock, work, stalled = copies, 0.0, 0.0, 0.0
    for _ in range(events):
        at, copy, what = heapq.heappop(queue)
        working = max(0.0, at - clock - stalled)
        stalled = max(0.0, stalled - (at - clock))
        if 2 * there >= copies:
            work += working * there / copies
        clock = at
        if what == "leaves":
            there -= 1
            stalled = stall_s
            away = stops.restart_s + (stops.repair_s if draw.random() < stops.broken_share else 0.0)
            heapq.heappush(queue, (at + away, copy, "returns"))
        else:
            there += 1
            heapq.heappush(queue, (at + draw.expovariate(stops.per_s / copies), copy, "leaves"))
    return work / clock


@pytest.mark.parametrize(
    ("copies", "per_hour", "repair_h", "stall_s"),
    [(2, 0.05, 6.0, 60.0), (4, 0.2, 2.0, 180.0), (16, 2.0, 3.0, 30.0), (16, 6.0, 0.5, 180.0)],
)
def test_a_run_event_by_event_trains_as_many_batches(
    copies: int, per_hour: float, repair_h: float, stall_s: float
) -> None:
    stops = Interruptions(per_s=per_hour / HOUR, restart_s=600.0, broken_share=0.6, repair_s=repair_h * HOUR, spares=0)
    found = simulated(stops, copies, stall_s, seed=copies)
    assert batch_share(stops, copies, stall_s=stall_s) == pytest.approx(found, rel=0.02)


def test_long_stalls_begin_anew_where_another_copy_leaves() -> None:
    """Six interruptions an hour, each a stall of ten minutes: four of ten minutes train, and no more is promised."""
    stops = Interruptions(per_s=6.0 / HOUR, restart_s=600.0, broken_share=0.6, repair_s=0.5 * HOUR, spares=0)
    found = simulated(stops, 16, 600.0, seed=1)
    assert 0.95 * found < batch_share(stops, 16, stall_s=600.0) < found


@settings(max_examples=100)
@given(
    stops=st.builds(
        Interruptions,
        per_s=st.floats(1e-9, 1e-3),
        restart_s=st.floats(1.0, 1e4),
        broken_share=st.floats(0.0, 1.0),
        repair_s=st.floats(0.0, 1e6),
        spares=st.integers(0, 5),
    ),
    copies=st.integers(2, 64),
    worse=st.floats(1.0, 10.0),
)
def test_worse_conditions_never_train_more(stops: Interruptions, copies: int, worse: float) -> None:
    share = batch_share(stops, copies)
    assert 0.0 <= share <= 1.0
    one_more_spare = replace(stops, spares=stops.spares + 1)
    assert away_s(one_more_spare) <= away_s(stops) + 1e-9
    for change in ({"per_s": worse * stops.per_s}, {"restart_s": worse * stops.restart_s}):
        assert batch_share(replace(stops, **change), copies) <= share + 1e-9
    assert batch_share(stops, copies, stall_s=worse * 180.0) <= share + 1e-12
