"""What TorchTitan allows, beyond what the mathematics of parallelism asks.

Held against its own parser by tests/conformance/torchtitan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.legality import (
    capacity_rule,
    context_style_rule,
    expert_transport_rules,
    host_only_rule,
    joint_offload_rule,
    no_offload_rule,
    no_vocabulary_parallel,
    own_loss_rules,
    own_optimizer_rule,
    switch_rules,
    whole_weights_rule,
)
from meshplan.planner.training.problem.frameworks.pytorch import (
    MESH_ORDERS,
    ZERO_1,
    ZERO_2,
    only_one,
    plain_sharding,
    sequence_splits,
)
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.layers import splits_by_weights

_TITAN = "torchtitan 0.3.0"

# Our models by the configuration function that builds the same layers: (module, function) of torchtitan.models.
TORCHTITAN_CONFIGS = {
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
}


# Its configuration converts every linear layer but the LM head to float8 as it is read.
ALWAYS_FLOAT8 = frozenset({"llama-3.1-405b"})


def _known_model(shape: ModelShape, config: Any) -> Any:
    return (config.tensor_parallel >= 1) & (shape.slug in TORCHTITAN_CONFIGS)


def _own_precision(shape: ModelShape, config: Any) -> Any:
    return np.equal(config.precision, "fp8") | (shape.slug not in ALWAYS_FLOAT8)


def _float8_linear(shape: ModelShape, config: Any) -> Any:
    return np.not_equal(config.precision, "fp8") | (shape.moe is None)


def _kv_heads(shape: ModelShape, config: Any) -> Any:
    heads = (
        shape.num_attention_heads if shape.attention is AttentionKind.MULTI_HEAD_LATENT else shape.num_key_value_heads
    )
    return heads % config.tensor_parallel == 0


def _titan_experts(_: ModelShape, config: Any) -> Any:
    stage = config.tensor_parallel * config.context_parallel * config.data_parallel_shard
    return stage % config.expert_parallel == 0


TORCHTITAN = FrameworkRules(
    name="torchtitan",
    version="0.3.0",
    rules=(
        *ANY_FRAMEWORK.rules,
        LegalityRule(
            name="model_has_a_configuration",
            holds=_known_model,
            message=f"TorchTitan trains registered models only: one of {', '.join(TORCHTITAN_CONFIGS)}",
            stage="parser",
            source=f"{_TITAN}: models/*/config_registry.py",
        ),
        LegalityRule(
            name="configuration_has_its_precision",
            holds=_own_precision,
            message=f"the configuration of {', '.join(sorted(ALWAYS_FLOAT8))} converts the linear layers to float8: "
            "workload.precision fp8",
            stage="run time",
            source=f"{_TITAN}: models/llama3/config_registry.py, llama3_405b",
        ),
        LegalityRule(
            name="float8_of_linear_layers",
            holds=_float8_linear,
            message="fp8 converts linear layers; the converter of experts (torchao's prototype) was not tried: "
            "workload.precision bf16",
            stage="run time",
            source=f"{_TITAN}: components/quantization/float8.py, Float8GroupedExpertsConverter",
        ),
        LegalityRule(
            name="kv_heads_divisible_by_tensor_parallel",
            holds=_kv_heads,
            message="num_key_value_heads must be a multiple of tensor_parallel",
            stage="run time",
            source=f"{_TITAN}: models/common/decoder.py, update_from_config",
        ),
        LegalityRule(
            name="sequence_divisible_by_its_splits",
            holds=sequence_splits,
            message="sequence_length must be a multiple of tensor_parallel (under sequence_parallel) × "
            "2 context_parallel",
            stage="run time",
            source=f"{_TITAN}: trainer.py, Trainer.__init__",
        ),
        LegalityRule(
            name="tied_embeddings_need_one_stage",
            holds=lambda shape, config: (config.pipeline_parallel == 1) | (not shape.tie_word_embeddings),
            message="tied embeddings need pipeline_parallel = 1",
            stage="run time",
            source=f"{_TITAN}: models/common/decoder.py, update_from_config",
        ),
        LegalityRule(
            name="fully_sharded_or_replicated",
            holds=lambda _, config: config.zero_stage != ZERO_1,
            message="zero_stage 1 has no word: FSDP shards optimizer states and gradients (2, 3) or nothing (0)",
            stage="parser",
            source=f"{_TITAN}: config/configs.py, ParallelismConfig",
        ),
        LegalityRule(
            name="context_parallel_shards",
            holds=lambda _, config: (config.context_parallel == 1) | (config.zero_stage >= ZERO_2),
            message="context_parallel > 1 always shards the states over its devices: zero_stage 2 or 3",
            stage="run time",
            source=f"{_TITAN}: distributed/parallel_dims.py, build_mesh",
        ),
        LegalityRule(
            name="experts_divide_the_shards",
            holds=_titan_experts,
            message="expert_parallel must divide tensor_parallel × context_parallel × data_parallel_shard",
            stage="process groups",
            source=f"{_TITAN}: distributed/parallel_dims.py, build_mesh",
        ),
        only_one("expert_tensor_parallel", "torchtitan", "experts are not split", f"{_TITAN}: config/configs.py"),
        *expert_transport_rules("torchtitan", f"{_TITAN}: config/configs.py (its own backends were not tried)"),
        capacity_rule("torchtitan", "its experts drop no tokens", f"{_TITAN}: models/common/moe.py"),
        *switch_rules("torchtitan", f"{_TITAN}: config/configs.py (its own settings were not tried)"),
        own_optimizer_rule("torchtitan", f"{_TITAN}: components/optimizer.py (AdamW or Adam, fp32 states)"),
        *own_loss_rules("torchtitan", f"{_TITAN}: components/loss.py (its chunked loss was not tried)"),
        whole_weights_rule("torchtitan", f"{_TITAN}: components/lora.py"),
        context_style_rule(
            "torchtitan", ("ring", "ring-plain"), f"{_TITAN}: config/configs.py (context_parallel_load_balancer)"
        ),
        *plain_sharding("torchtitan", f"{_TITAN}: config/configs.py, ParallelismConfig"),
        no_vocabulary_parallel("torchtitan"),
        joint_offload_rule("torchtitan", f"{_TITAN}: config/configs.py, enable_cpu_offload"),
        no_offload_rule("torchtitan", "activation_offload", "it has no word", f"{_TITAN}: distributed/"),
        no_offload_rule("torchtitan", "activation_offload_num_layers", "it has no word", f"{_TITAN}: distributed/"),
        host_only_rule("torchtitan", f"{_TITAN}: config/configs.py"),
    ),
    rank_orders=MESH_ORDERS,
    layer_splits=splits_by_weights,
    pipeline_schedules=("none", "1f1b", "interleaved", "dualpipe-v"),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=1,
    precisions=("bf16", "fp8"),
    scales_rows=True,
    notes=(
        "Selective recomputation keeps the outputs of chosen operators, not all but the attention core: its memory and "
        "time are those of another set than the estimate's.",
        "fp8 is torchao's float8 with a scale for each row, of every linear layer but the LM head: 0.3.0 has no other "
        "recipe, and no flag for it, so that a module beside the launch script names the converter.",
        "dualpipe-v is planned where fixed.pipeline_schedule asks for it; it cannot be combined with torch.compile "
        "(torch 2.13: distributed/pipelining/schedules.py, _check_torch_compile_compatibility).",
        "Stages of unequal length come from the weights of the embedding and the LM head, in layers; any other split "
        "would need module names per stage, which the command line cannot express.",
    ),
)
