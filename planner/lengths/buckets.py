"""Micro-batches of documents that are nearly as long as each other, each padded to its longest: no packing, no mask.

Documents by falling length; a micro-batch takes the next ones as long as its padded tokens, count × longest, stay
within its room. No attention goes across documents, no mask is needed, and padding takes time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed:
    """Padded micro-batches, longest documents first.

    Args:
        documents: of each micro-batch, by their place.
        padded_tokens: what each document of it is padded to.
    """

    documents: tuple[tuple[int, ...], ...]
    padded_tokens: tuple[int, ...]

    def work_s(self, work: Work) -> FloatArray:
        """Seconds of each micro-batch, padding included."""
        counts = np.array([len(own) for own in self.documents])
        return counts * work.of(np.array(self.padded_tokens))


def bucketed(tokens: IntArray, most_tokens: int) -> Bucketed:
    """Documents in micro-batches of at most so many padded tokens.

    Raises:
        ValueError: a document is longer than a micro-batch.

    >>> bucketed(np.array([2, 8, 3, 4]), 8).documents
    ((1,), (3, 2), (0,))
    """
    if int(tokens.max()) > most_tokens:
        raise ValueError(f"a document of {int(tokens.max())} tokens in micro-batches of {most_tokens}")
    order = np.argsort(-tokens, kind="stable")
    found, padded, begin = [], [], 0
    while begin < len(order):
        longest = int(tokens[order[begin]])
        end = min(begin + most_tokens // longest, len(order))
        found.append(tuple(order[begin:end].tolist()))
        padded.append(longest)
        begin = end
    return Bucketed(documents=tuple(found), padded_tokens=tuple(padded))
