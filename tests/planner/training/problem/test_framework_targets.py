"""A plan for each framework obeys its rules, and can be launched by it under every orchestrator."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, EmitError, SpecError
from meshplan.planner.service import emit_plan, make_plan
from meshplan.planner.training.service import resolve

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}]},
    "workload": {"sequence_length": 8192, "global_batch_size": 64},
}
SCRIPTS = {"torchtitan": "", "deepspeed": "train.py", "accelerate": "train.py"}


@pytest.mark.parametrize("target", SCRIPTS)
def test_a_plan_for_the_framework_can_be_launched(target: str, catalog: Catalog) -> None:
    plan = make_plan({**SPEC, "constraints": {"target": target}}, catalog)
    assert plan.solution["status"] == "optimal"
    script = SCRIPTS[target]
    for launcher in (target, "slurm", "jobset", "job", "trainjob", "skypilot"):
        emitted = emit_plan(plan, launcher, catalog, script=script)  # the framework is that of the plan
        assert emitted.parser_verified is not None
        assert all(plan.digest in file.content for file in emitted.artifacts if file.path.name == "README.md")


@pytest.mark.parametrize(("target", "degree"), [("deepspeed", "tensor_parallel"), ("accelerate", "context_parallel")])
def test_degrees_beyond_our_script_ask_for_one(target: str, degree: str, catalog: Catalog) -> None:
    plan = make_plan({**SPEC, "constraints": {"target": target}, "fixed": {degree: 2}}, catalog)
    with pytest.raises(EmitError, match=rf"{degree} 2.*--script train\.py"):
        emit_plan(plan, target, catalog)


def test_a_plan_for_another_framework_is_refused_with_the_reason(catalog: Catalog) -> None:
    choices = {"pipeline_parallel": 4, "tensor_parallel": 2}
    plan = make_plan({**SPEC, "fixed": choices}, catalog)
    with pytest.raises(CannotExpressError, match="stages are built in code"):
        emit_plan(plan, "deepspeed", catalog, script="train.py")


@pytest.mark.parametrize(
    ("model", "precision", "said"),
    [
        ("llama-3.1-405b", "bf16", r"workload\.precision: torchtitan: .*converts the linear layers to float8"),
        ("qwen3-30b-a3b", "fp8", r"the converter of experts .* was not tried"),
    ],
)
def test_torchtitan_names_what_it_cannot_multiply_in(model: str, precision: str, said: str, catalog: Catalog) -> None:
    """Files of a plan in bf16 for the 405B would have trained in float8, unsaid."""
    question = {
        **SPEC,
        "model": model,
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 32}]},
        "workload": {"sequence_length": 8192, "global_batch_size": 256, "precision": precision},
        "constraints": {"target": "torchtitan"},
    }
    with pytest.raises(SpecError, match=said):
        make_plan(question, catalog)


def test_float8_of_torchtitan_scales_rows(catalog: Catalog) -> None:
    """Its only recipe: every product waits for the scales of its rows, which Megatron's does not."""
    workload = {**SPEC["workload"], "precision": "fp8"}
    question = {**SPEC, "model": "llama-3.1-8b", "workload": workload, "constraints": {"target": "torchtitan"}}
    assert resolve(question, catalog).problem.workload.scales_rows
    assert not resolve({**question, "constraints": {"target": "megatron"}}, catalog).problem.workload.scales_rows
    wide = {**question, "workload": SPEC["workload"]}
    assert not resolve(wide, catalog).problem.workload.scales_rows


def test_models_that_torchtitan_does_not_know_have_no_plan(catalog: Catalog) -> None:
    # Degrees are pinned because larger clusters are tried in vain, each with all of its candidates.
    pinned = {"tensor_parallel": 2, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 1}
    question = {**SPEC, "model": "mixtral-8x7b", "constraints": {"target": "torchtitan"}, "fixed": pinned}
    plan = make_plan(question, catalog)
    assert plan.solution["status"] == "infeasible"
    assert any("registered models only" in str(row) for row in plan.rejected)
