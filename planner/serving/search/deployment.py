"""A whole configuration served: its pools become simulated workers, and clients see what the simulation says.

Clients see more than the engine. A prompt of p tokens of text reaches it, and its tokens reach the client, later by

    c + s·p

c is fitted (:class:`~meshplan.catalogs.constants.serving.ServingConstants`): the slowest server of a role, and once for
prefill and once for decode servers, because the router sends a disaggregated request to one and then to the other.
s is published. In a closed loop the next request reaches the engine as much later on average: the answer's last token
goes to the client, who then sends it. Only such gaps vary (:func:`gaps_s`): requests of one length would otherwise stay
in step for ever, and queue or not by a hair. The clients of a closed loop all begin at once. A server parses their
requests one after another, r each (:mod:`~meshplan.planner.serving.estimator.host.front_end`), and a thread of its own
tokenizes them (vllm-project/vllm, issue 25301), so that the i-th of a server reaches its engine i·max(r, s·p) later
(:func:`starts_s`). Assumptions: later prompts, which come one by one, do not wait for each other's tokenizing (a
hundred prompts of 1,024 tokens a second would); front ends of disaggregated servers tokenize in parallel; tokens of
images are not text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.estimator.exchange.cache_transfer import CacheTransfer
from meshplan.planner.serving.estimator.host.front_end import NO_FRONT_END, FrontEnd
from meshplan.planner.serving.estimator.memory import WorkerMemory, kv_bytes_per_token
from meshplan.planner.serving.estimator.pools import front_end as front_end_of
from meshplan.planner.serving.estimator.pools import pool_memory, pool_worker, scheduled
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import Pool, Role, ServingConfig
from meshplan.planner.serving.problem.engines.table import ENGINES
from meshplan.planner.serving.problem.problem import Site
from meshplan.planner.serving.problem.requests import Requests, ServingWorkload
from meshplan.planner.serving.search.trials import Serve
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.cluster import KvLink, ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping
from meshplan.planner.serving.simulation.prefix_cache import TierShape
from meshplan.planner.serving.simulation.run import ServingRun

# Time of a server to tokenize a prompt, s a token: 164 ms at the median of decode servers for prompts of some 37,000
# tokens (ray-project/ray, pull request 64049; vLLM's chat requests, 256 clients). A tokenizer alone takes 1.1 µs (1.1 s
# for a million tokens, charlesxu.io/parallel-tokenizer). The published time is that of a loaded server, as here.
TOKENIZE_S_PER_TOKEN = 0.164 / 37_000
# The tokenizer alone, where a front end in Rust runs it and servers get its tokens: "The Dynamo frontend tokenizes
# every incoming prompt before it sends the request to an inference backend" (docs.nvidia.com/dynamo, Fastokens).
TOKENIZER_S_PER_TOKEN = 1.1e-6
# How near a closed loop comes to the rate that its front end lets pass, and the most runs that look for the wait.
RATE_TOLERANCE, MOST_RUNS = 0.01, 4
GAP_SEED = 0  # of the order in which gaps are dealt out


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
        site: model, hardware and engine.
        config: the choices.
        workload: the load.
        seed: for drawing the requests.
        costs: iteration tables of the pools, if they are known already.

    Raises:
        SpecError: the workload is malformed.
    """
    return server(site, config, workload, costs=costs)(make_requests(workload, seed=seed), None)


def server(
    site: Site, config: ServingConfig, workload: ServingWorkload, *, costs: Sequence[StepCost] | None = None
) -> Serve:
    """A function that serves requests like those of a workload; arguments as for :func:`serve`."""
    costs = costs or [pool_worker(site, pool, workload, config.speculation).step_cost() for pool in config.pools]
    system = ServingSystem(
        pools=tuple(simulated_pool(site, pool, workload, cost) for pool, cost in zip(config.pools, costs, strict=True)),
        router=config.router,
        link=kv_link(site, config) if config.is_disaggregated else None,
        first_token_from_decode=True,
    )

    (front_end, messages), decodes = slowest_front_ends(site, config, workload), decodes_of(config, workload)

    def served(requests: Requests, stopping: EarlyStopping | None, wait_s: FloatArray) -> ServingRun:
        """The run where requests wait for the front end before they reach an engine, s, [n]."""
        later_s = outside_s(site, config, workload, requests.input_length)
        if requests.concurrency is None:
            requests = replace(requests, arrival_s=np.maximum.accumulate(requests.arrival_s + wait_s))
        else:
            begun = starts_s(config, workload, requests, front_end)
            arrival_s = np.maximum.accumulate(requests.arrival_s + begun)
            requests = replace(requests, arrival_s=arrival_s, think_s=requests.think_s + gaps_s(later_s) + wait_s)
            wait_s = np.where(np.arange(len(requests)) < (requests.concurrency or 0), begun, wait_s)
        if stopping is not None:  # no request is seen earlier than that: a run that is stopped violates its SLO
            stopping = stopping.later(float(later_s.min()))
        run = simulate_system(requests, system, stopping)
        return seen_by_clients(replace(run, arrival_s=run.arrival_s - wait_s), later_s)

    def passed_on(requests: Requests, stopping: EarlyStopping | None) -> ServingRun:
        num = len(requests)
        if requests.concurrency is None:
            answered_per_s = 1.0 / _between_at_least_s(system, num, decodes)
            wait_s = front_end.waits_s(requests.arrival_s, messages, answered_per_s=answered_per_s)
            return served(requests, stopping, wait_s)
        least_s = front_end.request_s(messages)
        if least_s <= _between_at_least_s(system, requests.concurrency, decodes):
            return served(requests, stopping, np.zeros(num))
        # A run whose requests wait has fewer in its engines: no limit is broken for certain before the wait is known.
        return _no_faster(least_s, requests, lambda wait_s: served(requests, None, np.full(num, wait_s)))

    return passed_on


