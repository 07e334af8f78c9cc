"""Grids: interpolated between knots, filled from neighbours, made to rise without moving what rises, stored exactly."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from meshplan.catalogs.surfaces.grid import (
    filled,
    grid_from_row,
    grid_row,
    grid_value,
    interpolation,
    monotone,
    packed,
    unpacked,
)

KNOTS = (np.array([1.0, 2.0, 8.0]), np.array([1.0]), np.array([10.0, 1000.0]))
grids = arrays.arrays(float, (4, 3, 5), elements=st.floats(-5, 5))
masks = arrays.arrays(bool, (4, 3, 5))


def test_between_knots_values_are_linear_in_the_logarithms() -> None:
    values = np.arange(6.0).reshape(3, 1, 2)
    points = (np.array([1.0, 4.0, 8.0]), np.array([1.0, 7.0, 1.0]), np.array([100.0, 10.0, 1e9]))
    np.testing.assert_allclose(grid_value(KNOTS, values, points), [0.5, 3.0, 5.0])


def test_weights_of_the_corners_sum_to_one() -> None:
    _, weights = interpolation(KNOTS, (np.array([0.1, 3.0]), np.array([5.0, 1.0]), np.array([20.0, 1e4])))
    np.testing.assert_allclose(weights.sum(axis=0), 1.0)


@given(grids, masks)
def test_filling_keeps_what_is_known_and_invents_no_extremes(values: np.ndarray, known: np.ndarray) -> None:
    result = filled(values, known)
    if known.any():
        np.testing.assert_array_equal(result[known], values[known])
        assert result.min() >= values[known].min() - 1e-9
        assert result.max() <= values[known].max() + 1e-9


@given(grids, masks)
def test_a_table_made_to_rise_rises_and_a_rising_one_is_kept(values: np.ndarray, known: np.ndarray) -> None:
    result = monotone(values, known, (0, 2))
    assert (np.diff(result, axis=0) >= 0).all()
    assert (np.diff(result, axis=2) >= 0).all()
    again = monotone(result, known, (0, 2))
    np.testing.assert_array_equal(again[known], result[known])


@given(arrays.arrays(np.int64, 50, elements=st.integers(-30000, 30000)))
def test_packing_is_exact_in_steps(steps: np.ndarray) -> None:
    np.testing.assert_allclose(unpacked(packed(steps * 0.01, 0.01), 0.01), steps * 0.01)


@given(grids, masks)
def test_a_stored_grid_comes_back_to_half_a_step(values: np.ndarray, known: np.ndarray) -> None:
    row = json.loads(json.dumps(grid_row(values, known, step=0.01)))
    again, touched = grid_from_row(row, values.shape)
    np.testing.assert_array_equal(touched, known)
    np.testing.assert_allclose(again[known], values[known], atol=0.0051)
