"""Documents packed into sequences of one length.

``concatenate``: documents follow one another, and every ``sequence_length`` tokens are cut off, within a document too:
no padding (pretraining). ``whole``: a document that does not fit into what is left of a sequence starts the next one;
the rest is padding (fine-tuning). Documents longer than a sequence are split over several, truncated, or dropped.

A token attends to the tokens before it in its own document. Causal pairs of a document of l tokens, of which each sees
at most w (a sliding window): r·l − r²/2 with r = min(l, w), that is l²/2 without a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.distribution import LengthTable, table_of

CONCATENATE, WHOLE = "concatenate", "whole"
SPLIT, TRUNCATE, DROP = "split", "truncate", "drop"
PACKINGS, LONGER = (CONCATENATE, WHOLE), (SPLIT, TRUNCATE, DROP)
# Sequences that statistics of a packing are taken from; documents' lengths are drawn without noise
# (:mod:`.distribution`), what is left is which of them share a sequence.
SAMPLED_SEQUENCES = 4096
# Fewer sequences where they hold more documents than this: each is then nearly the mean already.
SAMPLED_DOCUMENTS = 1_000_000


def causal_pairs(lengths: IntArray | FloatArray, window: int | None = None) -> FloatArray:
    """Query–key pairs of causal attention within documents.

    Args:
        lengths: tokens of each.
        window: tokens that a token sees, itself included; None: all before it.

    >>> causal_pairs(np.array([4, 100]), 10).tolist()
    [8.0, 950.0]
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    reach = tokens if window is None else np.minimum(tokens, float(window))
    return reach * tokens - 0.5 * reach**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Sequences with documents in them.

    Args:
        sequence_length: tokens of each sequence, padding included.
        num_sequences: how many.
        pieces: tokens of each piece: a document, or the part of it that lies in one sequence.
        sequence_of: in which sequence each piece lies.
    """

    sequence_length: int
    num_sequences: int
    pieces: IntArray
    sequence_of: IntArray

    def pairs(self, window: int | None = None) -> FloatArray:
        """Causal query–key pairs within documents, of each sequence."""
        return np.bincount(self.sequence_of, causal_pairs(self.pieces, window), minlength=self.num_sequences)

    @property
    def filled(self) -> float:
        """Tokens of documents over tokens of sequences."""
        return float(self.pieces.sum()) / (self.num_sequences * self.sequence_length)


def fitted(documents: IntArray, sequence_length: int, longer: str) -> IntArray:
    """Documents none of which is longer than a sequence.

    Args:
        documents: tokens of each.
        sequence_length: of a sequence.
        longer: what becomes of those that are longer, one of :data:`LONGER`.
    """
    if longer == TRUNCATE:
        return np.minimum(documents, sequence_length)
    if longer == DROP:
        return documents[documents <= sequence_length]
    parts = -(-documents // sequence_length)
    pieces = np.full(int(parts.sum()), sequence_length, dtype=np.int64)
    pieces[np.cumsum(parts) - 1] = documents - (parts - 1) * sequence_length
    return pieces


def concatenated(documents: IntArray, sequence_length: int) -> Packed:
    """Documents one after another, cut every ``sequence_length`` tokens; what fills no sequence is left out."""
    ends = np.cumsum(documents)
    count = int(ends[-1]) // sequence_length
    borders = np.arange(count + 1) * sequence_length
    cuts = np.union1d(borders, ends[ends < borders[-1]])
    return Packed(
        sequence_length=sequence_length,
        num_sequences=count,
        pieces=np.diff(cuts),
        sequence_of=cuts[:-1] // sequence_length,
    )


def whole_documents(documents: IntArray, sequence_length: int) -> Packed:
    """Documents in order; one that does not fit starts the next sequence. None may be longer than a sequence."""
    ends = np.concatenate([[0], np.cumsum(documents)])
    starts = [0]
    while starts[-1] < len(documents):
        starts.append(int(np.searchsorted(ends, ends[starts[-1]] + sequence_length, side="right")) - 1)
    sizes = np.diff(starts)
    return Packed(
        sequence_length=sequence_length,
        num_sequences=len(sizes),
        pieces=documents,
        sequence_of=np.repeat(np.arange(len(sizes)), sizes),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedDocuments:
    """Documents of a length distribution in sequences of one length; what is worked out of them is kept.

    Args:
        table: how long documents are.
        sequence_length: tokens of a sequence.
        packing: one of :data:`PACKINGS`.
        longer: one of :data:`LONGER`.
        attends_across: tokens attend to earlier documents of their sequence, too: no mask.
    """

    table: LengthTable
    sequence_length: int
    packing: str = CONCATENATE
    longer: str = SPLIT
    attends_across: bool = False

    @property
    def share_sequences(self) -> bool:
        """Whether several documents lie in one sequence: they do unless all fill whole ones."""
        return len(self.table.lengths) > 1 or self.table.longest % self.sequence_length != 0

    @property
    def _left(self) -> LengthTable:
        """The documents once longer ones are truncated or dropped; split ones are whole here."""
        lengths, shares = np.array(self.table.lengths), np.array(self.table.shares)
        if self.longer == TRUNCATE:
            return table_of(fitted(lengths, self.sequence_length, TRUNCATE), shares)
        if self.longer == DROP:
            return table_of(fitted(lengths, self.sequence_length, DROP), shares[lengths <= self.sequence_length])
        return self.table

    @cached_property
    def sample(self) -> Packed:
        """Sequences as they come, the same for the same question."""
        table = self._left
        most = int(SAMPLED_DOCUMENTS * table.mean / self.sequence_length)
        tokens = (min(max(most, 1), SAMPLED_SEQUENCES) + 1) * self.sequence_length
        documents = fitted(table.stream(tokens), self.sequence_length, self.longer)
        if self.packing == CONCATENATE:
            return concatenated(documents, self.sequence_length)
        return whole_documents(documents, self.sequence_length)

    @cached_property
    def filled(self) -> float:
        """Trained tokens over tokens of sequences; 1 without padding."""
        return self.sample.filled

    @cached_property
    def _pairs(self) -> dict[int | None, FloatArray]:
        return {}

    def pairs(self, window: int | None = None) -> FloatArray:
        """Causal pairs of each sampled sequence, by the layers' window."""
        if window not in self._pairs:
            whole = causal_pairs(np.array([self.sequence_length]), window)
            across = np.repeat(whole, self.sample.num_sequences)
            self._pairs[window] = across if self.attends_across else self.sample.pairs(window)
        return self._pairs[window]

    def mean_context(self, window: int | None) -> float:
        """Keys that a token of a sequence attends to on average, by the layers' window."""
        return float(self.pairs(window).sum()) / (self.sample.num_sequences * self.sequence_length)
