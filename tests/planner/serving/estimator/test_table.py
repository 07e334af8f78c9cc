"""Tables are read as lists are, whether an entry was stored or is interpolated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.serving.estimator.table import LISTED, Table, token_knots


@given(most=st.integers(2, 20_000), entries=st.lists(st.integers(0, 20_000), min_size=1, max_size=20))
def test_entries_are_linear_between_knots(most: int, entries: list[int]) -> None:
    knots = token_knots(most)
    seconds = np.sqrt(knots)
    table = Table(knots, seconds, most)
    assert len(table) == most + 1
    for entry in entries:
        index = min(entry, most)
        expected = 0.0 if index == 0 else np.interp(index, knots, seconds)
        assert table[index] == pytest.approx(expected)
    assert table[-1] == table[most]
    assert table[1:4] == [table[i] for i in range(1, min(4, most + 1))]


def test_beyond_the_end_is_an_error() -> None:
    table = Table(token_knots(10), token_knots(10), 10)
    with pytest.raises(IndexError):
        table[11]
    assert LISTED > 11


def test_values_never_fall() -> None:
    knots = np.array([1.0, 10.0, 100.0])
    table = Table(knots, np.array([3.0, 1.0, 5.0]), 100)
    assert [table[1], table[10], table[100]] == [3.0, 3.0, 5.0]
