"""How many independent copies of a deployment stay within a power budget, and at what risk.

Notation: X, power of one copy in a window; X₁ … X_n, the same of n copies; B, the budget; ε, the accepted risk.

The risk of n copies is the share of windows in which they exceed the budget together::

    risk(n) = P(X₁ + … + X_n > B)

*Distribution.* X has the histogram of the simulated windows, in :data:`NUM_BINS` bins of equal width between the least
and the largest power. A power counts at the upper edge of its bin, so that the risk is exact up to the bins: the sum is
at most n widths too high, and never too low. The copies are independent, so that the histogram of the sum is the n-fold
convolution of that of X, taken as the n-th power of its Fourier transform.

*Search.* No power is negative, so that risk(n) grows with n. ⌊B/largest X⌋ copies never exceed the budget, more than
⌊B/least X⌋ always do; the largest n with risk(n) ≤ ε is found between the two by halving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from meshplan.planner.core.arrays import FloatArray

# Bins of the histogram: a sum is at most 0.2 % of the spread of its parts too high.
NUM_BINS = 512
# Smallest risk that is told from rounding: transforms of millions of bins err by some 1e-13.
LEAST_RISK = 1e-9
# Most copies that are counted: the transforms of as many histograms take a quarter of a gigabyte.
MOST_COPIES = 10_000
# Relative error of a sum of powers that counts as rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerHistogram:
    """Distribution of the power of one copy over windows of time.

    Args:
        least_w: power of the first entry, W; above 0.
        width_w: distance of two entries, W; 0 where the power is constant.
        shares: share of the windows with each power ``least_w``, ``least_w + width_w``, …; they add up to 1.
    """

    least_w: float
    width_w: float
    shares: FloatArray

    @classmethod
    def of(cls, power_w: FloatArray) -> Self:
        """The histogram of simulated windows; ``power_w`` is the power in each, W."""
        least, largest = float(power_w.min()), float(power_w.max())
        width = (largest - least) / NUM_BINS
        if width <= _ROUNDING * largest:
            return cls(least_w=largest, width_w=0.0, shares=np.ones(1))
        bins = np.ceil((power_w - least) / width - _ROUNDING).astype(np.int64)
        shares = np.bincount(np.clip(bins, 0, NUM_BINS), minlength=NUM_BINS + 1) / len(power_w)
        return cls(least_w=least, width_w=width, shares=shares)

    @property
    def largest_w(self) -> float:
        """Power of the last entry, W."""
        return self.least_w + self.width_w * (len(self.shares) - 1)


def exceedance(histogram: PowerHistogram, copies: int, budget_w: float) -> float:
    """Share of windows in which independent copies together exceed a budget.

    >>> fair = PowerHistogram(least_w=1.0, width_w=1.0, shares=np.array([0.5, 0.5]))
    >>> [round(exceedance(fair, 2, budget_w), 6) for budget_w in (1.0, 2.0, 3.0, 4.0)]
    [1.0, 0.75, 0.25, 0.0]
    """
    room_w = budget_w * (1.0 + _ROUNDING) - copies * histogram.least_w
    if room_w < 0.0:
        return 1.0
    most = copies * (len(histogram.shares) - 1)
    if copies * histogram.largest_w <= budget_w * (1.0 + _ROUNDING) or not most:
        return 0.0
    within = min(math.floor(room_w / histogram.width_w), most)
    length = 1 << most.bit_length()
    sums = np.fft.irfft(np.fft.rfft(histogram.shares, length) ** copies, length)
    return float(np.clip(sums[within + 1 : most + 1].sum(), 0.0, 1.0))


def most_copies(histogram: PowerHistogram, budget_w: float, risk: float) -> int:
    """Most independent copies that exceed a budget in no more than a share ``risk`` of the windows.

    Raises:
        ValueError: the budget may hold more than :data:`MOST_COPIES`.

    >>> fair = PowerHistogram(least_w=1.0, width_w=1.0, shares=np.array([0.5, 0.5]))
    >>> most_copies(fair, 6.0, 0.001), most_copies(fair, 6.0, 0.32)
    (3, 4)
    """
    never, always = copies_within(histogram.largest_w, budget_w), copies_within(histogram.least_w, budget_w) + 1
    if always > MOST_COPIES:
        raise ValueError(
            f"{budget_w:g} W hold up to {always - 1:,} copies of {histogram.least_w:.0f} W, more than the "
            f"{MOST_COPIES:,} that are counted: give the budget of a rack or a row"
        )
    while always - never > 1:
        middle = (never + always) // 2
        if exceedance(histogram, middle, budget_w) <= risk:
            never = middle
        else:
            always = middle
    return never


def copies_within(each_w: float, budget_w: float) -> int:
    """Copies of constant power that a budget holds.

    >>> copies_within(5600.0, 40_000.0), copies_within(0.1, 0.3)
    (7, 3)
    """
    return math.floor(budget_w * (1.0 + _ROUNDING) / each_w)
