"""The training script of our own: which plans it takes, and what it asks of the Trainer (stand-ins, no torch)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from emit_cases import LLAMA_70B, config_for, plan_for, request_for

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.emit.training import train
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch.registry import emit

SHARDED = config_for(LLAMA_70B, data_parallel=16, zero_stage=3, micro_batch_size=2, activation_recompute="full")


def asked(config: Any = SHARDED, **workload: Any) -> TrainingRequest:
    plan = plan_for(LLAMA_70B, config)
    spec = {**plan.spec, "workload": {"sequence_length": 4096, **workload}}
    return replace(request_for(LLAMA_70B, config, hosts=()), plan=replace(plan, spec=spec))


def choices(request: TrainingRequest, target: str = "accelerate") -> dict[str, Any]:
    files = {str(file.path): file.content for file in emit(target, request).artifacts}
    return dict(json.loads(files["training_config.json"]))


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
def test_no_script_is_needed(target: str) -> None:
    """Where data parallelism is all that the plan needs, a script comes with the files."""
    files = {str(file.path): file.content for file in emit(target, asked()).artifacts}
    assert files["train.py"] == Path(train.__file__).read_text(encoding="utf-8")
    assert "script=$here/train.py" in files["launch.sh"]
    assert "`MODEL`" in files["README.md"]


def test_a_script_of_the_users_is_taken_as_before() -> None:
    files = {str(file.path) for file in emit("deepspeed", replace(asked(), script="mine.py")).artifacts}
    assert "train.py" not in files


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("deepspeed", config_for(LLAMA_70B, tensor_parallel=2, sequence_parallel=False, data_parallel=8)),
        ("accelerate", config_for(LLAMA_70B, context_parallel=2, data_parallel=8, zero_stage=3)),
    ],
)
def test_other_degrees_ask_for_a_script(target: str, config: Any) -> None:
    with pytest.raises(EmitError, match=r"expresses data parallelism only.*--script train.py"):
        emit(target, asked(config))


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
@pytest.mark.parametrize("phase", ["lora", "qlora"])
def test_a_trainer_of_every_weight_refuses_adapters(target: str, phase: str) -> None:
    """Files that train every weight of a plan for adapters would need far more memory than it counted on."""
    with pytest.raises(CannotExpressError, match=r"adapters.*target axolotl or torchtune; or accelerate or deepspeed"):
        emit(target, asked(phase=phase, lora_rank=16))


def test_fine_tuning_starts_from_a_checkpoint() -> None:
    """Every weight, but not from random ones."""
    files = {str(file.path): file.content for file in emit("megatron", asked(phase="sft")).artifacts}
    assert "--finetune" in files["launch.sh"]
    assert "${LOAD_DIR:?" in files["launch.sh"]
    files = {str(file.path): file.content for file in emit("megatron", asked()).artifacts}
    assert "--finetune" not in files["launch.sh"]


def test_arguments_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = choices(asked())
    for name in ("FSDP_ACTIVATION_CHECKPOINTING", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    said = train.training_arguments(document)
    assert "accelerator_config" not in said
    ranks = document["config"]["world_size"]
    batch = said["per_device_train_batch_size"] * said["gradient_accumulation_steps"] * ranks
    assert batch == document["config"]["global_batch_size"] == 256
    assert said["gradient_checkpointing"]
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    assert "gradient_checkpointing" not in train.training_arguments(document)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    synced = train.training_arguments(document)["accelerator_config"]["gradient_accumulation_kwargs"]
    assert synced == {"sync_each_batch": True}
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    offloaded = asked(replace(SHARDED, optimizer_offload=True))
    files = {str(file.path): file.content for file in emit("deepspeed", offloaded).artifacts}
    (tmp_path / "deepspeed_config.json").write_text(files["deepspeed_config.json"])
    monkeypatch.setenv("DEEPSPEED_CONFIG", str(tmp_path / "deepspeed_config.json"))
    arguments = train.training_arguments(document)
    made = arguments["deepspeed"]["optimizer"]
    assert made["type"] == "AdamW"
    # The Trainer stops where its arguments say otherwise (transformers, integrations/deepspeed.py).
    pairs = (("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("eps", "adam_epsilon"))
    assert all(made["params"][name] == arguments[field] for name, field in pairs)
    assert made["params"]["betas"] == [arguments["adam_beta1"], arguments["adam_beta2"]]


def test_another_number_of_processes_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training_config.json").write_text(json.dumps(choices(asked())))
    monkeypatch.setenv("MESHPLAN_CONFIG", str(tmp_path / "training_config.json"))
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(SystemExit, match="for 16 processes, 8 were started"):
        train.read_choices()


class Stand:
    """In place of torch and transformers: what is asked of them."""

    bfloat16, float16, float32 = "bfloat16", "float16", "float32"

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.AutoModelForCausalLM = self.AutoModelForSeq2SeqLM = self.AutoConfig = self
        self.config = SimpleNamespace(use_cache=True)

    def from_pretrained(self, name: str, **options: Any) -> Any:
        self.asked.append((name, options))
        return self

    def from_config(self, _: Any, **options: Any) -> Any:
        self.asked.append(("random weights", options))
        return self


@pytest.mark.parametrize("phase", ["pretraining", "sft"])
def test_the_first_rank_says_what_takes_long_before_it_does(
    phase: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand = Stand()
    monkeypatch.setitem(sys.modules, "torch", stand)
    monkeypatch.setitem(sys.modules, "transformers", stand)
    monkeypatch.setenv("MODEL", "org/model")
    document = choices(asked(phase=phase))
    monkeypatch.setenv("RANK", "1")
    train.load_model(document)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    train.load_model(document)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"{LLAMA_70B.num_parameters / 1e9:.3g} billion parameters" in said
    assert ("random weights" in said) is (phase == "pretraining")


@pytest.mark.parametrize("phase", ["pretraining", "sft"])
def test_trained_weights_are_kept_in_32_bits(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published configuration names bfloat16, and transformers 5 would make the weights that AdamW updates in it."""
    stand = Stand()
    monkeypatch.setitem(sys.modules, "torch", stand)
    monkeypatch.setitem(sys.modules, "transformers", stand)
    monkeypatch.setenv("MODEL", "org/model")
    train.load_model(choices(asked(phase=phase)))
    assert stand.asked[-1][1]["dtype"] == "float32"


def test_adapters_are_handed_over() -> None:
    document = choices(asked(phase="qlora", lora_rank=32))
    assert document["phase"] == "qlora"
    assert document["adapters"]["lora_rank"] == 32
    assert document["adapters"]["frozen_weights"]["quant_type"] == "nf4"
    assert choices(asked())["phase"] == "pretraining"


def test_readme_tells_which_variables_are_needed() -> None:
    """MASTER_ADDR has no default where several hosts have no names; on one host it has."""

    def text(request: TrainingRequest, name: str) -> str:
        return {str(file.path): file.content for file in emit("megatron", request).artifacts}[name]

    assert "| `MASTER_ADDR` | REQUIRED |" in text(asked(), "README.md")
    assert "${MASTER_ADDR:?" in text(asked(), "launch.sh")
    alone = asked(config_for(LLAMA_70B, data_parallel=8))
    assert "| `MASTER_ADDR` | `127.0.0.1` |" in text(alone, "README.md")
    assert "MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}" in text(alone, "launch.sh")
    named = replace(asked(), hosts=("left", "right"))
    assert "| `MASTER_ADDR` | `left` |" in text(named, "README.md")
