"""The chosen deployment with another place for its KV cache: simulated under the same load, "not validated".

*Prefixes in host memory or on NVMe*: what a second tier (:mod:`meshplan.planner.serving.simulation.prefix_cache`) would
gain a plan that has none. Engines have flags for host memory (``kv_tier`` of the spec); the model of it has not been
compared with measurements.

*One KV cache over all instances* (Infinite-LLM, arXiv:2401.02669): a long request may use free memory of other
instances. Each computes attention over the part that it holds; queries and partial results go over the network. No
supported engine does this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.exchange.collectives import Exchange
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import KvTier, ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.search.deployment import outside_s, seen_by_clients, simulated_pool
from meshplan.planner.serving.search.slo_judgement import judge
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.cluster import ServingSystem, simulate_system
from meshplan.planner.serving.simulation.metrics import Metrics, summarize

# Share of host memory that caches may take; the operating system and the engine need the rest.
HOST_MEMORY_SHARE = 0.5
# PCIe 5.0 x16 carries 63 GB/s each way; large pinned copies attain about 80 %. Assumed where the spec gives no rate.
HOST_LINK_BYTES_PER_S = 0.8 * 63e9
# One U.2 drive per device, as in a DGX H100 (8 × 3.84 TB, its data sheet), read over PCIe 4.0 x4 (7.9 GB/s) at 80 %;
# the rate holds where the spec names no drive (``cluster.drive``).
NVME_BYTES, NVME_BYTES_PER_S, NVME_LATENCY_S = 3.84e12, 0.8 * 7.9e9, 1e-4
# A shared cache is tried only where requests wait: at least so many on average, or some are preempted or rejected.
WAITING = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedShape:
    """The chosen deployment with another place for its KV cache.

    Args:
        name: what differs.
        label: sizes and rates that were assumed.
        ttft_mean_s: simulated.
        ttft_p99_s: simulated; dominated by requests whose prefix no worker held yet, where there are many of them.
        tpot_mean_s: simulated.
        num_rejected: requests that fit no worker.
        num_preemptions: preemptions for want of cache.
        by_engine: the target engine has flags for it.
        source: paper or engine.
    """

    name: str
    label: str
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    num_rejected: int
    num_preemptions: int
    by_engine: bool
    source: str


def simulated_shapes(
    problem: ServingProblem,
    config: ServingConfig,
    cost: StepCost,
    metrics: Metrics,
    *,
    seed: int = 0,
) -> list[SimulatedShape]:
    """Variants that may help the chosen deployment: a tier where prefixes are shared, one cache where it is short.

    Args:
        problem: the question, with the load under which the deployment was judged.
        config: the chosen deployment; disaggregated ones have no variants.
        cost: iteration times of its worker.
        metrics: its simulated figures.
        seed: for drawing the requests.
    """
    if config.is_disaggregated:
        return []
    found = list(_tiers(problem, config, seed))
    is_short = metrics.mean_queued > WAITING or metrics.num_rejected > 0 or metrics.num_preemptions > 0
    if config.pools[0].num_workers > 1 and is_short and config.pools[0].kv_tier is None:
        found.append(_one_cache(problem, config, cost, seed))
    return found


def assumed_tiers(machine: Machine) -> list[KvTier]:
    """The tiers that are tried: half of the host's memory over PCIe, and one NVMe drive per device."""
    found = (largest_tier(machine, store) for store in ("host", "nvme"))
    return [tier for tier in found if tier is not None]


def largest_tier(machine: Machine, store: str) -> KvTier | None:
    """A store at its assumed rate with all that it may give; None where nobody says how much that is.

    ``remote`` is the same memory as ``host``, read over the network, where all workers find what one of them stored.
    """
    if store == "nvme":
        stated = machine.nvme_bytes_per_s
        each = NVME_BYTES_PER_S if stated is None else stated / machine.devices_per_host
        return KvTier(
            store=store,
            bytes_per_device=NVME_BYTES,
            bytes_per_s_per_device=each,
            latency_s=NVME_LATENCY_S,
        )
    if machine.host_memory_bytes is None:
        return None
    each = HOST_MEMORY_SHARE * machine.host_memory_bytes / machine.devices_per_host
    if store == "host":
        return KvTier(store=store, bytes_per_device=each, bytes_per_s_per_device=HOST_LINK_BYTES_PER_S)
    return KvTier(
        store=store,
        bytes_per_device=each,
        bytes_per_s_per_device=min(Exchange(machine=machine).transfer_bytes_per_s, HOST_LINK_BYTES_PER_S),
        latency_s=machine.scale_out_latency_s,
    )


