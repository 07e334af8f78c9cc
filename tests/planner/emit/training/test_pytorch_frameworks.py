"""TorchTitan, DeepSpeed and Accelerate: goldens, refusals, and launch scripts run with stand-ins.

Their parsers need torch and judge the same files in tests/conformance (``make test-launchers``).
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from emit_cases import LLAMA_70B, MIXTRAL, QWEN3_4B, config_for, plan_for, request_for
from hypothesis import given, settings
from hypothesis import strategies as st
from read_back_cases import num_devices

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.training import accelerate, deepspeed, torchtitan
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import TARGETS, emit, target_names
from meshplan.planner.launch.support import support_matrix
from meshplan.planner.training.explanation import assumptions
from meshplan.planner.training.problem.frameworks.rules import ONE_BY_ONE
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import TrainingConfig

NOTE = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$NOTES/argv"
env > "$NOTES/env"
"""
FILES = {
    "torchtitan": torchtitan.ARGUMENTS_FILE,
    "deepspeed": deepspeed.CONFIG_FILE,
    "accelerate": accelerate.CONFIG_FILE,
}
CONFIGS = {
    "torchtitan": config_for(
        LLAMA_70B, tensor_parallel=8, pipeline_parallel=4, data_parallel=2, zero_stage=3, sequence_length=8192
    ),
    "deepspeed": config_for(LLAMA_70B, data_parallel=64, zero_stage=3, activation_recompute="full"),
    "accelerate": config_for(LLAMA_70B, context_parallel=2, data_parallel=32, data_parallel_shard=8, zero_stage=3),
}
CHOICES = {
    "tensor_parallel": st.sampled_from((1, 2, 4, 8)),
    "pipeline_parallel": st.sampled_from((1, 1, 2, 4)),
    "context_parallel": st.sampled_from((1, 1, 2)),
    "data_parallel": st.sampled_from((1, 2, 3, 4, 8)),
    "zero_stage": st.integers(0, 3),
    "sequence_parallel": st.booleans(),
    "micro_batch_size": st.sampled_from((1, 2)),
    "num_microbatches": st.sampled_from((4, 8)),
}


def request(target: str, config: TrainingConfig | None = None, **fields_: Any) -> TrainingRequest:
    script = "" if target == "torchtitan" else "train.py"
    return replace(request_for(LLAMA_70B, config or CONFIGS[target], **fields_), script=script)


def words(target: str, emitted: Any) -> Any:
    """The framework's file as data."""
    text = next(file.content for file in emitted.artifacts if file.path == FILES[target])
    if target == "deepspeed":
        return json.loads(text)
    return yaml.safe_load(text) if target == "accelerate" else [w for w in text.split("\n") if w and w[0] != "#"]


@pytest.mark.parametrize("target", FILES)
def test_golden(target: str, golden) -> None:
    for artifact in emit(target, request(target)).artifacts:
        if artifact.path.name in {"README.md", "launch.sh", str(FILES[target])}:
            golden(f"emit/{target}/{artifact.path}", artifact.content)


@pytest.mark.parametrize("target", FILES)
def test_readers_are_told_that_operators_run_one_by_one(target: str) -> None:
    asked = request(target)
    plan = replace(asked.plan, spec={**asked.plan.spec, "constraints": {"target": target}})
    is_eager = FRAMEWORKS[target].is_eager
    assert (ONE_BY_ONE in emit(target, asked).notes) == (ONE_BY_ONE in set(assumptions(plan))) == is_eager


@pytest.mark.parametrize("target", FILES)
@given(choices=st.fixed_dictionaries(CHOICES))
@settings(max_examples=120, deadline=None)
def test_legal_plans_are_emitted_and_others_are_refused(target: str, choices: dict[str, Any]) -> None:
    config = config_for(LLAMA_70B, **choices)
    rules = FRAMEWORKS[target]
    asked = request(target, config, hosts=())
    unequal_hosts = target == "accelerate" and config.world_size > 8 and config.world_size % 8 != 0
    if rules.broken(LLAMA_70B, config) or not rules.splits_as(config.layers_per_chunk) or unequal_hosts:
        with pytest.raises(CannotExpressError, match=r"Nearest it can: \w"):
            emit(target, asked)
        return
    assert num_devices(emit(target, asked)) == config.world_size


@pytest.mark.parametrize(
    ("target", "choices", "what"),
    [
        ("torchtitan", {"zero_stage": 1}, "zero_stage 1 has no word"),
        ("torchtitan", {"zero_stage": 3, "precision": "fp16"}, "precision 'fp16'"),
        (
            "torchtitan",
            {"zero_stage": 3, "pipeline_parallel": 2, "layers_per_chunk": (30, 50)},
            "chunks of 30, 50 layers",
        ),
        ("torchtitan", {"zero_stage": 3, "tensor_parallel": 16}, "num_key_value_heads"),
        ("torchtitan", {"zero_stage": 0, "context_parallel": 2}, "always shards"),
        ("deepspeed", {"pipeline_parallel": 2}, "stages are built in code"),
        ("deepspeed", {"context_parallel": 2, "zero_stage": 1}, "Ulysses"),
        ("deepspeed", {"activation_recompute": "selective"}, "activation_recompute 'selective'"),
        ("deepspeed", {"tensor_parallel": 2}, "sequence_parallel must be off"),
        ("deepspeed", {"tensor_parallel": 2, "sequence_parallel": False, "zero_stage": 3}, "AutoTP"),
        ("deepspeed", {"data_parallel": 8, "data_parallel_shard": 4}, "sharded over all"),
        ("accelerate", {"pipeline_parallel": 2, "zero_stage": 3}, "FSDP2 has no stages"),
        ("accelerate", {"zero_stage": 1}, "zero_stage 2 or 3"),
        ("accelerate", {"zero_stage": 3, "data_parallel": 4, "data_parallel_shard": 1}, "data_parallel_shard > 1"),
        ("accelerate", {"zero_stage": 3, "data_parallel": 12}, "unequal numbers of processes"),
    ],
)
def test_what_cannot_be_expressed_is_refused(target: str, choices: dict[str, Any], what: str) -> None:
    with pytest.raises(CannotExpressError) as refusal:
        emit(target, request(target, config_for(LLAMA_70B, **choices), hosts=()))
    assert what in str(refusal.value)


