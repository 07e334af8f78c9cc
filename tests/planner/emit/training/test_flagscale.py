"""FlagScale's argument rules, and that emitted files keep them and say what the plan says."""

from __future__ import annotations

import json

import pytest
import yaml

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.training.flagscale import broken_rules
from meshplan.planner.service import emit_plan, estimate_plan

SPEC = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-a100-40gb", "count": 2}, {"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 128, "precision": "bf16"},
}


def stage(node_type: str, layers: int, tensor: int, data: int, **more: object) -> dict[str, object]:
    return {
        "node_type": node_type,
        "num_layers": layers,
        "tensor_parallel": tensor,
        "data_parallel": data,
        **more,
    }


def planned(catalog: Catalog, *stages: dict[str, object]) -> Plan:
    return estimate_plan({**SPEC, "fixed": {"stages": list(stages)}}, catalog)


def test_files_keep_the_rules_and_say_the_plan(catalog: Catalog) -> None:
    plan = planned(
        catalog,
        stage("dgx-a100-40gb", 7, 4, 2, micro_batch_size=2),
        stage("dgx-a100-40gb", 7, 4, 2, micro_batch_size=2, activation_recompute="full"),
        stage("dgx-h100", 18, 2, 4, micro_batch_size=1),
    )
    files = {str(one.path): one.content for one in emit_plan(plan, "flagscale", catalog).artifacts}
    system = yaml.safe_load(files["train/plan.yaml"])["system"]
    hetero = system["hetero"]
    assert hetero["hetero_process_meshes"] == [4, 1, 1, 2, 2, 2, 1, 1, 4, 1]
    assert hetero["hetero_pipeline_layer_split"] == [7, 7, 18]
    assert system["pipeline_model_parallel_size"] == 3
    assert system["recompute_granularity_per_stage_micro_batch"] == ["[1,32,0]", "[1,32,1]", "[1,32,0]"]
    assert not broken_rules(
        hetero["hetero_process_meshes"],
        layer_split=hetero["hetero_pipeline_layer_split"],
        device_types=hetero["hetero_device_types"],
        micro_batch_size=system["micro_batch_size"],
        num_layers=system["num_layers"],
        ties_embeddings=not system["untie_embeddings_and_output_weights"],
        partial_reduce=hetero["use_partial_reduce_for_shared_embedding"],
    )
    hosts = [line for line in files["hostfile"].splitlines() if not line.startswith("#")]
    assert [line.split("type=")[1] for line in hosts] == ["dgx-a100-40gb"] * 2 + ["dgx-h100"]
    # torchrun drops the node rank under its default rendezvous: ranks would not fill the meshes in these lines' order.
    assert yaml.safe_load(files["config.yaml"])["experiment"]["runner"]["rdzv_backend"] == "static"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"process_meshes": [1, 1, 1, 4, 1, 1, 1, 1, 3, 1]}, "multiple"),
        ({"process_meshes": [1, 2, 1, 4, 1, 1, 1, 1, 4, 1]}, "context"),
        ({"layer_split": [4, 5]}, "layers"),
        ({"device_types": ["a"]}, "device types"),
        ({"process_meshes": [2, 1, 1, 4, 1, 1, 1, 1, 4, 1], "ties_embeddings": True}, "tensor parallelism"),
        ({"process_meshes": [1, 1, 1, 4, 1, 1, 1, 1, 2, 1], "ties_embeddings": True}, "partial_reduce"),
    ],
)
def test_each_rule_is_told(change: dict[str, object], said: str) -> None:
    right = {
        "process_meshes": [1, 1, 1, 4, 1, 1, 1, 1, 4, 1],
        "layer_split": [4, 4],
        "device_types": ["a", "b"],
        "micro_batch_size": 1,
        "num_layers": 8,
        "ties_embeddings": False,
        "partial_reduce": False,
    }
    assert not broken_rules(**right)
    assert said in "; ".join(broken_rules(**{**right, **change}))


def test_megatron_takes_one_set_of_degrees_with_uneven_layers_and_refuses_others(catalog: Catalog) -> None:
    alike = planned(catalog, stage("dgx-a100-40gb", 14, 2, 4), stage("dgx-h100", 18, 2, 4))
    files = {str(one.path): one.content for one in emit_plan(alike, "megatron", catalog).artifacts}
    assert "--pipeline-model-parallel-layout Et*14|t*18L" in files["megatron_args.txt"]
    unlike = planned(catalog, stage("dgx-a100-40gb", 14, 4, 4), stage("dgx-h100", 18, 2, 4))
    with pytest.raises(CannotExpressError, match="tensor_parallel 4, 2"):
        emit_plan(unlike, "megatron", catalog)


def test_a_plan_with_stages_reads_back_as_it_was(catalog: Catalog) -> None:
    plan = planned(catalog, stage("dgx-a100-40gb", 14, 2, 4), stage("dgx-h100", 18, 2, 4))
    again = Plan.from_document(json.loads(json.dumps(plan.to_document())))
    assert again.digest == plan.digest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "say every stage"),
        ({"fixed": {"stages": [stage("dgx-h100", 18, 2, 4)]}}, "18 layers"),
        ({"fixed": {"stages": [stage("dgx-b200", 32, 2, 4)]}}, "dgx-b200"),
        ({"fixed": {"stages": [stage("dgx-h100", 32, 8, 4)]}}, "32 devices"),
        ({"fixed": {"stages": [stage("dgx-h100", 16, 1, 4), stage("dgx-a100-40gb", 16, 1, 8)]}}, "the same"),
        ({"objective": "num_devices"}, "throughput"),
        (
            {"cluster": {"nodes": [{"type": "dgx-h100", "count": 1}, {"type": "gcp-a3-highgpu-8g", "count": 1}]}},
            "between",
        ),
        ({"cluster": {"nodes": [{"type": "dgx-h100", "count": 1}, {"type": "lambda-8x-h100", "count": 1}]}}, "network"),
    ],
)
def test_what_is_not_planned_is_said(catalog: Catalog, change: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        estimate_plan({**SPEC, **change}, catalog)
