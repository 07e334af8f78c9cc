"""Blocks that requests have in common: found as caches that know only lists find them, and no worse with more room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulation_cases import linear_cost
from tier_caches import blocks_served

from meshplan.planner.serving.problem.config import EngineLimits, Role, Router
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.problem.workload.blocks import Blocks
from meshplan.planner.serving.problem.workload.described import described_requests
from meshplan.planner.serving.problem.workload.spec import ServingWorkloadSpec
from meshplan.planner.serving.simulation.cluster import KvLink, ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.metrics import summarize
from meshplan.planner.serving.simulation.prefix_cache import BlockCache, empty_cache
from meshplan.planner.serving.simulation.request_state import RequestState

BLOCK = 16


def conversations(seed: int, num: int = 150) -> list[list[int]]:
    """Prompts that continue earlier ones: a name says all blocks up to its own."""
    rng = np.random.default_rng(seed)
    names: dict[tuple[int, ...], int] = {}
    histories: list[tuple[int, ...]] = [(0, 0)]
    prompts = []
    for number in range(num):
        start = histories[int(rng.integers(len(histories)))]
        history = (*start, *(1000 * number + turn for turn in range(int(rng.integers(1, 6)))))
        histories.append(history)
        prompts.append([names.setdefault(history[: depth + 1], len(names)) for depth in range(len(history))])
    return prompts


def requests_of(prompts: list[list[int]]) -> Requests:
    lengths = np.array([BLOCK * len(prompt) for prompt in prompts])
    blocks = Blocks.of_prompts(prompts, BLOCK)
    return Requests(
        arrival_s=np.arange(len(prompts), dtype=float),
        input_length=lengths,
        output_length=np.ones(len(prompts), dtype=np.int64),
        cached_tokens=blocks.found_at_most(lengths),
        blocks=blocks,
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [5, 40, 200, 100_000])
def test_a_cache_finds_what_a_cache_simulated_block_by_block_finds(seed: int, capacity: int) -> None:
    prompts = conversations(seed)
    cache = empty_cache(RequestState(requests_of(prompts)), capacity * BLOCK, holds_answers=False)
    assert isinstance(cache, BlockCache)
    found = [cache.find(request) for request in range(len(prompts))]
    assert sum(found) == BLOCK * blocks_served(prompts, [capacity])[0]
    assert all(tokens <= BLOCK * len(prompt) for tokens, prompt in zip(found, prompts, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_no_cache_finds_more_than_one_without_limit(seed: int) -> None:
    prompts = conversations(seed)
    requests = requests_of(prompts)
    cache = empty_cache(RequestState(requests), 10**9, holds_answers=False)
    assert requests.cached_tokens is not None
    assert [cache.find(request) for request in range(len(prompts))] == requests.cached_tokens.tolist()


def test_answers_take_room_and_the_next_turn_finds_them() -> None:
    """The second turn's prompt is the first one's prompt, its answer and two blocks more."""
    blocks = Blocks(
        names=np.array([0, 1, 2, 0, 1, 2, 3, 4, 5]),
        ends=np.array([3, 9]),
        of_prompt=np.array([2, 5]),
        tokens_each=BLOCK,
    )
    requests = Requests(
        arrival_s=np.arange(2.0),
        input_length=np.array([2 * BLOCK, 5 * BLOCK]),
        output_length=np.array([BLOCK, BLOCK]),
        cached_tokens=np.array([0, 3 * BLOCK]),
        blocks=blocks,
    )
    mixed, prefill = (
        empty_cache(RequestState(requests), 100 * BLOCK, holds_answers=answers) for answers in (True, False)
    )
    assert [mixed.find(0), mixed.matched(1), mixed.find(1)] == [0, 3 * BLOCK, 3 * BLOCK]
    assert [prefill.find(0), prefill.find(1)] == [0, 2 * BLOCK]
    full = empty_cache(RequestState(requests), 2 * BLOCK)
    assert [full.find(0), full.find(1)] == [0, 2 * BLOCK]  # the end of a request goes first


@pytest.mark.parametrize("role", ["mixed", "prefill"])
def test_a_router_sends_a_turn_to_the_worker_that_holds_the_last_one(role: str) -> None:
    """Two workers: by load alone they share conversations out, by what they hold each finds nearly all."""
    load = {"input_length": 2000, "output_length": 50, "request_rate_per_s": 2.0, "num_requests": 400}
    asked = ServingWorkloadSpec.model_validate({**load, "sessions": {"turns": 8, "gap_s": 5.0}})
    requests = described_requests(asked)
    assert requests is not None
    limits = EngineLimits(max_num_seqs=8, max_batched_tokens=512, prefix_caching=True)
    pool = SimulatedPool(
        cost=linear_cost(most_seqs=8, most_tokens=512), limits=limits, kv_capacity_tokens=10**6, num_workers=2
    )
    pools: tuple[SimulatedPool, ...] = (pool,)
    link = KvLink(kv_bytes_per_token=1e5, bandwidth_bytes_per_s=1e12, latency_s=1e-4) if role == "prefill" else None
    if role == "prefill":
        decode = replace(pool, role=Role.DECODE, limits=replace(limits, prefix_caching=False))
        pools = (replace(pool, role=Role.PREFILL), decode)
    waits = {}
    for router in (Router.LEAST_LOADED, Router.PREFIX_AWARE):
        run = simulate_system(requests, ServingSystem(pools=pools, router=router, link=link))
        waits[router] = float(np.mean(run.first_token_s - run.arrival_s))
    assert waits[Router.PREFIX_AWARE] < waits[Router.LEAST_LOADED]


def test_a_run_tells_what_its_caches_found() -> None:
    """With room for all of it every block that came before; no figure where nothing says what is shared."""
    requests = requests_of(conversations(3))
    limits = EngineLimits(max_num_seqs=8, max_batched_tokens=512, prefix_caching=True)
    pool = SimulatedPool(cost=linear_cost(most_seqs=8, most_tokens=512), limits=limits, kv_capacity_tokens=10**6)
    apart = replace(requests, arrival_s=10.0 * requests.arrival_s)
    found = summarize(simulate_system(apart, ServingSystem(pools=(pool,)))).found_share
    assert found == pytest.approx(requests.cached_share)
    told = replace(apart, blocks=None)
    assert summarize(simulate_system(told, ServingSystem(pools=(pool,)))).found_share is None