def _tiers(problem: ServingProblem, config: ServingConfig, seed: int) -> Iterator[SimulatedShape]:
    pool = config.pools[0]
    if not problem.workload.finds_what_is_held or pool.kv_tier is not None or not pool.limits.prefix_caching:
        return
    for tier in assumed_tiers(problem.machines[pool.node_type]):
        metrics = judge(problem, replace(config, pools=(replace(pool, kv_tier=tier),)), seed=seed).metrics
        yield _shape(
            metrics,
            name=f"prefixes kept {'in host memory' if tier.store == 'host' else 'on NVMe'}",
            label=f"{tier.bytes_per_device / 1e9:.0f} GB at {tier.bytes_per_s_per_device / 1e9:.0f} GB/s per device",
            by_engine=tier.store in problem.rules.kv_stores,
            source="vLLM OffloadingConnector, SGLang HiCache, TensorRT-LLM host_cache_size",
        )


def _one_cache(problem: ServingProblem, config: ServingConfig, cost: StepCost, seed: int) -> SimulatedShape:
    pool, site, workload = config.pools[0], problem.site, problem.workload
    machine, num = problem.machines[pool.node_type], pool.num_workers
    is_inside = pool.num_devices <= machine.domain_size
    latency = machine.scale_up_latency_s if is_inside else machine.scale_out_latency_s
    alone = simulated_pool(site, replace(pool, num_workers=1), workload, cost)
    together = replace(
        alone,
        cost=pooled(alone.cost, num, borrow_s=2.0 * latency * problem.shape.num_hidden_layers),
        limits=replace(alone.limits, max_num_seqs=num * alone.limits.max_num_seqs),
        kv_capacity_tokens=num * alone.kv_capacity_tokens,
    )
    run = simulate_system(make_requests(workload, seed=seed), ServingSystem(pools=(together,)))
    later_s = outside_s(site, config, workload, run.input_length)
    metrics = summarize(seen_by_clients(run, later_s), num_devices=config.num_devices)
    return _shape(
        metrics,
        name="one KV cache over all workers",
        label=f"{num} workers, {together.kv_capacity_tokens:,} tokens",
        by_engine=False,
        source="Infinite-LLM, arXiv:2401.02669",
    )


def _shape(metrics: Metrics, *, name: str, label: str, by_engine: bool, source: str) -> SimulatedShape:
    return SimulatedShape(
        name=name,
        label=label,
        ttft_mean_s=metrics.latencies["ttft"].mean,
        ttft_p99_s=metrics.latencies["ttft"].p99,
        tpot_mean_s=metrics.latencies["tpot"].mean,
        num_rejected=metrics.num_rejected,
        num_preemptions=metrics.num_preemptions,
        by_engine=by_engine,
        source=source,
    )


def pooled(cost: StepCost, num_instances: int, *, borrow_s: float) -> StepCost:
    """Tables of ``num_instances`` such workers with one KV cache, modelled as concurrent batches of one worker.

    Each instance has its own weights and share of the requests, and all of them admit against one cache. With W
    instances and the table of one of them::

        decode_fixed'[n] = decode_fixed[⌈n/W⌉] + borrow_s,    decode_context'[n] = decode_context[⌈n/W⌉]/W

    Neglected: the bytes of the queries (kilobytes per layer), and that instances need not step together.

    Args:
        cost: tables of one instance.
        num_instances: W.
        borrow_s: wait of an iteration for attention on other instances: one round trip per layer, s.
    """
    if num_instances == 1:
        return cost
    of_one = [-(-n // num_instances) for n in range(num_instances * cost.max_num_seqs + 1)]
    return replace(
        cost,
        concurrent_batches=num_instances * cost.concurrent_batches,
        pipeline_parallel=num_instances * cost.pipeline_parallel,  # experts process the tokens of their own instance
        decode_fixed_s=[cost.decode_fixed_s[n] + (borrow_s if n else 0.0) for n in of_one],
        decode_context_s=[cost.decode_context_s[n] / num_instances for n in of_one],
        front_end_s=cost.front_end_s / num_instances,
        request_s=cost.request_s / num_instances,
    )
