"""The most probable constants: by hand where there is one, by their own objective where there are many."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.validation.fitting import (
    LEAST_SQUARES,
    Linear,
    Loss,
    Parameters,
    Prior,
    gauss_newton,
    limited,
    most_probable,
    most_probable_non_negative,
    most_probable_parts,
)


def linear_of(slope: list[list[float]], target: list[float], noise: float = 1.0) -> Linear:
    rows, size = np.array(slope).shape
    return Linear(
        at=np.zeros(size),
        residual=np.array(target),
        slope=np.array(slope),
        noise=np.full(rows, noise),
        weight=np.ones(rows),
    )


def prior_of(mean: list[float], spread: float = 1.0) -> Prior:
    return Prior(mean=np.array(mean), spread=np.full(len(mean), spread))


def test_one_constant_by_hand() -> None:
    """Mean of prior and measurement, weighted with 1/s² and 1/σ²: (1/0.5² · 2 + 1/1² · 7)/(4 + 1) = 3."""
    found = most_probable(linear_of([[1.0]], [7.0]), prior_of([2.0], 0.5), LEAST_SQUARES, rounds=1)
    assert found == pytest.approx([3.0])


def test_where_rows_are_linearised_does_not_matter() -> None:
    here = linear_of([[1.0, 2.0], [0.5, -1.0]], [3.0, 1.0])
    at = np.array([0.7, -0.4])
    there = replace(here, at=at, residual=here.residual - here.slope @ at)
    prior = prior_of([1.0, 1.0])
    assert most_probable(there, prior, LEAST_SQUARES, rounds=1) == pytest.approx(
        most_probable(here, prior, LEAST_SQUARES, rounds=1)
    )


def test_rows_that_are_told_a_constant_say_nothing_of_it() -> None:
    """Told θ₁ = 2, the second row y = θ₀ + 3θ₁ = 7 is one of θ₀ = 1 alone, wherever it was linearised."""
    here = linear_of([[1.0, 0.0], [1.0, 3.0]], [5.0, 7.0])
    at = np.array([0.7, -0.4])
    for linear in (here, replace(here, at=at, residual=here.residual - here.slope @ at)):
        told = linear.given(np.array([[False, False], [False, True]]), np.array([[np.nan, np.nan], [np.nan, 2.0]]))
        assert told.slope == pytest.approx(np.array([[1.0, 0.0], [1.0, 0.0]]))
        found = most_probable(told.only([1]), prior_of([0.0, 9.0], 1e3), LEAST_SQUARES, rounds=1)
        assert found == pytest.approx([1.0, 9.0], rel=1e-4)


def test_constants_that_move_together_are_told_by_one_of_them() -> None:
    """u = (1, 1) and s = ½: the row sees θ₀ alone, of variance 1 + ¼; it and its partner go (1 + ¼) and 1 of the way
    times 5/(1 + ¼ + 1).
    """
    prior = replace(prior_of([0.0, 0.0], 0.5), together=np.ones(2))
    found = most_probable(linear_of([[1.0, 0.0]], [5.0]), prior, LEAST_SQUARES, rounds=1)
    assert found == pytest.approx([1.25 * 5.0 / 2.25, 5.0 / 2.25])


def test_precision_is_the_inverse_of_the_covariance() -> None:
    spread, together = np.array([0.5, 2.0, 0.1]), np.array([0.3, 0.0, 1.0])
    prior = Prior(mean=np.zeros(3), spread=spread, together=together)
    covariance = np.diag(spread**2) + np.outer(together, together)
    assert prior.precision @ covariance == pytest.approx(np.eye(3))


def test_a_constant_that_no_row_depends_on_stays_at_the_prior() -> None:
    found = most_probable(linear_of([[1.0, 0.0]] * 3, [5.0] * 3), prior_of([0.0, -2.5]), Loss(huber=1.5), rounds=8)
    assert found[1] == pytest.approx(-2.5)
    assert found[0] > 2.0


def test_huber_bounds_the_pull_of_an_outlier_and_cauchy_ignores_it() -> None:
    """Nine rows at 1, one at 100. At Huber's minimum the outlier pulls with its knee only: 9·(1 − x) + 2 = x/10²."""
    rows = linear_of([[1.0]] * 10, [1.0] * 9 + [100.0])
    prior = prior_of([0.0], 10.0)
    squares, huber, cauchy = (
        float(most_probable(rows, prior, loss, rounds=60)[0])
        for loss in (LEAST_SQUARES, Loss(huber=2.0), Loss(huber=2.0, cauchy=1.0))
    )
    assert squares == pytest.approx(109 / 10.01)
    assert huber == pytest.approx(11 / 9.01, rel=1e-6)
    assert cauchy == pytest.approx(1.0, abs=0.01)


