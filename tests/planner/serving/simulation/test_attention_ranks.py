"""Prompts on attention data-parallel ranks: each lies on one, and an iteration takes as long as the fullest."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.problem.config import EngineLimits
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.simulation.admission import AttentionRanks
from meshplan.planner.serving.simulation.engine import simulate
from tests.support.simulation_cases import linear_cost


def first_tokens_s(
    lengths: list[int], *, ranks: int, slots: int = 64, budget: int = 8000, outputs: list[int] | None = None
) -> FloatArray:
    """Times to the first token of requests that come together to an idle worker of so many ranks."""
    requests = Requests(
        arrival_s=np.zeros(len(lengths)),
        input_length=np.array(lengths),
        output_length=np.array(outputs or [1] * len(lengths)),
    )
    cost = linear_cost(most_seqs=slots, most_tokens=budget + slots, concurrent_batches=ranks)
    limits = EngineLimits(max_num_seqs=slots, max_batched_tokens=budget, chunked_prefill=True)
    return simulate(requests, cost, limits, kv_capacity_tokens=10**6).first_token_s


@pytest.mark.parametrize("short", [1, 10, 1000, 4000])
def test_a_prompt_on_another_rank_makes_no_long_one_faster(short: int) -> None:
    alone = first_tokens_s([4000], ranks=2)
    assert min(first_tokens_s([4000, short], ranks=2)) >= alone[0]


def test_prompts_that_come_together_lie_on_the_ranks_with_fewest_requests() -> None:
    """500 and 300 tokens on one rank, 400 and 200 on the other: as long as 800 on one, experts of all 1,400."""
    cost = linear_cost(most_tokens=8064, most_seqs=64)
    pairs = sum(length * (length + 1) / 2 for length in (500, 300))
    seconds = cost.dense_s[800] + cost.experts_s[1400] + cost.outputs_s[2] + cost.prefill_fixed_s
    found = first_tokens_s([500, 400, 300, 200], ranks=2)
    assert found == pytest.approx(np.full(4, seconds + cost.prefill_pair_s * pairs))


def test_each_rank_has_a_budget_of_its_own() -> None:
    """Two ranks of 1,000 tokens: of three prompts of 700 the first rank's second is cut after 300 tokens."""
    first, second, third = first_tokens_s([700, 700, 700], ranks=2, budget=1000)
    assert first == second < third


def test_a_request_takes_the_rank_on_which_another_ended() -> None:
    """Two slots: the first prompt ends with its first token, and those after it follow each other on its rank, so that
    no iteration has two of them, while the second request decodes on the other rank to the end.
    """
    found = first_tokens_s([100, 100, 900, 900], ranks=2, slots=2, outputs=[1, 50, 1, 1])
    assert found[0] == found[1] < found[2] < found[3]


@pytest.mark.parametrize("seed", range(20))
def test_no_assignment_is_faster_than_the_even_split_and_one_prompt_is_all_on_one_rank(seed: int) -> None:
    """What bounds and closed forms take, ⌈p/min(q, w)⌉ and P/min(q, w), is never above the fullest batch."""
    rng = np.random.default_rng(seed)
    num, stages, prompts = (int(rng.integers(1, high)) for high in (9, 4, 30))
    ranks = AttentionRanks(num, stages, slots=prompts * num)
    ranks.begin(10**6)
    chunks = rng.integers(1, 5000, prompts).tolist()
    placed = [int(rng.integers(num)) for _ in chunks]
    for rank, chunk in zip(placed, chunks, strict=True):
        ranks.prefill(rank, chunk, 0)
    tokens, pairs = ranks.fullest()
    spread = min(prompts, num * stages)
    assert tokens >= -(-sum(chunks) // spread)
    assert pairs >= sum(chunk * (chunk + 1) / 2 for chunk in chunks) / spread * (1 - 1e-12)
    assert tokens >= max(chunks) / stages
    alone = [sum(c for at, c in zip(placed, chunks, strict=True) if at == rank) for rank in range(num)]
    assert stages > 1 or tokens == max(alone)
