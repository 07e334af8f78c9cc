"""Copies under a power budget: the convolution is the enumeration, and every question has the sign that it should."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.power.copies import (
    MOST_COPIES,
    NUM_BINS,
    PowerHistogram,
    copies_within,
    exceedance,
    most_copies,
)


def small(seed: int) -> PowerHistogram:
    draws = np.random.default_rng(seed)
    shares = draws.dirichlet(np.ones(4)) if seed % 3 else np.array([0.5, 0.0, 0.0, 0.5])
    return PowerHistogram(
        least_w=float(draws.integers(1, 9)), width_w=float(draws.choice([0.5, 1.0, 2.5])), shares=shares
    )


def drawn(seed: int) -> FloatArray:
    """Powers of 3,000 windows with two humps, as of windows without and with prompts."""
    draws = np.random.default_rng(seed)
    return np.where(draws.random(3000) < 0.3, draws.normal(900.0, 40.0, 3000), draws.normal(500.0, 60.0, 3000))


def enumerated(histogram: PowerHistogram, copies: int, budget_w: float) -> float:
    powers = histogram.least_w + histogram.width_w * np.arange(len(histogram.shares))
    return sum(
        math.prod(float(histogram.shares[entry]) for entry in entries)
        for entries in itertools.product(range(len(powers)), repeat=copies)
        if sum(float(powers[entry]) for entry in entries) > budget_w + 1e-9
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_the_convolution_is_the_enumeration(seed: int, copies: int) -> None:
    histogram = small(seed)
    for budget_w in np.linspace(0.9 * copies * histogram.least_w, 1.05 * copies * histogram.largest_w, 9):
        expected = enumerated(histogram, copies, float(budget_w))
        assert exceedance(histogram, copies, float(budget_w)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_the_most_copies_are_those_of_the_enumeration(seed: int) -> None:
    histogram = small(seed)
    for budget_w, risk in itertools.product(np.linspace(1.0, 6.0, 4) * histogram.largest_w, (0.001, 0.1, 0.6)):
        last = copies_within(histogram.least_w, float(budget_w)) + 1
        within = [n for n in range(1, min(last, 8) + 1) if enumerated(histogram, n, float(budget_w)) <= risk]
        found = most_copies(histogram, float(budget_w), risk)
        if found < 8:
            assert found == max(within, default=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_histogram_counts_no_power_too_low_and_none_more_than_a_bin_too_high(seed: int) -> None:
    power_w = drawn(seed)
    histogram = PowerHistogram.of(power_w)
    entries = histogram.least_w + histogram.width_w * np.arange(NUM_BINS + 1)
    assert histogram.shares.sum() == pytest.approx(1.0)
    assert (histogram.least_w, histogram.largest_w) == pytest.approx((power_w.min(), power_w.max()))
    for budget_w in np.linspace(power_w.min(), power_w.max(), 50):
        exact = float((power_w > budget_w).mean())
        above = float((power_w > budget_w - histogram.width_w * (1.0 + 1e-6)).mean())
        assert exact - 1e-9 <= exceedance(histogram, 1, float(budget_w)) <= above + 1e-9
    assert float(histogram.shares @ entries) == pytest.approx(power_w.mean(), abs=histogram.width_w)


@pytest.mark.parametrize("seed", range(3))
def test_more_copies_are_never_less_risk(seed: int) -> None:
    histogram = PowerHistogram.of(drawn(seed))
    for budget_w in (5_000.0, 20_000.0):
        risks = [exceedance(histogram, copies, budget_w) for copies in range(1, 60)]
        assert risks[0] == 0.0
        assert risks[-1] == pytest.approx(1.0)
        assert (np.diff(risks) >= -1e-12).all()


def test_a_larger_budget_and_a_higher_risk_never_hold_fewer_copies() -> None:
    histogram = PowerHistogram.of(drawn(0))
    counts = [[most_copies(histogram, watts, risk) for risk in (1e-6, 1e-3, 0.1, 0.5)] for watts in range(0, 9000, 300)]
    assert (np.diff(counts, axis=0) >= 0).all()
    assert (np.diff(counts, axis=1) >= 0).all()
    assert counts[-1][0] < counts[-1][-1]


def test_more_copies_average_out() -> None:
    """The larger the budget, the nearer to its mean a copy counts; the same watts in other units count alike."""
    power_w = drawn(1)
    histogram, thousandth = PowerHistogram.of(power_w), PowerHistogram.of(power_w / 1000.0)
    each_w = []
    for budget_w in (4_000.0, 40_000.0, 400_000.0):
        copies = most_copies(histogram, budget_w, 0.001)
        assert most_copies(thousandth, budget_w / 1000.0, 0.001) == copies
        each_w.append(budget_w / copies)
    assert each_w == sorted(each_w, reverse=True)
    assert power_w.mean() < each_w[-1] < 1.05 * power_w.mean()


@pytest.mark.parametrize(("watts", "budget_w", "copies"), [(500.0, 4_000.0, 8), (700.0, 40_000.0, 57), (0.1, 0.3, 3)])
def test_constant_power_is_exact(watts: float, budget_w: float, copies: int) -> None:
    histogram = PowerHistogram.of(np.full(200, watts))
    assert most_copies(histogram, budget_w, 0.001) == most_copies(histogram, budget_w, 0.999) == copies
    assert exceedance(histogram, copies, budget_w) == 0.0
    assert exceedance(histogram, copies + 1, budget_w) == 1.0


def test_a_budget_for_a_town_is_refused() -> None:
    histogram = PowerHistogram.of(np.array([400.0, 500.0]))
    assert most_copies(histogram, 400.0 * MOST_COPIES - 1.0, 0.001) > 8_000
    with pytest.raises(ValueError, match="more than the 10,000 that are counted: give the budget of a rack or a row"):
        most_copies(histogram, 400.0 * MOST_COPIES + 1.0, 0.001)
