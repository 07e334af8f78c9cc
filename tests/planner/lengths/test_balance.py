"""Documents dealt out to micro-batches, against every assignment of small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshplan.planner.lengths.balance import balanced, least_s
from meshplan.planner.lengths.queue import DocumentQueue
from meshplan.planner.lengths.work import Work

WORK = Work(per_token_s=1.0, per_pair_s=((None, 1e-3),), fixed_s=0.0)


def _every_assignment_s(work: np.ndarray, ranks: int, micro_batches: int, p: int) -> float:
    """The least longest rank over all assignments."""
    best = np.inf
    for places in itertools.product(range(ranks * micro_batches), repeat=len(work)):
        loads = [0.0] * (ranks * micro_batches)
        for place, seconds in zip(places, work.tolist(), strict=True):
            loads[place] += seconds
        longest = 0.0
        for rank in range(ranks):
            own = loads[rank * micro_batches : (rank + 1) * micro_batches]
            longest = max(longest, sum(own) + (p - 1) * max(own))
        best = min(best, longest)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_small_cases_are_near_the_best_and_never_below_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.normal(6, 1.2, 7)).astype(int) + 1
    work = WORK.of(tokens)
    for ranks, micro_batches, p in ((2, 1, 1), (1, 2, 3), (2, 2, 2)):
        found = balanced(work, tokens, ranks=ranks, micro_batches=micro_batches, pipeline_parallel=p)
        best = _every_assignment_s(work, ranks, micro_batches, p)
        assert found.bound_s <= best * (1 + 1e-12)
        assert best * (1 - 1e-12) <= found.seconds <= 4.0 / 3.0 * best  # Graham's guarantee, at p = 1
        assert found.gap == pytest.approx(max(0.0, 1 - found.bound_s / found.seconds))


def test_every_document_is_in_one_micro_batch_and_none_is_too_full() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 9000, 300)
    found = balanced(WORK.of(tokens), tokens, ranks=4, micro_batches=8, pipeline_parallel=4, most_tokens=46_000)
    named = sorted(document for rank in found.ranks for micro in rank for document in micro)
    assert named == list(range(300))
    for rank, row in enumerate(found.ranks):
        for micro, inside in enumerate(row):
            assert tokens[list(inside)].sum() <= 46_000
            assert WORK.of(tokens[list(inside)]).sum() == pytest.approx(found.work_s[rank, micro])
    assert np.all(np.diff(found.work_s, axis=1) >= 0)  # a rank runs its micro-batches in order of work


def test_the_order_of_the_documents_does_not_matter() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.permutation(np.arange(10, 4000, 37))
    one = balanced(WORK.of(tokens), tokens, ranks=2, micro_batches=4, pipeline_parallel=2)
    other = balanced(WORK.of(np.sort(tokens)), np.sort(tokens), ranks=2, micro_batches=4, pipeline_parallel=2)
    assert one.seconds == pytest.approx(other.seconds, rel=1e-12)


def test_a_longer_document_never_lowers_the_bound() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, 5000, 12)
    before = least_s(WORK.of(tokens), ranks=2, micro_batches=2, pipeline_parallel=3)
    for place in range(12):
        longer = tokens.copy()
        longer[place] += 700
        assert least_s(WORK.of(longer), ranks=2, micro_batches=2, pipeline_parallel=3) >= before


def test_equal_documents_are_perfectly_even() -> None:
    tokens = np.full(64, 1000)
    found = balanced(WORK.of(tokens), tokens, ranks=4, micro_batches=4, pipeline_parallel=4)
    assert found.imbalance == pytest.approx(1.0)
    assert found.gap == pytest.approx(0.0, abs=1e-12)


def test_documents_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"a document of 10 tokens finds no room: 50 tokens in 2 micro-batches of at most 20"
    ):
        balanced(np.ones(5), np.full(5, 10), ranks=1, micro_batches=2, most_tokens=20)


def test_a_queue_trains_every_document_once_and_makes_long_ones_wait() -> None:
    rng = np.random.default_rng(0)
    work = Work(per_token_s=1.0, per_pair_s=((None, 3e-4),))
    queue = DocumentQueue(
        work=work, ranks=1, micro_batches=4, pipeline_parallel=4, window_tokens=16_000, most_tokens=24_000
    )
    lengths = np.where(rng.random(3000) < 0.01, rng.integers(9000, 16_000, 3000), rng.integers(50, 900, 3000))
    seen: list[int] = []
    imbalance = []
    for part in np.array_split(lengths, 30):
        queue.add(part)
        step = queue.next_step()
        assert step is not None
        seen += step.documents
        imbalance.append(step.assignment.imbalance)
        assert np.array_equal(step.tokens, lengths[list(step.documents)])
    plain = []
    for part in np.array_split(lengths, 30):
        plain.append(balanced(work.of(part), part, ranks=1, micro_batches=4, pipeline_parallel=4).imbalance)
    while queue.waiting:
        step = queue.next_step(last=True)
        assert step is not None
        seen += step.documents
    assert sorted(seen) == list(range(3000))
    assert queue.next_step() is None
    assert np.mean(imbalance) < 1.02 < np.mean(plain)


def test_a_queue_keeps_no_document_longer_than_said() -> None:
    work = Work(per_token_s=1.0, per_pair_s=((None, 1e-3),))
    queue = DocumentQueue(work=work, ranks=1, micro_batches=4, window_tokens=8000, most_tokens=8000, most_delay_steps=3)
    queue.add([7900])
    delays = []
    for _ in range(6):
        queue.add([100] * 50)
        step = queue.next_step()
        assert step is not None
        delays += step.delays[step.tokens == 7900].tolist()
    assert delays == [3]
    with pytest.raises(ValueError, match="holds 1 to 8000"):
        queue.add([8001])


def test_short_documents_that_find_no_room_wait_for_the_next_step() -> None:
    work = Work(per_token_s=1.0, per_pair_s=((None, 0.1),))
    queue = DocumentQueue(work=work, ranks=1, micro_batches=2, window_tokens=90, most_tokens=100)
    queue.add([46, 90, 55, 46])
    seen: list[int] = []
    while queue.waiting:
        step = queue.next_step(last=True)
        assert step is not None
        assert step.tokens.sum() > 0
        seen += step.documents
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize(("late", "others"), [(60, [100, 100]), (5, [100, 100])])
def test_what_has_waited_as_long_as_said_is_in_the_next_step(late: int, others: list[int]) -> None:
    """Where every step had a group of other long documents, one without neighbours and short ones waited for ever."""
    work = Work(per_token_s=1.0, per_pair_s=((None, 0.5),))
    queue = DocumentQueue(work=work, ranks=2, micro_batches=1, window_tokens=100, most_tokens=110, most_delay_steps=8)
    queue.add([5] * 50)
    while queue.waiting:
        assert queue.next_step() is not None
    began = queue.next_step()
    assert began is None
    queue.add([late])
    delays = []
    for _ in range(20):
        queue.add(others)
        step = queue.next_step()
        assert step is not None
        delays += step.delays[step.tokens == late].tolist()
    assert len(delays) == 1
    assert delays[0] <= 8


def test_exchanges_never_lengthen_the_longest_rank() -> None:
    """Between micro-batches of two ranks they made the other rank longer than the first had been."""
    tokens = np.array([20, 12, 18, 18, 11, 10])
    found = balanced(tokens.astype(float) ** 2, tokens, ranks=2, micro_batches=2)
    # As longest-first places them: 400 + 121 + 100 … and 324 + 324 + 100.
    assert found.seconds <= 748.0
    assert found.seconds == pytest.approx(found.work_s.sum(axis=1).max())
    assert sorted(document for rank in found.ranks for micro in rank for document in micro) == list(range(6))
    for rank, micros in enumerate(found.ranks):
        for micro, documents in enumerate(micros):
            assert found.work_s[rank, micro] == pytest.approx(float((tokens[list(documents)].astype(float) ** 2).sum()))
