"""The highest rate that is kept up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulation_cases import linear_cost

from meshplan.catalogs.errors import SpecError
from meshplan.planner.problems.serving import Arrival, EngineLimits, Objective, Requests, ServingWorkload
from meshplan.planner.simulation.arrivals import make_requests, scaled
from meshplan.planner.simulation.engine import simulate
from meshplan.planner.simulation.max_rate import max_rate, saturated_rate, worst_ratio
from meshplan.planner.simulation.run import ServingRun

COST = linear_cost()
WORKLOAD = ServingWorkload(
    arrival=Arrival.POISSON, input_length=800, output_length=100, request_rate_per_s=1.0, num_requests=600
)
REQUESTS = make_requests(WORKLOAD)


def serve(requests: Requests, capacity: int = 200_000) -> ServingRun:
    return simulate(requests, COST, EngineLimits(max_num_seqs=64), kv_capacity_tokens=capacity)


def promise(metric: str, percentile: str, limit_s: float) -> Objective:
    return Objective(metric=metric, percentile=percentile, limit_s=limit_s)


@pytest.mark.parametrize(
    "objectives",
    [
        [promise("ttft", "p99", 0.3)],
        [promise("tpot", "p95", 0.02)],
        [promise("itl", "p99", 0.035)],
        [promise("e2e", "mean", 2.0), promise("ttft", "p50", 0.05)],
    ],
    ids=lambda objectives: "-".join(objective.key for objective in objectives),
)
def test_the_rate_is_met_and_the_next_is_not(objectives: list[Objective]) -> None:
    found = max_rate(REQUESTS, serve, objectives)
    assert found.rate_per_s < found.broken_per_s <= 1.01 * found.rate_per_s
    assert worst_ratio(serve(scaled(REQUESTS, found.rate_per_s)), objectives)[0] <= 1.0
    assert worst_ratio(serve(scaled(REQUESTS, found.broken_per_s)), objectives)[0] > 1.0
    assert found.binding in objectives
    # A coarse scan agrees: nothing far above is met.
    for factor in (1.2, 1.5, 2.0):
        assert worst_ratio(serve(scaled(REQUESTS, factor * found.rate_per_s)), objectives)[0] > 1.0


def test_lax_promises_leave_saturation_as_the_limit() -> None:
    found = max_rate(REQUESTS, serve, [promise("e2e", "p99", 1e6)])
    assert found.binding is None
    assert found.rate_per_s == pytest.approx(saturated_rate(serve(replace(REQUESTS, arrival_s=np.zeros(600)))))
    assert found.num_runs == 2


def test_nothing_meets_a_promise_below_one_prefill() -> None:
    found = max_rate(REQUESTS, serve, [promise("ttft", "p50", 1e-4)])
    assert found.rate_per_s == 0.0
    assert found.run is None
    assert found.binding is not None


def test_a_request_that_fits_nowhere_meets_nothing() -> None:
    found = max_rate(REQUESTS, lambda requests: serve(requests, 100), [promise("e2e", "p99", 1e6)])
    assert found.rate_per_s == 0.0


def test_the_saturated_rate_is_that_of_a_long_queue() -> None:
    workload = replace(WORKLOAD, arrival=Arrival.CLOSED_LOOP, concurrency=64, num_requests=3000)
    run = serve(make_requests(workload))
    steady = 2000 / (np.sort(run.finish_s)[2500] - np.sort(run.finish_s)[500])
    at_once = serve(make_requests(replace(WORKLOAD, arrival=Arrival.ALL_AT_ONCE)))
    assert saturated_rate(at_once) == pytest.approx(steady, rel=0.05)


def test_a_run_above_saturation_shows_its_growth() -> None:
    above = max_rate(REQUESTS, serve, [promise("e2e", "p99", 1e6)], high_per_s=60.0)
    below = max_rate(REQUESTS, serve, [promise("e2e", "p99", 1e6)], high_per_s=5.0)
    assert above.growth > 1.5
    assert 0.7 < below.growth < 1.4


def test_requests_at_once_have_no_rate() -> None:
    with pytest.raises(SpecError, match="at once"):
        max_rate(replace(REQUESTS, arrival_s=np.zeros(600)), serve, [])
