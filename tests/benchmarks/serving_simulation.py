"""Serving-simulator benchmark: python tests/benchmarks/serving_simulation.py [--million]

Prints CPU seconds of 50 plans of 1,024 requests (arrivals, run and metrics), of the highest rate of a plan by
bisection, of several workers, and with --million of a million Poisson requests with the process's peak memory; beside
each the target.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from simulation_cases import linear_cost

from meshplan.planner.serving.problem.config import EngineLimits, Role, Router
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.max_rate import RateSearch
from meshplan.planner.serving.search.trials import Effort, Load, Trial, tried
from meshplan.planner.serving.simulation.arrivals import make_requests, scaled
from meshplan.planner.serving.simulation.cluster import KvLink, ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping
from meshplan.planner.serving.simulation.engine import simulate
from meshplan.planner.serving.simulation.metrics import summarize
from meshplan.planner.serving.simulation.run import ServingRun

COST = linear_cost(most_seqs=512)
NUM_PLANS = 50
POISSON = ServingWorkload(
    arrival=Arrival.POISSON,
    input_length=1000,
    output_length=300,
    length_ratio=0.8,
    request_rate_per_s=8.0,
    num_requests=1024,
)
WORKLOADS = {
    "closed loop, 128": replace(POISSON, arrival=Arrival.CLOSED_LOOP, concurrency=128),
    "Poisson, 8/s": POISSON,
    "Gamma, 8/s, CV 3": replace(POISSON, arrival=Arrival.GAMMA, burstiness=3.0),
    "all at once": replace(POISSON, arrival=Arrival.ALL_AT_ONCE),
}
MOST_PER_S = 64.0  # above what the worker can serve
SLOS = (
    Slo(metric="ttft", percentile="p99", limit_s=2.0),
    Slo(metric="tpot", percentile="p95", limit_s=0.02),
)


def cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def plans(workload: ServingWorkload, *, chunked: bool, capacity: int) -> float:
    def run() -> None:
        for seed in range(NUM_PLANS):
            requests = make_requests(workload, seed=seed)
            limits = EngineLimits(chunked_prefill=chunked)
            summarize(simulate(requests, COST, limits, kv_capacity_tokens=capacity))

    return cpu_s(run)


def highest_rate(load: Load) -> RateSearch:
    """The highest rate at which the SLOs are shown to hold."""

    def attempt(rate: float, may_stop_early: bool, effort: Effort) -> Trial:
        at_rate = replace(load, requests=lambda num: scaled(load.requests(num), rate))
        return tried(at_rate, serve, SLOS, may_stop_early=may_stop_early, effort=effort)

    return RateSearch(attempt, high_per_s=MOST_PER_S, tolerance=0.02).close().settle()


def main() -> None:
    if "--million" in sys.argv[1:]:
        million()
        return
    print(f"{NUM_PLANS} plans × 1,024 requests, with arrivals and metrics: CPU s (target 1.0)")
    print(f"{'':20} {'chunked':>9} {'exclusive':>10} {'short of KV':>12}")
    for name, workload in WORKLOADS.items():
        times = [
            plans(workload, chunked=True, capacity=10**6),
            plans(workload, chunked=False, capacity=10**6),
            plans(workload, chunked=True, capacity=60_000),
        ]
        print(f"{name:20} {times[0]:9.2f} {times[1]:10.2f} {times[2]:12.2f}")
    print("highest Poisson rate within ttft_p99_s 2, tpot_p95_s 0.02, to 2 %: CPU s a plan")
    for num in (256, 1024, None):
        load = Load(requests=lambda num: make_requests(replace(POISSON, num_requests=num), seed=1), given=num)
        times = [cpu_s(lambda load=load: highest_rate(load)) for _ in range(3)]
        found = highest_rate(load)
        asked = "as needed" if num is None else f"{num:9}"
        print(f"{asked} requests: {statistics.median(times):.3f} ({found.num_runs} loads, {found.low:.2f}/s)")
    print("several workers, 1,024 requests: CPU ms")
    for name, system in systems().items():
        rate = 8.0 * sum(pool.num_workers for pool in system.pools)
        requests = make_requests(replace(POISSON, request_rate_per_s=rate), seed=1)
        times = [cpu_s(partial(simulate_system, requests, system)) for _ in range(5)]
        print(f"{name:34} {statistics.median(times) * 1e3:6.1f}")


def serve(requests: Requests, stopping: EarlyStopping | None = None) -> ServingRun:
    return simulate(requests, COST, EngineLimits(), kv_capacity_tokens=300_000, stopping=stopping)


def systems() -> dict[str, ServingSystem]:
    pool = SimulatedPool(cost=COST, limits=EngineLimits(), kv_capacity_tokens=300_000)
    link = KvLink(kv_bytes_per_token=327_680, bandwidth_bytes_per_s=50e9, latency_s=1e-5)
    mixed = {
        f"{count} mixed, {router.value}": ServingSystem(pools=(replace(pool, num_workers=count),), router=router)
        for count in (2, 8, 16)
        for router in (Router.ROUND_ROBIN, Router.LEAST_LOADED)
    }
    disaggregated = {
        f"{p} prefill, {d} decode": ServingSystem(
            pools=(
                replace(pool, role=Role.PREFILL, num_workers=p),
                replace(pool, role=Role.DECODE, num_workers=d),
            ),
            link=link,
        )
        for p, d in ((1, 1), (4, 4))
    }
    return mixed | disaggregated


def million() -> None:
    requests = make_requests(replace(POISSON, num_requests=1_000_000), seed=1)
    start = time.process_time()
    run = serve(requests)
    seconds = time.process_time() - start
    metrics = summarize(run)
    total = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"1,000,000 Poisson requests: run {seconds:.1f} CPU s, with metrics {total:.1f} (target 60)")
    print(f"peak memory {peak:.0f} MB (target 1,000); {len(run.workers[0].segments):,} stretches")
    print(f"TTFT p99 {metrics.latencies['ttft'].p99:.4f} s, TPOT p95 {metrics.latencies['tpot'].p95:.5f} s")


if __name__ == "__main__":
    main()
