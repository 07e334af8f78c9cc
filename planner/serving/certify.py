"""A second opinion on a serving plan: the reference simulation replays its workers iteration by iteration.

The plan's latencies come from a simulation that takes all iterations of an unchanged batch as one event. The reference
(:mod:`meshplan.planner.serving.simulation.reference`) shares no code with it: it goes through every iteration and every
block of KV cache. One worker of each pool is given its share of the load by both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.certificate import Certificate, Check, same_value
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import Pool, Role, ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.search.deployment import simulated_pool
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.engine import KV_BLOCK_TOKENS, simulate
from meshplan.planner.serving.simulation.reference import reference_run

# Requests of each worker: the reference takes about a second for them.
NUM_REQUESTS = 300
LATENCIES = ("mean", "99th percentile")


def certify_deployment(
    problem: ServingProblem, config: ServingConfig, *, request_rate_per_s: float, seed: int
) -> Certificate:
    """Replay one worker of each pool.

    Args:
        problem: the question.
        config: the plan's choices.
        request_rate_per_s: rate of the plan.
        seed: for drawing the requests.
    """
    checks = [check for pool in config.pools for check in _replayed(problem, config, pool, request_rate_per_s, seed)]
    return Certificate(
        method="reference simulation, iteration by iteration",
        covers=f"one worker of each pool with its share of the load, {NUM_REQUESTS} requests; "
        "neither routing, transfers between pools, nor the time outside the engine",
        checks=tuple(checks),
    )


def _replayed(
    problem: ServingProblem, config: ServingConfig, pool: Pool, rate_per_s: float, seed: int
) -> Iterator[Check]:
    """What both simulations say of one worker."""
    workload = problem.workload
    cost = pool_worker(problem.site, pool, workload, config.speculation).step_cost()
    one = simulated_pool(problem.site, pool, workload, cost)
    requests = _share(workload, config, pool, rate_per_s, seed)
    if pool.role is Role.DECODE and int(requests.output_length.min()) < 2:  # noqa: PLR2004 - done after prefill
        return
    capacity, block = one.kv_capacity_tokens, KV_BLOCK_TOKENS
    run = simulate(requests, cost, one.limits, kv_capacity_tokens=capacity, kv_block_tokens=block, role=pool.role)
    found, preemptions = reference_run(
        requests, cost, one.limits, kv_capacity_tokens=capacity, kv_block_tokens=block, role=pool.role
    )
    served = run.is_served
    times: list[tuple[str, FloatArray, list[float]]] = []
    if pool.role is not Role.DECODE:
        first = [(request.token_s or [np.inf])[0] for request in found]
        times.append(("time to first token", run.first_token_s, first))
    if pool.role is not Role.PREFILL:
        times.append(("end-to-end latency", run.finish_s, [request.finish_s for request in found]))
    where = f"one {pool.role.value} worker"
    for name, mine, other in times:
        mine_s = (mine - run.arrival_s)[served]
        other_s = (np.array(other) - run.arrival_s)[served]
        for which, stated, again in zip(LATENCIES, _figures(mine_s), _figures(other_s), strict=True):
            yield same_value(f"{name} of {where}, {which}, s", stated, again)
    yield same_value(f"preemptions of {where}", run.num_preemptions, preemptions)


def _figures(seconds: FloatArray) -> tuple[float, float]:
    """The :data:`LATENCIES` of some requests, s."""
    return (float(seconds.mean()), float(np.quantile(seconds, 0.99))) if len(seconds) else (0.0, 0.0)


def _share(workload: ServingWorkload, config: ServingConfig, pool: Pool, rate_per_s: float, seed: int) -> Requests:
    """The requests of one worker of a pool: its share of the rate, or of what is in flight."""
    workers = sum(other.num_workers * other.weight for other in config.pools if other.role is pool.role)
    part = replace(workload, num_requests=NUM_REQUESTS, num_prefixes=None)
    if workload.trace is not None:
        part = replace(part, num_requests=min(NUM_REQUESTS, len(workload.trace)))
        return replace(make_requests(part, seed=seed), prefix=None)
    if workload.arrival is Arrival.CLOSED_LOOP and workload.concurrency is not None:
        part = replace(part, concurrency=max(workload.concurrency * pool.weight // workers, 1))
    elif workload.arrival is not Arrival.ALL_AT_ONCE:
        part = replace(part, arrival=workload.open_arrival, request_rate_per_s=rate_per_s * pool.weight / workers)
    return make_requests(part, seed=seed)
