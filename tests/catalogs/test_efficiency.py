"""The shipped curves of matrix products reach the planner's Device, with their error in the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import EvidenceLevel

MEASURED_DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "gb200", "l40s")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder: Path = tmp_path_factory.mktemp("catalog")
    return Catalog.open(str(folder / "catalog.sqlite"))


@pytest.mark.parametrize("slug", MEASURED_DEVICES)
def test_no_curve_is_faster_than_the_datasheet(catalog: Catalog, slug: str) -> None:
    device = catalog.device(slug)
    peaks = device.peak_flops_per_s
    for precision, (rate, bandwidth, saturation) in device.gemm_curves.items():
        peak = peaks[{"mxfp8": "fp8", "nvfp4": "fp4"}.get(precision, precision)]
        assert 0.3 * peak < rate < peak, precision
        assert bandwidth < device.memory_bandwidth_bytes_per_s, precision
        assert 0.0 <= saturation < 1000.0


def test_lower_precision_is_faster(catalog: Catalog) -> None:
    curves = catalog.device("b200-sxm-180gb").gemm_curves
    assert curves["bf16"][0] < curves["fp8"][0] < curves["nvfp4"][0]
    assert curves["fp16"] == curves["bf16"]
    assert curves["mxfp8"] == curves["fp8"]


def test_a_curve_says_where_it_comes_from(catalog: Catalog) -> None:
    evidence = catalog.device("h100-sxm-80gb").evidence["gemm_rate_flops_per_s.bf16"]
    assert evidence.level is EvidenceLevel.FITTED
    assert "held-out error median" in evidence.source
    assert evidence.num_samples > 1000


def test_a_device_without_measurements_has_no_curve(catalog: Catalog) -> None:
    assert catalog.device("mi355x").gemm_curves == {}


def test_a_board_with_a_lower_power_limit_multiplies_slower(catalog: Catalog) -> None:
    """500 W of 700 W on the same die: √(5/7) of the rate, the bandwidth as it is."""
    limited, full = (catalog.device(slug) for slug in ("h100-sxm-96gb", "h100-sxm-80gb"))
    assert limited.gemm_curves["bf16"][0] == pytest.approx((500 / 700) ** 0.5 * full.gemm_curves["bf16"][0], rel=1e-3)
    assert limited.gemm_curves["bf16"][1:] == full.gemm_curves["bf16"][1:]
