"""A machine's own measurements become factors of its operators: from a profile run to the planner's Device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.efficiency import GEMM_RATE_SHARE, KERNEL_S, MEMORY_SHARE, OPERATOR_CLASSES, SCALE_FIELD
from meshplan.catalogs.efficiency import PREFILL_ATTENTION_SHARE as ATTENTION_SHARE
from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.facts import Fact
from meshplan.catalogs.hardware import Device, Evidence, EvidenceLevel
from meshplan.catalogs.measurements.types import Measurement, Metric, ProfileRun, Spread
from meshplan.catalogs.surfaces.gemm import gemm_surface
from meshplan.catalogs.surfaces.operator_scales import (
    _work,
    measured_s,
    operator_scales,
    predicted_s,
)
from meshplan.planner.serving.estimator import operators
from meshplan.profiler.device.facts import scale_facts
from meshplan.profiler.device.numpy_backend import NumpyBackend
from meshplan.profiler.device.probes import Effort, cases

POINTS = (
    ("gemm", "bf16", {"m": 4096, "n": 4096, "k": 4096}),
    ("gemm", "bf16", {"m": 8192, "n": 8192, "k": 8192}),
    ("gemm", "bf16", {"m": 1, "n": 512, "k": 512}),  # too short to count
    ("attention_prefill", "bf16", {"batch": 1, "heads": 32, "kv_heads": 8, "tokens": 16384, "head_dim": 128}),
    ("attention_decode", "bf16", {"batch": 32, "heads": 32, "kv_heads": 8, "context": 16384, "head_dim": 128}),
    ("memory_copy", "fp32", {"size_bytes": 2**30}),
    ("elementwise", "fp32", {"size_bytes": 2**30}),
)
CLASSES = {"gemm.bf16", "attention_prefill", "attention_decode", "memory"}


def measured(probe: str, dtype: str, parameters: dict[str, int], rate: float) -> Measurement:
    return Measurement(
        probe=probe,
        device="GPU",
        dtype=dtype,
        parameters=parameters,
        metric=Metric.FLOPS_PER_S if "gemm" in probe or "prefill" in probe else Metric.BYTES_PER_S,
        spread=Spread(value=rate, low=rate, high=rate, n=5),
        source="test",
        host="h",
        measured_at="2026-11-21T10:00:00+00:00",
    )


def as_predicted(device: Device, *, slower: dict[str, float] | None = None) -> list[Measurement]:
    """A run of the points that takes exactly the predicted time, some probes ``slower`` by a factor."""
    found = []
    for probe, dtype, parameters in POINTS:
        unit = measured(probe, dtype, parameters, 1.0)
        predicted = predicted_s(device, unit)
        assert predicted is not None
        rate = _work(unit) / predicted / (slower or {}).get(probe, 1.0)
        found.append(measured(probe, dtype, parameters, rate))
    return found


@pytest.mark.parametrize("slug", ["h200-sxm-141gb", "b200-sxm-180gb", "mi300x"])
def test_a_machine_that_is_as_predicted_has_scales_of_one(catalog: Catalog, slug: str) -> None:
    device = catalog.device(slug)
    scales = operator_scales(device, as_predicted(device))
    assert set(scales) == CLASSES
    for scale in scales.values():
        assert scale.value == pytest.approx(1.0)
    assert scales["gemm.bf16"].n == 2
    assert scales["memory"].n == 2


def test_ten_times_slower_attention_is_a_scale_of_ten_and_nothing_else_moves(catalog: Catalog) -> None:
    device = catalog.device("h200-sxm-141gb")
    scales = operator_scales(device, as_predicted(device, slower={"attention_decode": 10.0}))
    assert scales["attention_decode"].value == pytest.approx(10.0)
    assert scales["attention_prefill"].value == pytest.approx(1.0)
    assert scales["gemm.bf16"].value == pytest.approx(1.0)


@pytest.mark.parametrize("slug", ["h200-sxm-141gb", "gh200", "a100-sxm-40gb", "h100-pcie-80gb", "mi300x"])
def test_a_machine_that_is_as_the_estimator_prices_it_has_scales_near_one(catalog: Catalog, slug: str) -> None:
    device = catalog.device(slug)
    priced = operators.Operators(device=device, engine="any")
    size, batch, context = np.array([8192.0]), np.array([32.0]), np.array([16383.0])
    seconds = {
        "gemm": priced.gemm_s("bf16", size, 8192, 8192),
        "attention_decode": priced.decode_attention_s(batch, context, heads=32, kv_heads=8, head_dim=128, kv_bytes=2.0),
        "memory_copy": priced.memory_op_s(np.array([2.0 * 2**30]), kernels=1),
    }
    run = []
    for probe, dtype, parameters in POINTS[1:]:
        if probe in seconds:
            work = _work(measured(probe, dtype, parameters, 1.0))
            run.append(measured(probe, dtype, parameters, work / float(seconds[probe][0])))
    scales = operator_scales(device, run, measured_as=catalog.device(operators.measured_as(device)))
    assert scales["gemm.bf16"].value == pytest.approx(1.0, rel=0.05)
    assert scales["attention_decode"].value == pytest.approx(1.0, rel=0.05)
    assert scales["memory"].value == pytest.approx(1.0, rel=1e-6)


def test_an_fp8_product_is_compared_without_the_kernels_that_quantise(catalog: Catalog) -> None:
    """The surface's products were timed with them, 10 to 15 µs on Hopper; those of the probe are quantised before."""
    device = catalog.device("h200-sxm-141gb")
    surface = gemm_surface(device.slug, "fp8")
    assert surface is not None
    for m, least in ((64, 4096**2 / device.memory_bandwidth_bytes_per_s), (8192, 2.0 * 8192 * 4096**2 / 1.979e15)):
        with_kernels = float(surface.time_s(m, 4096, 4096))
        predicted = predicted_s(device, measured("gemm", "fp8", {"m": m, "n": 4096, "k": 4096}, 1e15))
        assert predicted is not None
        assert least < predicted < with_kernels
        assert with_kernels - predicted <= surface.base[3]


