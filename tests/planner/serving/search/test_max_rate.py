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
from meshplan.planner.serving.search.max_rate import TOLERANCE, RateSearch, saturated_rate
from meshplan.planner.serving.simulation.arrivals import make_requests, scaled
from meshplan.planner.serving.simulation.cluster import KvLink, ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping, SloViolatedError
from meshplan.planner.serving.simulation.engine import simulate
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import worst_ratio

COST = linear_cost()
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
    found = RateSearch(REQUESTS, serve, slos).close()
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
    found = RateSearch(requests, serve, slos).close()
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
    found = RateSearch(REQUESTS, serve, [slo("e2e", "p99", 1e6)]).close()
    assert found.low == pytest.approx(saturated_rate(serve(replace(REQUESTS, arrival_s=np.zeros(600)))))
    assert found.num_runs == 2


def test_nothing_meets_an_slo_below_one_prefill() -> None:
    found = RateSearch(REQUESTS, serve, [slo("ttft", "p50", 1e-4)]).close()
    assert found.low == 0.0
    assert found.low_run is None


def test_a_request_that_fits_nowhere_meets_nothing() -> None:
    found = RateSearch(REQUESTS, partial(serve, capacity=100), [slo("e2e", "p99", 1e6)]).close()
    assert found.low == 0.0


def test_the_saturated_rate_is_that_of_a_long_queue() -> None:
    workload = replace(WORKLOAD, arrival=Arrival.CLOSED_LOOP, concurrency=64, num_requests=3000)
    run = serve(make_requests(workload))
    steady = 2000 / (np.sort(run.finish_s)[2500] - np.sort(run.finish_s)[500])
    at_once = serve(make_requests(replace(WORKLOAD, arrival=Arrival.ALL_AT_ONCE)))
    assert saturated_rate(at_once) == pytest.approx(steady, rel=0.05)


def test_requests_at_once_have_no_rate() -> None:
    with pytest.raises(SpecError, match="at once"):
        RateSearch(replace(REQUESTS, arrival_s=np.zeros(600)), serve, []).close()
