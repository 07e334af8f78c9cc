"""The share of a run that makes progress, and the best time between two checkpoints.

Notation (seconds)
    λ  interruptions per second        τ  training between two checkpoints     T = τ + b  from one to the next
    R  restart                         b  the training stands still            w  until it can be restored from
    η  progress per time               L  age of the damage of a share s of the interruptions

Model. Interruptions come at random (Poisson), also while a job starts; it then starts again. A job that has trained for
X seconds since its start (X exponential) has secured J = ⌊(X − w)/T⌋ checkpoints, at least 0. The mean of J is

    Σ_{j≥1} P(X ≥ w + jT) = e^{−λ(w+T)} / (1 − e^{−λT})

The time from one interruption to the next is the first stretch of R seconds without any, then X: together e^{λR}/λ on
average (Daly, doi:10.1016/j.futu.2004.11.016, eq. 13). A renewal-reward argument gives the long-run share exactly:

    η = τ E[J] λ e^{−λR}          with w = 0:  λ τ e^{−λR} / (e^{λT} − 1)

Damage that is found late makes checkpoints useless that are younger than L: J = min(⌊(X − L)/T⌋, ⌊(X − w)/T⌋⁺), which
may be negative. It is counted in training time, as if no restart lay within L.

Source       the exact model of J. T. Daly, "A higher order estimate of the optimum checkpoint interval" (2006), with
             writes in the background. Young's and Daly's short formulas are shown beside the exact optimum.
Assumptions  one rate for the whole run; R, b and w are constants; writes of two checkpoints do not overlap (τ + b ≥ w).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.units import SECONDS_PER_DAY
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.goodput.conditions import Checkpoints, Interruptions

# The search for the best interval: points of a grid in log τ, and how often it is made finer around its best point.
_GRID, _ROUNDS = 61, 6
# Longest interval looked at, in mean times between interruptions: the best one is below √(2 b/λ) + 1/λ.
_LONGEST_IN_MTBF = 8.0
# Longest interval where nothing interrupts or nothing is lost: a month.
LONGEST_S = 30 * SECONDS_PER_DAY
# Its exponential and the inverse of that are doubles.
MOST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BestInterval:
    """The best time between checkpoints, and what shorter formulas say.

    Args:
        interval_s: τ with the largest η.
        efficiency: η there.
        young_s: √(2 b M) with M = 1/λ (Young 1974).
        daly_s: Daly's expansion, √(2 b M) (1 + √(b/2M)/3 + b/18M) − b where b < 2M, else M.
    """

    interval_s: float
    efficiency: float
    young_s: float
    daly_s: float


def efficiency(interval_s: FloatArray | float, stops: Interruptions, costs: Checkpoints) -> FloatArray:
    """η, progress per time while no node is waited for.

    Args:
        interval_s: τ, [any shape], seconds; above 0.
        stops: λ, R, s, L.
        costs: b, w; their own interval is not read.

    Returns:
        η between 0 and 1, of the shape of ``interval_s``.
    """
    interval = np.asarray(interval_s, dtype=float)
    period = interval + costs.block_s
    rate = stops.per_s
    if rate <= 0.0:
        return interval / period
    secured = _mean_secured(period, rate, costs.durable_s)
    if stops.late_share > 0.0:
        late = _mean_secured_late(period, rate, costs.durable_s, stops.late_s)
        secured = (1.0 - stops.late_share) * secured + stops.late_share * late
    progress = interval * secured * rate * math.exp(-min(rate * stops.restart_s, MOST_EXPONENT))
    return np.clip(progress, 0.0, 1.0)


def _mean_secured(period: FloatArray, rate: float, wait_s: float) -> FloatArray:
    """E[J] = e^{−λ(w+T)}/(1 − e^{−λT}), checkpoints that one stretch of training secures."""
    return np.asarray(np.exp(-rate * (wait_s + period)) / -np.expm1(-rate * period))


def _mean_secured_late(period: FloatArray, rate: float, wait_s: float, late_s: float) -> FloatArray:
    """E[J] where checkpoints of the last ``late_s`` seconds are of no use either."""
    gained = _mean_secured(period, rate, max(wait_s, late_s))
    # −Σ_{j≥0} P(X < L − jT): checkpoints of earlier stretches that are given up.
    steps = np.ceil(late_s / period)
    # e^{−λL} (e^{λTn} − 1)/(e^{λT} − 1) for n steps, divided through by e^{λT}: no exponent is above 0.
    whole, least = np.exp(rate * (period * (steps - 1.0) - late_s)), np.exp(-rate * (late_s + period))
    geometric = (whole - least) / -np.expm1(-rate * period)
    return np.asarray(gained - (steps - geometric))


def best_interval(stops: Interruptions, costs: Checkpoints, *, least_s: float = 1.0) -> BestInterval:
    """The τ of the largest η, by a grid in log τ that is made finer around its best point.

    η rises with τ up to one point and falls behind it; tests hold the result against an exhaustive search.

    Args:
        stops: λ, R, s, L.
        costs: b, w.
        least_s: shortest interval, such as one step.
    """
    young, daly = young_interval(stops, costs), daly_interval(stops, costs)
    low = max(least_s, costs.durable_s - costs.block_s)
    longest = LONGEST_S if stops.per_s <= 0.0 else min(LONGEST_S, _LONGEST_IN_MTBF / stops.per_s)
    high = max(low, longest)
    if costs.block_s <= 0.0 and stops.per_s > 0.0:
        # Nothing is lost by a checkpoint: as often as possible.
        return BestInterval(interval_s=low, efficiency=float(efficiency(low, stops, costs)), young_s=young, daly_s=daly)
    least, most = low, high
    for _ in range(_ROUNDS):
        grid = np.geomspace(least, most, _GRID)
        at = int(np.argmax(efficiency(grid, stops, costs)))
        least, most = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, _GRID - 1)])
    best = float(grid[at])
    return BestInterval(interval_s=best, efficiency=float(efficiency(best, stops, costs)), young_s=young, daly_s=daly)


def young_interval(stops: Interruptions, costs: Checkpoints) -> float:
    """√(2 b M); infinite where nothing interrupts."""
    return math.inf if stops.per_s <= 0.0 else math.sqrt(2.0 * costs.block_s / stops.per_s)


def daly_interval(stops: Interruptions, costs: Checkpoints) -> float:
    """√(2 b M) (1 + √(b/2M)/3 + b/18M) − b where b < 2M, else M; infinite where nothing interrupts."""
    if stops.per_s <= 0.0:
        return math.inf
    mean, block = 1.0 / stops.per_s, costs.block_s
    if block >= 2.0 * mean:
        return mean
    ratio = block / (2.0 * mean)
    return math.sqrt(2.0 * block * mean) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - block
