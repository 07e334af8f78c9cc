"""The three-parameter GEMM model: it is the planner's, and its fit finds planted parameters."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.planner.training.estimator.operators.products import GemmCurve, gemm_s
from meshplan.profiler.fitting.gemm_model import GemmSamples, fastest, fit_gemm, gemm_time_s

RATE, BANDWIDTH, SATURATION = 7e14, 2.5e12, 120.0


def shapes(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products with dimensions 256 … 16384."""
    m, n, k = np.round(2.0 ** rng.uniform(8, 14, size=(3, count)))
    return m, n, k


def planted(count: int, *, noise: float, seed: int = 1) -> GemmSamples:
    rng = np.random.default_rng(seed)
    m, n, k = shapes(rng, count)
    exact = gemm_time_s(
        np.array([RATE, BANDWIDTH, SATURATION]),
        GemmSamples(m=m, n=n, k=k, time_s=np.ones(count)),
        element_bytes=2.0,
    )
    return GemmSamples(m=m, n=n, k=k, time_s=exact * np.exp(noise * rng.standard_normal(count)))


def test_the_model_is_the_planners() -> None:
    m, n, k = shapes(np.random.default_rng(0), 500)
    curve = GemmCurve(
        rate_flops_per_s=RATE, bandwidth_bytes_per_s=BANDWIDTH, inner_saturation=SATURATION, is_fitted=True
    )
    ours = gemm_time_s(
        np.array([RATE, BANDWIDTH, SATURATION]), GemmSamples(m=m, n=n, k=k, time_s=np.ones(500)), element_bytes=1.0
    )
    np.testing.assert_allclose(ours, gemm_s(curve, m, n, k, efficiency=1.0, element_bytes=1.0), rtol=1e-12)


def test_the_fit_finds_planted_parameters() -> None:
    fit = fit_gemm(planted(2000, noise=0.0), element_bytes=2.0)
    found = (fit.rate_flops_per_s, fit.bandwidth_bytes_per_s, fit.inner_saturation)
    assert found == pytest.approx((RATE, BANDWIDTH, SATURATION), rel=1e-3)
    assert fit.held_out_error.p90 < 1e-4


def test_outliers_do_not_move_the_rate() -> None:
    samples = planted(2000, noise=0.02)
    disturbed = samples.time_s.copy()
    disturbed[::20] *= 5.0
    fit = fit_gemm(GemmSamples(m=samples.m, n=samples.n, k=samples.k, time_s=disturbed), element_bytes=2.0)
    assert fit.rate_flops_per_s == pytest.approx(RATE, rel=0.02)
    assert fit.held_out_error.median < 0.03


def test_too_few_products_are_refused() -> None:
    with pytest.raises(ValueError, match="products are large enough for a fit; measure at least 10"):
        fit_gemm(planted(5, noise=0.0), element_bytes=2.0)


def test_the_faster_kernel_counts() -> None:
    one = GemmSamples(m=np.array([1.0, 2.0]), n=np.ones(2), k=np.ones(2), time_s=np.array([3.0, 1.0]))
    two = GemmSamples(m=np.array([2.0, 4.0]), n=np.ones(2), k=np.ones(2), time_s=np.array([0.5, 7.0]))
    both = fastest(one, two)
    assert both.m.tolist() == [1.0, 2.0, 4.0]
    assert both.time_s.tolist() == [3.0, 0.5, 7.0]
