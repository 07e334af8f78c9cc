"""Requests of a workload: their number, lengths and arrivals, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.simulation.arrivals import check_requests, make_requests, scaled

POISSON = ServingWorkload(arrival=Arrival.POISSON, input_length=1000, output_length=100, request_rate_per_s=4.0)


def test_one_seed_gives_one_sequence() -> None:
    first, second, other = (
        make_requests(POISSON, seed=1),
        make_requests(POISSON, seed=1),
        make_requests(POISSON, seed=2),
    )
    assert np.array_equal(first.arrival_s, second.arrival_s)
    assert not np.array_equal(first.arrival_s, other.arrival_s)


def test_two_rates_meet_the_same_requests() -> None:
    workload = replace(POISSON, length_ratio=0.5)
    slow, fast = make_requests(workload), make_requests(replace(workload, request_rate_per_s=8.0))
    assert np.array_equal(slow.input_length, fast.input_length)
    assert slow.arrival_s == pytest.approx(2.0 * fast.arrival_s)


def test_a_longer_run_begins_with_the_requests_of_a_shorter_one() -> None:
    workload = replace(POISSON, length_ratio=0.5, prefix_hit_rate=0.5, num_prefixes=9)
    short, long = (make_requests(replace(workload, num_requests=num)) for num in (500, 5000))
    assert short.prefix is not None
    assert long.prefix is not None
    for name in ("input_length", "output_length", "prefix"):
        assert np.array_equal(getattr(short, name), getattr(long, name)[:500])
    ratio = short.arrival_s / long.arrival_s[:500]
    assert ratio == pytest.approx(np.full(500, ratio[0]))


@pytest.mark.parametrize("num", [1, 2, 150])
@pytest.mark.parametrize("spread", [1.0, 2.0, 100.0])
def test_a_rate_means_the_same_however_the_requests_are_made(num: int, spread: float) -> None:
    """The realised rate: drawn at a rate, or drawn at another and scaled to it."""
    workload = replace(POISSON, arrival=Arrival.GAMMA, burstiness=spread, num_requests=num)
    direct = make_requests(replace(workload, request_rate_per_s=7.0))
    span = direct.arrival_s[-1] - direct.arrival_s[0]
    if span > 0.0:
        assert (num - 1) / span == pytest.approx(7.0)
        assert scaled(make_requests(workload), 7.0).arrival_s == pytest.approx(direct.arrival_s)


@pytest.mark.parametrize(("arrival", "spread"), [(Arrival.POISSON, 1.0), (Arrival.GAMMA, 3.0), (Arrival.GAMMA, 0.3)])
def test_gaps_have_the_rate_and_the_burstiness(arrival: Arrival, spread: float) -> None:
    workload = replace(POISSON, arrival=arrival, burstiness=spread, num_requests=200_000)
    gaps = np.diff(make_requests(workload).arrival_s)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.03)


def test_lengths_are_uniform_between_the_ratio_and_nominal() -> None:
    requests = make_requests(replace(POISSON, length_ratio=0.8, num_requests=20_000))
    assert requests.input_length.min() >= 800
    assert requests.input_length.max() <= 1000
    assert requests.input_length.mean() == pytest.approx(900, rel=0.01)
    assert make_requests(replace(POISSON, output_length=1.2, length_ratio=0.1)).output_length.min() == 1
    assert set(make_requests(POISSON).output_length.tolist()) == {100}


def test_a_closed_loop_has_ten_requests_for_each_in_flight() -> None:
    requests = make_requests(replace(POISSON, arrival=Arrival.CLOSED_LOOP, concurrency=16))
    assert len(requests) == 160
    assert requests.concurrency == 16
    assert not requests.arrival_s.any()


def test_a_static_batch_is_one_batch_at_once() -> None:
    requests = make_requests(replace(POISSON, arrival=Arrival.STATIC_BATCH, concurrency=16))
    assert len(requests) == 16
    assert requests.concurrency is None
    assert not requests.arrival_s.any()


def test_cached_tokens_are_a_share_of_the_prompt() -> None:
    requests = make_requests(replace(POISSON, prefix_hit_rate=0.3))
    assert requests.cached_tokens is not None
    assert set(requests.cached_tokens.tolist()) == {300}


def test_a_trace_is_replayed_at_its_own_rate_or_another() -> None:
    trace = make_requests(POISSON)
    replay = replace(POISSON, arrival=Arrival.TRACE, trace=trace, request_rate_per_s=None)
    assert make_requests(replay) is trace
    faster = make_requests(replace(replay, request_rate_per_s=10.0)).arrival_s
    assert (len(faster) - 1) / (faster[-1] - faster[0]) == pytest.approx(10.0)


def test_a_trace_may_be_replayed_in_part() -> None:
    trace = replace(make_requests(POISSON), priority=np.arange(1024))
    replay = replace(POISSON, arrival=Arrival.TRACE, trace=trace, request_rate_per_s=None, num_requests=10)
    part = make_requests(replay)
    assert len(part) == len(part.input_length) == 10
    assert part.priority is not None
    assert part.priority.tolist() == list(range(10))
    assert part.cached_tokens is None
    with pytest.raises(SpecError, match="2000 requests of a trace that has 1024"):
        make_requests(replace(replay, num_requests=2000))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"request_rate_per_s": None}, "request_rate_per_s"),
        ({"request_rate_per_s": 0.0}, "request_rate_per_s"),
        ({"request_rate_per_s": float("nan")}, "request_rate_per_s"),
        ({"arrival": Arrival.GAMMA, "burstiness": 0.0}, "burstiness"),
        ({"arrival": Arrival.CLOSED_LOOP}, "concurrency"),
        ({"arrival": Arrival.STATIC_BATCH, "concurrency": 0}, "concurrency"),
        ({"arrival": Arrival.TRACE}, "trace"),
        ({"output_length": 0}, "output_length"),
        ({"input_length": float("nan")}, "input_length"),
        ({"length_ratio": 0.0}, "length_ratio"),
        ({"prefix_hit_rate": 1.5}, "prefix_hit_rate"),
        ({"num_requests": 0}, "num_requests"),
    ],
)
def test_impossible_workloads_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        make_requests(replace(POISSON, **change))


def test_every_problem_of_a_workload_is_named() -> None:
    with pytest.raises(SpecError) as caught:
        make_requests(replace(POISSON, input_length=0, output_length=-1, length_ratio=2.0))
    assert len(caught.value.problems) == 3


GOOD = Requests(
    arrival_s=np.array([0.0, 1.0, 1.0]), input_length=np.array([1, 2, 3]), output_length=np.array([1, 1, 2])
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arrival_s": np.zeros(0)}, "no requests"),
        ({"arrival_s": np.array([0.0, -1.0, 2.0])}, r"arrival_s\[1\]: -1.0 must not be negative"),
        ({"arrival_s": np.array([0.0, 2.0, 1.0])}, r"arrival_s\[2\]: 1.0 is earlier"),
        ({"arrival_s": np.array([0.0, np.nan, 1.0])}, r"arrival_s\[1\]: nan must be a finite"),
        ({"arrival_s": np.array([0.0, 1.0, np.inf])}, r"arrival_s\[2\]: inf must be a finite"),
        ({"input_length": np.array([1, 0, 1])}, r"input_length\[1\]: 0"),
        ({"output_length": np.array([1, 0, 1])}, r"output_length\[1\]: 0"),
        ({"input_length": np.array([1, 1])}, "2 values for 3 arrivals"),
        ({"cached_tokens": np.array([0, 3, 0])}, r"cached_tokens\[1\]: 3"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, object], named: str) -> None:
    check_requests(GOOD)
    with pytest.raises(SpecError, match=named):
        check_requests(replace(GOOD, **change))


def test_requests_at_once_have_no_rate_to_scale() -> None:
    with pytest.raises(SpecError, match="at once"):
        scaled(replace(GOOD, arrival_s=np.zeros(3)), 2.0)
