"""Host memory or NVMe as a second tier of KV cache: against the reference implementation, and its properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost, random_requests

from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.problem.config import EngineLimits, Role, Router
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.cluster import ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.metrics import summarize
from meshplan.planner.serving.simulation.prefix_cache import PrefixCache, TierShape
from meshplan.planner.serving.simulation.reference import reference_run
from meshplan.planner.serving.simulation.request_state import RequestState

LIMITS = EngineLimits(max_num_seqs=8, max_batched_tokens=256, prefix_caching=True)
COST = linear_cost(most_seqs=8, most_tokens=256)
TIER = TierShape(capacity_tokens=10**6, seconds_per_token=1e-6)
POOL = SimulatedPool(cost=COST, limits=LIMITS, kv_capacity_tokens=2000)
SHARED = ServingWorkload(
    arrival=Arrival.POISSON,
    input_length=1000,
    output_length=20,
    request_rate_per_s=2.0,
    num_requests=300,
    prefix_hit_rate=0.9,
    num_prefixes=40,
)


def shared_requests(seed: int, num: int, rate: float, num_prefixes: int) -> Requests:
    requests = random_requests(seed, num, rate_per_s=rate, cached=True)
    return replace(requests, prefix=np.random.default_rng(seed).integers(-1, num_prefixes, num))


def least_recently_used(held: list[list[int]], capacity: int, prefix: int, tokens: int, own: tuple[int, int]) -> int:
    """Tokens of a prefix that are found; the plainest cache: a list, the next to go first.

    ``own`` names what the request writes beyond its prefix, and its tokens.
    """
    before = next((entry[1] for entry in held if entry[0] == prefix), 0)
    held[:] = [entry for entry in held if entry[0] not in (prefix, own[0])] + [[*own]]
    held += [] if prefix == -1 else [[prefix, max(before, tokens)]]
    while sum(entry[1] for entry in held) > capacity:
        held.pop(0)
    return tokens if prefix == -1 else min(before, tokens)


def entered(requests: Requests, tier: TierShape, capacity: int) -> tuple[list[float], list[int]]:
    """When each request enters the engine's queue, and how many tokens of its prompt are then there."""
    near: list[list[int]] = []
    far: list[list[int]] = []
    free, found = 0.0, [0] * len(requests)
    when = requests.arrival_s.tolist()
    coming = [(when[i], 0, i) for i in range(len(requests))]
    while coming:
        now, has_fetched, i = min(coming)
        coming.remove((now, has_fetched, i))
        prefix, tokens = int(requests.prefix[i]), int(requests.cached_tokens[i])
        own = (-2 - i, int(requests.input_length[i] + requests.output_length[i]) - tokens)
        if not has_fetched:
            here = least_recently_used(near, capacity, prefix, tokens, own)
            there = least_recently_used(far, tier.capacity_tokens, prefix, tokens, own)
            found[i] = max(here, there)
            if there > here:
                free = max(free, now) + (there - here) * tier.seconds_per_token
                when[i] = free + tier.latency_s
                coming.append((when[i], 1, i))
                continue
        least_recently_used(near, capacity, prefix, tokens, own)
    return when, found


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 50),
    rate=st.sampled_from([2.0, 20.0, 200.0]),
    num_prefixes=st.sampled_from([1, 3, 20]),
    capacity=st.sampled_from([272, 600, 4000]),
    far=st.sampled_from([0, 300, 2000, 10**6]),
    seconds=st.sampled_from([1e-7, 1e-4, 3e-3]),
    latency=st.sampled_from([0.0, 0.02]),
    chunked=st.booleans(),
    lag=st.sampled_from([0.0, 1.0, 0.37]),
)
def test_a_worker_with_a_tier_agrees_with_the_reference(
    seed: int,
    num: int,
    rate: float,
    num_prefixes: int,
    capacity: int,
    far: int,
    seconds: float,
    latency: float,
    chunked: bool,
    lag: float,
) -> None:
    """It is a worker to which requests come when their prefix has, with what was found of it."""
    requests = shared_requests(seed, num, rate, num_prefixes)
    tier = TierShape(capacity_tokens=far, seconds_per_token=seconds, latency_s=latency)
    cost, limits = replace(COST, admission_steps=lag), replace(LIMITS, chunked_prefill=chunked)
    pool = SimulatedPool(cost=cost, limits=limits, kv_capacity_tokens=capacity, tier=tier)
    run = simulate_system(requests, ServingSystem(pools=(pool,)))
    when, found = entered(requests, tier, capacity)
    order = sorted(range(num), key=lambda i: (when[i], when[i] != requests.arrival_s[i], i))
    everyone, preemptions = reference_run(
        Requests(
            arrival_s=np.array(when)[order],
            input_length=requests.input_length[order],
            output_length=requests.output_length[order],
            cached_tokens=np.array(found)[order],
            priority=np.array(order),
        ),
        cost,
        limits,
        kv_capacity_tokens=capacity,
        kv_block_tokens=16,
    )
    assert run.finish_s[order].tolist() == pytest.approx([one.finish_s for one in everyone], rel=1e-9, abs=1e-12)
    first = [(one.token_s or [np.inf])[0] for one in everyone]
    assert run.first_token_s[order].tolist() == pytest.approx(first, rel=1e-9, abs=1e-12)
    assert run.num_preemptions == preemptions
    assert run.arrival_s[run.is_served].tolist() == requests.arrival_s[run.is_served].tolist()


