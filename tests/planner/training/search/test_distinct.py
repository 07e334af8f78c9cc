"""Distinct values that are counted are those that are sorted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.training.search.bounds.distinct import LEAST_COUNTED, MOST_PLACES, distinct, firsts


@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.sampled_from([0, 1, LEAST_COUNTED - 1, LEAST_COUNTED, 1000]),
    least=st.sampled_from([-3, 0]),
    most=st.sampled_from([1, 7, 300, MOST_PLACES * 1000 + 5, 2**40]),
    dtype=st.sampled_from([np.int64, np.int32, np.uint16, bool]),
)
def test_counted_as_sorted(seed: int, num: int, least: int, most: int, dtype: type) -> None:
    column = np.random.default_rng(seed).integers(least, most, num).astype(dtype)
    values, first, which = np.unique(column, return_index=True, return_inverse=True)
    found, places = distinct(column)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(places, which)
    np.testing.assert_array_equal(firsts(places, len(found)), first)


@pytest.mark.parametrize("length", [LEAST_COUNTED, 10 * LEAST_COUNTED])
def test_fractions_are_sorted(length: int) -> None:
    column = np.linspace(0.0, 1.0, length)
    np.testing.assert_array_equal(distinct(column)[0], column)