def test_the_spread_is_that_of_the_points(catalog: Catalog) -> None:
    device = catalog.device("h200-sxm-141gb")
    run = as_predicted(device)
    run[0] = replace(run[0], spread=Spread(value=run[0].spread.value / 2, low=1.0, high=1e18, n=5))
    scale = operator_scales(device, run)["gemm.bf16"]
    assert (scale.low, scale.value, scale.high) == pytest.approx((1.1, 1.5, 1.9))


def test_other_probes_say_nothing(catalog: Catalog) -> None:
    device = catalog.device("h200-sxm-141gb")
    other = measured("disk_read", "fp32", {"size_bytes": 2**30}, 1e9)
    unknown = measured("gemm", "fp32", {"m": 4096, "n": 4096, "k": 4096}, 1e13)
    launch = replace(other, probe="kernel_launch", metric=Metric.LATENCY_S, parameters={})
    assert operator_scales(replace(device, peak_flops_per_s={"bf16": 1e15}), [other, unknown, launch]) == {}


def test_work_is_counted_as_the_probes_count_it(tmp_path: Path) -> None:
    effort = Effort(is_quick=False, is_accelerator=False, scratch=tmp_path)
    probes = ("gemm", "attention_prefill", "attention_decode", "memory_copy", "elementwise")
    checked = 0
    for case in cases(NumpyBackend(), effort, probes):
        measurement = measured(case.probe, case.dtype or "", dict(case.parameters), 2.0)
        measurement = replace(measurement, metric=case.metric)
        assert measured_s(measurement) == pytest.approx(case.work / 2.0)
        checked += 1
    assert checked > 20


def test_the_roofline_is_the_serving_estimators() -> None:
    assert operators.KERNEL_S == KERNEL_S
    assert operators.GEMM_RATE_SHARE == GEMM_RATE_SHARE
    assert operators.MEMORY_SHARE == MEMORY_SHARE
    assert operators.PREFILL_ATTENTION_SHARE == ATTENTION_SHARE


def test_from_a_run_to_the_planners_device(tmp_path: Path) -> None:
    catalog = Catalog.open(str(tmp_path / "catalog.sqlite"))
    device = catalog.device("h200-sxm-141gb")
    assert device.operator_scales == {}
    run = ProfileRun(
        run_id="abc", kind="device", host="h", environment={}, protocol={}, started_at="2026-11-21T10:00:00+00:00"
    )
    slower = {"gemm": 1.25, "attention_decode": 10.0, "memory_copy": 1e4, "elementwise": 1e4}
    scales = operator_scales(device, as_predicted(device, slower=slower))

    without, absurd = scale_facts(run, scales, with_attention=False)
    assert [fact.field for fact in without] == [f"{SCALE_FIELD}.gemm.bf16"]
    assert len(absurd) == 1
    assert "memory: 1e+04 times" in absurd[0]
    with_attention, _ = scale_facts(run, scales, with_attention=True)
    catalog.add_facts("device", device.slug, with_attention)

    after = catalog.device(device.slug)
    assert after.operator_scales == {
        "gemm.bf16": pytest.approx(1.25),
        "attention_prefill": pytest.approx(1.0),
        "attention_decode": pytest.approx(10.0),
    }
    assert after.evidence[f"{SCALE_FIELD}.attention_decode"].level is EvidenceLevel.MEASURED
    assert after.memory_bandwidth_bytes_per_s == device.memory_bandwidth_bytes_per_s


def test_a_scale_out_of_range_is_refused(tmp_path: Path) -> None:
    catalog = Catalog.open(str(tmp_path / "catalog.sqlite"))
    evidence = Evidence(level=EvidenceLevel.MEASURED, source="test", date="2026-11-21")
    for field, value in ((f"{SCALE_FIELD}.memory", 1e6), (f"{SCALE_FIELD}.gemv", 1.0)):
        with pytest.raises(CatalogError, match="operator_time_scale"):
            catalog.add_facts("device", "h200-sxm-141gb", [Fact(field=field, value=value, evidence=evidence)])
    assert catalog.device("h200-sxm-141gb").operator_scales == {}


def test_every_class_is_a_field_of_a_device(tmp_path: Path) -> None:
    catalog = Catalog.open(str(tmp_path / "catalog.sqlite"))
    evidence = Evidence(level=EvidenceLevel.IMPORTED, source="test", date="2026-11-21")
    facts = [Fact(field=f"{SCALE_FIELD}.{name}", value=2.0, evidence=evidence) for name in OPERATOR_CLASSES]
    catalog.add_facts("device", "l40s", facts)
    assert catalog.device("l40s").operator_scales == dict.fromkeys(OPERATOR_CLASSES, 2.0)