def _between_at_least_s(system: ServingSystem, in_flight: int, decodes: float) -> float:
    """Time between two requests of so many in flight at least: what their decodes alone take of all workers."""
    pools = [pool for pool in system.pools if pool.role is not Role.PREFILL]
    workers = sum(pool.num_workers for pool in pools)
    each = max(-(-in_flight // workers), 1)
    return min(
        decodes * pool.cost.decode_s(count) / count / workers
        for pool in pools
        for count in (min(each, pool.cost.max_num_seqs),)
    )


def _no_faster(least_s: float, requests: Requests, served: Callable[[float], ServingRun]) -> ServingRun:
    """A closed loop whose requests come no faster than one in ``least_s``: each waits as long as that takes.

    All but the first N of n wait, in N chains one after another: a wait of w adds w·(n − N)/(n·N) between two. Engines
    take less the more wait, so that it is found from below, to :data:`RATE_TOLERANCE` or in :data:`MOST_RUNS`.
    """
    in_flight, num = requests.concurrency or 1, len(requests)
    wait_s, run = 0.0, served(0.0)
    for _ in range(MOST_RUNS):
        short_s = least_s - float(np.max(run.finish_s, initial=0.0)) / num
        if num <= in_flight or short_s <= RATE_TOLERANCE * least_s:
            break
        wait_s += short_s * in_flight * num / (num - in_flight)
        run = served(wait_s)
    return run


def slowest_front_ends(site: Site, config: ServingConfig, workload: ServingWorkload) -> tuple[FrontEnd, float]:
    """The API servers of the role that lets fewest requests pass, and iterations in which a request gains tokens there.

    Tokens pass none of prefill workers.
    """
    decodes = decodes_of(config, workload)
    found = []
    for role in {pool.role: None for pool in config.pools}:
        pools = [pool for pool in config.pools if pool.role is role]
        each = [front_end_of(site, pool, workload) for pool in pools]
        processes = sum(one.processes * pool.num_workers for one, pool in zip(each, pools, strict=True))
        found.append((replace(each[0], processes=processes), 0.0 if role is Role.PREFILL else decodes))
    return max(found, key=lambda one: one[0].request_s(one[1]))


def decodes_of(config: ServingConfig, workload: ServingWorkload) -> float:
    """Iterations in which a request of a workload gains tokens, on average."""
    drafts = config.speculation
    return max(workload.mean_lengths[1] / (1.0 if drafts is None else drafts.tokens_per_step), 1.0)


def simulated_pool(site: Site, pool: Pool, workload: ServingWorkload, cost: StepCost) -> SimulatedPool:
    """A pool as the simulator takes it."""
    memory = pool_memory(site, pool, workload)
    return SimulatedPool(
        cost=cost,
        limits=scheduled(pool, site.recipe, workload),
        kv_capacity_tokens=memory.kv_capacity_tokens,
        num_workers=pool.num_workers,
        role=pool.role,
        tier=_tier_shape(pool, memory),
        weight=pool.weight,
    )


def seen_by_clients(run: ServingRun, later_s: FloatArray) -> ServingRun:
    """The run with the time that each request spends outside the engines, s, [n], added to its tokens' times."""
    return replace(run, first_token_s=run.first_token_s + later_s, finish_s=run.finish_s + later_s)


def gaps_s(later_s: FloatArray) -> FloatArray:
    """Times from an answer of a closed loop to the request that it starts, s, [n].

    A request that arrives by itself spends ``later_s`` outside the engines, [n]. Such times are waits for processes and
    sockets, of which the mean alone is known: exponential, the distribution of most entropy. Its quantiles are dealt
    out at random, always in the same order, so that what follows moves smoothly with the mean.
    """
    quantiles = (np.arange(len(later_s)) + 0.5) / len(later_s)
    shares = -np.log1p(-np.random.default_rng(GAP_SEED).permutation(quantiles))
    return np.asarray(later_s * shares)


def starts_s(
    config: ServingConfig, workload: ServingWorkload, requests: Requests, front_end: FrontEnd = NO_FRONT_END
) -> FloatArray:
    """How long the requests that begin a closed loop wait to be parsed and tokenized behind those before them, s, [n].

    The loop's first requests are dealt in turn to the API servers, each with a thread that tokenizes what it has
    parsed, first come, first served; those that follow wait for none of it.
    """
    waited_s = np.zeros(len(requests))
    if not workload.has_front_end:
        return waited_s
    first = min(requests.concurrency or 0, len(requests))
    waited_s[:first] = front_end.waits_s(np.zeros(first), 0.0, answered_per_s=math.inf)
    if config.is_disaggregated:
        return waited_s
    each_s = tokenize_s(workload, requests.input_length[:first])
    threads = front_end.processes or sum(pool.num_workers for pool in config.pools)
    for thread in range(min(threads, first)):
        own_s, parsed_s = each_s[thread::threads], waited_s[thread:first:threads]
        before_s = np.cumsum(own_s) - own_s
        waited_s[thread:first:threads] = before_s + np.maximum.accumulate(parsed_s - before_s)
    return waited_s


def outside_s(
    site: Site, config: ServingConfig, workload: ServingWorkload, prompt_tokens: FloatArray | IntArray
) -> FloatArray:
    """Time that requests with such prompts spend outside the engines of a configuration, s, [len(prompt_tokens)]."""
    if not workload.has_front_end:
        return np.zeros(len(prompt_tokens))
    slowest = dict.fromkeys(Role, 0.0)
    for pool in config.pools:
        slowest[pool.role] = max(slowest[pool.role], site.constants[pool.node_type].first_token_offset_s)
    each_s = TOKENIZE_S_PER_TOKEN if site.recipe.parses_requests else TOKENIZER_S_PER_TOKEN
    return sum(slowest.values()) + tokenize_s(workload, np.asarray(prompt_tokens), each_s)


def tokenize_s(
    workload: ServingWorkload, prompt_tokens: FloatArray | IntArray, each_s: float = TOKENIZE_S_PER_TOKEN
) -> FloatArray:
    """Time to tokenize prompts, s, of the shape of ``prompt_tokens``, at so much a token."""
    images = workload.images
    of_images = 0 if images is None else images.per_request * images.tokens
    return np.asarray(each_s * np.maximum(np.asarray(prompt_tokens) - of_images, 0.0))


def kv_link(site: Site, config: ServingConfig) -> KvLink:
    """The link for KV caches: the network shares of the smaller worker's devices, at the rate of the slower end."""
    prefill, decode = config.pool(Role.PREFILL), config.pool(Role.DECODE)
    reads_again = ENGINES[config.engine].decode_reads_prompt and site.recipe.parses_requests
    moved = [CacheTransfer(connector=config.kv_connector, machine=site.machine(pool)) for pool in (prefill, decode)]
    return KvLink(
        kv_bytes_per_token=kv_bytes_per_token(site.shape, prefill.quantization),
        bandwidth_bytes_per_s=min(prefill.layout.num_devices, decode.layout.num_devices)
        * min(end.bytes_per_s for end in moved),
        latency_s=max(end.start_s(site.shape) for end in moved),
        reads_prompt_s_per_token=TOKENIZE_S_PER_TOKEN if reads_again else 0.0,
        holds_slots=ENGINES[config.engine].prefill_holds_slots,
    )


def _tier_shape(pool: Pool, memory: WorkerMemory) -> TierShape | None:
    """A pool's tier in tokens: every device stores and fetches its own share of a token's cache."""
    tier, ranks = pool.kv_tier, pool.layout.attention_data_parallel
    if tier is None:
        return None
    is_shared = tier.store == "remote"
    together = pool.num_workers if is_shared else 1
    return TierShape(
        is_shared=is_shared,
        capacity_tokens=int(tier.bytes_per_device / memory.kv_bytes_per_token * ranks * together),
        seconds_per_token=memory.kv_bytes_per_token / tier.bytes_per_s_per_device,
        latency_s=tier.latency_s,
    )
