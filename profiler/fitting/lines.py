"""Fits of measured curves with their residuals and the error on points that the fit had not seen.

- ``alpha_beta``: time = α + bytes/β of a link, a class of links or a collective (Hockney's model).
- ``gemm_curve``: the three parameters of :mod:`meshplan.profiler.fitting.gemm_model`.

The held-out error is found by leaving out one point after the other (a random fifth where there are many points) and
predicting it from a fit of the rest; it becomes the interval of what is predicted from the fit.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994) 389.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshplan.catalogs.measurements.types import Fit
from meshplan.profiler.fitting.least_squares import FloatArray, fit_positive, relative_error

MIN_POINTS = 3


def fit_alpha_beta(
    subject: str, sizes_bytes: Sequence[float], times_s: Sequence[float], *, source: str, model: str = "alpha_beta"
) -> Fit | None:
    """Latency α and bandwidth β of a curve of times over message sizes; None with fewer than three sizes.

    Args:
        subject: what was measured.
        sizes_bytes: message sizes.
        times_s: times, seconds.
        source: what was fitted.
        model: name of the fit.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(times_s, dtype=float)
    if len(np.unique(sizes)) < MIN_POINTS:
        return None

    def predict(parameters: FloatArray, chosen: FloatArray) -> FloatArray:
        return np.asarray(parameters[0] + chosen / parameters[1])

    def fit(chosen: FloatArray, measured: FloatArray) -> FloatArray:
        start = np.array([measured.min(), float((chosen / measured).max())])
        return fit_positive(lambda parameters: predict(parameters, chosen), measured, start)

    parameters = fit(sizes, times)
    return _described(
        subject,
        model,
        {"latency_s": float(parameters[0]), "bandwidth_bytes_per_s": float(parameters[1])},
        residual=(predict(parameters, sizes), times),
        unseen=_leave_one_out(sizes, times, fit, predict),
        source=source,
    )


def _leave_one_out(
    inputs: FloatArray,
    measured: FloatArray,
    fit: Callable[[FloatArray, FloatArray], FloatArray],
    predict: Callable[[FloatArray, FloatArray], FloatArray],
) -> tuple[FloatArray, FloatArray]:
    """Predictions of each point from a fit of the others, and the points."""
    predictions = []
    for index in range(len(inputs)):
        rest = np.arange(len(inputs)) != index
        parameters = fit(inputs[rest], measured[rest])
        predictions.append(predict(parameters, inputs[index : index + 1])[0])
    return np.array(predictions), measured


def _described(
    subject: str,
    model: str,
    coefficients: dict[str, float],
    *,
    residual: tuple[FloatArray, FloatArray],
    unseen: tuple[FloatArray, FloatArray],
    source: str,
) -> Fit:
    inside, outside = relative_error(*residual), relative_error(*unseen)
    return Fit(
        subject=subject,
        model=model,
        coefficients=coefficients,
        residual_median=inside.median,
        residual_p90=inside.p90,
        held_out_median=outside.median,
        held_out_p90=outside.p90,
        num_points=inside.num_points,
        source=source,
    )
