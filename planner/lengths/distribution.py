"""How long documents are: a table of lengths with their shares, and a stream of documents drawn from it.

A stream takes the table's quantiles in equal steps and shuffles them (systematic sampling): its mean length and mean
square are the table's own up to the width of one step, whatever the seed. The order of the lengths in a file says
nothing: data loaders shuffle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

# Documents between two shuffles of a stream.
DOCUMENTS_PER_EPOCH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTable:
    """Lengths of documents.

    Args:
        lengths: tokens, distinct, ascending.
        shares: of all documents, one for each length; they sum to 1.
    """

    lengths: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Tokens of a document on average."""
        return float(np.dot(self.lengths, self.shares))

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return self.lengths[-1]

    def quantile(self, share: float) -> int:
        """The length that a share of the documents does not exceed.

        >>> table_of([100, 200, 300, 400]).quantile(0.5)
        200
        """
        rank = np.searchsorted(np.cumsum(self.shares), share * (1.0 - 1e-12))
        return self.lengths[min(int(rank), len(self.lengths) - 1)]

    def token_share_above(self, length: int) -> float:
        """Share of all tokens that lie in documents longer than ``length``."""
        lengths, shares = np.array(self.lengths), np.array(self.shares)
        tokens = lengths * shares
        return float(tokens[lengths > length].sum() / tokens.sum())

    def epoch(self, rng: np.random.Generator) -> IntArray:
        """Lengths of :data:`DOCUMENTS_PER_EPOCH` documents: the table's quantiles in equal steps, shuffled."""
        at = (np.arange(DOCUMENTS_PER_EPOCH) + 0.5) / DOCUMENTS_PER_EPOCH
        ranks = np.minimum(np.searchsorted(np.cumsum(self.shares), at), len(self.lengths) - 1)
        return rng.permutation(np.array(self.lengths, dtype=np.int64)[ranks])

    def stream(self, num_tokens: int, *, seed: int = 0) -> IntArray:
        """Documents in the order in which a loader may give them, at least ``num_tokens`` together.

        Args:
            num_tokens: tokens wanted.
            seed: of the shuffles.
        """
        rng = np.random.default_rng(seed)
        parts, tokens = [], 0
        while tokens < num_tokens:
            part = self.epoch(rng)
            parts.append(part)
            tokens += int(part.sum())
        documents = np.concatenate(parts)
        wanted = int(np.searchsorted(np.cumsum(documents), num_tokens)) + 1
        return documents[:wanted]


def table_of(lengths: Sequence[int] | IntArray, counts: Sequence[float] | FloatArray | None = None) -> LengthTable:
    """The table of some documents.

    Args:
        lengths: tokens of each, at least 1, in any order.
        counts: how many documents have each of these lengths; None: one each.
    """
    weights = np.ones(len(lengths)) if counts is None else np.asarray(counts, dtype=np.float64)
    values, places = np.unique(np.asarray(lengths, dtype=np.int64), return_inverse=True)
    shares = np.bincount(places.ravel(), weights=weights, minlength=len(values)) / weights.sum()
    kept = shares > 0.0
    return LengthTable(lengths=tuple(values[kept].tolist()), shares=tuple(shares[kept].tolist()))
