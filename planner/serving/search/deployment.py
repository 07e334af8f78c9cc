"""A whole configuration served: its pools become workers, its workload requests, and what clients see is judged.

Clients see more than the engine: tokeniser and network take a fixed time of every request
(:class:`~meshplan.catalogs.constants.serving.ServingConstants`), and with prefill and decode apart twice: the router
hands the request to one server, then to another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.collectives import Exchange
from meshplan.planner.serving.estimator.memory import WorkerMemory, kv_bytes_per_token, worker_memory
from meshplan.planner.serving.estimator.pools import pool_worker, scheduled
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import (
    Arrival,
    Objective,
    Pool,
    Requests,
    Role,
    ServingConfig,
    ServingWorkload,
)
from meshplan.planner.serving.search.max_rate import RateSearch, Serve
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.cluster import KvLink, ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.early_stopping import Watch
from meshplan.planner.serving.simulation.metrics import Metrics, summarize
from meshplan.planner.serving.simulation.prefix_cache import TierShape
from meshplan.planner.serving.simulation.run import ServingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a simulation needs to know beside the configuration.

    Args:
        shape: the model.
        machines: node type → device and links.
        recipe: how the engine schedules.
        constants: node type → calibrated constants.
    """

    shape: ModelShape
    machines: Mapping[str, Machine]
    recipe: EngineRecipe
    constants: Mapping[str, ServingConstants]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the simulation says of a configuration.

    Args:
        metrics: as clients see it.
        output_tokens_per_s: of all devices; under open arrivals what is offered, since the run's own figure counts the
            time in which the last requests drain.
        requests_per_s: likewise.
        broken: promises that are not kept, with their simulated latencies, s; a rejected request breaks all.
        run: what was simulated: all workers, or a part of many alike.
    """

    metrics: Metrics
    output_tokens_per_s: float
    requests_per_s: float
    broken: tuple[tuple[Objective, float], ...]
    run: ServingRun


def site_of(problem: ServingProblem) -> Site:
    """The site of a question."""
    return Site(
        shape=problem.shape,
        machines=problem.machines,
        recipe=problem.recipe,
        constants={name: calibration.constants for name, calibration in problem.calibrations.items()},
    )


def judge(
    problem: ServingProblem,
    config: ServingConfig,
    *,
    request_rate_per_s: float | None = None,
    num_running: int | None = None,
    seed: int = 0,
    costs: Sequence[StepCost] | None = None,
) -> Judged:
    """Simulate a configuration under the question's load and hold it against every promise.

    Args:
        problem: the question.
        config: the choices.
        request_rate_per_s: of Poisson arrivals, where the question leaves the load free.
        num_running: requests kept in flight instead, over all workers.
        seed: of the requests.
        costs: tables of the pools' iterations where they are at hand.
    """
    workload = problem.workload
    if problem.has_free_load and num_running is not None:
        workload = replace(workload, arrival=Arrival.CLOSED_LOOP, concurrency=num_running)
    elif problem.has_free_load:
        workload = replace(workload, arrival=Arrival.POISSON, request_rate_per_s=request_rate_per_s)
    share, part, copies = _share(config, workload)
    run = serve(site_of(problem), share, part, seed=seed, costs=costs)
    return _judged(problem, workload, run, share, copies)


class HighestRate:
    """The search for the highest Poisson rate of a configuration up to ``high_per_s`` at which it keeps every promise.

    It can be left at any time: ``kept_per_s`` and ``broken_per_s`` then say what is known.
    """

    def __init__(
        self,
        problem: ServingProblem,
        config: ServingConfig,
        *,
        high_per_s: float,
        seed: int = 0,
        costs: Sequence[StepCost] | None = None,
    ) -> None:
        self.problem = problem
        self.workload = replace(problem.workload, arrival=Arrival.POISSON, request_rate_per_s=high_per_s)
        self.share, part, self.copies = _share(config, self.workload)
        self.search = RateSearch(
            make_requests(part, seed=seed),
            server(site_of(problem), self.share, part, costs=costs),
            problem.promises,
            high_per_s=high_per_s / self.copies,
            tolerance=RATE_TOLERANCE,
        )

    @property
    def kept_per_s(self) -> float:
        """The highest rate tried that keeps every promise; 0 before one does."""
        return self.search.low * self.copies

    @property
    def broken_per_s(self) -> float:
        """No rate above it keeps them, as far as is known: the lowest tried that breaks one, or the limit."""
        return min(self.search.high, self.search.most) * self.copies

    @property
    def has_tried(self) -> bool:
        """Some rate has been tried."""
        return self.search.num_runs > 0

    @property
    def is_closed(self) -> bool:
        """Nothing is left to try."""
        return self.search.is_closed

    @property
    def tokens_per_request(self) -> float:
        """Mean answer of the requests that are simulated."""
        return float(self.search.requests.output_length.mean())

    def narrow(self, rate_per_s: float | None = None) -> None:
        """Try one rate, to the end where it is given, else the next of the search."""
        if rate_per_s is None:
            self.search.try_rate(self.search.next_rate())
        else:
            self.search.try_rate(rate_per_s / self.copies, gives_up=False)

    def judged(self) -> Judged:
        """The configuration at the rate that is kept if the search is closed; else, or if none is, at one that is not.

        A run that was given up is made again.
        """
        if self.search.low_run is not None and (self.is_closed or self.search.high == math.inf):
            return self._judged(self.search.low_run, self.kept_per_s)
        if self.search.high_run is None:
            self.narrow(self.broken_per_s)
        assert self.search.high_run is not None  # noqa: S101  (that run was made to its end)
        return self._judged(self.search.high_run, self.broken_per_s)

    def _judged(self, run: ServingRun, rate_per_s: float) -> Judged:
        at = replace(self.workload, request_rate_per_s=rate_per_s)
        return _judged(self.problem, at, run, self.share, self.copies)


def _judged(
    problem: ServingProblem, workload: ServingWorkload, run: ServingRun, share: ServingConfig, copies: float
) -> Judged:
    """What a run of a part says of the whole."""
    metrics = _of_all(summarize(run, num_devices=share.num_devices), copies)
    broken = tuple(
        (promise, metrics.value(promise))
        for promise in problem.promises
        if metrics.num_rejected or metrics.value(promise) > promise.limit_s
    )
    offered = None if workload.arrival is Arrival.CLOSED_LOOP else workload.request_rate_per_s
    each = metrics.output_tokens_per_s / metrics.requests_per_s if metrics.requests_per_s else 0.0
    return Judged(
        metrics=metrics,
        output_tokens_per_s=metrics.output_tokens_per_s if offered is None else offered * each,
        requests_per_s=metrics.requests_per_s if offered is None else offered,
        broken=broken,
        run=run,
    )


# Relative distance between the highest rate that is kept and the lowest that is not: the noise of a thousand requests.
RATE_TOLERANCE = 0.02
# Alike workers that are simulated together; more are represented by as many with their share of the load.
MOST_SIMULATED_WORKERS = 4


def _share(config: ServingConfig, workload: ServingWorkload) -> tuple[ServingConfig, ServingWorkload, float]:
    """A part of a large deployment with its part of the load, and how many such parts there are.

    Splitting Poisson arrivals at random gives Poisson arrivals; a router that knows the load does better, so the part
    is no faster than the whole. Traces, shared prefixes and several pools are simulated whole.
    """
    workers = config.pools[0].num_workers
    is_one = workload.trace is not None or workload.num_prefixes is not None
    if config.is_disaggregated or workers <= MOST_SIMULATED_WORKERS or is_one:
        return config, workload, 1.0
    copies = workers / MOST_SIMULATED_WORKERS
    rate, concurrency = workload.request_rate_per_s, workload.concurrency
    part = replace(
        workload,
        request_rate_per_s=None if rate is None else rate / copies,
        concurrency=None if concurrency is None else max(round(concurrency / copies), 1),
        num_requests=max(round((workload.num_requests or 1) / copies), 1)
        if workload.arrival is Arrival.ALL_AT_ONCE
        else workload.num_requests,
    )
    return replace(config, pools=(replace(config.pools[0], num_workers=MOST_SIMULATED_WORKERS),)), part, copies


def _of_all(metrics: Metrics, copies: float) -> Metrics:
    """What a deployment does of which a part was simulated: rates and counts in flight scale, latencies do not."""
    if copies == 1.0:
        return metrics
    return replace(
        metrics,
        output_tokens_per_s=copies * metrics.output_tokens_per_s,
        requests_per_s=copies * metrics.requests_per_s,
        mean_in_flight=copies * metrics.mean_in_flight,
        mean_queued=copies * metrics.mean_queued,
    )


def serve(
    site: Site,
    config: ServingConfig,
    workload: ServingWorkload,
    *,
    seed: int = 0,
    costs: Sequence[StepCost] | None = None,
) -> ServingRun:
    """Serve a workload with a configuration, as clients see it.

    Args:
        site: model, machines, engine and constants.
        config: the choices.
        workload: the requests.
        seed: they are drawn from.
        costs: tables of the pools' iterations where they are at hand.

    Raises:
        SpecError: the workload is malformed.
    """
    return server(site, config, workload, costs=costs)(make_requests(workload, seed=seed), None)


def server(
    site: Site, config: ServingConfig, workload: ServingWorkload, *, costs: Sequence[StepCost] | None = None
) -> Serve:
    """What serves requests like those of a workload, as clients see it."""
    costs = costs or [_cost(site, config, pool, workload) for pool in config.pools]
    system = ServingSystem(
        pools=tuple(simulated_pool(site, pool, workload, cost) for pool, cost in zip(config.pools, costs, strict=True)),
        router=config.router,
        link=_kv_link(site, config) if config.is_disaggregated else None,
        first_token_from_decode=True,
    )
    outside_s = sum(site.constants[pool.node_type].first_token_offset_s for pool in config.pools)

    def served(requests: Requests, watch: Watch | None) -> ServingRun:
        if watch is not None:
            watch = watch.later(outside_s)
        return seen_by_clients(simulate_system(requests, system, watch), outside_s)

    return served


def simulated_pool(site: Site, pool: Pool, workload: ServingWorkload, cost: StepCost) -> SimulatedPool:
    """A pool as the simulator takes it."""
    memory = pool_memory(site, pool, workload)
    return SimulatedPool(
        cost=cost,
        limits=scheduled(pool, site.recipe, workload),
        kv_capacity_tokens=memory.kv_capacity_tokens,
        num_workers=pool.num_workers,
        role=pool.role,
        tier=tier_shape(pool, memory),
    )


def _cost(site: Site, config: ServingConfig, pool: Pool, workload: ServingWorkload) -> StepCost:
    return pool_worker(
        site.shape,
        site.machines[pool.node_type],
        pool,
        recipe=site.recipe,
        constants=site.constants[pool.node_type],
        workload=workload,
        speculation=config.speculation,
    ).step_cost()


def _kv_link(site: Site, config: ServingConfig) -> KvLink:
    """What caches go over: the network shares of the smaller worker's devices, at the slower end."""
    prefill, decode = config.pool(Role.PREFILL), config.pool(Role.DECODE)
    exchanges = [Exchange(machine=site.machines[pool.node_type]) for pool in (prefill, decode)]
    return KvLink(
        kv_bytes_per_token=kv_bytes_per_token(site.shape, prefill.quantization),
        bandwidth_bytes_per_s=min(prefill.layout.num_devices, decode.layout.num_devices)
        * min(exchange.transfer_bytes_per_s for exchange in exchanges),
        latency_s=max(exchange.machine.scale_out_latency_s for exchange in exchanges),
    )


def pool_memory(site: Site, pool: Pool, workload: ServingWorkload) -> WorkerMemory:
    """Memory of one worker of a pool under a workload."""
    return worker_memory(
        site.shape,
        site.machines[pool.node_type].device,
        pool.layout,
        pool.limits,
        pool.quantization,
        context=workload.input_length + workload.output_length / 2.0,
    )


def tier_shape(pool: Pool, memory: WorkerMemory) -> TierShape | None:
    """A pool's tier in tokens: every device keeps, and fetches, its own share of a token's cache."""
    tier, lanes = pool.kv_tier, pool.layout.attention_data_parallel
    if tier is None:
        return None
    return TierShape(
        capacity_tokens=int(tier.bytes_per_device / memory.kv_bytes_per_token * lanes),
        seconds_per_token=memory.kv_bytes_per_token / tier.bytes_per_s_per_device,
        latency_s=tier.latency_s,
    )


def seen_by_clients(run: ServingRun, outside_s: float) -> ServingRun:
    """The run with what passes outside the engines, s, once for each request."""
    return replace(run, first_token_s=run.first_token_s + outside_s, finish_s=run.finish_s + outside_s)
