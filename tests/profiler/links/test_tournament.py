"""The rounds of a tournament: every pair once, nobody twice in a round, as few rounds as there can be."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.profiler.links.tournament import rounds, sampled_rounds, unmeasured


@given(st.integers(min_value=2, max_value=70))
def test_every_pair_once_in_disjoint_rounds(size: int) -> None:
    schedule = rounds(size)
    assert len(schedule) == size - 1 + size % 2
    assert sorted(pair for matching in schedule for pair in matching) == list(combinations(range(size), 2))
    for matching in schedule:
        ends = [end for pair in matching for end in pair]
        assert len(ends) == len(set(ends)) == size - size % 2


@given(st.integers(min_value=65, max_value=200))
def test_a_sample_sees_every_endpoint_and_names_the_rest(size: int) -> None:
    schedule = sampled_rounds(size)
    measured = {pair for matching in schedule for pair in matching}
    assert {end for pair in measured for end in pair} == set(range(size))
    assert measured.isdisjoint(unmeasured(size, schedule))
    assert len(measured) + len(unmeasured(size, schedule)) == size * (size - 1) // 2


def test_a_sample_is_reproducible() -> None:
    assert sampled_rounds(100) == sampled_rounds(100)
    assert sampled_rounds(100, seed=1) != sampled_rounds(100)


@pytest.mark.parametrize("size", [0, 1])
def test_nobody_to_talk_to(size: int) -> None:
    assert rounds(size) == []
