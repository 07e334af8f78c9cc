"""Surfaces: the fit finds a planted kernel, the stored form loses nothing that matters, the shipped ones are sound."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.surfaces.gemm import (
    SURFACES,
    GemmSurface,
    base_time_s,
    gemm_surface,
    surface_from_rows,
    surface_row,
)
from meshplan.profiler.fitting.gemm_model import GemmSamples
from meshplan.profiler.shipped.fit_gemm import fit_surface

SIZES = (1, 16, 64, 65, 256, 257, 1024, 4096, 16384)


@pytest.fixture(scope="module")
def planted() -> GemmSamples:
    """A kernel with the formula's times, a fifth slower where k is large."""
    m, n, k = np.array(list(product(SIZES, repeat=3)), dtype=float).T
    formula = base_time_s(np.array([7e14, 2e12, 100.0, 4e-6]), m, n, k, element_bytes=2.0)
    return GemmSamples(m=m, n=n, k=k, time_s=formula * np.where(k > 2000, 1.2, 1.0))


@pytest.fixture(scope="module")
def fitted(planted: GemmSamples) -> GemmSurface:
    return fit_surface(planted, device="mine", kernel="bfloat16")


def test_the_fit_reproduces_a_planted_kernel(planted: GemmSamples, fitted: GemmSurface) -> None:
    predicted = fitted.time_s(planted.m, planted.n, planted.k)
    assert np.quantile(np.abs(predicted / planted.time_s - 1.0), 0.9) < 0.02
    assert fitted.median_error < 0.05


def test_the_stored_form_is_the_same_surface(fitted: GemmSurface) -> None:
    stored = json.loads(json.dumps(surface_row(fitted)))
    again = surface_from_rows([stored | {"source": fitted.source}])
    m = np.array([1.0, 100.0, 5000.0])
    np.testing.assert_allclose(again.time_s(m, 512, 300), fitted.time_s(m, 512, 300), rtol=2e-3)


def test_shapes_broadcast(fitted: GemmSurface) -> None:
    assert fitted.time_s(np.ones((3, 1)), np.ones(4), 64).shape == (3, 4)


def test_beyond_the_grid_time_grows_with_the_work(fitted: GemmSurface) -> None:
    inside, outside = fitted.time_s([16384, 65536], 16384, 16384)
    assert outside == pytest.approx(4 * inside, rel=0.02)


@pytest.mark.parametrize("key", sorted(SURFACES.rows))
def test_shipped_surfaces_are_sound(key: tuple[str, str], database: Catalog) -> None:
    surface = gemm_surface(*key)
    assert surface is not None
    device = database.device(key[0])
    assert surface.median_error < 0.05
    assert surface.p90_error < 0.15
    assert surface.num_samples > 5000
    assert "Apache-2.0" in surface.source
    m = np.array([1, 16, 256, 4096, 16384])
    rate = 2.0 * m * 8192 * 8192 / surface.time_s(m, 8192, 8192)
    assert rate.max() < max(device.peak_flops_per_s.values())
    # Twice the rows take longer once the device is busy. With few rows libraries change kernels, and they do not.
    times = surface.time_s(2.0 ** np.arange(10, 16), 4096, 4096)
    assert (times[1:] > 1.3 * times[:-1]).all()


def test_no_surface_for_what_was_not_measured() -> None:
    assert gemm_surface("mi300x", "bfloat16") is None


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite"))
