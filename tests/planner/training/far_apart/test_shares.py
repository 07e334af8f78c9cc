"""Shares of the batch: whole, equal where sites are, and of two unequal sites as good as every split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.far_apart.shares import proportional, quantum, share_batch


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8))
def test_parts_are_whole_and_make_the_total(extra: int, rates: list[float]) -> None:
    total = len(rates) + extra
    parts = proportional(total, rates)
    assert sum(parts) == total
    assert min(parts) >= 1


def never(site: int, sequences: int) -> float:
    raise AssertionError(f"site {site} is planned for {sequences}")


@pytest.mark.parametrize(("batch", "count", "shares"), [(1024, 2, (512, 512)), (96, 3, (32, 32, 32))])
def test_equal_sites_take_equal_shares(batch: int, count: int, shares: tuple[int, ...]) -> None:
    assert share_batch(batch, [1.0] * count, [8] * count, never, alike=True) == shares


def test_equal_sites_of_an_odd_number_take_multiples_of_a_quantum() -> None:
    shares = share_batch(1024, [1.0] * 3, [8] * 3, never, alike=True)
    size = quantum(1024, [8] * 3)
    assert size % 8 == 0
    assert sum(shares) == 1024
    assert {share % size for share in shares} == {0}
    assert max(shares) - min(shares) <= size


def test_replicas_divide_the_quantum_where_they_divide_the_batch() -> None:
    assert quantum(96, [4, 2]) == 4
    assert quantum(1024, [32, 16]) == 32
    assert quantum(100, [8, 16]) == 2


SITES = st.tuples(st.floats(0.5, 8.0), st.floats(0.0, 0.2))


def stepping(sites: list[tuple[float, float]], batch: int):
    """Steps that grow with the sequences and have a part that does not."""

    def step(site: int, sequences: int) -> float:
        rate, fixed = sites[site]
        return fixed + sequences / batch / rate

    return step


@settings(max_examples=50, deadline=None)
@given(SITES, SITES)
def test_two_unequal_sites_are_as_good_as_every_split(one: tuple[float, float], other: tuple[float, float]) -> None:
    batch, step = 128, stepping([one, other], 128)
    shares = share_batch(batch, [step(0, batch), step(1, batch)], [1, 1], step, alike=False)
    size = quantum(batch, [1, 1])
    splits = [(first, batch - first) for first in range(size, batch, size)]
    best = min(max(step(0, first), step(1, second)) for first, second in splits)
    assert sum(shares) == batch
    assert max(step(0, shares[0]), step(1, shares[1])) <= best + size / batch / min(one[0], other[0])


@settings(max_examples=50, deadline=None)
@given(st.lists(SITES, min_size=3, max_size=5))
def test_moves_never_make_the_slowest_slower(sites: list[tuple[float, float]]) -> None:
    batch, step = 128, stepping(sites, 128)
    steps, replicas = [step(site, batch) for site in range(len(sites))], [1] * len(sites)
    size = quantum(batch, replicas)
    start = [size * one for one in proportional(batch // size, [1.0 / one for one in steps])]
    shares = share_batch(batch, steps, replicas, step, alike=False)
    assert sum(shares) == batch
    assert max(map(step, range(len(sites)), shares)) <= max(map(step, range(len(sites)), start))
