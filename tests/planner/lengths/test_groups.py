"""Context-parallel groups by length, against every partition and assignment of small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshplan.planner.lengths.attention_kernel import attention_forward_s, split_slowdown
from meshplan.planner.lengths.groups import GroupQuestion, mixed_groups, partitions


def _question(rng: np.random.Generator, ranks: int, documents: int, most: int = 32_768) -> GroupQuestion:
    tokens = np.minimum(np.exp(rng.normal(8.5, 1.3, documents)).astype(int) + 64, most * ranks // 2)
    seconds = {}
    for power in range(ranks.bit_length()):
        size = 2**power
        whole = tokens + tokens.astype(float) ** 2 / 12_000
        seconds[size] = whole / size * (1.0 + 0.03 * (size > 1)) + 0.02 * tokens * power + 200.0 * (size > 1)
    return GroupQuestion(seconds=seconds, tokens=tokens, ranks=ranks, most_tokens=most)


def _exhaustive_s(question: GroupQuestion) -> float:
    best = np.inf
    tokens = question.tokens.tolist()
    shapes = {
        tuple(sorted(sizes))
        for count in range(1, question.ranks + 1)
        for sizes in itertools.combinations_with_replacement(sorted(question.seconds), count)
        if sum(sizes) == question.ranks
    }
    for sizes in shapes:
        for places in itertools.product(range(len(sizes)), repeat=len(tokens)):
            ends, filled = [0.0] * len(sizes), [0] * len(sizes)
            for document, place in enumerate(places):
                ends[place] += float(question.seconds[sizes[place]][document])
                filled[place] += tokens[document]
            if all(have <= size * question.most_tokens for have, size in zip(filled, sizes, strict=True)):
                best = min(best, max(ends))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_few_documents_on_few_ranks_get_the_best_groups(seed: int) -> None:
    question = _question(np.random.default_rng(seed), 4, 5)
    found = mixed_groups(question, static_size=4)
    best = _exhaustive_s(question)
    if found is None:
        assert best == np.inf
        return
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.bound_s <= best * (1 + 1e-12)


def test_partitions_are_all_there_and_each_once() -> None:
    sizes = (8, 4, 2, 1)
    expected = {
        tuple(sorted(one, reverse=True))
        for count in range(1, 9)
        for one in itertools.combinations_with_replacement(sizes, count)
        if sum(one) == 8
    }
    assert set(partitions(8, sizes)) == expected
    assert len(partitions(8, sizes)) == len(expected) == 10


@pytest.mark.parametrize("seed", range(4))
def test_more_documents_and_ranks_are_never_worse_than_equal_groups(seed: int) -> None:
    question = _question(np.random.default_rng(seed), 16, 60, most=65_536)
    found = mixed_groups(question, static_size=8)
    assert found is not None
    alone = mixed_groups(
        GroupQuestion(
            seconds={8: question.seconds[8]}, tokens=question.tokens, ranks=16, most_tokens=question.most_tokens
        ),
        static_size=8,
    )
    assert alone is not None
    assert found.seconds <= alone.seconds * (1 + 1e-12)
    assert found.bound_s <= found.seconds
    assert sum(found.sizes) == 16
    assert sorted(itertools.chain.from_iterable(found.documents)) == list(range(60))
    for size, inside in zip(found.sizes, found.documents, strict=True):
        assert question.tokens[list(inside)].sum() <= size * question.most_tokens


def test_a_document_that_fits_no_group_has_no_answer() -> None:
    seconds = {1: np.ones(1), 2: np.ones(1)}
    question = GroupQuestion(seconds=seconds, tokens=np.array([300]), ranks=2, most_tokens=100)
    assert mixed_groups(question, static_size=1) is None


def test_attention_takes_longer_for_longer_documents_and_fewer_ranks() -> None:
    lengths = 2.0 ** np.arange(6, 18)
    seconds = attention_forward_s(lengths[:, None], np.array([1, 2, 4, 8]), heads=64)
    assert np.all(np.diff(seconds, axis=0) > 0)
    assert np.all(np.diff(seconds[5:], axis=1) < 0)  # below 2,048 tokens the launch is most of it
    rate = 4.0 * 64 * 128 * 0.5 * 65_536.0**2 / seconds[10, 0]
    assert rate == pytest.approx(341e12, rel=0.03)  # published for 65,536 tokens
    slower = split_slowdown(lengths, 8, heads=64, head_dim=128)
    assert np.all(slower >= 1.0)
    assert slower[-1] < 1.1 < slower[5]
