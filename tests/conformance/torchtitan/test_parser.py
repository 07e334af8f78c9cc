"""TorchTitan's own parser, its ``ParallelDims`` and its models' checks over what we emit. On demand:
``make test-launchers``.
"""

from __future__ import annotations

import importlib.metadata
import random
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emit_cases import LLAMA_70B, QWEN3_4B, config_for, request_for
from read_back_cases import differences, num_devices, read_back
from torchtitan_judge import Judge

from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.planner.emit.training import torchtitan as emitter
from meshplan.planner.launch.registry import emit
from meshplan.planner.training.problem.frameworks.torchtitan import ALWAYS_FLOAT8, TORCHTITAN, TORCHTITAN_CONFIGS
from meshplan.planner.training.problem.layers import splits_by_weights
from meshplan.planner.training.problem.problem import TrainingConfig

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500
LLAMA_8B = replace(
    LLAMA_70B,
    slug="llama-3.1-8b",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
)
QWEN3_14B = replace(
    QWEN3_4B,
    slug="qwen3-14b",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=40,
    tie_word_embeddings=False,
)
QWEN3_30B_A3B = replace(
    QWEN3_4B,
    slug="qwen3-30b-a3b",
    num_hidden_layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    num_key_value_heads=4,
    tie_word_embeddings=False,
    moe=MixtureOfExperts(
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_size=768,
        shared_intermediate_size=0,
        moe_layers=(True,) * 48,
    ),
)
LLAMA_405B = replace(
    LLAMA_70B,
    slug="llama-3.1-405b",
    num_hidden_layers=126,
    hidden_size=16384,
    intermediate_size=53248,
    num_attention_heads=128,
)
SHAPES = (LLAMA_8B, LLAMA_70B, QWEN3_14B, QWEN3_30B_A3B)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def words(shape: ModelShape, config: TrainingConfig) -> list[str]:
    return [word for flag in emitter.arguments(request_for(shape, config)) for word in flag]


def random_plans(*, seed: int, count: int) -> list[tuple[ModelShape, TrainingConfig]]:
    draw = random.Random(seed)
    found: list[tuple[ModelShape, TrainingConfig]] = []
    while len(found) < count:
        shape = draw.choice(SHAPES)
        stages, virtual = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 2))
        choices: dict[str, Any] = {
            "tensor_parallel": draw.choice((1, 2, 4, 8)),
            "pipeline_parallel": stages,
            "virtual_pipeline_stages": virtual,
            "context_parallel": draw.choice((1, 1, 2, 4)),
            "data_parallel": draw.choice((1, 2, 3, 4, 8)),
            "zero_stage": draw.choice((0, 2, 3)),
            "activation_recompute": draw.choice(("none", "selective", "full")),
            "micro_batch_size": draw.choice((1, 2)),
            "num_microbatches": draw.choice((4, 8, 16)),
            "expert_parallel": draw.choice((1, 2, 8)) if shape.moe else 1,
        }
        if choices["zero_stage"]:
            choices["data_parallel_shard"] = draw.choice((choices["data_parallel"], 1))
        if choices["context_parallel"] > 1:
            choices["context_parallel_style"] = draw.choice(("ring", "ring-plain"))
        if choices["zero_stage"] == 3 and draw.random() < 0.3:
            choices |= {"parameter_offload": True, "optimizer_offload": True}
        splits = splits_by_weights(shape.num_hidden_layers, stages * virtual)
        if not splits:
            continue
        config = config_for(shape, **choices, layers_per_chunk=draw.choice(splits))
        if not TORCHTITAN.broken(shape, config):
            found.append((shape, config))
    return found


def test_version_is_the_one_that_the_rules_name() -> None:
    assert importlib.metadata.version("torchtitan") == TORCHTITAN.version == emitter.VERIFIED.version


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.slug)
def test_registered_models_have_our_layers(judge: Judge, shape: ModelShape) -> None:
    config, _ = judge.parse(words(shape, config_for(shape, zero_stage=3)), world_size=1)
    assert len(config.model_spec.model.layers) == shape.num_hidden_layers
    assert config.model_spec.model.dim == shape.hidden_size


