"""Attention data-parallel ranks: :class:`~meshplan.planner.serving.simulation.admission.AttentionRanks`, compiled."""

from __future__ import annotations

from typing import Any

from meshplan.planner.serving.simulation.compiled.jit import machine_code
from meshplan.planner.serving.simulation.compiled.memory import NONE, PROMPTS, RUNNING, TOKENS, Memory


@machine_code
def begin(m: Memory, worker: Any) -> None:
    """An iteration begins: no rank has prompts yet."""
    for rank in range(worker.num_ranks):
        m.ranks[worker.number, PROMPTS, rank] = m.ranks[worker.number, TOKENS, rank] = 0
        m.rank_pairs[worker.number, rank] = 0.0


@machine_code
def rank_room(m: Memory, worker: Any, batch_budget: int, rank: int) -> int:
    """Tokens of one prompt that a rank may still prefill in this iteration."""
    return min(batch_budget, batch_budget * worker.pipeline - m.ranks[worker.number, TOKENS, rank])


@machine_code
def emptiest(m: Memory, worker: Any, batch_budget: int, wanted: int) -> int:
    """Rank for a prompt of ``wanted`` new tokens in this iteration, NONE if there is none."""
    found, fewest, ranks = NONE, worker.most_on_rank, m.ranks[worker.number]
    for rank in range(worker.num_ranks):
        if ranks[RUNNING, rank] < fewest:
            room = rank_room(m, worker, batch_budget, rank)
            if room > 0 and (worker.is_chunked or room >= wanted or ranks[TOKENS, rank] == 0):
                found, fewest = rank, ranks[RUNNING, rank]
    return found


@machine_code
def prefill_on(m: Memory, worker: Any, rank: int, chunk: int, done: int) -> None:
    """A rank prefills a chunk of a prompt of which ``done`` tokens are cached."""
    m.ranks[worker.number, PROMPTS, rank] += 1
    m.ranks[worker.number, TOKENS, rank] += chunk
    m.rank_pairs[worker.number, rank] += chunk * (done + (chunk + 1) / 2)


@machine_code
def enter_rank(m: Memory, worker: Any, number: int, rank: int) -> None:
    """A request lies on a rank from now on."""
    m.requests[number].attention_rank = rank
    m.ranks[worker.number, RUNNING, rank] += 1


@machine_code
def leave_rank(m: Memory, worker: Any, number: int) -> None:
    """A request has left its rank."""
    m.ranks[worker.number, RUNNING, m.requests[number].attention_rank] -= 1


@machine_code
def fullest_tokens(m: Memory, worker: Any) -> int:
    """Prompt tokens of the fullest micro-batch."""
    tokens, ranks = 0, m.ranks[worker.number]
    for rank in range(worker.num_ranks):
        if ranks[PROMPTS, rank] > 0:
            tokens = max(tokens, -(-ranks[TOKENS, rank] // min(ranks[PROMPTS, rank], worker.pipeline)))
    return tokens


@machine_code
def fullest_pairs(m: Memory, worker: Any) -> float:
    """Attended pairs of the micro-batch with most."""
    pairs, prompts = 0.0, m.ranks[worker.number, PROMPTS]
    for rank in range(worker.num_ranks):
        if prompts[rank] > 0:
            pairs = max(pairs, m.rank_pairs[worker.number, rank] / min(prompts[rank], worker.pipeline))
    return pairs


@machine_code
def least_running(m: Memory, worker: Any) -> int:
    """The rank with the fewest requests, the first of equals."""
    found, running = 0, m.ranks[worker.number, RUNNING]
    for rank in range(1, worker.num_ranks):
        if running[rank] < running[found]:
            found = rank
    return found
