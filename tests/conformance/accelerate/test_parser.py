"""Accelerate's own launch parser and ``ParallelismConfig`` over the YAML that we emit. On demand:
``make test-launchers`` (it needs torch).
"""

from __future__ import annotations

import importlib.metadata
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from emit_cases import LLAMA_70B, QWEN3_4B, config_for, request_for
from read_back_cases import differences, num_devices, read_back

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.training import accelerate as emitter
from meshplan.planner.launch.registry import emit
from meshplan.planner.training.problem.frameworks.accelerate import ACCELERATE
from meshplan.planner.training.problem.problem import TrainingConfig

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500
PREFIX = "parallelism_config_"


class Judge:
    """Accelerate, imported once."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from accelerate.commands import launch
            from accelerate.parallelism_config import ParallelismConfig
            from accelerate.utils.launch import prepare_multi_gpu_env
        self.launch, self.parallelism, self.environment = launch, ParallelismConfig, prepare_multi_gpu_env
        self.parser = launch.launch_command_parser()

    def parse(self, text: str, folder: Path) -> tuple[Any, Any]:
        """(launch arguments, ParallelismConfig)."""
        path = folder / "accelerate_config.yaml"
        path.write_text(text)
        words = ["--config_file", str(path), "--num_machines", "2", "--machine_rank", "1"]
        words += ["--main_process_ip", "localhost", "--main_process_port", "29500", "train.py", "--lr", "1"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments, _, _ = self.launch._validate_launch_command(self.parser.parse_args(words))
            variables = self.environment(arguments)  # what the ranks will read
            names = ("tp_size", "cp_size", "dp_shard_size", "dp_replicate_size")
            sizes = {name: int(variables[f"{PREFIX}{name}".upper()]) for name in names}
            return arguments, self.parallelism(**sizes)

    def refusal(self, text: str, folder: Path) -> str | None:
        try:
            self.parse(text, folder)
        except (SystemExit, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return None


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def emitted_for(shape: ModelShape, config: TrainingConfig) -> EmittedPlan:
    return emit("accelerate", replace(request_for(shape, config), script="train.py"))


def text_in(emitted: EmittedPlan) -> str:
    return next(file.content for file in emitted.artifacts if file.path == emitter.CONFIG_FILE)


def text_of(shape: ModelShape, config: TrainingConfig) -> str:
    return text_in(emitted_for(shape, config))


def random_plans(*, seed: int, count: int) -> list[tuple[ModelShape, TrainingConfig]]:
    draw = random.Random(seed)
    found: list[tuple[ModelShape, TrainingConfig]] = []
    while len(found) < count:
        shape = draw.choice((LLAMA_70B, QWEN3_4B))
        data = draw.choice((1, 2, 4, 8))
        states = draw.random() < 0.3
        config = config_for(
            shape,
            tensor_parallel=draw.choice((1, 1, 2, 4, 8)),
            sequence_parallel=False,
            context_parallel=draw.choice((1, 1, 2)),
            data_parallel=data,
            data_parallel_shard=draw.choice((data, max(1, data // 2))),
            zero_stage=draw.choice((2, 3)),
            precision=draw.choice(("bf16", "fp16")),
            activation_recompute=draw.choice(("none", "full")),
            parameter_offload=states,
            optimizer_offload=states,
            activation_offload=draw.random() < 0.3,
        )
        if config.world_size % 8 == 0 and not ACCELERATE.broken(shape, config):
            found.append((shape, config))
    return found


def test_version_is_the_one_that_the_rules_name() -> None:
    assert importlib.metadata.version("accelerate") == ACCELERATE.version == emitter.VERIFIED.version


def test_random_legal_plans_are_accepted_and_read_back(judge: Judge, tmp_path: Path) -> None:
    for shape, config in random_plans(seed=5, count=NUM_RANDOM_PLANS):
        emitted = emitted_for(shape, config)
        arguments, sizes = judge.parse(text_in(emitted), tmp_path)
        assert sizes.total_size == config.world_size == int(arguments.num_processes)
        assert (sizes.tp_size, sizes.cp_size) == (config.tensor_parallel, config.context_parallel)
        assert sizes.dp_shard_size * sizes.dp_replicate_size == config.data_parallel
        assert arguments.use_fsdp
        assert int(arguments.fsdp_version) == 2
        assert arguments.fsdp_reshard_after_forward is (config.zero_stage == 3)
        assert arguments.fsdp_activation_checkpointing is (config.activation_recompute == "full")
        # The parser's own default is the text "false".
        assert str(arguments.fsdp_offload_params).lower() == str(config.parameter_offload).lower()
        kept = arguments.fsdp_activation_checkpointing_offload
        assert str(kept).lower() == str(config.activation_offload).lower()
        assert arguments.mixed_precision == config.precision
        assert arguments.training_script_args == ["--lr", "1"]
        assert num_devices(emitted) == config.world_size
        reading = read_back("accelerate", emitted, tmp_path)
        assert reading.problems == []
        assert reading.launch.num_devices == config.world_size
        assert differences(reading, config, handed=False) == {}


PLAIN = config_for(LLAMA_70B, data_parallel=8, zero_stage=3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("distributed_type: FSDP", "distributed_type: FSDQ"),
        ("mixed_precision: bf16", "mixed_precision: bf17"),
        ("use_cpu: false", "use_cpus: false"),
        ("dp_shard_size: 8", "dp_shard_size: 0"),
        ("dp_shard_size: 8", "dp_shard_size: eight"),
    ],
)
def test_mutations_are_refused(judge: Judge, tmp_path: Path, old: str, new: str) -> None:
    text = text_of(LLAMA_70B, PLAIN)
    assert judge.refusal(text, tmp_path) is None
    assert old in text
    assert judge.refusal(text.replace(old, new), tmp_path) is not None


@pytest.mark.parametrize(("old", "new"), [("tp_size: 1", "tp_sice: 1"), ("fsdp_version: 2", "fsdp_version: two")])
def test_holes_of_the_parser(judge: Judge, tmp_path: Path, old: str, new: str) -> None:
    """What it accepts silently; the next test compares our keys with its own instead."""
    text = text_of(LLAMA_70B, PLAIN)
    assert old in text
    assert judge.refusal(text.replace(old, new), tmp_path) is None


def test_every_key_is_one_of_the_parser(judge: Judge) -> None:
    known = {word.lstrip("-") for word in judge.parser._option_string_actions}
    for shape, config in random_plans(seed=3, count=40):
        words = yaml.safe_load(text_of(shape, config))
        for section in ("fsdp_config", "parallelism_config"):
            assert words[section].keys() <= known
