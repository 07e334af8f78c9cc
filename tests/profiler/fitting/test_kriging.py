"""Kriging on a lattice: it is the textbook's posterior mean, fills what was not measured, and outliers pull nobody."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.surfaces.grid import grid_value
from meshplan.profiler.fitting import kriging
from meshplan.profiler.fitting.kriging import Prior, krige

KNOTS = (np.array([1.0, 2.0, 16.0, 17.0]), np.array([32.0, 512.0, 1536.0]), np.array([64.0, 128.0, 8192.0]))
PRIOR = Prior(lengths=(8.0, 0.5, 4.0), own_shares=(0.03, 0.3, 0.0), noise=0.05)


def lattice_points(knots: tuple[np.ndarray, ...] = KNOTS) -> tuple[np.ndarray, ...]:
    return tuple(np.array(list(product(*knots))).T)


def dense_mean(points: tuple[np.ndarray, ...], values: np.ndarray, seen: np.ndarray, prior: Prior) -> np.ndarray:
    """Rasmussen and Williams, equation 2.25: K_*ᵀ·(K + s·I)⁻¹·y, at all points, from those seen."""
    covariance = np.ones((len(values), len(values)))
    for axis, length, share in zip(points, prior.lengths, prior.own_shares, strict=True):
        apart = np.abs(np.log2(axis[:, None] / axis))
        covariance *= np.exp(-apart / length) + share * (apart == 0)
    inner = covariance[np.ix_(seen, seen)] + prior.noise * np.eye(seen.sum())
    return covariance[:, seen] @ np.linalg.solve(inner, values[seen])


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), noise=st.sampled_from([0.003, 0.05, 0.3]))
def test_without_outliers_it_is_the_posterior_mean_of_the_textbook(seed: int, noise: float) -> None:
    random = np.random.default_rng(seed)
    points = lattice_points()
    # So small that no residual is an outlier.
    values = 1e-3 * random.standard_normal(len(points[0]))
    seen = random.random(len(values)) < 0.7
    seen[0] = True
    prior = Prior(lengths=PRIOR.lengths, own_shares=PRIOR.own_shares, noise=noise)
    # White noise is the hardest target of conjugate gradients: their usual stop would be seen at places not measured.
    with pytest.MonkeyPatch.context() as exactly:
        exactly.setattr(kriging, "_CONVERGED", 1e-7)
        exactly.setattr(kriging, "MAX_STEPS", 1000)
        found = krige(KNOTS, tuple(axis[seen] for axis in points), values[seen], prior)
    expected = dense_mean(points, values, seen, prior)
    np.testing.assert_allclose(found.ravel(), expected, atol=5e-3 * np.abs(values).max())


def test_an_outlier_moves_neither_its_neighbours_nor_its_own_place_much() -> None:
    knots = (2.0 ** np.arange(12),) * 3
    points = lattice_points(knots)
    smooth = 0.1 * np.log2(points[0] * points[2]) / 12
    disturbed = smooth.copy()
    worst = len(smooth) // 2 + 6
    disturbed[worst] += 1.5
    prior = Prior(lengths=(8.0, 2.0, 4.0), own_shares=(0.03, 0.3, 0.0), noise=0.03)
    found = krige(knots, points, disturbed, prior).ravel()
    assert np.abs(found - smooth).max() < 0.1
    assert np.quantile(np.abs(found - smooth), 0.99) < 0.01


def test_measurements_between_the_knots_count_by_their_place() -> None:
    knots = (np.array([1.0, 4.0, 16.0]), np.array([1.0, 1024.0]), np.array([1.0, 1024.0]))
    random = np.random.default_rng(3)
    points = tuple(np.exp2(random.uniform(0.0, top, 400)) for top in (4.0, 10.0, 10.0))
    values = grid_value(knots, 0.1 * np.arange(12.0).reshape(3, 2, 2), points)
    found = krige(knots, points, values, Prior(lengths=(8.0, 8.0, 8.0), own_shares=(0.1, 0.1, 0.1), noise=0.003))
    np.testing.assert_allclose(found.ravel(), 0.1 * np.arange(12.0), atol=0.02)


def test_one_measurement_is_enough_and_none_gives_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    one = krige(KNOTS, tuple(axis[:1] for axis in KNOTS), np.array([0.2]), PRIOR)
    assert np.isfinite(one).all()
    assert one.argmax() == 0
    none = krige(KNOTS, tuple(axis[:0] for axis in KNOTS), np.empty(0), PRIOR)
    np.testing.assert_array_equal(none, np.zeros((4, 3, 3)))
    monkeypatch.setattr(kriging, "MAX_STEPS", 0)  # no step of the solver: the prior's mean
    np.testing.assert_array_equal(krige(KNOTS, tuple(axis[:1] for axis in KNOTS), np.array([0.2]), PRIOR), none)
