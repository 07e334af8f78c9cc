"""Nodes that come and go: the policy against hindsight, the expectation against single nodes, hindsight by hand."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from availability_cases import PARCAE_RATES, stretched
from availability_events import simulated_progress

from meshplan.catalogs.errors import SpecError
from meshplan.planner.goodput.availability.capacity import Capacity, hit_probability, rates_of
from meshplan.planner.goodput.availability.hindsight import best_in_hindsight
from meshplan.planner.goodput.availability.outcome import Seen, play
from meshplan.planner.goodput.availability.policy import LearnedPolicy
from meshplan.planner.goodput.availability.report import EveryNode, played
from meshplan.planner.goodput.availability.trace import AvailabilityTrace, read_availability

DAY = 86_400.0


def walk(seed: int, *, most: int = 8, many: int = 60, mean_s: float = 1500.0) -> AvailabilityTrace:
    """A random walk of the nodes."""
    draw = random.Random(seed)
    nodes, times, now = [draw.randint(1, most)], [0.0], 0.0
    while len(nodes) < many:
        now += draw.expovariate(1.0 / mean_s)
        nodes.append(min(most, max(0, nodes[-1] + draw.choice([-2, -1, 1, 2]))))
        times.append(now)
    return AvailabilityTrace(name="walk", times_s=np.array([*times, now + mean_s]), nodes=np.array(nodes))


def capacity(most: int = 8, *, change_s: float = 120.0, forced_s: float = 200.0) -> Capacity:
    return Capacity(rates=stretched(PARCAE_RATES, most), change_s=change_s, forced_s=forced_s)


class _Drawn:
    """A policy that decides at random, the same in the same place."""

    def __init__(self, seed: int, most: int) -> None:
        self.wait_s, self.seed, self.most = 300.0, seed, most

    def saw(self, time_s: float, nodes: int) -> None:
        pass

    def choose(self, seen: Seen) -> int:
        draw = random.Random(hash((self.seed, round(seen.time_s), seen.used)))
        return draw.randint(0, seen.nodes) if draw.random() < 0.4 or seen.used > seen.nodes else seen.used


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_hindsight(seed: int) -> None:
    trace, job = walk(seed), capacity()
    best = best_in_hindsight(trace, job)
    for policy in (LearnedPolicy(job), EveryNode(job), *(_Drawn(number, job.most) for number in range(4))):
        assert play(trace, job, policy).progress <= best * (1.0 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_the_expectation_is_what_single_nodes_make_of_it(seed: int) -> None:
    trace, job = walk(seed, many=150), capacity()
    expected = play(trace, job, LearnedPolicy(job)).progress
    assert expected == pytest.approx(simulated_progress(trace, job, lambda: LearnedPolicy(job), draws=12), rel=0.02)


def test_the_policy_misses_little_and_less_than_taking_every_node() -> None:
    traces, job = [walk(seed) for seed in range(5)], capacity(change_s=300.0, forced_s=500.0)
    result = played(traces, job)
    assert result.progress_share > result.every_node_share
    assert result.regret < 0.1


def test_hindsight_by_hand() -> None:
    # Two nodes for 1,000 s, three for 50 s, two again: the third is not worth 100 s, and who takes it is surely hit.
    trace = AvailabilityTrace(name="x", times_s=np.array([0.0, 1000.0, 1050.0, 2000.0]), nodes=np.array([2, 3, 2]))
    job = Capacity(rates=(0.0, 1.0, 2.0, 3.0), change_s=100.0, forced_s=100.0)
    # The one that goes is one of three: a job of two is hit with probability 2/3 and starts again, 100 s later.
    assert best_in_hindsight(trace, job) == pytest.approx(2.0 * (2000.0 - 100.0 - 100.0 * 2.0 / 3.0))


def test_of_nodes_that_stand_by_the_job_feels_nothing() -> None:
    assert hit_probability(4, 4, 1) == 1.0
    assert hit_probability(4, 1, 1) == pytest.approx(0.25)
    assert hit_probability(4, 2, 2) == pytest.approx(1.0 - 1.0 / 6.0)
    assert hit_probability(4, 0, 4) == 0.0


def test_a_plan_for_fewer_nodes_runs_on_more() -> None:
    assert rates_of({2: 5.0, 3: 4.0, 9: 99.0}, 4) == (0.0, 0.0, 5.0, 5.0, 5.0)


def test_all_nodes_all_the_time_is_the_whole_rate_but_the_start() -> None:
    trace = AvailabilityTrace(name="x", times_s=np.array([0.0, 30 * DAY]), nodes=np.array([4]))
    job = capacity(4)
    result = played([trace], job)
    assert result.progress_share == pytest.approx(1.0 - job.change_s / (30 * DAY))
    assert result.regret == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("change_s", [60.0, 600.0, 3600.0])
def test_a_job_that_stands_still_starts_where_it_can(change_s: float) -> None:
    """A long restart and one number of nodes that trains: before anything was seen, the policy waited for ever."""
    job = Capacity(rates=rates_of({4: 1.0}, 4), change_s=change_s, forced_s=change_s + 100.0)
    whole = AvailabilityTrace(name="whole", times_s=np.array([0.0, 36_000.0]), nodes=np.array([4]))
    assert play(whole, job, LearnedPolicy(job)).progress == pytest.approx(36_000.0 - change_s)


def test_a_file_of_traces(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "time_s,event,nodes,trace,usd_per_node_hour\n0,start,2,a,3.6\n100,add,4,a,7.2\n"
        "0,start,1,b,\n200,end,4,a,7.2\n50,end,1,b,\n"
    )
    a, b = read_availability(path)
    assert (a.name, list(a.nodes), list(a.times_s)) == ("a", [2, 4], [0.0, 100.0, 200.0])
    assert a.mean_nodes == 3.0
    assert a.mean_usd_per_s == pytest.approx((2 * 3.6 + 4 * 7.2) / 2 / 3600)
    assert b.mean_usd_per_s is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time_s\n1\n", "without nodes"),
        ("time_s,nodes,colour\n", "colour"),
        ("time_s,nodes\n", "no lines"),
        ("time_s,nodes\n0,1\n", "two lines"),
        ("time_s,nodes\n5,1\n0,2\n", "must ascend"),
        ("time_s,nodes\n0,-1\n5,2\n", "line 2"),
        ("time_s,nodes\n0,1\nnan,2\n", "line 3"),
        ("time_s,nodes\n0,1.5\n9,2\n", r"line 2: nodes: '1\.5' is not a whole number such as 8"),
        ("time_s,nodes\nnoon,1\n9,2\n", "line 2: time_s: 'noon' is not a number"),
        ("time_s,nodes\n0\n9,2\n", "line 2"),
    ],
)
def test_a_malformed_trace_is_refused_by_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=says):
        read_availability(path)


@pytest.mark.parametrize("text", ["time_s,nodes\n", "time_s,nodes\n0,1\n"])
def test_a_trace_without_a_span_is_refused_with_the_field_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"a\.csv") as refused:
        read_availability(path)
    assert [problem.path for problem in refused.value.problems] == ["run.availability"]


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.csv"):
        read_availability(tmp_path / "none.csv")
