"""What is written is read back, and has the very keys that the consumers look for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from expert_map_reader import read_expert_map

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.emit.expert_maps import expert_map

PLACEMENT = np.array([[0, 1, 2, 3, 0, 2], [3, 1, 0, 2, 3, 1]])
PLAIN = np.array([[2, 0, 1, 3], [3, 2, 1, 0]])


@pytest.mark.parametrize("target", ["sglang", "trtllm", "vllm", "vllm-ascend"])
def test_a_map_reads_back_as_the_placement(target: str) -> None:
    text = expert_map(target, PLACEMENT, num_experts=4, num_devices=2)
    assert read_expert_map(target, text).tolist() == PLACEMENT.tolist()


def test_sglang_has_exactly_one_key() -> None:
    document = json.loads(expert_map("sglang", PLACEMENT, num_experts=4, num_devices=2))
    assert document == {"physical_to_logical_map": PLACEMENT.tolist()}


def test_trtllm_names_the_models_layers() -> None:
    document = yaml.safe_load(expert_map("trtllm", PLACEMENT, num_experts=4, num_devices=2, layer_ids=[3, 4]))
    assert document == {
        "num_slots": 6,
        "initial_global_assignments": {3: PLACEMENT[0].tolist(), 4: PLACEMENT[1].tolist()},
        "layer_updates_per_iter": 0,
    }


def test_vllm_reads_one_line_of_its_own_record_type() -> None:
    text = expert_map("vllm", PLACEMENT, num_experts=4, num_devices=2, layer_ids=[3, 4])
    record = json.loads(text)
    assert text.count("\n") == 1
    assert record["record_type"] == "eplb_initial_mapping"
    assert record["num_redundant_experts"] == 2
    assert list(record["initial_global_assignments"]) == ["0", "1"]


def test_vllm_ascend_lists_devices() -> None:
    document = json.loads(expert_map("vllm-ascend", PLACEMENT, num_experts=4, num_devices=2))
    assert document["moe_layer_count"] == 2
    assert document["layer_list"][1] == {
        "layer_id": 1,
        "device_count": 2,
        "device_list": [{"device_id": 0, "device_expert": [3, 1, 0]}, {"device_id": 1, "device_expert": [2, 3, 1]}],
    }


def test_megatron_permutations_undo_each_other() -> None:
    text = expert_map("megatron", PLAIN, num_experts=4, num_devices=2, layer_ids=[1, 2])
    assert read_expert_map("megatron", text).tolist() == PLAIN.tolist()
    for row in json.loads(text)["layers"].values():
        assert [row["new_to_old_expert"][new] for new in row["old_to_new_expert"]] == [0, 1, 2, 3]


def test_megatron_cannot_express_copies() -> None:
    with pytest.raises(CannotExpressError, match="2 redundant experts"):
        expert_map("megatron", PLACEMENT, num_experts=4, num_devices=2)


def test_an_unknown_target_and_a_wrong_number_of_layers_are_refused() -> None:
    with pytest.raises(EmitError, match="known are sglang"):
        expert_map("sgl", PLACEMENT, num_experts=4, num_devices=2)
    with pytest.raises(EmitError, match="3 layer ids"):
        expert_map("sglang", PLACEMENT, num_experts=4, num_devices=2, layer_ids=[1, 2, 3])
