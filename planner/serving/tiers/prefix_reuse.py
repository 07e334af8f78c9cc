"""How much of recorded prompts a cache of any size would have held: stack distances of prefix blocks under LRU.

A prompt is a list of block hashes, each of which names its block and all blocks before it. A cache of C blocks that
evicts the least recently used holds exactly the blocks whose *stack distance*, the number of distinct blocks used since
their last use, is below C (Mattson et al., IBM Systems Journal 9, 1970). So one pass over a trace answers all sizes.
With tiers that keep what lies above them (device ⊂ host ⊂ NVMe), tier i serves distances from C_{i−1} to C_i.

A prompt's blocks are used deepest first, so that its first block is the most recent: no block outlives one that it
follows, and what is found is always a prefix. Distances are those before the prompt: it does not find itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import IntArray
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.problem.workload.blocks import Blocks

# Tokens of a block by which prefixes that are named whole are counted: those of engines, or what leaves so many blocks.
LEAST_BLOCK_TOKENS, MOST_BLOCKS = 16, 200_000
# Distance of a block that was never used before.
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixReuse:
    """Stack distances of a trace's blocks.

    Args:
        distances: [blocks] of all prompts in order; :data:`NEVER` for new ones.
        num_blocks: blocks of all prompts.
    """

    distances: IntArray
    num_blocks: int

    def hit_rate(self, capacity_blocks: float) -> float:
        """Share of blocks that a cache of so many blocks holds."""
        return float((self.distances < min(capacity_blocks, float(NEVER))).mean()) if self.num_blocks else 0.0

    def tier_rates(self, capacities: Sequence[float]) -> list[float]:
        """Share of blocks that each tier serves, the fastest first; each holds what those above it hold, and more.

        Args:
            capacities: blocks of each tier alone; tier i holds the blocks with distances below the largest so far.
        """
        reached = [self.hit_rate(size) for size in np.maximum.accumulate(np.asarray(capacities, dtype=np.float64))]
        return [rate - before for rate, before in zip(reached, [0.0, *reached], strict=False)]

    def size_for(self, share: float) -> float:
        """The least blocks that find ``share`` of what a cache without limit finds."""
        found = np.sort(self.distances[self.distances < NEVER])
        return float(found[min(int(np.ceil(share * len(found))), len(found)) - 1]) + 1.0 if len(found) else 0.0


def prefix_blocks(trace: Requests) -> Blocks:
    """Blocks of requests that name the prefix which each shares, and how many of its tokens are shared."""
    each = max(LEAST_BLOCK_TOKENS, int((trace.input_length + trace.output_length).sum()) // MOST_BLOCKS)
    counts = np.zeros(len(trace), dtype=np.int64) if trace.cached_tokens is None else trace.cached_tokens // each
    most = int(counts.max(initial=0)) + 1
    prefixes = np.full(len(trace), -1) if trace.prefix is None else trace.prefix
    pairs = zip(prefixes.tolist(), counts.tolist(), strict=True)
    chains = [[prefix * most + i for i in range(count)] if prefix >= 0 else [] for prefix, count in pairs]
    return Blocks.of_prompts(chains, each)


def prefix_reuse(prompts: Iterable[Sequence[int]]) -> PrefixReuse:
    """Distances of every block of some prompts, in the order in which they come.

    Each block's last use is a mark on the line of uses; a binary indexed tree counts the marks after it, which are the
    distinct blocks used since.
    """
    uses = [list(prompt) for prompt in prompts]
    total = sum(map(len, uses))
    tree, last, distances, now, marks = [0] * (total + 1), dict[int, int](), [], 0, 0
    for prompt in uses:
        for block in prompt:
            at = last.get(block)
            distances.append(NEVER if at is None else marks - _sum(tree, at))
        for block in reversed(prompt):
            at = last.get(block)
            if at is not None:
                _add(tree, at, -1)
                marks -= 1
            now += 1
            _add(tree, now, 1)
            marks += 1
            last[block] = now
    return PrefixReuse(distances=np.array(distances, dtype=np.int64), num_blocks=total)


def _add(tree: list[int], place: int, step: int) -> None:
    while place < len(tree):
        tree[place] += step
        place += place & -place


def _sum(tree: list[int], place: int) -> int:
    total = 0
    while place:
        total += tree[place]
        place &= place - 1
    return total


def break_even_bytes_per_s(kv_bytes_per_token: float, prefill_tokens_per_s: float) -> float:
    """Rate at which fetching a prefix takes as long as computing it again: below it a tier costs more than it spares.

    >>> break_even_bytes_per_s(327_680, 10_000)
    3276800000.0
    """
    return float(kv_bytes_per_token * prefill_tokens_per_s)
