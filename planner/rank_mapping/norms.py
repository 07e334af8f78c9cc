"""Powers and roots with exponent p = 2^k, by repeated squares and square roots: what p-norms are made of.

The p-norm (Σ xᵖ)^(1/p) stands in for a maximum in annealing: it falls when the second largest value does, so that a
search can walk where the maximum itself is flat.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray


def raised(values: FloatArray, doublings: int) -> FloatArray:
    """Each value to the power of 2^doublings."""
    for _ in range(doublings):
        values = values * values
    return values


def rooted(values: FloatArray, doublings: int) -> FloatArray:
    """The 2^doublings-th root of each value."""
    for _ in range(doublings):
        values = np.sqrt(values)
    return values
