"""Fits the grids of the shipped surfaces.

Simultaneous iterative reconstruction: every measurement moves the knots around it by its own residual, averaged by
weight (Gilbert, J. Theor. Biol. 36 (1972) 105). Knots with little weight lean on their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.surfaces.grid import FloatArray, Knots, grid_value, interpolation, neighbour_sum
from meshplan.catalogs.surfaces.time_tables import STEP, Formula, Points, TimeTable
from meshplan.profiler.fitting.gemm_model import HELD_OUT_FRACTION
from meshplan.profiler.fitting.least_squares import HUBER_THRESHOLD, fit_positive, folds, relative_error

ITERATIONS = 60
# A knot with less than this weight of measurements around it leans on its neighbours.
SMOOTHING = 0.05
# Weight of a knot without measurements when a table is made to rise: it gives way.
UNTOUCHED_WEIGHT = 1e-4
PROJECTIONS = 30


def fit_grid(
    knots: Knots,
    points: Points,
    residuals: FloatArray,
    *,
    trust: FloatArray | None = None,
    smoothing: float = SMOOTHING,
    iterations: int = ITERATIONS,
) -> tuple[FloatArray, FloatArray]:
    """Values at the knots that interpolate to ``residuals`` at ``points`` best, and the points' weight at each knot.

    Args:
        knots: one array per axis.
        points: one flat array per axis, [n].
        residuals: [n].
        trust: weight of each measurement, [n]; 1 without.
        smoothing: weight of the neighbours' mean; 0 keeps the knots independent.
        iterations: how often the residuals are shared out.
    """
    shape = tuple(len(positions) for positions in knots)
    size, num_points = int(np.prod(shape)), len(residuals)
    corners, weights = interpolation(knots, points)
    # Most points lie on a knot in some axis: half of their corners carry no weight.
    used = weights.ravel() > 0
    index, weight = corners.ravel()[used], weights.ravel()[used]
    point = np.broadcast_to(np.arange(num_points), corners.shape).ravel()[used]
    pull = weight if trust is None else weight * trust[point]
    weight_at = np.bincount(index, pull, minlength=size).astype(float)
    lean = smoothing / np.maximum(smoothing + weight_at.reshape(shape), SMOOTHING)
    count = np.maximum(neighbour_sum(np.ones(shape)), 1.0)
    table = np.zeros(size)
    for _ in range(iterations):
        missing = residuals - np.bincount(point, table[index] * weight, minlength=num_points)
        step = np.bincount(index, pull * missing[point], minlength=size)
        table = table + step / np.maximum(weight_at, SMOOTHING)
        if smoothing:
            grid = table.reshape(shape)
            table = ((1.0 - lean) * grid + lean * neighbour_sum(grid) / count).ravel()
    return table.reshape(shape), weight_at.reshape(shape)


def fit_grid_robustly(
    knots: Knots,
    points: Points,
    residuals: FloatArray,
    *,
    iterations: int = ITERATIONS,
    first_iterations: int = ITERATIONS // 3,
) -> tuple[FloatArray, FloatArray]:
    """:func:`fit_grid`, with less trust in measurements that a first, shorter fit contradicts (Huber's weights).

    Single shapes ran a badly chosen kernel, up to six times slower: they must not pull the others along.
    """
    values, _ = fit_grid(knots, points, residuals, iterations=first_iterations)
    rest = np.abs(residuals - grid_value(knots, values, points))
    return fit_grid(
        knots, points, residuals, trust=HUBER_THRESHOLD / np.maximum(rest, HUBER_THRESHOLD), iterations=iterations
    )


def rising_fit(values: FloatArray, weights: FloatArray, axes: Sequence[int]) -> FloatArray:
    """The table closest to ``values`` (weighted squares) that rises along ``axes``.

    Dykstra's alternating projections (J. Am. Stat. Assoc. 78 (1983) 837); along one axis the weighted isotonic
    regression max over j ≤ i of min over k ≥ i of the mean of j … k.
    """
    weights = np.maximum(weights, UNTOUCHED_WEIGHT)
    steps = [np.zeros_like(values) for _ in axes]
    current = values
    for _ in range(PROJECTIONS if len(axes) > 1 else 1):
        for step, axis in zip(steps, axes, strict=True):
            before = current + step
            current = _isotonic(before, weights, axis)
            step[...] = before - current
    return current


def _isotonic(values: FloatArray, weights: FloatArray, axis: int) -> FloatArray:
    lines, mass = np.moveaxis(values, axis, 0), np.moveaxis(weights, axis, 0)
    size = len(lines)
    zero = np.zeros((1, *lines.shape[1:]))
    sums = np.concatenate([zero, np.cumsum(lines * mass, axis=0)])
    masses = np.concatenate([zero, np.cumsum(mass, axis=0)])
    result = np.full(lines.shape, -np.inf)
    for start in range(size):
        means = (sums[start + 1 :] - sums[start]) / (masses[start + 1 :] - masses[start])
        least = np.flip(np.minimum.accumulate(np.flip(means, axis=0), axis=0), axis=0)
        result[start:] = np.maximum(result[start:], least)
    return np.moveaxis(result, 0, axis)


def fit_time_table(
    points: Points,
    time_s: FloatArray,
    *,
    formula: Formula,
    start: tuple[float, ...],
    knots: Knots,
    rising: tuple[int, ...],
    kernel: str,
) -> TimeTable:
    """Fit a table; its error is not known yet.

    Args:
        points: measured coordinates, one flat array per axis, [n].
        time_s: measured seconds, [n].
        formula: see :class:`~meshplan.catalogs.surfaces.time_tables.TimeTable`.
        start: first guess of the formula's parameters.
        knots: grid positions, one array per axis.
        rising: axes along which times must not fall.
        kernel: framework, version and kernel.
    """
    parameters = fit_positive(lambda trial: formula(trial, points), time_s, np.array(start))
    residuals = np.log(time_s / formula(parameters, points))
    corrections, weights = fit_grid_robustly(knots, points, residuals)
    at_knots = np.log(formula(parameters, tuple(np.meshgrid(*knots, indexing="ij"))))
    corrections = rising_fit(at_knots + corrections, weights, rising) - at_knots
    return TimeTable(
        formula=formula,
        parameters=tuple(float(parameter) for parameter in parameters),
        knots=knots,
        corrections=np.round(corrections / STEP) * STEP,
        touched=weights > 0,
        rising=rising,
        kernel=kernel,
        num_samples=len(time_s),
        median_error=math.nan,
        p90_error=math.nan,
    )


def cross_validated(
    fit: Callable[[Points, FloatArray], TimeTable], points: Points, time_s: FloatArray, *, seed: int = 0
) -> TimeTable:
    """A table of all measurements, with the error of those that have not seen a fifth of them, each fifth in turn.

    Args:
        fit: coordinates and seconds → table.
        points: measured coordinates, one flat array per axis, [n].
        time_s: measured seconds, [n].
        seed: for the random fifths.
    """

    def chosen(mask: NDArray[np.bool_]) -> Points:
        return tuple(values[mask] for values in points)

    predicted = np.empty(len(time_s))
    for hidden in folds(len(time_s), fraction=HELD_OUT_FRACTION, seed=seed):
        predicted[hidden] = fit(chosen(~hidden), time_s[~hidden]).time_s(chosen(hidden))
    error = relative_error(predicted, time_s)
    return replace(fit(points, time_s), median_error=error.median, p90_error=error.p90)
