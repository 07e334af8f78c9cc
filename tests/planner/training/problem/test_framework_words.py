"""What a framework has no word for is neither planned nor accepted in a spec."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.service import emit_plan, make_plan

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}]},
    "workload": {"sequence_length": 8192, "global_batch_size": 64},
}


@pytest.mark.parametrize("target", ["deepspeed", "accelerate", "torchtitan"])
def test_a_plan_for_a_framework_can_be_emitted(catalog: Catalog, target: str) -> None:
    plan = make_plan({**SPEC, "constraints": {"target": target}}, catalog)
    script = "" if target == "torchtitan" else "train.py"  # torchtitan brings its own trainer
    assert emit_plan(plan, target, catalog, script=script).artifacts


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
def test_tensor_parallelism_is_found_without_sequence_parallelism(catalog: Catalog, target: str) -> None:
    spec = {**SPEC, "constraints": {"target": target}, "fixed": {"tensor_parallel": 2, "zero_stage": 1}}
    config = make_plan(spec, catalog).config
    if config:  # a plan, not an infeasible answer
        assert config["sequence_parallel"] is False


@pytest.mark.parametrize(
    ("target", "change", "path"),
    [
        ("torchtitan", {"workload": {**SPEC["workload"], "precision": "fp16"}}, r"workload\.precision"),
        ("deepspeed", {"fixed": {"activation_recompute": "selective"}}, r"fixed\.activation_recompute"),
        (
            "torchtitan",
            {"fixed": {"activation_recompute": "block"}},
            r"none, selective, full, not block",
        ),
    ],
)
def test_a_choice_without_a_word_is_a_spec_error(
    catalog: Catalog, target: str, change: dict[str, Any], path: str
) -> None:
    with pytest.raises(SpecError, match=path):
        make_plan({**SPEC, **change, "constraints": {"target": target}}, catalog)
