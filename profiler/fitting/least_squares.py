"""Robust non-linear least squares for models with a handful of positive parameters.

Every model of the profiler is a time, and errors of times are relative, so the residual is ``log(predicted/measured)``
and the parameters are fitted as logarithms: they stay positive without constraints. Gross outliers (a kernel that fell
back to a slow path, a measurement that was disturbed) get less weight, after Huber: r² inside ``threshold``, linear
outside. The minimum is found by Levenberg and Marquardt's method with a numerical Jacobian, which is enough for the
three to six parameters of these models; SciPy would be a heavy dependency for one function.

Source: Huber, Robust Estimation of a Location Parameter, 1964; Marquardt, SIAM J. Appl. Math. 11 (1963) 431.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Model = Callable[[FloatArray], FloatArray]

# Residuals beyond 10 % count linearly: what is farther off is a different kernel or a disturbed measurement.
HUBER_THRESHOLD = 0.10
MAX_ITERATIONS = 100
# Damping of a singular system and the factor that it grows and shrinks with.
_FIRST_DAMPING, _DAMPING_FACTOR, _MAX_DAMPING = 1e-3, 4.0, 1e12
_RELATIVE_STEP = 1e-5
# One step changes a parameter by at most e²; a parameter that no longer matters would run off to zero otherwise.
_MAX_LOG_STEP = 2.0
_CONVERGED = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeError:
    """How far predictions are off, as fractions of the measured value.

    Args:
        median: of |predicted/measured − 1|.
        p90: 90th percentile of the same.
        num_points: how many predictions were compared.
    """

    median: float
    p90: float
    num_points: int


def relative_error(predicted: FloatArray, measured: FloatArray) -> RelativeError:
    """Median and 90th percentile of |predicted/measured − 1|.

    >>> relative_error(np.array([1.1, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])).median
    0.0
    """
    off = np.abs(predicted / measured - 1.0)
    return RelativeError(median=float(np.median(off)), p90=float(np.quantile(off, 0.9)), num_points=len(off))


def fit_positive(model: Model, measured: FloatArray, start: FloatArray) -> FloatArray:
    """Parameters that make ``model`` agree with ``measured`` best, in relative terms.

    Args:
        model: positive parameters → predicted values, [n], all positive.
        measured: [n], all positive.
        start: first guess, positive.

    Returns:
        The parameters, positive.
    """
    logs = np.log(start)
    target = np.log(measured)

    def residuals(position: FloatArray) -> FloatArray:
        return np.log(model(np.exp(position))) - target

    current = residuals(logs)
    damping = _FIRST_DAMPING
    for _ in range(MAX_ITERATIONS):
        weights = HUBER_THRESHOLD / np.maximum(np.abs(current), HUBER_THRESHOLD)
        jacobian = _jacobian(residuals, logs, current)
        normal = jacobian.T @ (weights[:, None] * jacobian)
        gradient = jacobian.T @ (weights * current)
        scale = np.diag(normal) + np.finfo(float).eps
        while damping < _MAX_DAMPING:
            step = np.linalg.solve(normal + damping * np.diag(scale), gradient)
            candidate = logs - np.clip(step, -_MAX_LOG_STEP, _MAX_LOG_STEP)
            trial = residuals(candidate)
            if _huber(trial) < _huber(current):
                break
            damping *= _DAMPING_FACTOR
        else:
            break  # no descent in any direction: this is the minimum
        gain = _huber(current) - _huber(trial)
        logs, current = candidate, trial
        damping /= _DAMPING_FACTOR
        if gain <= _CONVERGED * _huber(current):
            break
    return np.exp(logs)


def held_out(num_points: int, *, fraction: float, seed: int) -> NDArray[np.bool_]:
    """A random mask of the points that a fit does not see, reproducible by ``seed``, [num_points]."""
    mask = np.zeros(num_points, dtype=bool)
    chosen = np.random.default_rng(seed).permutation(num_points)[: round(fraction * num_points)]
    mask[chosen] = True
    return mask


def folds(num_points: int, *, fraction: float, seed: int) -> Iterator[NDArray[np.bool_]]:
    """Masks of ``fraction`` of the points each, random, that together hide every point once, [num_points] each."""
    parts = np.array_split(np.random.default_rng(seed).permutation(num_points), max(round(1.0 / fraction), 2))
    for chosen in parts:
        mask = np.zeros(num_points, dtype=bool)
        mask[chosen] = True
        yield mask


def _huber(residuals: FloatArray) -> float:
    size = np.abs(residuals)
    inside = 0.5 * size**2
    outside = HUBER_THRESHOLD * (size - 0.5 * HUBER_THRESHOLD)
    return float(np.where(size <= HUBER_THRESHOLD, inside, outside).sum())


def _jacobian(residuals: Model, position: FloatArray, current: FloatArray) -> FloatArray:
    columns = []
    for index in range(len(position)):
        moved = position.copy()
        moved[index] += _RELATIVE_STEP
        columns.append((residuals(moved) - current) / _RELATIVE_STEP)
    return np.stack(columns, axis=1)
