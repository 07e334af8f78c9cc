"""What Megatron-LM refuses: plans that our rules refuse, arguments that nobody wrote, formats that the judge lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from emit_cases import GPT2_XL, GPT_OSS_20B, LLAMA_70B, LLAMA_70B_ON_64, MIXTRAL, QWEN3_4B, config_for
from megatron_plans import environment, random_plans, refusal, words

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON

pytestmark = pytest.mark.launchers


REFUSED: Sequence[tuple[str, ModelShape, dict[str, Any]]] = (
    ("heads_divisible_by_tensor_parallel", LLAMA_70B, {"tensor_parallel": 3}),
    ("heads_divisible_by_tensor_parallel", GPT2_XL, {"tensor_parallel": 2}),
    ("kv_heads_and_tensor_parallel_divide", replace(LLAMA_70B, num_key_value_heads=16), {"tensor_parallel": 3}),
    ("sequence_divisible_by_twice_context_parallel", LLAMA_70B, {"context_parallel": 4, "sequence_length": 4100}),
    ("experts_divisible_by_expert_parallel", MIXTRAL, {"data_parallel": 6, "expert_parallel": 3}),
    (
        "expert_bias_needs_whole_experts",
        GPT_OSS_20B,
        {"data_parallel": 8, "expert_parallel": 2, "expert_tensor_parallel": 2},
    ),
    ("global_batch_divisible", QWEN3_4B, {"data_parallel": 4, "global_batch_size": 30}),
)


@pytest.mark.parametrize(
    ("rule", "shape", "choices"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_we_refuse_megatron_refuses(megatron: Any, rule: str, shape: ModelShape, choices: dict[str, Any]) -> None:
    config = config_for(shape, **choices)
    assert rule in {broken.name for broken in MEGATRON.broken(shape, config)}
    assert refusal(megatron, shape, config) is not None


def test_parser_rules_agree_on_random_illegal_plans(megatron: Any) -> None:
    """A rule attributed to the parser is the parser's: without it, plans would be refused for nothing."""
    wrong = []
    in_parser = {rule.name for rule in MEGATRON.rules if rule.stage == "parser"}
    switched_off = {"sequence_parallel_needs_tensor_parallel", "interleaving_needs_pipeline"}
    for shape, config in random_plans(legal=False, seed=5, count=100):
        broken = {rule.name for rule in MEGATRON.broken(shape, config)}
        reason = refusal(megatron, shape, config)
        if broken & in_parser - switched_off and reason is None:
            wrong.append(f"{shape.slug} {config}: accepted, although {broken}")
    assert wrong == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--pipeline-model-parallel-layout", "Et*20|t*20|t*20|t*19L"),
        ("--pipeline-model-parallel-layout", "Et*20|t*20|t*40L"),
        ("--pipeline-model-parallel-layout", "t*20|t*20|t*20|t*20L"),
        ("--tensor-model-parallel-size", "7"),
        ("--recompute-granularity", "some"),
        ("--optimizer-cpu-offload", "--bf16"),
        ("--rotary-base", "5e5"),
        ("--recompute-gran", "full"),
        ("--no-such-flag", "1"),
    ],
)
def test_mutated_arguments_are_refused(megatron: Any, flag: str, value: str) -> None:
    mutated = [*words(LLAMA_70B_ON_64, LLAMA_70B), flag, value]
    variables = environment(LLAMA_70B_ON_64, LLAMA_70B)
    assert megatron.refusal(mutated, world_size=64, environment=variables) is not None


def test_expert_groups_are_refused_by_the_process_groups(megatron: Any) -> None:
    config = config_for(MIXTRAL, data_parallel=4, pipeline_parallel=2, expert_parallel=8)
    assert "expert_groups_divide_stage" in {rule.name for rule in MEGATRON.broken(MIXTRAL, config)}
    parsed, _ = megatron.config(words(config, MIXTRAL), world_size=8, environment={})
    with pytest.raises(RuntimeError, match="not divisible by expert_tensor_model_pipeline_parallel"):
        megatron.coordinates(parsed, 0)


@pytest.mark.parametrize(("stages", "fits"), [(1, True), (2, False)])
def test_full_sharding_needs_one_stage(megatron: Any, stages: int, fits: bool) -> None:
    config = config_for(LLAMA_70B, tensor_parallel=2, data_parallel=4, pipeline_parallel=stages, zero_stage=3)
    assert (not MEGATRON.broken(LLAMA_70B, config)) is fits
    parsed, _ = megatron.config(words(config, LLAMA_70B), world_size=config.world_size, environment={})
    assert megatron.can_shard_fully(parsed) is fits


@pytest.mark.parametrize("connections", ["", "1"])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_number_of_hardware_queues(megatron: Any, connections: str, zero_stage: int) -> None:
    """Tensor parallelism before Blackwell wants the variable at 1, full sharding wants it unset."""
    config = config_for(LLAMA_70B, tensor_parallel=8, data_parallel=1 if zero_stage == 1 else 2, zero_stage=zero_stage)
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}
    reason = megatron.refusal(words(config, LLAMA_70B), world_size=config.world_size, environment=variables)
    assert (reason is None) is (variables == environment(config, LLAMA_70B))


def test_fp8_experts_at_the_argument_level(megatron: Any) -> None:
    """Without Transformer Engine the parser refuses every fp8 model with experts; the flags at least are known."""
    config = config_for(MIXTRAL, data_parallel=8, expert_parallel=8, precision="fp8")
    reason = refusal(megatron, MIXTRAL, config)
    assert reason is not None
    assert "transformer-engine" in reason
    assert {word for word in words(config, MIXTRAL) if word.startswith("--")} <= megatron.option_strings


def test_nvfp4_is_known_and_excludes_fp8(megatron: Any) -> None:
    """The parser takes the flags; the rest of the check asks for Transformer Engine 2.7, which the judge lacks."""
    config = config_for(LLAMA_70B, tensor_parallel=8, precision="nvfp4")
    said = words(config, LLAMA_70B)
    assert {"--fp4-format", "--fp4-recipe"} <= set(said) & megatron.option_strings
    assert "Transformer Engine >= 2.7" in (refusal(megatron, LLAMA_70B, config) or "")
    for flag, value in (("--fp4-format", "e4m3"), ("--fp4-recipe", "mxfp4"), ("--fp8-format", "e4m3")):
        reason = megatron.refusal([*said, flag, value], world_size=8, environment=environment(config, LLAMA_70B))
        assert reason is not None
        assert "Transformer Engine >= 2.7" not in reason