@pytest.mark.parametrize("shape", [LLAMA_8B, LLAMA_70B, QWEN3_14B, LLAMA_405B], ids=lambda shape: shape.slug)
@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_float8_plans_build_float8_linear_layers(
    judge: Judge, shape: ModelShape, tensor_parallel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear layer of the decoder becomes torchao's, the LM head stays; a CPU stands in for one with float8."""
    from torchtitan.components.quantization import float8
    from torchtitan.models.common.linear import Linear

    monkeypatch.setattr(float8, "has_cuda_capability", lambda *_: True)
    config = replace(config_for(shape, zero_stage=3, tensor_parallel=tensor_parallel), precision="fp8")
    emitted = emit("torchtitan", request_for(shape, config))
    for file in emitted.artifacts:
        if file.path.suffix == ".py":
            (tmp_path / file.path.name).write_text(file.content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, emitter.FLOAT8_MODULE, raising=False)
    parsed, dims = judge.parse(words(shape, config), world_size=config.world_size)
    kinds = {name: type(one) for name, one, *_ in parsed.model_spec.model.traverse(Linear.Config)}
    narrow = {name for name, kind in kinds.items() if kind is float8.Float8Linear.Config}
    assert set(kinds) - narrow == {"lm_head"}
    assert len(parsed.model_spec.model.layers) == shape.num_hidden_layers
    assert dims.tp == tensor_parallel
    (tmp_path / "read").mkdir()
    reading = read_back("torchtitan", emitted, tmp_path / "read")
    assert reading.problems == []
    assert differences(reading, config) == {}


def test_the_configuration_that_always_converts_is_known(judge: Judge) -> None:
    """It needs a device with float8 as soon as it is read; the others name no converter."""
    refused = {
        slug
        for slug, (module, function) in TORCHTITAN_CONFIGS.items()
        if "float8" in (judge.refusal(["--module", module, "--config", function], world_size=1) or "").lower()
    }
    assert refused == ALWAYS_FLOAT8


def test_random_legal_plans_are_accepted_and_read_back(judge: Judge, tmp_path: Path) -> None:
    for shape, config in random_plans(seed=17, count=NUM_RANDOM_PLANS):
        said = words(shape, config)
        parsed, dims = judge.parse(said, world_size=config.world_size)
        shard = config.data_parallel_shard if config.zero_stage else 1
        told = (dims.tp, dims.pp, dims.cp, dims.dp_replicate * dims.dp_shard, dims.dp_shard, dims.ep)
        ours = (
            config.tensor_parallel,
            config.pipeline_parallel,
            config.context_parallel,
            config.data_parallel,
            shard,
            config.expert_parallel,
        )
        assert told == ours
        balancer = None if config.context_parallel_style == "ring-plain" else "headtail"
        assert parsed.parallelism.context_parallel_load_balancer == balancer
        emitted = emit("torchtitan", request_for(shape, config))
        assert num_devices(emitted) == config.world_size
        reading = read_back("torchtitan", emitted, tmp_path)
        assert reading.problems == []
        assert differences(reading, config) == {}
        assert parsed.training.global_batch_size == config.global_batch_size
        assert parsed.training.seq_len == config.sequence_length
        assert parsed.training.enable_cpu_offload is config.parameter_offload
        assert parsed.compile.enable
        assert {"model", "loss"} <= set(parsed.compile.components)
        assert not parsed.compile.enable_async_tensor_parallel
        assert judge.layers_per_stage(parsed, dims) == config.layers_per_chunk
        policy = parsed.activation_checkpoint
        expected = {"none": "NoneType", "selective": "SelectiveAC", "full": "FullAC"}[config.activation_recompute]
        assert expected in type(policy).__qualname__


PLAIN = config_for(LLAMA_70B, tensor_parallel=8, pipeline_parallel=4, data_parallel=2, zero_stage=3, num_microbatches=8)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--parallelism.tensor-parallel-degree", "--parallelism.tensor-paralel-degree"),
        ("always", "sometimes"),
        ("bfloat16", "bf16"),
        ("activation-checkpoint:none", "activation-checkpoint:selectiv"),
        ("llama3_70b", "llama3_71b"),
        ("--training.disable-cuda-graphs", "--training.no-disable-cuda-graphs"),
        ("8192", "eight"),
    ],
)
def test_mutations_are_refused(judge: Judge, old: str, new: str) -> None:
    said = words(LLAMA_70B, replace(PLAIN, sequence_length=8192))
    assert judge.refusal(said, world_size=PLAIN.world_size) is None
    assert old in said
    assert judge.refusal([new if word == old else word for word in said], world_size=PLAIN.world_size) is not None


def test_another_number_of_devices_is_refused(judge: Judge) -> None:
    assert "WORLD_SIZE" in str(judge.refusal(words(LLAMA_70B, PLAIN), world_size=PLAIN.world_size + 1))


def test_rules_that_the_model_checks(judge: Judge) -> None:
    """What our rule rejects, TorchTitan rejects too."""
    said = words(QWEN3_30B_A3B, config_for(QWEN3_30B_A3B, tensor_parallel=4, zero_stage=3))
    degree = said.index("--parallelism.tensor-parallel-degree") + 1
    said[degree] = "8"  # 4 key-value heads
    assert "must divide" in str(judge.refusal(said, world_size=8))
    assert TORCHTITAN.broken(QWEN3_30B_A3B, config_for(QWEN3_30B_A3B, tensor_parallel=8, zero_stage=3))


def test_flags_are_written_out(judge: Judge) -> None:
    """No abbreviation: every flag is a field of the configuration."""
    config, _ = judge.parse(words(LLAMA_70B, PLAIN), world_size=PLAIN.world_size)
    sections = types.SimpleNamespace(parallelism=config.parallelism, training=config.training)
    for shape, plan in random_plans(seed=3, count=40):
        for flag, *_ in emitter.arguments(request_for(shape, plan)):
            if flag.startswith(("--parallelism.", "--training.")):
                section, field = flag[2:].split(".")
                assert hasattr(getattr(sections, section), field.removeprefix("no-").replace("-", "_")), flag
