"""Framework rules: one predicate serves one plan and whole columns; tests/conformance holds them to the framework."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from emit_cases import DEEPSEEK_V3, GPT_OSS_20B, LLAMA_70B, LLAMA_70B_ON_64, MIXTRAL, SHAPES, config_for
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_layout import rank_coordinates

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.choice import CONTEXT_PARALLEL_STYLES
from meshplan.planner.training.problem.choices import SPLIT
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS, framework_rules
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.switches import USUAL_MODULES

DEGREES = st.sampled_from((1, 2, 3, 4, 6, 8))
CONFIGS = st.builds(
    lambda **choices: choices,
    tensor_parallel=DEGREES,
    pipeline_parallel=DEGREES,
    virtual_pipeline_stages=st.sampled_from((1, 2)),
    context_parallel=DEGREES,
    data_parallel=DEGREES,
    data_parallel_shard=DEGREES,
    expert_parallel=DEGREES,
    expert_tensor_parallel=DEGREES,
    sequence_parallel=st.booleans(),
    zero_stage=st.integers(0, 3),
    optimizer_offload=st.booleans(),
    parameter_offload=st.booleans(),
    activation_offload=st.booleans(),
    activation_offload_num_layers=st.sampled_from((0, 0, 4, 80)),
    offload_to=st.sampled_from(("host", "nvme")),
    activation_recompute=st.sampled_from(("none", "full")),
    expert_capacity_factor=st.sampled_from((0.0, 1.0, 1.25)),
    expert_dispatcher=st.sampled_from(("alltoall", "deepep", "hybridep")),
    expert_parallel_overlap=st.booleans(),
    quantised_weights=st.booleans(),
    recompute_modules=st.sampled_from((USUAL_MODULES, ("layernorm", "moe_act"), ("mla_up_proj", "moe"), ("mlp",))),
    gradient_precision=st.sampled_from(("default", "bf16")),
    cuda_graphs=st.sampled_from(("none", "partial", "full")),
    loss=st.sampled_from(("default", "whole", "chunked")),
    optimizer=st.sampled_from(("default", "adamw-bf16-moments", "adamw-8bit")),
    optimizer_in_backward=st.booleans(),
    context_parallel_style=st.sampled_from(CONTEXT_PARALLEL_STYLES),
    context_parallel_heads=st.sampled_from((1, 2, 4)),
    zero_hpz_partition_size=st.sampled_from((1, 2, 4)),
    outer_zero_stage=st.integers(0, 1),
    gathered_num_layers=st.integers(0, 2),
    num_microbatches=st.integers(1, 12),
    global_batch_size=st.integers(1, 64),
    sequence_length=st.sampled_from((1024, 4096, 4098, 4100)),
)


# What all candidates of a batch have in common: their split, and what their question says in several words.
SHARED = (*(choice.name for choice in SPLIT), "recompute_modules")


def columns(configs: list[TrainingConfig]) -> SimpleNamespace:
    """A struct of arrays, as the enumeration holds its candidates: all of them share one pipeline split."""
    rows = [asdict(config) for config in configs]
    shared = {name: getattr(configs[0], name) for name in SHARED}
    return SimpleNamespace(**{name: np.array([row[name] for row in rows]) for name in rows[0]} | shared)


ALL_RULES = {rule.name: rule for rules in FRAMEWORKS.values() for rule in rules.rules}


@pytest.mark.parametrize("rule", ALL_RULES.values(), ids=lambda rule: rule.name)
@settings(max_examples=10)
@given(choices=st.lists(CONFIGS, min_size=1, max_size=8), shape=st.sampled_from(SHAPES))
def test_columns_and_single_plans_agree(
    rule: LegalityRule, choices: list[dict[str, object]], shape: ModelShape
) -> None:
    split = {name: choices[0][name] for name in SHARED if name in choices[0]}
    configs = [config_for(shape, **{**choice, **split}) for choice in choices]
    by_column = np.broadcast_to(rule.holds(shape, columns(configs)), len(configs))
    assert by_column.dtype == bool
    assert by_column.tolist() == [bool(rule.holds(shape, config)) for config in configs]


SWITCHES = {"recompute_modules", "gradient_precision", "cuda_graphs", "loss", "optimizer", "optimizer_in_backward"}
SPLITTING = {"context_parallel_style", "context_parallel_heads"}
SHARDING = {"zero_hpz_partition_size", "outer_zero_stage", "gathered_num_layers"}


@settings(max_examples=200, deadline=None)
@given(choices=CONFIGS, shape=st.sampled_from(SHAPES))
def test_a_rule_holds_at_the_defaults_of_what_it_is_about(choices: dict[str, object], shape: ModelShape) -> None:
    """The search does not ask such a rule then, but for what another one asks anyway."""
    plain = {name: value for name, value in choices.items() if name not in SPLITTING | SHARDING | SWITCHES}
    for rules in FRAMEWORKS.values():
        broken = rules.broken(shape, config_for(shape, **plain))
        about = [rule.name for rule in broken if rule.about]
        assert not about or {rule.name for rule in broken} > set(about)


@pytest.mark.parametrize(
    ("shape", "choices", "broken"),
    [
        (LLAMA_70B, {"tensor_parallel": 16}, set()),
        (LLAMA_70B, {"tensor_parallel": 8, "data_parallel": 8, "data_parallel_shard": 4}, set()),
        (
            replace(LLAMA_70B, num_key_value_heads=12, num_attention_heads=48),
            {"tensor_parallel": 16},
            {"kv_heads_and_tensor_parallel_divide"},
        ),
        (LLAMA_70B, {"tensor_parallel": 8, "sequence_length": 4100}, {"sequence_divisible_by_tensor_parallel"}),
        (LLAMA_70B, {"sequence_parallel": True}, {"sequence_parallel_needs_tensor_parallel"}),
        (LLAMA_70B, {"virtual_pipeline_stages": 2}, {"interleaving_needs_pipeline"}),
        (LLAMA_70B, {"data_parallel": 6, "data_parallel_shard": 4}, {"shard_groups_divide_replicas"}),
        (LLAMA_70B, {"pipeline_parallel": 2, "zero_stage": 3}, {"zero_2_and_3_need_one_stage"}),
        (LLAMA_70B, {"data_parallel": 2, "zero_stage": 2}, {"zero_2_saves_nothing"}),
        (LLAMA_70B, {"data_parallel": 8, "expert_parallel": 2}, {"experts_divisible_by_expert_parallel"}),
        (MIXTRAL, {"tensor_parallel": 4, "context_parallel": 2, "expert_parallel": 8}, set()),
        (MIXTRAL, {"data_parallel": 4, "expert_parallel": 8}, {"expert_groups_divide_stage"}),
        (
            MIXTRAL,
            {"data_parallel": 8, "expert_parallel": 8, "data_parallel_shard": 4},
            {"shard_groups_divide_replicas"},
        ),
        (DEEPSEEK_V3, {"tensor_parallel": 128}, set()),
        (GPT_OSS_20B, {"context_parallel": 2}, {"sliding_windows_need_whole_sequences"}),
    ],
)
def test_which_rules_break(shape: ModelShape, choices: dict[str, object], broken: set[str]) -> None:
    assert {rule.name for rule in MEGATRON.broken(shape, config_for(shape, **choices))} == broken


def test_the_reference_plan_breaks_nothing() -> None:
    assert MEGATRON.broken(LLAMA_70B, LLAMA_70B_ON_64) == ()


def test_rules_are_named_once_and_cite_their_source() -> None:
    for framework in FRAMEWORKS.values():
        names = [rule.name for rule in framework.rules]
        assert len(set(names)) == len(names)
        assert all(rule.source and rule.stage in {"parser", "process groups", "run time"} for rule in framework.rules)


def test_vocabulary_is_padded_for_every_tensor_parallel_device() -> None:
    assert MEGATRON.padded_vocab_size(128256, 8) == 129024
    assert MEGATRON.padded_vocab_size(32000, 2) == 32000


def test_only_known_frameworks_have_rules() -> None:
    assert framework_rules("megatron") is MEGATRON
    assert framework_rules("unheard-of") is None


@given(st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_coordinates_count_the_ranks_once(sizes: list[int]) -> None:
    order = MEGATRON.rank_orders[0]
    total = int(np.prod(sizes))
    seen = {tuple(rank_coordinates(order, sizes, rank).values()) for rank in range(total)}
    assert len(seen) == total
    assert rank_coordinates(order, sizes, 0) == dict.fromkeys(order, 0)
