"""Axolotl and torchtune: goldens, refusals, what is read back, and launch scripts run with stand-ins.

Their own schema and builders judge the same files in tests/conformance/finetuning (``make test-launchers``).
"""

from __future__ import annotations

import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from emit_cases import LLAMA_70B, MIXTRAL, config_for
from finetuning_cases import ALONE, SHARDED, random_tuning, tuning
from read_back_cases import differences, num_devices, read_back

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.training import axolotl, torchtune
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit
from meshplan.planner.training.problem.frameworks.rules import ONE_BY_ONE

FILES = {"axolotl": axolotl.CONFIG_FILE, "torchtune": torchtune.CONFIG_FILE}
NOTE = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$NOTES/argv"
"""


def document(target: str, request: TrainingRequest) -> dict[str, Any]:
    text = next(file.content for file in emit(target, request).artifacts if file.path == FILES[target])
    return dict(yaml.safe_load(text))


AT_ONCE = config_for(LLAMA_70B, data_parallel=16, zero_stage=3, num_microbatches=1, optimizer_in_backward=True)


@pytest.mark.parametrize("target", FILES)
def test_golden(target: str, golden) -> None:
    for artifact in emit(target, tuning()).artifacts:
        if artifact.path.name in {"README.md", "launch.sh", str(FILES[target])}:
            golden(f"emit/{target}/{artifact.path}", artifact.content)


@pytest.mark.parametrize("target", FILES)
def test_what_is_emitted_is_read_back(target: str, tmp_path: Path) -> None:
    """Every choice, what is trained and of which rank; nothing is left unread."""
    draw = random.Random(7)
    for _ in range(25):
        request = random_tuning(draw, target)
        emitted = emit(target, request)
        assert num_devices(emitted) == request.config.world_size
        reading = read_back(target, emitted, tmp_path)
        assert (reading.problems, reading.unread) == ([], [])
        assert differences(reading, request.config) == {}
        workload = request.plan.spec["workload"]
        assert reading.values["phase"] == workload["phase"]
        if workload["phase"] != "sft":
            assert reading.values["lora_rank"] == workload["lora_rank"]
            usual = "all-linear" if workload["phase"] == "qlora" else "attention"
            assert reading.values["lora_targets"] == workload.get("lora_targets", usual)


def test_axolotls_readers_are_told_that_operators_run_one_by_one() -> None:
    assert ONE_BY_ONE in emit("axolotl", tuning()).notes


def test_axolotl_trains_the_adapters_that_the_plan_counts() -> None:
    lora = document("axolotl", tuning())
    assert (lora["adapter"], lora["lora_r"], lora["base_model"]) == ("lora", 16, "meta-llama/Llama-3.1-70B")
    assert lora["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    narrow = document("axolotl", tuning(phase="qlora", precision="bf16"))
    assert (narrow["adapter"], narrow["load_in_4bit"], narrow["lora_target_linear"]) == ("qlora", True, True)
    assert document("axolotl", tuning(lora_targets="all-linear"))["lora_target_linear"] is True
    whole = document("axolotl", tuning(trains_vocabulary=True))
    assert whole["lora_modules_to_save"] == ["embed_tokens", "lm_head"]
    every = document("axolotl", tuning(phase="sft", lora_rank=None))
    assert not [key for key in every if key.startswith(("lora", "adapter", "load_in"))]
    assert document("axolotl", tuning(phase="pretraining"))["reinit_weights"] is True


@pytest.mark.parametrize(
    ("phase", "is_said"), [("lora", True), ("sft", True), ("qlora", False), ("pretraining", False)]
)
def test_axolotl_reads_a_large_checkpoint_once_a_host(phase: str, is_said: bool) -> None:
    """Its schema refuses that for weights in four bits, and new weights are in no checkpoint."""
    precision = {"precision": "bf16"} if phase == "qlora" else {}
    sharded = document("axolotl", tuning(phase=phase, **precision))["fsdp_config"]
    assert sharded.get("cpu_ram_efficient_loading", False) is is_said
    assert "fsdp_config" not in document("axolotl", tuning(ALONE))


def split(**choices: Any) -> TrainingRequest:
    """A LoRA plan for Axolotl whose sequences lie on four devices each."""
    usual = {"data_parallel": 2, "context_parallel": 4, "context_parallel_style": "ring-plain", "zero_stage": 3}
    return tuning(config_for(LLAMA_70B, sequence_length=65536, **{**usual, **choices}))


def test_axolotl_splits_sequences() -> None:
    """Its name for them; the package that it needs is named."""
    written = document("axolotl", split())
    assert (written["context_parallel_size"], written["dp_shard_size"], written["dp_replicate_size"]) == (4, 2, 1)
    assert "context_parallel_size" not in document("axolotl", tuning())
    assert any("axolotl[ring-flash-attn]" in note for note in emit("axolotl", split()).notes)


@pytest.mark.parametrize(("sequence_length", "is_told"), [(1024, False), (131072, True)])
def test_axolotls_example_data_are_told_to_be_few(sequence_length: int, is_told: bool) -> None:
    config = config_for(LLAMA_70B, data_parallel=16, zero_stage=3, num_microbatches=1, sequence_length=sequence_length)
    notes = emit("axolotl", tuning(config)).notes
    assert any("set DATA before you measure" in note for note in notes) is is_told


def test_torchtune_trains_the_adapters_that_the_plan_counts() -> None:
    lora = document("torchtune", tuning())["model"]
    assert lora["_component_"] == "torchtune.models.llama3_1.lora_llama3_1_70b"
    assert lora["lora_attn_modules"] == ["q_proj", "k_proj", "v_proj", "output_proj"]
    assert (lora["apply_lora_to_mlp"], lora["lora_rank"]) == (False, 16)
    narrow = document("torchtune", tuning(phase="qlora", precision="bf16"))["model"]
    assert (narrow["_component_"].split(".")[-1], narrow["apply_lora_to_mlp"]) == ("qlora_llama3_1_70b", True)
    every = document("torchtune", tuning(phase="sft"))["model"]
    assert every == {"_component_": "torchtune.models.llama3_1.llama3_1_70b"}


@pytest.mark.parametrize(
    ("target", "request_", "what"),
    [
        ("axolotl", tuning(config_for(LLAMA_70B, data_parallel=8, zero_stage=1)), "zero_stage 0 (replicas)"),
        ("axolotl", tuning(config_for(LLAMA_70B, tensor_parallel=2, zero_stage=0)), "tensor_parallel must be 1"),
        ("axolotl", tuning(phase="qlora", frozen_weights="gptq"), "GPTQ"),
        ("axolotl", split(micro_batch_size=2), "micro_batch_size 1"),
        ("axolotl", split(zero_stage=0, data_parallel_shard=1), "zero_stage 2 or 3"),
        ("axolotl", split(context_parallel_style="ring"), "context_parallel_style must be ring-plain"),
        ("axolotl", tuning(replace(SHARDED, activation_offload=True)), "activation_offload"),
        ("torchtune", tuning(phase="pretraining"), "start from a checkpoint"),
        ("torchtune", tuning(trains_vocabulary=True), "embedding and LM head"),
        ("torchtune", tuning(config_for(LLAMA_70B, data_parallel=8, zero_stage=0)), "several devices always shard"),
        ("torchtune", tuning(config_for(LLAMA_70B, zero_stage=3)), "several devices always shard"),
        ("torchtune", tuning(replace(SHARDED, precision="fp16")), "precision 'fp16'"),
        ("torchtune", tuning(AT_ONCE), "of adapters"),
        ("torchtune", tuning(replace(SHARDED, optimizer_in_backward=True)), "one micro-batch"),
        ("axolotl", tuning(replace(SHARDED, loss="chunked")), "made with its own alone"),
        (
            "torchtune",
            tuning(config_for(MIXTRAL, data_parallel=8, zero_stage=3), shape=MIXTRAL),
            "builds its own models",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(target: str, request_: TrainingRequest, what: str) -> None:
    with pytest.raises(CannotExpressError) as refusal:
        emit(target, request_)
    assert what in str(refusal.value)


class Host:
    """One host with a torchrun that takes notes, a python that knows where recipes lie, and a checkpoint."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "torchrun").write_text(NOTE)
        (root / "python3").write_text("#!/usr/bin/env bash\necho /site/recipes/of_torchtune.py\n")
        for name in ("torchrun", "python3"):
            (root / name).chmod(0o755)
        (root / "weights").mkdir()
        for part in (1, 2):
            (root / "weights" / f"model-0000{part}-of-00002.safetensors").write_text("")

    def run(self, target: str, request: TrainingRequest, **variables: str) -> list[str] | str:
        """The arguments of torchrun; what is said where the script stops."""
        write_artifacts(emit(target, request).artifacts, self.root / "out", force=True)
        environment = {
            "PATH": f"{self.root}:{os.environ['PATH']}",
            "NOTES": str(self.root),
            "MESHPLAN_SKIP_CHECKS": "1",
            "MASTER_ADDR": "localhost",
            **variables,
        }
        command = [str(self.root / "out" / "launch.sh"), "0", "last=1"]
        done = subprocess.run(command, env=environment, cwd=self.root, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else (self.root / "argv").read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_axolotl_is_started_with_its_file(host: Host) -> None:
    argv = host.run("axolotl", tuning(), LR="2e-5", DATA="data/my file.jsonl", DATA_TYPE="completion")
    start = argv.index("-m")
    assert argv[start:] == [
        *("-m", "axolotl.cli.train", f"{host.root}/out/axolotl.yaml"),
        '--datasets=[{"path": "data/my file.jsonl", "type": "completion"}]',
        *("--learning_rate=2e-5", "last=1"),
    ]
    assert "no quotes" in host.run("axolotl", tuning(), DATA='"}]; x')


def test_axolotl_asks_for_a_model_that_is_not_published(host: Host) -> None:
    unknown = tuning(source="")
    assert "set MODEL" in host.run("axolotl", unknown)
    assert "--base_model=/weights" in host.run("axolotl", unknown, MODEL="/weights")


def test_torchtune_is_started_with_the_checkpoints_files(host: Host) -> None:
    weights = str(host.root / "weights")
    argv = host.run("torchtune", tuning(), MODEL=weights)
    start = argv.index("/site/recipes/of_torchtune.py")
    assert argv[start + 1 :] == [
        *("--config", f"{host.root}/out/torchtune.yaml"),
        f"checkpointer.checkpoint_dir={weights}",
        "checkpointer.checkpoint_files=[model-00001-of-00002.safetensors,model-00002-of-00002.safetensors]",
        f"tokenizer.path={weights}/original/tokenizer.model",
        "last=1",
    ]
    assert "set MODEL" in host.run("torchtune", tuning())
    assert "no *.safetensors" in host.run("torchtune", tuning(), MODEL="/nowhere")


@pytest.mark.parametrize(
    ("config", "phase", "recipe"),
    [
        (SHARDED, "lora", "lora_finetune_distributed"),
        (SHARDED, "sft", "full_finetune_distributed"),
        (ALONE, "qlora", "lora_finetune_single_device"),
        (ALONE, "sft", "full_finetune_single_device"),
    ],
)
def test_one_device_has_a_recipe_of_its_own(config: Any, phase: str, recipe: str) -> None:
    assert torchtune.recipe_of(tuning(config, phase=phase)) == recipe
    files = {str(file.path): file.content for file in emit("torchtune", tuning(config, phase=phase)).artifacts}
    assert f'"{recipe}.py"' in files["launch.sh"]


@pytest.mark.parametrize("framework", FILES)
@pytest.mark.parametrize("target", ["slurm", "jobset", "job", "trainjob", "skypilot"])
def test_every_orchestrator_wraps_them(target: str, framework: str) -> None:
    text = "".join(file.content for file in emit(target, tuning(), framework=framework).artifacts)
    assert str(FILES[framework]) in text
