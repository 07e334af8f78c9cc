"""Attention and the other work spread apart, against every placement; and padded micro-batches of like lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.lengths.apart import ApartQuestion, spread_apart
from meshplan.planner.lengths.buckets import bucketed
from meshplan.planner.lengths.work import Work

RANKS = 4
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=3)


def question(lengths: list[int], *, moved_s: float = 0.0, most: float = 1e9) -> ApartQuestion:
    tokens = np.array(lengths)
    # Split attention loses a tenth each time it is halved.
    attention = {size: 1e-3 * tokens**2 / size * 1.1 ** np.log2(size) for size in (1, 2, 4)}
    return ApartQuestion(
        attention=attention,
        tokens=tokens,
        ranks=RANKS,
        per_token_s=0.05,
        per_moved_token_s=moved_s,
        most_tokens=most,
    )


def exhaustive_s(asked: ApartQuestion) -> float:
    """The shortest of all aligned placements."""
    places = [(first, size) for size in (1, 2, 4) for first in range(0, RANKS, size)]
    found = []
    for groups in itertools.product(places, repeat=len(asked.tokens)):
        busy, held = np.zeros(RANKS), np.zeros(RANKS)
        for document, (first, size) in enumerate(groups):
            busy[first : first + size] += asked.attention[size][document]
            held[first : first + size] += asked.tokens[document] / size
        found.append(asked.seconds(busy, held))
    return min(found)


@settings(max_examples=25)
@given(LENGTHS, st.sampled_from([0.0, 0.02]))
def test_it_lies_between_its_bound_and_the_worst(lengths: list[int], moved_s: float) -> None:
    asked = question(lengths, moved_s=moved_s)
    found = spread_apart(asked)
    assert found is not None
    best = exhaustive_s(asked)
    assert found.bound_s <= best * (1 + 1e-9)
    assert best <= found.seconds * (1 + 1e-9)
    # All attention of every document over all ranks, one after another, is always possible.
    most_s = float(asked.attention[4].sum()) + asked.linear_s + moved_s * sum(lengths)
    assert found.seconds <= most_s * (1 + 1e-9)


def test_a_long_document_is_split_and_its_other_work_is_not_its_ranks_alone() -> None:
    found = spread_apart(question([400, 10, 10]))
    assert found is not None
    assert found.groups[0] == (0, RANKS)
    assert found.seconds == pytest.approx(found.bound_s, rel=0.05)


def test_a_document_without_room_has_no_placement() -> None:
    assert spread_apart(question([400], most=99.0)) is None
    assert spread_apart(question([400], most=100.0)) is not None


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_buckets_hold_every_document_once_within_their_room(lengths: list[int]) -> None:
    tokens, work = np.array(lengths), Work(per_token_s=1.0, per_pair_s=((None, 0.1),))
    found = bucketed(tokens, 64)
    assert sorted(document for own in found.documents for document in own) == list(range(len(lengths)))
    for own, padded in zip(found.documents, found.padded_tokens, strict=True):
        assert len(own) * padded <= 64
        assert padded == max(lengths[document] for document in own)
    assert found.work_s(work).sum() >= work.of(tokens).sum() * (1 - 1e-12)
    with pytest.raises(ValueError, match="micro-batches of 10"):
        bucketed(np.array([11]), 10)
