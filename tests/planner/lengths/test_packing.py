"""Documents in sequences, against token-by-token counting."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.planner.lengths.distribution import table_of
from meshplan.planner.lengths.packing import (
    CONCATENATE,
    DROP,
    SPLIT,
    TRUNCATE,
    WHOLE,
    PackedDocuments,
    causal_pairs,
    concatenated,
    fitted,
    whole_documents,
)


def _counted(pieces: list[int], window: int | None) -> float:
    """Pairs of every token with itself and those before it, less half of itself: the continuous count l²/2."""
    total = 0.0
    for length in pieces:
        for token in range(length):
            seen = token + 1 if window is None else min(token + 1, window)
            total += seen
        reach = length if window is None else min(length, window)
        total -= reach / 2.0
    return total


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_pairs_are_those_of_counting_tokens(window: int | None) -> None:
    lengths = [1, 2, 7, 40, 41]
    assert causal_pairs(np.array(lengths), window).sum() == pytest.approx(_counted(lengths, window))


def test_concatenated_documents_are_cut_where_sequences_end() -> None:
    rng = np.random.default_rng(3)
    documents = rng.integers(1, 30, 200)
    packed = concatenated(documents, 16)
    owner = np.repeat(np.arange(len(documents)), documents)[: packed.num_sequences * 16].reshape(-1, 16)
    expected = [[int(n) for n in np.unique(row, return_counts=True)[1]] for row in owner]
    found = [packed.pieces[packed.sequence_of == row].tolist() for row in range(packed.num_sequences)]
    assert found == expected
    assert packed.filled == 1.0


def test_whole_documents_stay_whole_and_in_order() -> None:
    rng = np.random.default_rng(4)
    documents = rng.integers(1, 17, 200)
    packed = whole_documents(documents, 16)
    expected, filled = [], 99
    for length in documents.tolist():
        if filled + length > 16:
            expected.append([])
            filled = 0
        expected[-1].append(length)
        filled += length
    found = [packed.pieces[packed.sequence_of == row].tolist() for row in range(packed.num_sequences)]
    assert found == expected


@pytest.mark.parametrize(("longer", "left"), [(SPLIT, [3, 8, 8, 8, 1, 8]), (TRUNCATE, [3, 8, 8, 8]), (DROP, [3, 8])])
def test_documents_longer_than_a_sequence(longer: str, left: list[int]) -> None:
    assert fitted(np.array([3, 8, 17, 8]) if longer != DROP else np.array([3, 8, 17]), 8, longer).tolist() == left


def test_a_stream_has_the_mean_of_its_table_and_is_the_same_however_the_lengths_are_ordered() -> None:
    lengths = [100] * 60 + [1000] * 30 + [30_000] * 10
    table, other = table_of(lengths), table_of(sorted(lengths, reverse=True))
    assert table == other
    assert table.mean == pytest.approx(np.mean(lengths))
    stream = table.stream(40_000_000, seed=1)
    assert stream.mean() == pytest.approx(table.mean, rel=0.02)
    assert np.array_equal(stream, other.stream(40_000_000, seed=1))
    assert table.token_share_above(1000) == pytest.approx(300_000 / 336_000)


def test_one_length_fills_sequences_exactly() -> None:
    for packing in (CONCATENATE, WHOLE):
        documents = PackedDocuments(table=table_of([4096]), sequence_length=4096, packing=packing)
        assert documents.mean_context(None) == 2048.0
        assert documents.mean_context(1024) == 1024.0 - 1024.0**2 / 8192.0
        assert documents.filled == 1.0
        assert np.ptp(documents.pairs()) == 0.0


def test_without_a_mask_documents_make_no_difference() -> None:
    documents = PackedDocuments(table=table_of([10, 500]), sequence_length=4096, attends_across=True)
    assert documents.mean_context(None) == 2048.0


@pytest.mark.parametrize("packing", [CONCATENATE, WHOLE])
@pytest.mark.parametrize("longer", [DROP, TRUNCATE])
def test_sequences_are_sampled_from_what_is_left_of_long_documents(longer: str, packing: str) -> None:
    """Of a million tokens a document nearly all were dropped, and with one document in 10,000 none was left to pack."""
    table = table_of([10, 1_000_000], [1.0, 9999.0] if longer == DROP else [9999.0, 1.0])
    documents = PackedDocuments(table=table, sequence_length=4096, packing=packing, longer=longer)
    sample = documents.sample
    assert sample.num_sequences >= 2000
    whole = int((sample.pieces == 4096).sum())
    if longer == DROP:
        assert whole == 0
    elif packing == WHOLE:
        assert sorted(set(sample.pieces.tolist())) == [10, 4096]
        assert whole / len(sample.pieces) == pytest.approx(1e-4, rel=0.2)
