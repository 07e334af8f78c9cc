"""Axolotl's own schema over the YAML that we emit. On demand: ``make test-launchers`` (it needs torch).

The schema takes unknown keys: ours are compared with the names of its fields.
"""

from __future__ import annotations

import importlib.metadata
import random
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from emit_cases import LLAMA_70B, config_for
from finetuning_cases import random_tuning, tuning

from meshplan.planner.emit.training import axolotl as emitter
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.training.problem.frameworks.axolotl import AXOLOTL

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 200
ON_H100 = {"bf16": True, "fp8": True, "n_gpu": 8, "n_node": 1, "compute_capability": "sm_90"}


class Judge:
    """Axolotl's schema, imported once; it looks for ring-flash-attn, which wants a GPU, where sequences are split."""

    def __init__(self) -> None:
        sys.modules.setdefault("ring_flash_attn", types.ModuleType("ring_flash_attn"))
        from axolotl.utils.schemas.config import AxolotlConfigWCapabilities
        from axolotl.utils.schemas.fsdp import FSDPConfig

        self.schema, self.fsdp = AxolotlConfigWCapabilities, FSDPConfig

    def read(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The values that Axolotl holds after its checks."""
        said = {**document, "capabilities": ON_H100, "env_capabilities": {"torch_version": "2.11.0"}}
        found: dict[str, Any] = self.schema(**said).model_dump()
        return found

    def refuses(self, document: Mapping[str, Any]) -> bool:
        try:
            self.read(document)
        except ValueError:  # pydantic's errors are of this kind
            return True
        return False


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def document(request: TrainingRequest) -> dict[str, Any]:
    """What Axolotl reads: the emitted text."""
    text = next(file.content for file in emitter.job(request).files if file.path == emitter.CONFIG_FILE)
    return dict(yaml.safe_load(text))


def test_version_is_the_one_that_the_rules_name() -> None:
    assert importlib.metadata.version("axolotl") == AXOLOTL.version == emitter.VERIFIED.version


def test_random_legal_plans_are_accepted_unchanged(judge: Judge) -> None:
    draw = random.Random(3)
    for _ in range(NUM_RANDOM_PLANS):
        said = document(random_tuning(draw, "axolotl"))
        held = judge.read(said)
        nested = {"fsdp_config", "datasets"}
        assert {key: held[key] for key in said if key not in nested} == {
            key: value for key, value in said.items() if key not in nested
        }
        for key, value in said.get("fsdp_config", {}).items():
            assert held["fsdp_config"][key] == value
        assert (held["fsdp_config"] is not None) == ("fsdp_config" in said)


def test_offload_of_what_adapters_keep_is_accepted(judge: Judge) -> None:
    """Both keys: the schema refuses offload without the other, which the trainer then does not do."""
    layers = LLAMA_70B.num_hidden_layers
    said = document(tuning(config_for(LLAMA_70B, zero_stage=0, activation_offload_num_layers=layers)))
    held = judge.read(said)
    assert (held["activation_offloading"], held["gradient_checkpointing"]) == (True, True)
    assert judge.refuses({**said, "gradient_checkpointing": False})


SPLIT = tuning(
    config_for(LLAMA_70B, data_parallel=2, context_parallel=4, context_parallel_style="ring-plain", zero_stage=3)
)


def test_packed_sequences_are_split_in_order(judge: Judge) -> None:
    """The exchange that the plan counts is the one that Axolotl chooses; more than one sequence it refuses."""
    said = document(SPLIT)
    assert judge.read(said)["ring_attn_func"].value == "varlen_llama3"
    assert judge.refuses({**said, "micro_batch_size": 2})


@pytest.mark.parametrize("phase", ["lora", "sft", "qlora"])
def test_what_the_first_rank_alone_may_read(judge: Judge, phase: str) -> None:
    said = document(tuning(phase=phase, precision="bf16"))
    loaded_once = {**said, "fsdp_config": {**said["fsdp_config"], "cpu_ram_efficient_loading": True}}
    assert judge.refuses(loaded_once) == (phase == "qlora")


def test_every_key_is_one_of_the_schema(judge: Judge) -> None:
    draw = random.Random(4)
    for _ in range(40):
        said = document(random_tuning(draw, "axolotl"))
        assert said.keys() <= judge.schema.model_fields.keys()
        assert said.get("fsdp_config", {}).keys() <= judge.fsdp.model_fields.keys()


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": "one"},
        {"sequence_len": [4096]},
        {"lora_r": "sixteen"},
        {"lora_modules_to_save": "embed_tokens"},
        {"gradient_checkpointing": "sometimes"},
        {"datasets": None},
        {"adapter": None, "load_in_4bit": True},
        {"adapter": "qlora", "load_in_4bit": False},
        {"fsdp_config": {"auto_wrap_policy": "SOME_WRAP"}},
    ],
    ids=str,
)
def test_mutations_are_refused(judge: Judge, change: Mapping[str, Any]) -> None:
    said = document(tuning())
    assert not judge.refuses(said)
    assert judge.refuses({**said, **change})


@pytest.mark.parametrize("change", [{"micro_batch_sice": 1}, {"fp16": True}], ids=str)
def test_holes_of_the_schema(judge: Judge, change: Mapping[str, Any]) -> None:
    """Unknown keys are taken silently (another test compares ours with its names), and two precisions at once."""
    assert not judge.refuses({**document(tuning()), **change})
