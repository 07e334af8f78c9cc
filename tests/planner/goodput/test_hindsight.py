"""Hindsight against decisions in every moment of small traces, and what must hold of any trace."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from availability_by_second import best_by_second

from meshplan.planner.goodput.availability.capacity import Capacity, rates_of
from meshplan.planner.goodput.availability.hindsight import best_in_hindsight
from meshplan.planner.goodput.availability.outcome import Policy, Seen, play
from meshplan.planner.goodput.availability.policy import LearnedPolicy
from meshplan.planner.goodput.availability.report import EveryNode
from meshplan.planner.goodput.availability.trace import AvailabilityTrace

# Steps of a second in which the judge decides.
PARTS = 4


def trace_of(times_s: list[float], nodes: list[int]) -> AvailabilityTrace:
    return AvailabilityTrace(name="x", times_s=np.array(times_s, dtype=float), nodes=np.array(nodes))


def small(seed: int) -> tuple[AvailabilityTrace, Capacity]:
    """Five spells of a few seconds and up to four nodes."""
    draw = random.Random(seed)
    times, nodes, rates = [0.0], [], [0.0]
    for _ in range(5):
        nodes.append(draw.randint(0, 4))
        times.append(times[-1] + draw.randint(1, 12))
        rates.append(rates[-1] + draw.choice([0.0, 0.5, 1.0, 2.0]))
    change_s = draw.randint(1, 6)
    forced_s = change_s + draw.choice([0, 2, 6])
    return trace_of(times, nodes), Capacity(rates=tuple(rates[:5]), change_s=change_s, forced_s=forced_s)


class _LastMoment:
    """Two nodes, and just before the nodes have been the same for so long only one."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def saw(self, time_s: float, nodes: int) -> None:
        pass

    def choose(self, seen: Seen) -> int:
        return 1 if seen.is_settled else min(seen.nodes, 2)


def test_a_job_that_shrinks_at_the_last_moment_does_not_beat_hindsight() -> None:
    # Of two nodes one goes; the change after it costs little, starting again much.
    trace = trace_of([0.0, 100.0, 120.0], [2, 1])
    job = Capacity(rates=(0.0, 1.0, 2.0), change_s=10.0, forced_s=19.0)
    assert play(trace, job, _LastMoment(99.0)).progress <= best_in_hindsight(trace, job)


@pytest.mark.parametrize("seed", range(60))
def test_hindsight_is_what_decisions_in_every_quarter_of_a_second_make(seed: int) -> None:
    trace, job = small(seed)
    least = best_by_second(
        [PARTS * int(time) for time in trace.times_s],
        [int(count) for count in trace.nodes],
        [rate / PARTS for rate in job.rates],
        change_s=PARTS * int(job.change_s),
        forced_s=PARTS * int(job.forced_s),
    )
    found = best_in_hindsight(trace, job)
    assert found >= least * (1.0 - 1e-12)
    # Hindsight changes at the very end of a spell, the judge one step before it, once a spell at most.
    assert found <= least + len(trace.nodes) * job.rates[-1] / PARTS + 1e-9


def outages() -> AvailabilityTrace:
    """Four nodes, none for a while, four again, ten times."""
    return trace_of([500.0 * number for number in range(21)], [4, 0] * 10)


@pytest.mark.parametrize("made", [LearnedPolicy, EveryNode])
def test_work_lost_with_all_nodes_is_done_again_once_they_are_back(made: type[LearnedPolicy] | type[EveryNode]) -> None:
    """A job that stood still until nodes came back was charged a chosen change: its lost work counted as done."""
    trace = outages()
    job = Capacity(rates=rates_of({4: 1.0}, 4), change_s=50.0, forced_s=150.0)
    # Ten spells of 500 s: the first start takes 50 s, and each of the nine others 150 s.
    assert play(trace, job, made(job)).progress == pytest.approx(10 * 500.0 - 50.0 - 9 * 150.0)


def test_hindsight_pays_for_lost_work_too_unless_it_stops_in_time() -> None:
    trace = outages()
    job = Capacity(rates=rates_of({4: 1.0}, 4), change_s=50.0, forced_s=150.0)
    # Whoever knows when the nodes go saves the work just before, and starts with 50 s each time.
    assert best_in_hindsight(trace, job) == pytest.approx(10 * 450.0)


@pytest.mark.parametrize("seed", range(6))
def test_a_line_that_repeats_the_number_of_nodes_changes_nothing(seed: int) -> None:
    """A sampled trace, a change of price, or nodes beyond those of the cluster: no change for the job."""
    draw = random.Random(seed)
    times, nodes = [0.0], [3]
    for _ in range(40):
        times.append(times[-1] + draw.expovariate(1.0 / 1500.0))
        nodes.append(draw.choice([number for number in range(5) if number != nodes[-1]]))
    trace = trace_of([*times, times[-1] + 1500.0], nodes)
    ends = trace.times_s
    middles = 0.5 * (ends[1:] + ends[:-1])
    twice = trace_of(sorted([*ends, *middles]), [number for number in nodes for _ in range(2)])
    job = Capacity(rates=(0.0, 1.0, 1.9, 2.7, 3.4), change_s=300.0, forced_s=500.0)
    policies: list[Policy] = [LearnedPolicy(job), EveryNode(job)]
    again: list[Policy] = [LearnedPolicy(job), EveryNode(job)]
    for policy, other in zip(policies, again, strict=True):
        assert play(twice, job, other) == play(trace, job, policy)
    assert best_in_hindsight(twice, job) == pytest.approx(best_in_hindsight(trace, job), rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_units_a_later_start_and_idle_node_types_change_nothing(seed: int) -> None:
    trace, job = small(seed)
    best = best_in_hindsight(trace, job)
    minutes = replace(trace, times_s=trace.times_s / 60.0)
    by_minute = Capacity(
        rates=tuple(60.0 * rate for rate in job.rates), change_s=job.change_s / 60.0, forced_s=job.forced_s / 60.0
    )
    assert best_in_hindsight(minutes, by_minute) == pytest.approx(best, rel=1e-9)
    assert best_in_hindsight(replace(trace, times_s=trace.times_s + 4096.0), job) == pytest.approx(best, rel=1e-9)
    assert best_in_hindsight(trace, replace(job, rates=(*job.rates, 9.0, 99.0))) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_faster_changes_and_faster_nodes_are_never_worse(seed: int) -> None:
    trace, job = small(seed)
    best = best_in_hindsight(trace, job)
    better = [
        replace(job, change_s=0.5 * job.change_s),
        replace(job, forced_s=job.change_s),
        replace(job, rates=tuple(1.5 * rate for rate in job.rates)),
    ]
    assert all(best_in_hindsight(trace, other) >= best * (1.0 - 1e-12) for other in better)
    longer = replace(trace, times_s=np.append(trace.times_s[:-1], trace.times_s[-1] + 5.0))
    assert best_in_hindsight(longer, job) >= best * (1.0 - 1e-12)
