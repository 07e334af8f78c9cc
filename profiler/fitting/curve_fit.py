"""A smooth curve of times over message sizes from few, noisy points.

One line α + bytes/β cannot follow a library that changes its protocol with the size, and interpolation follows every
zigzag of the measurements. Between them: a line, times the exponential of a Gaussian process of log₂(bytes) with a
level of its own ::

    log(time/(α + bytes/β)) ~ GP(0, 1 + exp(−|Δlog₂ bytes|/ℓ)) + noise of variance s

ℓ octaves and s are those under which each point is predicted best from all the others, in the mean of |log error|;
these errors have the closed form [C⁻¹·r]_i/[C⁻¹]_ii with C the covariance of the points, noise included.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.25 and 5.12.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from meshplan.profiler.fitting.least_squares import FloatArray, RelativeError, fit_positive, relative_error

LENGTHS = (2.0, 8.0)  # octaves
NOISES = (0.001, 0.01, 0.1, 0.3, 1.0)  # variance of a measurement over that of the process


def smoothed_time_s(sizes_bytes: FloatArray, times_s: FloatArray, wanted_bytes: ArrayLike) -> FloatArray:
    """Seconds at ``wanted_bytes``, [any], by the curve through the points.

    Args:
        sizes_bytes: rising, at least three, [n].
        times_s: measured, positive, [n].
        wanted_bytes: positive; outside the points the line decides how times grow.
    """
    wanted = np.asarray(wanted_bytes, dtype=float)
    start = np.array([times_s.min(), sizes_bytes[-1] / times_s[-1]])
    latency_s, bandwidth = fit_positive(lambda line: line[0] + sizes_bytes / line[1], times_s, start)
    residuals = np.log(times_s / (latency_s + sizes_bytes / bandwidth))
    octaves = np.log2(sizes_bytes)
    candidates = []
    for length, noise in product(LENGTHS, NOISES):
        inverse = np.linalg.inv(_covariance(octaves, octaves, length) + noise * np.eye(len(octaves)))
        left_out = inverse @ residuals / inverse.diagonal()
        candidates.append((float(np.abs(left_out).mean()), length, inverse))
    _, length, inverse = min(candidates, key=lambda candidate: candidate[0])
    correction = _covariance(np.log2(wanted), octaves, length) @ inverse @ residuals
    return np.asarray((latency_s + wanted / bandwidth) * np.exp(correction))


def left_out_error(sizes_bytes: FloatArray, times_s: FloatArray) -> RelativeError:
    """Error of each inner point, predicted by a curve that was fitted, its ℓ and s included, to all the others."""
    predicted = [
        smoothed_time_s(np.delete(sizes_bytes, index), np.delete(times_s, index), sizes_bytes[index])
        for index in range(1, len(sizes_bytes) - 1)
    ]
    return relative_error(np.array(predicted), times_s[1:-1])


def _covariance(these: FloatArray, those: FloatArray, length: float) -> FloatArray:
    return np.asarray(1.0 + np.exp(-np.abs(these[..., None] - those) / length))
