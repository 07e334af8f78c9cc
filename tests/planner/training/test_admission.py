"""A search keeps to the safe bound; pins that only the typical figure lets in are admitted with a warning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, configured, problem_of

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.units import format_bytes
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.training.admission import Admission, admission, by_typical_figure
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.explanation import fit, proof
from meshplan.planner.training.resolve import calibration_for

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"nodes": [{"type": "dgx-h200", "count": 1}]},
    "workload": {"sequence_length": 8192, "global_batch_size": 64},
}
PINNED = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "micro_batch_size": 1,
    "zero_stage": 1,
    "activation_recompute": "full",
}


def between(catalog: Catalog, fixed: dict[str, Any]) -> dict[str, Any]:
    """The question with so much memory left free that the pinned plan fits by its typical figure alone."""
    priced = estimate_plan({**SPEC, "fixed": fixed}, catalog)
    typical = max(stage["typical_bytes"] for stage in priced.memory["stages"])
    limit = (typical + priced.memory["worst"]["safe_bytes"]) / 2
    free = int(priced.memory["device_memory_bytes"] - limit)
    usable = int(priced.memory["limit_bytes"] - limit)
    assert free > 0
    assert usable > 0
    return {**SPEC, "fixed": fixed, "constraints": {"memory_headroom": f"{usable} B"}}


def test_the_strictest_figure_within_the_limit_counts() -> None:
    problem = problem_of(DENSE)
    priced = price(problem, configured(problem, data_parallel=8))
    for limit, expected in (
        (priced.safe_bytes, Admission.SAFE),
        (priced.typical_bytes, Admission.TYPICAL),
        (priced.typical_bytes - 1, Admission.NONE),
    ):
        limited = replace(problem, limits=replace(problem.limits, memory_bytes=limit))
        assert admission(limited, priced) is expected
    generous = by_typical_figure(problem)
    assert price(generous, priced.config).safe_bytes == pytest.approx(priced.typical_bytes)


def test_the_typical_figure_has_no_factor_of_the_bound(catalog: Catalog) -> None:
    """Whatever the framework's own bound is made of: factors of states and of activations."""
    for framework in ("megatron", "torchtitan", "deepspeed", "torchtune", "ms-swift", "litgpt"):
        problem = replace(problem_of(DENSE), calibration=calibration_for(catalog, framework, "hopper"))
        priced = price(by_typical_figure(problem), configured(problem, data_parallel=8))
        typical = price(problem, priced.config).typical_bytes
        assert priced.safe_bytes == pytest.approx(typical), framework


def test_pins_are_admitted_by_the_typical_figure_and_the_plan_says_so(catalog: Catalog) -> None:
    spec = between(catalog, PINNED)
    plan = make_plan(spec, catalog)
    assert plan.config
    assert plan.solution["admitted_by"] == "typical figure"
    assert "typical figure alone" in fit(plan)
    assert "gradient_precision: bf16" in fit(plan)
    assert plan.memory["worst"]["safe_bytes"] > plan.memory["limit_bytes"]
    assert "that fit by the typical figure" in proof(plan)
    assert plan.alternatives[0]["safe_bytes"] == pytest.approx(plan.memory["worst"]["safe_bytes"])
    priced = estimate_plan(spec, catalog)
    assert priced.solution["status"] == "feasible"
    assert priced.solution["admitted_by"] == "typical figure"


def test_a_search_keeps_to_the_safe_bound(catalog: Catalog) -> None:
    plan = make_plan({**between(catalog, PINNED), "fixed": {}}, catalog)
    assert plan.memory["worst"]["safe_bytes"] <= plan.memory["limit_bytes"]
    assert "admitted_by" not in plan.solution
    assert "typical" not in proof(plan)


MIXED: dict[str, Any] = {
    **SPEC,
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}, {"type": "dgx-a100-40gb", "count": 1}]},
    "fixed": {
        "stages": [
            {"node_type": "dgx-h100", "num_layers": 22, "tensor_parallel": 4, "data_parallel": 2},
            {"node_type": "dgx-a100-40gb", "num_layers": 10, "tensor_parallel": 4, "data_parallel": 2},
        ]
    },
}


def test_pinned_stages_on_several_node_types_are_admitted_by_the_same_rule(catalog: Catalog) -> None:
    """Each rank by its own device's limit: the typical figure is told of where the bound is exceeded."""
    stages = estimate_plan(MIXED, catalog).memory["stages"]
    tight = max(stages, key=lambda one: one["safe_bytes"] / one["device_limit"])
    for share, status, admitted_by in ((0.5, "feasible", "typical figure"), (-0.1, "infeasible", None)):
        limit = tight["typical_bytes"] + share * (tight["safe_bytes"] - tight["typical_bytes"])
        headroom = {"memory_headroom": f"{int(tight['device_limit'] - limit)} B"}
        plan = estimate_plan({**MIXED, "constraints": headroom}, catalog)
        assert plan.memory["worst"]["node_type"] == tight["node_type"]
        assert (plan.solution["status"], plan.solution.get("admitted_by")) == (status, admitted_by)
        assert plan.solution["oom"] is (status == "infeasible")
        if admitted_by:
            assert f"{format_bytes(tight['typical_bytes'])} of {format_bytes(limit)}" in fit(plan)


def test_beyond_the_typical_figure_nothing_is_admitted(catalog: Catalog) -> None:
    spec = {**SPEC, "fixed": PINNED, "constraints": {"memory_headroom": "110 GiB"}}
    assert not make_plan(spec, catalog).config
    assert estimate_plan(spec, catalog).solution["oom"] is True
