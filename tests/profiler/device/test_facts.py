"""A measured curve reaches the planner's Device, and a slower one makes the predicted product slower."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.measurements.types import Fit, ProfileRun
from meshplan.planner.training.estimator.operators.products import gemm_curve, gemm_s
from meshplan.profiler.device.facts import gemm_facts


def test_a_measured_curve_rules_and_changes_the_prediction(tmp_path: Path) -> None:
    catalog = Catalog.open(str(tmp_path / "catalog.sqlite"))
    before = catalog.device("h100-sxm-80gb")
    rate, bandwidth, saturation = before.gemm_curves["bf16"]
    fit = Fit(
        subject="NVIDIA H100 80GB HBM3",
        model="gemm_curve.bf16",
        coefficients={
            "rate_flops_per_s": rate / 2,
            "bandwidth_bytes_per_s": bandwidth / 2,
            "inner_saturation": saturation,
        },
        residual_median=0.02,
        residual_p90=0.05,
        held_out_median=0.03,
        held_out_p90=0.06,
        num_points=40,
        source="gemm probe",
    )
    run = ProfileRun(
        run_id="abc", kind="device", host="h", environment={}, protocol={}, started_at="2026-11-21T10:00:00+00:00"
    )
    other = Fit(**{name: getattr(fit, name) for name in fit.__slots__} | {"model": "alpha_beta.host_to_device"})
    facts, bad = gemm_facts(run, [fit, other])
    assert (len(facts), bad) == (3, ())
    # On an H100 the products of fp8 that were measured first were mostly launch: 99 % off where they were left out.
    worse = Fit(**{name: getattr(fit, name) for name in fit.__slots__} | {"held_out_median": 0.99})
    assert gemm_facts(run, [worse]) == ([], ("the curve of bf16 products: half of those left out are 99% off",))
    catalog.add_facts("device", "h100-sxm-80gb", facts)

    after = catalog.device("h100-sxm-80gb")
    assert after.gemm_curves["bf16"] == (rate / 2, bandwidth / 2, saturation)
    assert after.evidence["gemm_rate_flops_per_s.bf16"].num_samples == 40
    size = np.array([4096.0])
    slow, fast = (
        gemm_s(gemm_curve(device, "bf16"), size, size, size, efficiency=1.0, element_bytes=2.0)
        for device in (after, before)
    )
    np.testing.assert_allclose(slow, 2 * fast)
