"""Hit rates of tiers from stack distances, exact against caches that are simulated block by block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_caches import blocks_served

from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.tiers.prefix_reuse import NEVER, prefix_blocks, prefix_reuse

Prompts = list[list[int]]


def conversations(seed: int, num: int = 120) -> Prompts:
    """Prompts of several turns that share their beginnings: each hash names all blocks before it."""
    rng = np.random.default_rng(seed)
    names: dict[tuple[int, ...], int] = {}
    histories: list[tuple[int, ...]] = [(0, 0)]
    prompts: Prompts = []
    for number in range(num):
        start = histories[int(rng.integers(len(histories)))]
        history = (*start, *(1000 * number + turn for turn in range(int(rng.integers(1, 6)))))
        histories.append(history)
        prompts.append([names.setdefault(history[: depth + 1], len(names)) for depth in range(len(history))])
    return prompts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacities", [[5], [40, 200], [10, 10_000], [3, 30, 300]])
def test_tiers_serve_what_separate_caches_serve(seed: int, capacities: list[int]) -> None:
    prompts = conversations(seed)
    reuse = prefix_reuse(prompts)
    rates = reuse.tier_rates(capacities)
    assert [round(rate * reuse.num_blocks) for rate in rates] == blocks_served(prompts, capacities)
    assert sum(rates) == pytest.approx(reuse.hit_rate(max(capacities)))


@given(st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), max_size=25), st.integers(1, 14))
def test_distances_are_those_of_a_list(prompts: Prompts, size: int) -> None:
    """Any order of blocks, prefixes or not: against a list that is searched."""
    stack: list[int] = []
    expected = []
    for prompt in prompts:
        expected += [stack.index(block) if block in stack else NEVER for block in prompt]
        for block in reversed(prompt):
            if block in stack:
                stack.remove(block)
            stack.insert(0, block)
    reuse = prefix_reuse(prompts)
    assert reuse.distances.tolist() == expected
    hits = sum(distance < size for distance in expected)
    assert reuse.hit_rate(size) == pytest.approx(hits / len(expected) if expected else 0.0)


def test_the_least_size_finds_the_share() -> None:
    reuse = prefix_reuse(conversations(7))
    every = reuse.hit_rate(np.inf)
    for share in (0.5, 0.9, 1.0):
        size = reuse.size_for(share)
        assert reuse.hit_rate(size) >= share * every
        assert reuse.hit_rate(size - 1) < reuse.hit_rate(size)


def test_prefixes_that_are_named_whole_become_blocks() -> None:
    trace = Requests(
        arrival_s=np.arange(4.0),
        input_length=np.array([1000, 1000, 700, 300]),
        output_length=np.array([10, 10, 10, 10]),
        cached_tokens=np.array([640, 640, 320, 0]),
        prefix=np.array([2, 2, 5, -1]),
    )
    blocks = prefix_blocks(trace)
    chains = blocks.chains()
    assert [len(chain) for chain in chains] == [40, 40, 20, 0]
    assert chains[0] == chains[1]
    assert not set(chains[0]) & set(chains[2])
