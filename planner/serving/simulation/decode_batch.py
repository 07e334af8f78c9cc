"""The decode batch of a worker: its requests, their context and KV blocks, and when the next request is done.

All requests of the batch take part in every iteration. A request is therefore described by its state when it joined and
by the common progress since: D iterations and ⌊s·D⌋ tokens, with s = tokens_per_step. No request is updated when an
iteration passes, and K iterations cost as much as one.

The KV blocks after some iterations are Σ ⌈(offset + grown)/block⌉, where offset is what a request held when it joined
minus the common progress at that time. With offset = block·w + r this is Σ w + Σ ⌈(r + grown)/block⌉, and the second
sum needs only the number of offsets with each residue r.
"""

from __future__ import annotations

import heapq
import math

from meshplan.planner.serving.simulation.request_state import RequestState


class DecodeBatch:
    """The decode batch of one worker and the blocks of its KV cache.

    Args:
        state: the requests of the run.
        tokens_per_step: s, tokens that a request gains per iteration.
        kv_capacity_tokens: capacity of the KV cache; only whole blocks of it are used.
        kv_block_tokens: tokens of a block.
    """

    def __init__(
        self, state: RequestState, *, tokens_per_step: float, kv_capacity_tokens: int, kv_block_tokens: int
    ) -> None:
        self.state, self.num_requests = state, len(state)
        self.is_plain = tokens_per_step == 1.0
        self.speed: float = int(tokens_per_step) if tokens_per_step == int(tokens_per_step) else tokens_per_step
        self.most_per_step = math.ceil(tokens_per_step)
        self.block, self.num_blocks = kv_block_tokens, kv_capacity_tokens // kv_block_tokens
        self.steps = 0
        self.grown = 0
        self.num_decoding = 0
        # Tokens that all requests attend in the next iteration: their KV tokens and the one that each computes.
        self.context: float = 0
        # Heap of target × num_requests + request: one number compares faster than a pair.
        self.finishing: list[int] = []
        self.decoding: set[int] = set()
        self.prompt_blocks = 0
        # Tokens that decodes may hold in addition to the prompts in prefill.
        self.room = self.num_blocks * self.block
        self.whole_blocks = 0
        self.residues = [0] * kv_block_tokens

    def hold_prompt(self, length: int) -> None:
        """Reserve blocks for a whole prompt."""
        self.prompt_blocks -= -length // self.block
        self.room = (self.num_blocks - self.prompt_blocks) * self.block

    def release_prompt(self, length: int) -> None:
        """Free the blocks of a prompt, or hand them over to the decode batch."""
        self.prompt_blocks += -length // self.block
        self.room = (self.num_blocks - self.prompt_blocks) * self.block

    def blocks(self, grown: int) -> int:
        """Blocks held at a common progress of ``grown`` tokens: Σ ⌈(offset + grown)/block⌉, by residues."""
        whole, part = divmod(grown, self.block)
        blocks = self.whole_blocks + self.num_decoding * (whole + 1)
        if part:
            return blocks + sum(self.residues[self.block + 1 - part :])
        return blocks - self.residues[0]

    def given(self, steps: int) -> int:
        """Tokens that each decoding request gains in ``steps`` iterations from the start."""
        return int(self.speed * steps)

    def join(self, request: int, generated: int) -> None:
        """Add a request with its KV cache and ``generated`` tokens to the decode batch."""
        state = self.state
        held = state.input_length[request] + generated - 1
        target = state.target[request] = self.grown + state.output_length[request] - generated
        heapq.heappush(self.finishing, target * self.num_requests + request)
        self.decoding.add(state.rank[request])
        self.num_decoding += 1
        self.context += held + 1
        state.anchor[request] = held + 1 - self.speed * self.steps
        offset = state.offset[request] = held - self.grown
        whole, residue = divmod(offset, self.block)
        self.whole_blocks += whole
        self.residues[residue] += 1

    def remove(self, request: int) -> None:
        """Remove a request from the decode batch."""
        state = self.state
        self.decoding.remove(state.rank[request])
        self.num_decoding -= 1
        self.context -= state.anchor[request] + self.speed * self.steps
        whole, residue = divmod(state.offset[request], self.block)
        self.whole_blocks -= whole
        self.residues[residue] -= 1

    def steps_to_finish(self) -> int:
        """Iterations until the first request is done."""
        target = self.finishing[0] // self.num_requests
        if self.is_plain:
            return target - self.steps
        steps = math.ceil(target / self.speed)
        while self.given(steps) < target:
            steps += 1
        while self.given(steps - 1) >= target:
            steps -= 1
        return steps - self.steps

    def steps_that_fit(self, most: int) -> int:
        """The most iterations, at least one, after which the decodes' blocks still fit."""
        free = self.num_blocks - self.prompt_blocks
        if self.blocks(self.given(self.steps + most)) <= free:
            return most
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.blocks(self.given(self.steps + middle)) <= free:
                low = middle
            else:
                high = middle
        return low


def steps_to_reach(seconds: float, first: float, half: float) -> int:
    """The least k ≥ 1 with k·first + half·k(k − 1) ≥ seconds."""
    if half > 0.0:
        linear = first - half
        steps = math.ceil((math.sqrt(linear * linear + 4.0 * half * seconds) - linear) / (2.0 * half))
    else:
        steps = math.ceil(seconds / first)
    steps = max(steps, 1)
    while steps > 1 and (steps - 1) * (first + half * (steps - 2)) >= seconds:
        steps -= 1
    while steps * (first + half * (steps - 1)) < seconds:
        steps += 1
    return steps