def test_weights_and_rows_count() -> None:
    rows = linear_of([[1.0], [1.0], [1.0]], [1.0, 4.0, 50.0])
    twice = replace(rows, weight=np.array([2.0, 1.0, 0.0]))
    doubled = rows.only([0, 0, 1])
    prior = prior_of([0.0])
    assert most_probable(twice, prior, LEAST_SQUARES, rounds=1) == pytest.approx(
        most_probable(doubled, prior, LEAST_SQUARES, rounds=1)
    )
    assert most_probable(rows.only([]), prior_of([3.0]), LEAST_SQUARES, rounds=1) == pytest.approx([3.0])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
@example(seed=44629)  # 200 rounds are not enough
def test_no_neighbour_of_where_the_rounds_lead_is_better(seed: int) -> None:
    """The objective of the module docstring, Huber's ρ(x) = x² up to k and 2k|x| − k² beyond."""
    random, knee = np.random.default_rng(seed), 1.5
    rows = Linear(
        at=random.normal(size=3),
        residual=random.normal(size=12) * np.where(random.random(12) < 0.2, 20.0, 1.0),
        slope=random.normal(size=(12, 3)),
        noise=random.uniform(0.2, 2.0, 12),
        weight=random.uniform(0.1, 1.0, 12),
    )
    prior = Prior(mean=random.normal(size=3), spread=random.uniform(0.3, 3.0, 3))

    def objective(theta: FloatArray) -> float:
        size = np.abs(rows.residual - rows.slope @ (theta - rows.at)) / rows.noise
        loss = np.where(size <= knee, size**2, 2.0 * knee * size - knee**2)
        return float(rows.weight @ loss + (((theta - prior.mean) / prior.spread) ** 2).sum())

    found = gauss_newton(
        lambda theta: most_probable(rows, prior, Loss(huber=knee), rounds=100, start=theta),
        rows.at,
        iterations=1000,
        converged=1e-12,
    )
    best = objective(found)
    for _ in range(20):
        assert objective(found + random.normal(size=3) * 10 ** random.uniform(-3, 0)) >= best - 1e-9


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_constants_of_which_none_is_negative_are_the_best_of_those(seed: int) -> None:
    """Where a constant is 0 the objective only grows with it, elsewhere it is level: no such point is better."""
    random = np.random.default_rng(seed)
    rows = Linear(
        at=random.normal(size=4),
        residual=random.normal(size=9),
        slope=random.normal(size=(9, 4)),
        noise=random.uniform(0.2, 2.0, 9),
        weight=random.uniform(0.1, 1.0, 9),
    )
    prior = Prior(mean=random.normal(size=4), spread=random.uniform(0.3, 3.0, 4))
    found = most_probable_non_negative(rows, prior)
    off = rows.residual - rows.slope @ (found - rows.at)
    gradient = (found - prior.mean) / prior.spread**2 - rows.slope.T @ (off * rows.weight / rows.noise**2)
    assert (found >= 0.0).all()
    assert gradient[found > 0.0] == pytest.approx(0.0, abs=1e-7)
    assert (gradient[found == 0.0] >= -1e-7).all()


