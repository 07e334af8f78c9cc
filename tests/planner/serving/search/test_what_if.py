"""Shapes that no engine runs: bounds, their labels, and when they say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.what_if import WhatIf, what_if


def problem(catalog: Catalog, **changes: Any) -> ServingProblem:
    spec = {
        "kind": "serving",
        "model": "deepseek-v3",
        "cluster": {"nodes": [{"type": "dgx-h200", "count": 4}]},
        "workload": {"input_length": 4000, "output_length": 1000},
        "slo": {"tpot_p95_s": 0.05},
        **changes,
    }
    return resolve_serving(read_serving_spec(spec), catalog, Path()).problem


def shape(name: str, asked: ServingProblem) -> WhatIf | None:
    return next((one for one in what_if(asked) if name in one.name), None)


def test_disaggregated_attention_meets_the_slo_within_the_devices(catalog: Catalog) -> None:
    asked = problem(catalog)
    split = shape("attention and FFN", asked)
    assert split is not None
    assert split.tpot_s <= 0.05
    assert split.num_devices <= 32
    assert split.tokens_per_s_per_device == pytest.approx(split.num_running / split.tpot_s / split.num_devices)


def test_a_looser_slo_never_lowers_the_bound(catalog: Catalog) -> None:
    found = [shape("attention and FFN", problem(catalog, slo={"tpot_p95_s": limit})) for limit in (0.05, 0.1)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].tokens_per_s_per_device >= found[0].tokens_per_s_per_device


def test_an_slo_that_no_shape_meets_leaves_none(catalog: Catalog) -> None:
    assert what_if(problem(catalog, slo={"tpot_p95_s": 1e-4})) == []


def test_experts_move_to_host_memory_only_where_they_must(catalog: Catalog) -> None:
    small = {"nodes": [{"type": "dgx-h100", "count": 1}]}
    tight = shape("host memory", problem(catalog, cluster=small, slo={}))
    roomy = shape("host memory", problem(catalog, cluster={"nodes": [{"type": "dgx-h200", "count": 1}]}, slo={}))
    assert tight is not None
    assert "of the experts on devices" in tight.label
    assert roomy is None


def test_a_dense_model_has_no_experts_to_move(catalog: Catalog) -> None:
    assert shape("host memory", problem(catalog, model="llama-3.1-70b")) is None
