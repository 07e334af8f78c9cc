"""What documents take in context-parallel groups of each size, and a step's groups: nothing here prices a plan.

Seconds come from a plan (:mod:`.mixed`); attention that is split over many ranks loses in the kernel
(:mod:`meshplan.planner.lengths.attention_kernel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.attention_kernel import split_slowdown
from meshplan.planner.lengths.groups import GroupQuestion, MixedGroups, mixed_groups
from meshplan.planner.lengths.packing import causal_pairs
from meshplan.planner.lengths.work import Work

# Short documents go in bundles, of which a rank gets about so many.
BUNDLES_PER_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCosts:
    """What documents take in groups of each size.

    Args:
        works: size c → seconds of a micro-batch from its documents.
        heads: query heads on a rank.
        head_dim: width of a head.
        ranks: of data × context parallelism together.
        static_size: c of the plan.
        most_tokens: that one rank holds.
    """

    works: Mapping[int, Work]
    heads: float
    head_dim: int
    ranks: int
    static_size: int
    most_tokens: int

    def question(self, tokens: IntArray) -> GroupQuestion:
        """The groups' question for some documents."""
        return GroupQuestion(
            seconds={size: self.seconds(size, tokens) for size in self.works},
            tokens=tokens,
            ranks=self.ranks,
            most_tokens=self.most_tokens,
            micro_batches=None,
        )

    def seconds(self, size: int, tokens: IntArray) -> FloatArray:
        """What each document takes in a group of that size."""
        work = self.works[size]
        slower = split_slowdown(tokens, size, heads=self.heads, head_dim=self.head_dim)
        usual = split_slowdown(tokens, self.static_size, heads=self.heads, head_dim=self.head_dim)
        seconds = work.per_token_s * tokens
        for window, per_pair_s in work.per_pair_s:
            seconds = seconds + per_pair_s * causal_pairs(tokens, window) * slower / usual
        return np.asarray(seconds)

    def to_document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "works": [{"size": size, "work": work.to_document()} for size, work in self.works.items()],
            "heads": self.heads,
            "head_dim": self.head_dim,
            "ranks": self.ranks,
            "static_size": self.static_size,
            "most_tokens": self.most_tokens,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> GroupCosts:
        """Read back what :meth:`to_document` wrote."""
        works = {row["size"]: Work.from_document(row["work"]) for row in document["works"]}
        return cls(**{**document, "works": works})


def grouped(costs: GroupCosts, tokens: IntArray) -> MixedGroups | None:
    """Groups of a step; None where a document fits into none. Documents are named by their place in ``tokens``.

    Args:
        costs: what documents take.
        tokens: of every document of the step.
    """
    order = np.argsort(-tokens, kind="stable")
    whole = costs.question(tokens[order])
    most = min(int(tokens.sum()) / (costs.ranks * BUNDLES_PER_RANK), costs.most_tokens)
    starts, bundles = _bundles(tokens[order], most)
    question = replace(
        whole,
        seconds={size: np.add.reduceat(seconds, starts) for size, seconds in whole.seconds.items()},
        tokens=np.add.reduceat(whole.tokens, starts),
    )
    found = mixed_groups(question, static_size=costs.static_size)
    if found is None:
        return None
    inside = tuple(tuple(int(order[place]) for bundle in own for place in bundles[bundle]) for own in found.documents)
    return replace(found, documents=inside, bound_s=min(whole.least_s(whole.sizes), found.seconds))


def _bundles(tokens: IntArray, most: float) -> tuple[IntArray, list[range]]:
    """Neighbours together up to ``most`` tokens: where each bundle starts, and the places in it."""
    starts, filled = [0], 0
    for place, length in enumerate(tokens.tolist()):
        if place and filled + length > most:
            starts.append(place)
            filled = 0
        filled += length
    ends = [*starts[1:], len(tokens)]
    return np.array(starts), [range(begin, end) for begin, end in zip(starts, ends, strict=True)]
