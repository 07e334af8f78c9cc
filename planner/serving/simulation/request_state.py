"""The requests of a running simulation, as plain lists that workers read and write one number at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import EngineLimits
from meshplan.planner.serving.problem.requests import Requests


def may_pass(requests: Requests) -> bool:
    """Whether a later arrival may have a smaller rank: by priority, or in a closed loop that does not begin at once."""
    begins_apart = requests.concurrency is not None and bool(np.any(requests.arrival_s))
    return requests.priority is not None or begins_apart


def _tokens_of_prefixes(requests: Requests) -> dict[int, int]:
    """Tokens of each prefix, as many as any of its requests shares."""
    tokens: dict[int, int] = {}
    if requests.prefix is None or requests.cached_tokens is None:  # one worker that finds what they state
        return tokens
    for prefix, shared in zip(requests.prefix.tolist(), requests.cached_tokens.tolist(), strict=True):
        tokens[prefix] = max(shared, tokens.get(prefix, 0))
    return tokens


class RequestState:
    """Columns over the requests; times are infinite until they are known.

    ``rank`` orders them by priority and then by number, ``by_rank`` is its inverse; ``may_pass`` says that a later
    arrival may have a smaller rank. ``generated`` counts the tokens generated when the request last joined a decode
    batch; ``target`` is the common progress of its worker's decode batch, in tokens, at which it is done; ``anchor``
    and ``offset`` are its context and its KV tokens minus the common progress at the time it joined; ``found_tokens``
    are the cached tokens that its worker really held, ``warm_tokens`` the prefixes that workers hold at the start;
    ``chains`` are the names of each request's blocks of ``block_tokens`` tokens, the first ``prompt_blocks`` of its
    prompt; there are none where requests share prefixes or nothing;
    ``attention_rank`` is the one of its worker on which it lies.
    """

    def __init__(self, requests: Requests) -> None:
        num = len(requests)
        self.num = num
        self.input_length: list[int] = requests.input_length.tolist()
        self.output_length: list[int] = requests.output_length.tolist()
        cached = requests.cached_tokens
        self.cached_tokens: list[int] = [0] * num if cached is None else cached.tolist()
        self.found_tokens = [0] * num
        self.prefix: list[int] | None = None if requests.prefix is None else requests.prefix.tolist()
        blocks = requests.blocks
        self.block_tokens = 0 if blocks is None else blocks.tokens_each
        self.chains: list[list[int]] = [] if blocks is None else blocks.chains()
        self.prompt_blocks: list[int] = [] if blocks is None else blocks.of_prompt.tolist()
        self.warm_tokens = _tokens_of_prefixes(requests) if requests.finds_warm_caches else {}
        self.may_pass = may_pass(requests)
        order = np.arange(num) if requests.priority is None else np.argsort(requests.priority, kind="stable")
        self.by_rank: list[int] = order.tolist()
        self.rank: list[int] = np.argsort(order).tolist()
        self.arrival_s = [math.inf] * num
        self.admitted_s = [math.inf] * num
        self.first_token_s = [math.inf] * num
        self.finish_s = [math.inf] * num
        self.generated = [0] * num
        self.has_kv = [False] * num
        self.attention_rank = [0] * num
        self.target = [0] * num
        self.anchor = [0.0] * num
        self.offset = [0] * num
        # For the gaps between tokens: when it last joined a decode batch, and its last token before a preemption.
        self.joined_s = [math.inf] * num
        self.last_token_s = [math.inf] * num

    def __len__(self) -> int:
        return self.num

    def arrive_prefilled(self, request: int, first_token_s: float) -> None:
        """The request arrives with its KV cache; its first token was seen at that time, infinity if not yet."""
        self.generated[request] = 1
        self.has_kv[request] = True
        self.first_token_s[request] = first_token_s


def fits(
    requests: Requests, kv_capacity_tokens: int, kv_block_tokens: int, tokens_per_step: float
) -> NDArray[np.bool_]:
    """[n] whether a worker's KV cache can hold a request to its end.

    The last token's own KV is never written; the iteration before it may write up to ⌈tokens_per_step⌉.
    """
    held = requests.input_length + np.where(
        requests.output_length > 1, requests.output_length - 2 + math.ceil(tokens_per_step), 0
    )
    return -(-held // kv_block_tokens) <= kv_capacity_tokens // kv_block_tokens


def num_slots(cost: StepCost, limits: EngineLimits) -> int:
    """Most requests that run in one worker: by its limit, by the range of the tables, and by the token budget."""
    decodes = limits.max_batched_tokens // cost.verified_tokens * cost.concurrent_batches
    return max(min(limits.max_num_seqs, cost.max_num_seqs, decodes), 1)
