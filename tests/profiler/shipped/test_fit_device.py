"""A user's kernel tables become surfaces that take the place of the shipped ones, or are refused as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.surfaces import gemm as gemm_surfaces
from meshplan.profiler.shipped.fit_device import fit_device

RATE, BANDWIDTH, LAUNCH = 2e14, 1.5e12, 4e-6
SIZES = (1, 64, 512, 2048, 8192)


@pytest.fixture
def surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for the user's surfaces; what was read from the shipped ones is forgotten before and after."""
    monkeypatch.setenv("MESHPLAN_SURFACES", str(tmp_path / "surfaces"))
    gemm_surfaces.SURFACES.forget()
    yield tmp_path / "surfaces"
    gemm_surfaces.SURFACES.forget()


def tables(folder: Path, system: str = "my_gpu", **changes: Any) -> Path:
    """Products of a made-up device in the structure of the wheel."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    m, n, k = (np.array(column) for column in zip(*product(SIZES, (256, 1024, 4096), (256, 1024, 4096)), strict=True))
    seconds = LAUNCH + np.maximum(2.0 * m * n * k / RATE, 2.0 * (m * k + n * k + m * n) / BANDWIDTH)
    content: dict[str, Any] = {
        "framework": ["TRTLLM"] * len(m),
        "device": ["My GPU"] * len(m),
        "gemm_dtype": ["bfloat16"] * len(m),
        "m": m,
        "n": n,
        "k": k,
        "latency": 1e3 * seconds,
    }
    path = folder / system / "gemm" / "trtllm" / "1.0" / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(arrow.table(content | changes), path)
    return folder


def test_a_new_device_gets_surfaces(surfaces: Path, tmp_path: Path) -> None:
    assert gemm_surfaces.gemm_surface("mi300x", "bfloat16") is None
    done = fit_device(tables(tmp_path / "data"), device="mi300x", system="my_gpu")
    assert done == {"attention": 0, "latent": 0, "experts": 0, "products": 1}
    found = gemm_surfaces.gemm_surface("mi300x", "bfloat16")
    assert found is not None
    assert float(found.time_s(2048, 4096, 4096)) == pytest.approx(LAUNCH + 2.0 * 2048 * 4096**2 / RATE, rel=0.2)
    assert gemm_surfaces.gemm_surface("h200-sxm-141gb", "bfloat16") is not None


def test_the_users_surface_takes_the_place_of_the_shipped_one(surfaces: Path, tmp_path: Path) -> None:
    before = gemm_surfaces.gemm_surface("l40s", "bfloat16")
    fit_device(tables(tmp_path / "data", system="l40s"), device="l40s")
    after = gemm_surfaces.gemm_surface("l40s", "bfloat16")
    assert before is not None
    assert after is not None
    assert after.num_samples == 45
    assert before.num_samples > 1000
    assert gemm_surfaces.gemm_surface("l40s", "fp8") is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"framework": ["SGLang"] * 45}, "rows of SGLang in the folder of trtllm: a copied file"),
        ({"device": ["My GPU"] * 44 + ["Another"]}, "rows of several devices: Another, My GPU"),
        ({"gemm_dtype": np.arange(45)}, "is not a text"),
        ({"m": ["bfloat16"] * 45}, "texts where numbers belong; are columns swapped"),
        ({"latency": np.full(45, 4e7)}, "another unit"),
    ],
)
def test_a_malformed_table_leaves_nothing_behind(
    surfaces: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CatalogError, match=message):
        fit_device(tables(tmp_path / "data", **changes), device="mi300x", system="my_gpu")
    assert not surfaces.exists()


def test_a_folder_without_the_device_names_what_there_is(surfaces: Path, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="--system: h100_sxm"):
        fit_device(tables(tmp_path / "data", system="h100_sxm"), device="mi300x")
    (tmp_path / "data" / "empty").mkdir()
    with pytest.raises(CatalogError, match="too few measurements"):
        fit_device(tmp_path / "data", device="mi300x", system="empty")
    with pytest.raises(CatalogError, match="holds no kernel tables"):
        fit_device(tmp_path, device="mi300x")


def test_a_broken_file_of_the_user_is_named(surfaces: Path) -> None:
    surfaces.mkdir()
    (surfaces / "gemm_surfaces.l40s.json").write_text("{")
    with pytest.raises(CatalogError, match=r"gemm_surfaces\.l40s\.json"):
        gemm_surfaces.gemm_surface("l40s", "bfloat16")
