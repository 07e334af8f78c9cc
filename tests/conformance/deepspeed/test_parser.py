"""DeepSpeed's own ``DeepSpeedConfig`` over the JSON that we emit. On demand: ``make test-launchers``.

It needs torch, which is why this is not in the default suite. The number of ranks is the only thing that is replaced.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
import os
import random
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emit_cases import GPT2_XL, LLAMA_70B, QWEN3_4B, config_for, request_for
from read_back_cases import differences, num_devices, read_back

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training import deepspeed as emitter
from meshplan.planner.launch.registry import emit
from meshplan.planner.training.problem.frameworks.deepspeed import DEEPSPEED
from meshplan.planner.training.problem.problem import TrainingConfig

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    os.environ["DS_BUILD_OPS"] = "0"
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime import config
    before = config.dist
    yield config
    config.dist = before
    logging.disable(logging.NOTSET)


def parse(module: Any, words: dict[str, Any], world_size: int) -> Any:
    module.dist = types.SimpleNamespace(
        get_world_size=lambda *_: world_size, get_rank=lambda *_: 0, is_initialized=lambda: True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module.DeepSpeedConfig(copy.deepcopy(words))


def refusal(module: Any, words: dict[str, Any], world_size: int) -> str | None:
    try:
        parse(module, words, world_size)
    except (AssertionError, ValueError, TypeError) as error:
        return str(error) or type(error).__name__
    return None


def random_plans(*, seed: int, count: int) -> list[tuple[ModelShape, TrainingConfig]]:
    draw = random.Random(seed)
    found: list[tuple[ModelShape, TrainingConfig]] = []
    while len(found) < count:
        shape = draw.choice((LLAMA_70B, QWEN3_4B, GPT2_XL))
        offloads = draw.random() < 0.3, draw.random() < 0.3
        config = config_for(
            shape,
            tensor_parallel=draw.choice((1, 1, 2, 4, 8)),
            sequence_parallel=False,
            data_parallel=draw.choice((1, 2, 3, 8, 64)),
            zero_stage=draw.choice((0, 1, 2, 3)),
            micro_batch_size=draw.choice((1, 2, 3)),
            num_microbatches=draw.choice((1, 4, 7)),
            precision=draw.choice(("bf16", "fp16")),
            activation_recompute=draw.choice(("none", "full")),
            optimizer_offload=offloads[0],
            optimizer_offload_percent=draw.choice((7, 50, 100)) if offloads[0] else 100,
            parameter_offload=offloads[1],
            offload_to="nvme" if any(offloads) and draw.random() < 0.3 else "host",
            activation_offload=draw.random() < 0.3,
            zero_hpz_partition_size=draw.choice((1, 1, 2, 4)),
        )
        if not DEEPSPEED.broken(shape, config):
            found.append((shape, config))
    return found


def test_version_is_the_one_that_the_rules_name() -> None:
    assert importlib.metadata.version("deepspeed") == DEEPSPEED.version == emitter.VERIFIED.version


def test_random_legal_plans_are_accepted_and_read_back(module: Any, tmp_path: Path) -> None:
    for shape, config in random_plans(seed=5, count=NUM_RANDOM_PLANS):
        request = replace(request_for(shape, config), script="train.py")
        emitted = emit("deepspeed", request)
        files = {str(file.path): file.content for file in emitted.artifacts}
        words = json.loads(files["deepspeed_config.json"])
        parsed = parse(module, words, config.world_size)
        assert parsed.zero_optimization_stage == config.zero_stage
        assert parsed.zero_config.zero_hpz_partition_size == config.zero_hpz_partition_size
        device = {"host": "cpu", "nvme": "nvme"}[config.offload_to]
        for offload, planned in (
            (parsed.zero_config.offload_optimizer, config.optimizer_offload),
            (parsed.zero_config.offload_param, config.parameter_offload),
        ):
            assert (offload is not None and offload.device == device) is planned
            assert not planned or (str(offload.nvme_path) == emitter.NVME_PATH) is (device == "nvme")
        if config.optimizer_offload:
            ratio = parsed.zero_config.offload_optimizer.ratio
            assert ratio == pytest.approx(config.optimizer_offload_percent / 100)
            # What steps on the device are whole groups of the rank's parameters, rounded down: int((1 − ratio)·groups).
            groups = shape.num_parameters / config.data_parallel_shard / parsed.zero_config.sub_group_size
            assert ratio == 1.0 or groups == pytest.approx(20, rel=0.01)
        assert parsed.activation_checkpointing_config.cpu_checkpointing is config.activation_offload
        assert parsed.gradient_accumulation_steps == config.num_microbatches
        assert parsed.train_micro_batch_size_per_gpu == config.micro_batch_size
        assert parsed.train_batch_size == config.global_batch_size * config.tensor_parallel
        assert max(1, parsed.tensor_parallel_config.autotp_size) == config.tensor_parallel
        assert parsed.bfloat16_config.enabled is (config.precision == "bf16")
        assert num_devices(emitted) == config.world_size
        reading = read_back("deepspeed", emitted, tmp_path)
        assert reading.problems == []
        assert differences(reading, config, handed=False) == {}
        assert reading.values["zero_stage"] == parsed.zero_optimization_stage
        assert reading.values["tensor_parallel"] == max(1, parsed.tensor_parallel_config.autotp_size)


WORDS = emitter.configuration(request_for(LLAMA_70B, config_for(LLAMA_70B, data_parallel=8, zero_stage=2)))


@pytest.mark.parametrize(
    "change",
    [
        {"train_batch_size": WORDS["train_batch_size"] + 1},
        {"gradient_accumulation_steps": 3},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "moon"}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"zero_optimization": {"stage": 2, "overlap_com": True}},
        {"zero_optimization": {"stage": "two"}},
        {"tensor_parallel": {"autotp_size": "two"}},
        {"fp16": {"enabled": True}},  # beside bf16
    ],
    ids=str,
)
def test_mutations_are_refused(module: Any, change: dict[str, Any]) -> None:
    assert refusal(module, WORDS, 8) is None
    assert refusal(module, {**WORDS, **change}, 8) is not None


def test_another_number_of_ranks_is_refused(module: Any) -> None:
    assert "world_size" in str(refusal(module, WORDS, 9))


def test_unknown_top_level_keys_pass_so_ours_are_compared(module: Any) -> None:
    """The hole in the parser; it is closed by comparing our keys with the constants of its source."""
    assert refusal(module, {**WORDS, "train_batch_sice": 1}, 8) is None
    from deepspeed.runtime import constants
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT

    known = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    known |= {"zero_optimization", "tensor_parallel", ACT_CHKPT}
    said = {
        key
        for shape, config in random_plans(seed=9, count=40)
        for key in emitter.configuration(request_for(shape, config))
    }
    assert said <= known
