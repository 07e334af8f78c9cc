"""Fits of grids: a planted kernel is found, a rising table is the closest one, disturbed points pull nobody along."""

from __future__ import annotations

import json
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from meshplan.catalogs.surfaces.attention import RISING, attention_formula
from meshplan.catalogs.surfaces.experts import ELEMENT_BYTES, expert_features, expert_formula
from meshplan.catalogs.surfaces.grid import grid_value, interpolation
from meshplan.catalogs.surfaces.time_tables import TimeTable, table_from_row, table_row
from meshplan.profiler.fitting.least_squares import folds
from meshplan.profiler.fitting.surface_fit import (
    cross_validated,
    fit_grid,
    fit_grid_robustly,
    fit_time_table,
    rising_fit,
)
from meshplan.profiler.shipped.fit_attention import octaves
from meshplan.profiler.shipped.fit_experts import ExpertSamples, fit_experts

FORMULA = attention_formula("decode", "bf16")
PLANTED = np.array([3e12, 4e14, 8e-6])


@pytest.fixture(scope="module")
def points() -> tuple[np.ndarray, ...]:
    axes = product(octaves(1, 1024), octaves(16, 65536), (1.0,), (1.0, 4.0, 8.0), (64.0, 128.0))
    return tuple(np.array(list(axes)).T)


@pytest.fixture(scope="module")
def table(points: tuple[np.ndarray, ...]) -> TimeTable:
    units, attended, *_ = points
    # A tenth slower for single sequences, as kernels that cannot split are.
    times = FORMULA(PLANTED, points) * np.where((units < 4) & (attended > 1000), 1.1, 1.0)
    knots = (octaves(1, 1024), octaves(16, 65536), np.ones(1), octaves(1, 8), np.array([64.0, 128.0]))
    fit = partial(
        fit_time_table, formula=FORMULA, start=(2e12, 3e14, 1e-5), knots=knots, rising=RISING, kernel="planted"
    )
    return cross_validated(fit, points, times)


def test_a_planted_kernel_is_found(table: TimeTable, points: tuple[np.ndarray, ...]) -> None:
    assert table.median_error < 0.02
    assert table.p90_error < 0.05
    assert np.quantile(np.abs(table.time_s(points) / FORMULA(PLANTED, points) - 1.0), 0.5) < 0.03


def test_beyond_the_grid_times_grow_as_the_formula(table: TimeTable) -> None:
    inside, beyond = (np.array([value]) for value in (65536.0, 16 * 65536.0))
    rest = (np.array([1.0]), np.array([8.0]), np.array([128.0]))
    first, second = (table.time_s((np.array([1024.0]), length, *rest)) for length in (inside, beyond))
    assert second / first == pytest.approx(16.0, rel=0.02)


def test_the_stored_form_is_the_same_table(table: TimeTable, points: tuple[np.ndarray, ...]) -> None:
    row = json.loads(json.dumps(table_row(table)))
    again = table_from_row(row, formula=FORMULA, rising=RISING)
    np.testing.assert_allclose(again.time_s(points), table.time_s(points), rtol=1e-4)


@given(
    arrays.arrays(float, (5, 4), elements=st.floats(-3, 3)), arrays.arrays(float, (5, 4), elements=st.floats(0.1, 9))
)
def test_the_rising_table_rises_and_keeps_the_weighted_mean(values: np.ndarray, weights: np.ndarray) -> None:
    result = rising_fit(values, weights, (0,))
    assert (np.diff(result, axis=0) >= -1e-9).all()
    # Pooling moves values within their line only, so the weighted mean of a line stays.
    np.testing.assert_allclose((result * weights).sum(axis=0), (values * weights).sum(axis=0), atol=1e-9)
    np.testing.assert_allclose(rising_fit(result, weights, (0,)), result, atol=1e-9)


def test_one_axis_agrees_with_pooling_by_hand() -> None:
    result = rising_fit(np.array([1.0, 3.0, 2.0, 4.0]), np.array([1.0, 1.0, 3.0, 1.0]), (0,))
    np.testing.assert_allclose(result, [1.0, 2.25, 2.25, 4.0])


def test_untrusted_points_do_not_pull() -> None:
    knots = (np.array([1.0, 10.0]),)
    places = (np.array([1.0, 1.0, 10.0]),)
    values, _ = fit_grid(knots, places, np.array([0.0, 5.0, 1.0]), trust=np.array([1.0, 1e-9, 1.0]), smoothing=0.0)
    np.testing.assert_allclose(values, [0.0, 1.0], atol=1e-3)


def test_planted_experts_are_found() -> None:
    tokens, hidden, size, devices, skew = np.array(
        list(product(octaves(1, 16384), (2048, 4096, 7168), (512, 1024, 2048), (1, 4, 16), (0.0, 1.2)))
    ).T
    columns = (hidden, size, np.full_like(hidden, 8), np.full_like(hidden, 128), devices, np.full_like(hidden, 3))
    features = expert_features(tokens, columns, skew)
    times = expert_formula(np.array([6e14, 3e12, 2e-5, 1e-7, 1e-9]), features, element_bytes=ELEMENT_BYTES["fp8_block"])
    samples = ExpertSamples(tokens=tokens, shapes=np.stack(columns, axis=1), skew=skew, time_s=times, kernel="planted")
    surface = fit_experts(samples, device="mine", quantization="fp8_block", framework="trtllm")
    assert surface.median_error < 0.02
    assert surface.new_shape_median_error < 0.05
    assert len(surface.shapes) == 27


def scattered(num_points: int) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], np.ndarray]:
    """Knots, points anywhere between them, and a smooth field with scatter."""
    random = np.random.default_rng(3)
    knots = (octaves(1, 64), octaves(16, 1024))
    points = (2.0 ** random.uniform(0, 6, num_points), 2.0 ** random.uniform(4, 10, num_points))
    values = np.sin(np.log(points[0])) + 0.3 * np.log(points[1]) + random.normal(0.0, 0.02, num_points)
    return knots, points, values


def test_the_grid_agrees_with_exact_least_squares() -> None:
    knots, points, values = scattered(600)
    corners, weights = interpolation(knots, points)
    design = np.zeros((len(values), 49))
    np.add.at(design, (np.arange(len(values)), corners), weights)
    exact = np.linalg.lstsq(design, values, rcond=None)[0]
    found, weight = fit_grid(knots, points, values, smoothing=0.0, iterations=400)
    np.testing.assert_allclose(weight.ravel(), design.sum(axis=0))
    best = np.square(design @ exact - values).mean()
    assert np.square(design @ found.ravel() - values).mean() < 1.02 * best


def test_a_few_bad_measurements_do_not_pull_the_grid_along() -> None:
    knots, points, values = scattered(600)
    disturbed = values.copy()
    disturbed[::40] += np.log(5.0)
    errors = []
    for fit in (fit_grid, fit_grid_robustly):
        found, _ = fit(knots, points, disturbed)
        errors.append(np.quantile(np.abs(grid_value(knots, found, points) - values), 0.9))
    plain, robust = errors
    assert robust < 0.6 * plain


def test_every_measurement_is_hidden_from_one_fit() -> None:
    masks = list(folds(103, fraction=0.2, seed=0))
    assert len(masks) == 5
    assert (np.sum(masks, axis=0) == 1).all()