def test_a_worker_that_falls_idle_sees_all_who_have_come() -> None:
    """Rule 1: an idle worker admits whoever has arrived when its iteration begins, the last of them without lag."""
    test_a_worker_with_a_tier_agrees_with_the_reference.hypothesis.inner_test(
        seed=1752496193,
        num=8,
        rate=20.0,
        num_prefixes=1,
        capacity=272,
        far=0,
        seconds=1e-7,
        latency=0.0,
        chunked=False,
        lag=1.0,
    )


def test_a_tier_that_holds_nothing_changes_nothing() -> None:
    requests = shared_requests(3, 60, 20.0, 5)
    plain = simulate_system(requests, ServingSystem(pools=(POOL,)))
    empty = replace(POOL, tier=replace(TIER, capacity_tokens=0))
    assert simulate_system(requests, ServingSystem(pools=(empty,))).finish_s.tolist() == pytest.approx(
        plain.finish_s.tolist(), rel=1e-9
    )


def ttft(requests: Requests, pool: SimulatedPool, router: Router = Router.LEAST_LOADED) -> float:
    return summarize(simulate_system(requests, ServingSystem(pools=(pool,), router=router))).latencies["ttft"].mean


def test_prefixes_that_no_longer_fit_the_devices_come_back_from_the_tier() -> None:
    requests = make_requests(SHARED)
    pool = replace(POOL, kv_capacity_tokens=9000)
    lost, tiered, roomy = ttft(requests, pool), ttft(requests, replace(pool, tier=TIER)), replace(pool)
    everything = ttft(requests, replace(roomy, kv_capacity_tokens=10**6))
    assert tiered < 0.6 * lost
    assert everything <= tiered


def test_a_slow_link_makes_the_tier_worse_than_computing_again() -> None:
    requests = make_requests(SHARED)
    pool = replace(POOL, kv_capacity_tokens=9000)
    found = [ttft(requests, replace(pool, tier=replace(TIER, seconds_per_token=s))) for s in (1e-6, 1e-4, 1e-3)]
    assert found == sorted(found)
    assert found[-1] > ttft(requests, pool)


def test_a_tier_belongs_to_workers_that_prefill_and_keep_prefixes() -> None:
    requests = make_requests(SHARED)
    for wrong in (
        replace(POOL, tier=TIER, limits=replace(LIMITS, prefix_caching=False)),
        replace(POOL, tier=TIER, role=Role.DECODE),
    ):
        with pytest.raises(SpecError, match="a tier keeps the prefixes"):
            simulate_system(requests, ServingSystem(pools=(wrong,)))


def test_the_same_seed_deals_the_same_lengths_with_and_without_prefixes() -> None:
    plain = make_requests(replace(SHARED, num_prefixes=None, length_ratio=0.5))
    shared = make_requests(replace(SHARED, length_ratio=0.5))
    assert np.array_equal(plain.input_length, shared.input_length)
    assert np.array_equal(plain.arrival_s, shared.arrival_s)
    assert shared.prefix is not None
    assert set(shared.prefix.tolist()) <= set(range(40))
    with pytest.raises(SpecError, match="0 prefixes"):
        make_requests(replace(SHARED, num_prefixes=0))


def test_what_others_write_drives_a_prefix_out() -> None:
    """100 prompts in turn, 1,000 tokens each with answers of 1,400: a cache of 100,000 tokens has lost them all, one of
    300,000 none (a load generator's repeated prompts on vLLM)."""
    requests = Requests(
        arrival_s=np.arange(400) * 10.0,
        input_length=np.full(400, 1000),
        output_length=np.full(400, 1400),
        cached_tokens=np.full(400, 992),
        prefix=np.arange(400) % 100,
    )
    for capacity, is_found in ((100_000, False), (300_000, True)):
        run = simulate_system(requests, ServingSystem(pools=(replace(POOL, kv_capacity_tokens=capacity),)))
        first, again = (run.first_token_s - run.arrival_s)[[0, 399]]
        assert (again < 0.5 * first) == is_found


def test_a_worker_that_only_prefills_caches_no_answers() -> None:
    state = RequestState(replace(make_requests(SHARED), prefix=np.full(300, -1)))
    caches = [PrefixCache(state, 10**9, holds_answers=holds) for holds in (True, False)]
    for cache in caches:
        cache.find(0)
    assert caches[0].held_tokens - caches[1].held_tokens == 20