def test_gauss_newton_solves_a_problem_that_is_not_linear() -> None:
    """Three readings of exp(θ) = 5, a wide prior far away."""

    def step(theta: FloatArray) -> FloatArray:
        value = np.exp(theta[0])
        rows = Linear(
            at=theta,
            residual=np.full(3, 5.0 - value),
            slope=np.full((3, 1), value),
            noise=np.full(3, 0.01),
            weight=np.ones(3),
        )
        return most_probable(rows, prior_of([0.0], 100.0), LEAST_SQUARES, rounds=1, max_step=0.5)

    first = gauss_newton(step, np.zeros(1), iterations=1)
    assert first == pytest.approx([0.5])  # one step is no longer than it may be
    assert gauss_newton(step, np.zeros(1), iterations=30, converged=1e-9) == pytest.approx([np.log(5.0)])


def test_an_iteration_that_changes_nothing_is_the_last() -> None:
    calls = []

    def step(theta: FloatArray) -> FloatArray:
        calls.append(theta)
        return np.minimum(theta + 1.0, 2.0)

    assert gauss_newton(step, np.zeros(1), iterations=10, converged=0.5) == pytest.approx([2.0])
    assert len(calls) == 3


def test_no_constant_moves_farther_than_allowed() -> None:
    assert limited(np.array([0.0, 1.0]), np.array([0.4, -3.0]), 1.0).tolist() == [0.4, 0.0]


@dataclass(frozen=True)
class Two:
    time_s: float
    share: float


@given(time=st.floats(1e-8, 1e3), share=st.floats(0.001, 0.999))
def test_the_units_of_the_fit_go_there_and_back(time: float, share: float) -> None:
    parameters = Parameters(names=("time_s", "share"), fractions=frozenset({"share"}))
    back = parameters.replaced(Two(1.0, 0.5), parameters.vector(Two(time, share)))
    assert (back.time_s, back.share) == pytest.approx((time, share), rel=1e-3)


def test_ends_of_the_range_have_a_finite_unit() -> None:
    parameters = Parameters(names=("time_s", "share"), fractions=frozenset({"share"}))
    for ends in (Two(0.0, 0.0), Two(0.0, 1.0)):
        assert np.isfinite(parameters.vector(ends)).all()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_parts_summed_by_set_are_those_of_the_design_written_out(seed: int) -> None:
    """Sets of rows, of which some share parts and one has no rows, with losses that reweight."""
    rng = np.random.default_rng(seed)
    num_rows, num_sets, num_parts, size = 40, 4, 5, 3
    set_of = rng.integers(0, num_sets - 1, num_rows)
    has = rng.random((num_sets, num_parts)) < 0.6
    rows = Linear(
        at=np.zeros(size),
        residual=rng.normal(0.0, 3.0, num_rows),
        slope=rng.normal(size=(num_rows, size)),
        noise=rng.uniform(0.5, 2.0, num_rows),
        weight=rng.uniform(0.2, 1.0, num_rows),
    )
    prior = Prior(
        mean=rng.normal(size=(num_parts, size)),
        spread=rng.uniform(0.5, 2.0, (num_parts, size)),
    )
    loss = Loss(huber=1.5, cauchy=2.0)
    found = most_probable_parts(rows, prior, loss, set_of=set_of, has=has, rounds=12)
    design = np.stack([np.kron(has[k], slope) for k, slope in zip(set_of, rows.slope, strict=True)])
    whole = most_probable(
        replace(rows, at=np.zeros(num_parts * size), slope=design),
        Prior(mean=prior.mean.ravel(), spread=prior.spread.ravel()),
        loss,
        rounds=12,
        start=prior.mean.ravel(),
    )
    assert found.ravel() == pytest.approx(whole, abs=1e-8)
