"""The shipped collective curves: sound, interpolated between points, extended beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.surfaces.collectives import collective_curve, never_falling, shipped_curves


@pytest.mark.parametrize("key", sorted(shipped_curves()))
def test_every_curve_is_sound(key: tuple[str, str, int, str], catalog: Catalog) -> None:
    curve = shipped_curves()[key]
    assert catalog.device(curve.device)
    assert list(curve.sizes_bytes) == sorted(set(curve.sizes_bytes))
    assert min(curve.times_s) > 1e-6
    assert 0.0 <= curve.median_error < 1.0
    assert "Apache-2.0" in curve.source
    np.testing.assert_allclose(curve.time_s(curve.sizes_bytes), curve.times_s)


def test_the_curves_predict_what_they_have_not_seen() -> None:
    errors = np.array([curve.median_error for curve in shipped_curves().values()])
    assert np.median(errors) < 0.03
    assert errors.max() < 0.10


def test_published_bus_bandwidths() -> None:
    # AIConfigurator's table, 8 devices, largest message: H100 445 GB/s for all-reduce, A100 222, B200 704.
    for device, expected in (("h100-sxm-80gb", 445e9), ("a100-sxm-80gb", 222e9), ("b200-sxm-180gb", 704e9)):
        curve = collective_curve(device, "all_reduce", 8)
        assert curve is not None
        bus = 2 * 7 / 8 * curve.sizes_bytes[-1] / curve.times_s[-1]
        assert bus == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("library", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize("device", ["h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb"])
def test_an_engines_kernel_beats_nccl_where_latency_decides(device: str, library: str) -> None:
    engine, nccl = collective_curve(device, "all_reduce", 8, library), collective_curve(device, "all_reduce", 8)
    assert engine is not None
    assert nccl is not None
    small, large = np.array([8192.0, 65536.0]), 512 * 2**20
    assert (engine.time_s(small) < 0.7 * nccl.time_s(small)).all()
    assert engine.time_s(large) == pytest.approx(nccl.time_s(large), rel=0.2)


@given(st.floats(min_value=1.0, max_value=1e12), st.floats(min_value=1.0, max_value=100.0))
def test_outside_it_is_a_latency_and_a_bandwidth(size: float, factor: float) -> None:
    curve = collective_curve("h100-sxm-80gb", "all_gather", 8)
    assert curve is not None
    assert curve.time_s(curve.sizes_bytes[0] / factor) == pytest.approx(curve.times_s[0])
    assert curve.time_s(curve.sizes_bytes[-1] * factor) == pytest.approx(factor * curve.times_s[-1])
    assert curve.time_s(size) >= 0.8 * min(curve.times_s)


def test_no_curve_for_what_was_not_measured() -> None:
    assert collective_curve("mi300x", "all_reduce", 8) is None


@given(st.lists(st.floats(min_value=1e-6, max_value=1.0), min_size=1, max_size=12))
def test_times_in_order_stay_and_others_are_pooled(times: list[float]) -> None:
    pooled = never_falling(times)
    assert list(pooled) == sorted(pooled)
    assert np.log(pooled).sum() == pytest.approx(np.log(times).sum())
    np.testing.assert_allclose(never_falling(sorted(times)), sorted(times))


def test_one_outlier_does_not_lift_the_curve() -> None:
    assert max(never_falling([1.0, 1.0, 3.0, *[1.0] * 10])) < 1.2
