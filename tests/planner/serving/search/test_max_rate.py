"""The highest rate at which the SLOs are met."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost, random_requests

from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.problem.config import EngineLimits, Role
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.max_rate import RateSearch
from meshplan.planner.serving.search.trials import DECISIVE, FEWEST, MOST, Effort, Load, Trial, Verdict, tried
from meshplan.planner.serving.simulation.arrivals import make_requests, scaled
from meshplan.planner.serving.simulation.cluster import KvLink, ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping, SloViolatedError
from meshplan.planner.serving.simulation.engine import simulate
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import worst_ratio

COST = linear_cost()
TOLERANCE = 0.01
WORKLOAD = ServingWorkload(
    arrival=Arrival.POISSON, input_length=800, output_length=100, request_rate_per_s=1.0, num_requests=600
)
REQUESTS = make_requests(WORKLOAD)
POOL = SimulatedPool(cost=COST, limits=EngineLimits(max_num_seqs=16), kv_capacity_tokens=2000)
APART = ServingSystem(
    pools=(replace(POOL, role=Role.PREFILL), replace(POOL, role=Role.DECODE, num_workers=2)),
    link=KvLink(kv_bytes_per_token=1e5, bandwidth_bytes_per_s=1e9, latency_s=1e-3),
)
SYSTEMS = {
    "one": ServingSystem(pools=(POOL,)),
    "two": ServingSystem(pools=(replace(POOL, num_workers=2),)),
    "disaggregated": APART,
    "disaggregated, first token from decode": replace(APART, first_token_from_decode=True),
}


def serve(requests: Requests, stopping: EarlyStopping | None = None, *, capacity: int = 200_000) -> ServingRun:
    return simulate(requests, COST, EngineLimits(max_num_seqs=64), kv_capacity_tokens=capacity, stopping=stopping)


def saturated_rate(run: ServingRun) -> float:
    """Requests/s that leave a run whose requests all arrive at once: over the middle half of them."""
    finish = np.sort(run.finish_s)
    return float(len(finish) / 2 / (finish[3 * len(finish) // 4] - finish[len(finish) // 4]))


def searched(requests: Requests, slos: list[Slo], *, high: float = 0.0, capacity: int = 200_000) -> RateSearch:
    """By one run of the given requests at each rate."""
    load, served = Load(requests=lambda num: requests, given=len(requests)), partial(serve, capacity=capacity)

    def attempt(rate: float, may_stop_early: bool, effort: Effort) -> Trial:
        at_rate = replace(load, requests=lambda num: scaled(requests, rate))
        return tried(at_rate, served, slos, may_stop_early=may_stop_early, effort=effort)

    high = high or saturated_rate(serve(replace(requests, arrival_s=np.zeros(len(requests)))))
    return RateSearch(attempt, high_per_s=high, tolerance=TOLERANCE).close()


def meets(requests: Requests, slos: list[Slo], rate: float) -> bool:
    return worst_ratio(serve(scaled(requests, rate)), slos) <= 1.0


def bisected(requests: Requests, slos: list[Slo], high: float) -> tuple[float, float]:
    """The plainest search: halve the rate until it is met, then the bracket on logarithms; every run to its end."""
    if meets(requests, slos, high):
        return high, math.inf
    low = high / 2
    while not meets(requests, slos, low):
        low, high = low / 2, low
    while high > low * (1.0 + TOLERANCE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(requests, slos, middle) else (low, middle)
    return low, high


def slo(metric: str, percentile: str, limit_s: float) -> Slo:
    return Slo(metric=metric, percentile=percentile, limit_s=limit_s)


ASKED = [
    [slo("ttft", "p99", 0.3)],
    [slo("tpot", "p95", 0.02)],
    [slo("itl", "p99", 0.035)],
    [slo("e2e", "mean", 2.0), slo("ttft", "p50", 0.05)],
]
of_each = pytest.mark.parametrize("slos", ASKED, ids=lambda slos: "-".join(slo.key for slo in slos))


@of_each
def test_the_rate_is_met_and_the_next_is_not(slos: list[Slo]) -> None:
    found = searched(REQUESTS, slos)
    assert found.low < found.high <= 1.01 * found.low
    assert worst_ratio(serve(scaled(REQUESTS, found.low)), slos) <= 1.0
    assert worst_ratio(serve(scaled(REQUESTS, found.high)), slos) > 1.0
    # A coarse scan agrees: nothing far above is met.
    for factor in (1.2, 1.5, 2.0):
        assert worst_ratio(serve(scaled(REQUESTS, factor * found.low)), slos) > 1.0


@of_each
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_rate_of_a_plain_bisection(slos: list[Slo], seed: int) -> None:
    """Within the tolerance, unless the SLO is met again above a rate at which it is not: then either is right."""
    requests = make_requests(replace(WORKLOAD, length_ratio=0.5), seed=seed)
    found = searched(requests, slos)
    high = saturated_rate(serve(replace(requests, arrival_s=np.zeros(600))))
    low, violated = bisected(requests, slos, high)
    if found.low != pytest.approx(low, rel=1.01 * TOLERANCE):
        tried = sorted({low, violated, found.low, found.high})
        met = [meets(requests, slos, rate) for rate in tried]
        assert met == [True, False, True, False]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 80),
    rate=st.sampled_from([2.0, 20.0, 100.0]),
    metric=st.sampled_from(["ttft", "tpot", "e2e", "itl"]),
    percentile=st.sampled_from(["mean", "p50", "p90", "p99"]),
    share=st.floats(0.3, 1.5),
    later=st.sampled_from([0.0, 0.02]),
    system=st.sampled_from(["one", "two", "disaggregated", "disaggregated, first token from decode"]),
)
def test_only_a_run_that_violates_its_slo_is_stopped(
    seed: int, num: int, rate: float, metric: str, percentile: str, share: float, later: float, system: str
) -> None:
    requests = random_requests(seed, num, rate_per_s=rate)
    whole = simulate_system(requests, SYSTEMS[system])
    seen = replace(whole, first_token_s=whole.first_token_s + later, finish_s=whole.finish_s + later)
    latency_s = worst_ratio(seen, [slo(metric, percentile, 1.0)])
    if latency_s == 0.0:
        return  # no answer has a second token
    asked = [slo(metric, percentile, share * latency_s)]
    stoppable = None
    with suppress(SloViolatedError):
        stoppable = simulate_system(requests, SYSTEMS[system], EarlyStopping(slos=asked).later(later))
    if stoppable is None:
        assert worst_ratio(seen, asked) > 1.0 - 1e-9
        return
    assert stoppable.finish_s.tolist() == pytest.approx(whole.finish_s.tolist(), rel=1e-9)
    assert stoppable.first_token_s.tolist() == pytest.approx(whole.first_token_s.tolist(), rel=1e-9)
    assert stoppable.num_preemptions == whole.num_preemptions


def test_a_run_that_is_far_too_slow_is_stopped_early() -> None:
    requests = scaled(REQUESTS, 3.0 * saturated_rate(serve(replace(REQUESTS, arrival_s=np.zeros(600)))))
    with pytest.raises(SloViolatedError, match="ttft_p99_s is beyond its limit"):
        serve(requests, EarlyStopping(slos=[slo("ttft", "p99", 0.1)]))


def test_lax_slos_leave_saturation_as_the_limit() -> None:
    found = searched(REQUESTS, [slo("e2e", "p99", 1e6)])
    assert found.low == pytest.approx(saturated_rate(serve(replace(REQUESTS, arrival_s=np.zeros(600)))))
    assert found.num_runs == 1


def test_nothing_meets_an_slo_below_one_prefill() -> None:
    found = searched(REQUESTS, [slo("ttft", "p50", 1e-4)])
    assert found.low == 0.0
    assert found.low_trial is None


def test_a_request_that_fits_nowhere_meets_nothing() -> None:
    found = searched(REQUESTS, [slo("e2e", "p99", 1e6)], high=10.0, capacity=100)
    assert found.low == 0.0


def trial(verdict: Verdict, ratio: float) -> Trial:
    one = slo("ttft", "p99", 1.0)
    run = serve(scaled(make_requests(replace(WORKLOAD, num_requests=2)), 1.0))
    return Trial(verdict=verdict, run=run, interval_s={one: (ratio, ratio)}, num_requests=2)


def test_a_rate_that_fails_below_one_that_holds_ends_nothing() -> None:
    """Held up to 4 requests/s, not shown from 4 to 5, held again from 5 to 7, violated beyond."""

    def attempt(rate: float, *_: bool) -> Trial:
        if rate > 7.0:
            return trial(Verdict.VIOLATED, 1.5)
        return trial(Verdict.OPEN, 1.1) if 4.0 <= rate < 5.0 else trial(Verdict.MET, 0.9)

    found = RateSearch(attempt, high_per_s=16.0, tolerance=TOLERANCE)
    found.try_rate(8.0)
    found.try_rate(4.5)
    found.close()
    assert 7.0 / (1.0 + TOLERANCE) <= found.low <= 7.0 <= found.refuted < 7.0 * (1.0 + TOLERANCE)


def test_what_is_neither_shown_to_hold_nor_to_fail_lies_within_the_stated_interval() -> None:
    def attempt(rate: float, *_: bool) -> Trial:
        if rate > 6.0:
            return trial(Verdict.VIOLATED, 1.5)
        return trial(Verdict.OPEN, 1.1) if rate > 5.0 else trial(Verdict.MET, 0.9)

    found = RateSearch(attempt, high_per_s=16.0, tolerance=TOLERANCE).close()
    assert 5.0 / (1.0 + TOLERANCE) <= found.low <= 5.0
    assert 6.0 < found.refuted < 6.3


def drawn(rate: float, **changes: float) -> Load:
    workload = replace(WORKLOAD, request_rate_per_s=rate, num_requests=None)
    return Load(requests=lambda num: make_requests(replace(workload, num_requests=num)), **changes)


def test_a_clear_case_takes_the_fewest_requests_and_a_close_one_more() -> None:
    clear = tried(drawn(4.0), serve, [slo("ttft", "p99", 5.0)], may_stop_early=True)
    assert (clear.verdict, clear.num_requests) == (Verdict.MET, FEWEST)
    hopeless = tried(drawn(60.0), serve, [slo("ttft", "p99", 0.1)], may_stop_early=True)
    assert (hopeless.verdict, hopeless.run, hopeless.ratio) == (Verdict.VIOLATED, None, DECISIVE)
    high = clear.interval_s[slo("ttft", "p99", 5.0)][1]
    close = tried(drawn(4.0), serve, [slo("ttft", "p99", 1.2 * high)], may_stop_early=True)
    assert close.num_requests >= MOST


def test_a_question_that_gives_the_number_gets_one_run_of_it() -> None:
    one = tried(drawn(4.0, given=300), serve, [slo("ttft", "p99", 5.0)], may_stop_early=True)
    assert one.run is not None
    assert len(one.run) == one.num_requests == 300


def test_a_run_is_longer_than_its_requests_stay() -> None:
    """Many requests in the system at once: the first thousand say nothing of the rest."""
    rate, limits = 60.0, EngineLimits(max_num_seqs=4096)
    cost = linear_cost(most_seqs=4096)

    def many(requests: Requests, stopping: EarlyStopping | None) -> ServingRun:
        return simulate(requests, cost, limits, kv_capacity_tokens=10**8, stopping=stopping)

    workload = replace(WORKLOAD, input_length=1, output_length=300, request_rate_per_s=rate, num_requests=None)
    load = Load(requests=lambda num: make_requests(replace(workload, num_requests=num)))
    found = tried(load, many, [slo("e2e", "p99", 1e4)], may_stop_early=True)
    assert found.run is not None
    span = found.run.arrival_s[-1] - found.run.arrival_s[0]
    assert span > 5.0 * (found.run.finish_s - found.run.arrival_s).mean()


def test_requests_at_once_have_no_rate() -> None:
    with pytest.raises(SpecError, match="at once"):
        searched(replace(REQUESTS, arrival_s=np.zeros(600)), [], high=1.0)
