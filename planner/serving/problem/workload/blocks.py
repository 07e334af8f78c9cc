"""Blocks of KV cache that requests have in common, by names: equal names are equal tokens after equal tokens.

Recordings call them hashes. Two requests share their first blocks up to the first that differs, so that prompts of one
system prompt, of one document and of one conversation form a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The blocks of the requests of a run, the same only as itself.

    Args:
        names: of all blocks, request by request, each request's in order; not negative.
        ends: [n] place in ``names`` behind each request's last block.
        of_prompt: [n] blocks of each request that its prompt fills; those that follow are of its answer.
        tokens_each: tokens of a block; a prompt's last one may be filled in part.
    """

    names: IntArray
    ends: IntArray
    of_prompt: IntArray
    tokens_each: int

    def __len__(self) -> int:
        return len(self.ends)

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]], tokens_each: int) -> Blocks:
        """Blocks of prompts alone: no answer's."""
        counts = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        names = np.array([name for prompt in prompts for name in prompt], dtype=np.int64)
        return cls(names=names, ends=np.cumsum(counts), of_prompt=counts, tokens_each=tokens_each)

    def chains(self) -> list[list[int]]:
        """[n] The names of each request's blocks."""
        whole, ends = self.names.tolist(), self.ends.tolist()
        return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def first(self, num: int) -> Blocks:
        """Those of the first requests."""
        return Blocks(
            names=self.names[: int(self.ends[num - 1])],
            ends=self.ends[:num],
            of_prompt=self.of_prompt[:num],
            tokens_each=self.tokens_each,
        )

    def found_at_most(self, input_length: IntArray) -> IntArray:
        """[n] Prompt tokens that one cache without limit would find of each request, in the order of arrival."""
        seen: set[int] = set()
        found = []
        for chain, of_prompt in zip(self.chains(), self.of_prompt.tolist(), strict=True):
            known = next((i for i, name in enumerate(chain[:of_prompt]) if name not in seen), of_prompt)
            found.append(known)
            seen.update(chain)
        return np.minimum(np.array(found, dtype=np.int64) * self.tokens_each, input_length)
