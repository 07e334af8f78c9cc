"""Plans whose stages have degrees of their own, for launchers with one set of degrees and for scripts of the user's."""

from __future__ import annotations

import json

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.service import emit_plan, estimate_plan

TYPES = ["dgx-a100-40gb", "dgx-h100"]
STAGES: list[dict[str, object]] = [
    {"node_type": TYPES[0], "num_layers": 14, "tensor_parallel": 4, "data_parallel": 2, "micro_batch_size": 2},
    {"node_type": TYPES[1], "num_layers": 18, "tensor_parallel": 2, "data_parallel": 4, "micro_batch_size": 1},
]
UNLIKE = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": name, "count": 1} for name in TYPES]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64, "precision": "bf16"},
    "constraints": {"target": "any"},
    "fixed": {"stages": STAGES},
}


@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_a_script_of_the_users_gets_every_stage(catalog: Catalog, target: str) -> None:
    plan = estimate_plan(UNLIKE, catalog)
    framework = None if target == "torchrun" else "torchrun"
    emitted = emit_plan(plan, target, catalog, script="train.py", framework=framework)
    files = {one.path.name: one.content for one in emitted.artifacts}
    assert json.loads(files["training_config.json"])["config"] == plan.config
    assert len(json.loads(files["rank_table.json"])["rank_table"]) == 16
    assert "stage 1" in files["README.md"]
    assert "tensor_parallel 2, data_parallel 4" in files["README.md"]


def test_the_refusal_names_who_takes_stages(catalog: Catalog) -> None:
    with pytest.raises(CannotExpressError, match=r"flagscale.*torchrun with a script of yours"):
        emit_plan(estimate_plan(UNLIKE, catalog), "accelerate", catalog, script="train.py")


def test_files_of_a_reworded_plan_name_the_plan_that_is_stored(catalog: Catalog) -> None:
    stages = [{**stage, "tensor_parallel": 4, "data_parallel": 2, "micro_batch_size": 1} for stage in STAGES]
    plan = estimate_plan({**UNLIKE, "fixed": {"stages": stages}}, catalog)
    emitted = emit_plan(plan, "torchrun", catalog, script="train.py")
    stamped = {one.path.name: one.content for one in emitted.artifacts}["launch.sh"]
    assert f"meshplan plan {plan.plan_id}" in stamped