def test_models_without_a_configuration_are_refused() -> None:
    for shape in (MIXTRAL, QWEN3_4B):
        with pytest.raises(CannotExpressError, match="registered models only"):
            emit("torchtitan", request_for(shape, config_for(shape, zero_stage=3)))


class Host:
    """One host with a torchrun and an accelerate that only take notes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("torchrun", "accelerate"):
            (root / name).write_text(NOTE)
            (root / name).chmod(0o755)
        (root / "train.py").write_text("")

    def run(self, target: str, asked: TrainingRequest, *extra: str) -> list[str]:
        write_artifacts(emit(target, asked).artifacts, self.root / "out")
        environment = {
            "PATH": f"{self.root}:{os.environ['PATH']}",
            "NOTES": str(self.root),
            "MESHPLAN_SKIP_CHECKS": "1",
        }
        command = [str(self.root / "out" / "launch.sh"), "0", *extra]
        done = subprocess.run(command, env=environment, cwd=self.root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return (self.root / "argv").read_text().splitlines()

    @property
    def env(self) -> str:
        return (self.root / "env").read_text()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_torchtitan_finds_the_module_with_its_float8_layers(host: Host) -> None:
    """The release has no flag for float8: a module beside the script has it, and Python finds it there."""
    narrow = request_for(LLAMA_70B, replace(CONFIGS["torchtitan"], precision="fp8"))
    argv = host.run("torchtitan", narrow)
    words = ["torchtitan.train", "--module", "meshplan_torchtitan", "--config", "llama3_70b_float8"]
    assert argv[argv.index("-m") + 1 :][:5] == words
    assert f"PYTHONPATH={host.root}/out" in host.env
    text = (host.root / "out" / "meshplan_torchtitan.py").read_text()
    assert "def llama3_70b_float8()" in text
    compile(text, "meshplan_torchtitan.py", "exec")
    files = {str(file.path) for file in emit("torchtitan", request("torchtitan")).artifacts}
    assert "meshplan_torchtitan.py" not in files


def test_torchtitan_flags_come_before_the_sub_command(host: Host) -> None:
    argv = host.run("torchtitan", request("torchtitan"), "--debug.seed", "1")
    assert argv[argv.index("-m") + 1 :][:5] == ["torchtitan.train", "--module", "llama3", "--config", "llama3_70b"]
    assert argv[-5:] == ["--training.steps", "100", "--debug.seed", "1", "activation-checkpoint:none"]
    planned = [word for flag in torchtitan.arguments(request("torchtitan")) for word in flag]
    start = argv.index("--module")
    assert argv[start : start + len(planned) - 1] == planned[:-1]


def test_deepspeed_script_gets_its_files(host: Host) -> None:
    argv = host.run("deepspeed", request("deepspeed"), "--lr", "1")
    assert argv[-3:] == [str(host.root / "train.py"), "--lr", "1"]
    assert f"DEEPSPEED_CONFIG={host.root}/out/deepspeed_config.json\n" in host.env
    assert f"MESHPLAN_CONFIG={host.root}/out/training_config.json\n" in host.env


def test_accelerate_starts_itself(host: Host) -> None:
    argv = host.run("accelerate", request("accelerate"), "--lr", "1")
    assert argv[:3] == ["launch", "--config_file", f"{host.root}/out/accelerate_config.yaml"]
    said = dict(zip(argv[1:-3:2], argv[2:-3:2], strict=True))
    assert (said["--num_machines"], said["--num_processes"], said["--machine_rank"]) == ("8", "64", "0")
    assert argv[-3:] == [str(host.root / "train.py"), "--lr", "1"]


def test_accelerate_cannot_place_single_ranks() -> None:
    config = config_for(LLAMA_70B, data_parallel=4, zero_stage=3)
    plan = plan_for(LLAMA_70B, config, rank_table=((0, 0), (1, 0), (0, 1), (1, 1)))
    for target, framework in (("slurm", "accelerate"), ("accelerate", None)):
        with pytest.raises(CannotExpressError, match="returns to a host"):
            emit(target, request("accelerate", config, plan=plan, hosts=()), framework=framework)


@pytest.mark.parametrize("framework", FILES)
@pytest.mark.parametrize("target", ["slurm", "jobset", "job", "trainjob", "skypilot"])
def test_every_orchestrator_wraps_every_framework(target: str, framework: str) -> None:
    emitted = emit(target, request(framework, hosts=()), framework=framework)
    text = "".join(file.content for file in emitted.artifacts)
    assert str(FILES[framework]) in text
    assert request(framework, hosts=()).plan.digest in text


def test_every_target_has_rows_in_the_support_matrix() -> None:
    rows = support_matrix()
    assert {row["target"] for row in rows} == set(target_names())
    assert all(row["verified_by"] and (row["expressed_by"] or row["refuses"]) for row in rows)
    known = {field.name for field in fields(TrainingConfig)} | {
        "rank_table",
        "hosts",
        "configuration",
        "sequence_lengths",
        "recurrent layers",
    }
    trains = {target.name for target in TARGETS if not target.serves}
    assert {row["feature"] for row in rows if row["target"] in trains} <= known
    assert all(row["parser_verified"] for row in rows if row["target"] in {"vllm", "sglang"})
