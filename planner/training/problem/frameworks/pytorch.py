"""What TorchTitan, DeepSpeed, Accelerate, Axolotl and torchtune allow, beyond what the mathematics of parallelism asks.

Their rules are held against the frameworks' own parsers by tests/conformance. A choice that a framework has no flag
for is refused here, so that a plan made for it can be launched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshplan.catalogs.models.shapes import AttentionKind, ModelShape
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
    offload_rule,
    plain_sharding_rule,
    switch_rules,
    whole_weights_rule,
)
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.layers import equal_layers, splits_by_weights

_TITAN = "torchtitan 0.3.0"
_SPEED = "deepspeed 0.19.8"
_ACCELERATE = "accelerate 1.15.0"
_AXOLOTL = "axolotl 0.19.0"
_TUNE = "torchtune 0.6.1"
_ZERO_1, _ZERO_2, _ZERO_3 = 1, 2, 3

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

# Our models by the builder of torchtune.models that makes the same layers. Mistral's and Gemma's builders are left out:
# they leave out the sliding window, or cap logits, as the planner's model does not.
TORCHTUNE_BUILDERS = {
    "llama-2-7b": ("llama2", "llama2_7b"),
    "llama-2-13b": ("llama2", "llama2_13b"),
    "llama-2-70b": ("llama2", "llama2_70b"),
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-8b": ("llama3_1", "llama3_1_8b"),
    "llama-3.1-70b": ("llama3_1", "llama3_1_70b"),
    "llama-3.1-405b": ("llama3_1", "llama3_1_405b"),
    "llama-3.2-1b": ("llama3_2", "llama3_2_1b"),
    "llama-3.2-3b": ("llama3_2", "llama3_2_3b"),
    "llama-3.3-70b": ("llama3_3", "llama3_3_70b"),
    "qwen2-7b": ("qwen2", "qwen2_7b"),
    "qwen2.5-0.5b": ("qwen2_5", "qwen2_5_0_5b"),
    "qwen2.5-1.5b": ("qwen2_5", "qwen2_5_1_5b_base"),
    "qwen2.5-3b": ("qwen2_5", "qwen2_5_3b"),
    "qwen2.5-7b": ("qwen2_5", "qwen2_5_7b_base"),
    "qwen2.5-14b": ("qwen2_5", "qwen2_5_14b_base"),
    "qwen2.5-32b": ("qwen2_5", "qwen2_5_32b_base"),
    "qwen2.5-72b": ("qwen2_5", "qwen2_5_72b_base"),
}


def _known_model(shape: ModelShape, config: Any) -> Any:
    return (config.tensor_parallel >= 1) & (shape.slug in TORCHTITAN_CONFIGS)


def _kv_heads(shape: ModelShape, config: Any) -> Any:
    heads = (
        shape.num_attention_heads if shape.attention is AttentionKind.MULTI_HEAD_LATENT else shape.num_key_value_heads
    )
    return heads % config.tensor_parallel == 0


def _sequence_splits(_: ModelShape, config: Any) -> Any:
    # 2 × context_parallel where it is split at all; factors are written without branches, for columns.
    split = config.context_parallel * (1 + (config.context_parallel > 1))
    by_tensor = 1 + (config.tensor_parallel - 1) * config.sequence_parallel
    return config.sequence_length % (split * by_tensor) == 0


def _titan_experts(_: ModelShape, config: Any) -> Any:
    stage = config.tensor_parallel * config.context_parallel * config.data_parallel_shard
    return stage % config.expert_parallel == 0


def _one(field: str, framework: str, reason: str, source: str, stage: str = "parser") -> LegalityRule:
    """The framework has no flag for more than one of ``field``."""
    return LegalityRule(
        name=f"{framework}_has_no_{field}",
        holds=lambda _, config: getattr(config, field) == 1,
        message=f"{field} must be 1: {reason}",
        stage=stage,
        source=source,
    )


def _whole_sequences(reason: str, source: str) -> LegalityRule:
    """The framework does not split activations along the sequence between tensor-parallel ranks."""
    return LegalityRule(
        name="no_sequence_parallel",
        holds=lambda _, config: np.logical_not(config.sequence_parallel),
        message=f"sequence_parallel must be off: {reason} (fixed.sequence_parallel: false)",
        stage="parser",
        source=source,
    )


def _plain_sharding(framework: str, source: str, *, hpz: bool = False) -> tuple[LegalityRule, ...]:
    """No optimizer sharding over groups, one policy for all layers, a second copy of parameters only with ``hpz``."""
    outer = plain_sharding_rule(framework, "outer_zero_stage", 0, "copies of states are whole", source)
    gathered = plain_sharding_rule(
        framework, "gathered_num_layers", 0, "one policy for all layers (all that stay gathered: zero_stage 2)", source
    )
    second = plain_sharding_rule(framework, "zero_hpz_partition_size", 1, "it has no word", source)
    return (outer, gathered) if hpz else (outer, gathered, second)


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
            name="kv_heads_divisible_by_tensor_parallel",
            holds=_kv_heads,
            message="num_key_value_heads must be a multiple of tensor_parallel",
            stage="run time",
            source=f"{_TITAN}: models/common/decoder.py, update_from_config",
        ),
        LegalityRule(
            name="sequence_divisible_by_its_splits",
            holds=_sequence_splits,
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
            holds=lambda _, config: config.zero_stage != _ZERO_1,
            message="zero_stage 1 has no word: FSDP shards optimizer states and gradients (2, 3) or nothing (0)",
            stage="parser",
            source=f"{_TITAN}: config/configs.py, ParallelismConfig",
        ),
        LegalityRule(
            name="context_parallel_shards",
            holds=lambda _, config: (config.context_parallel == 1) | (config.zero_stage >= _ZERO_2),
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
        _one("expert_tensor_parallel", "torchtitan", "experts are not split", f"{_TITAN}: config/configs.py"),
        *expert_transport_rules("torchtitan", f"{_TITAN}: config/configs.py (its own backends were not tried)"),
        capacity_rule("torchtitan", "its experts drop no tokens", f"{_TITAN}: models/common/moe.py"),
        *switch_rules("torchtitan", f"{_TITAN}: config/configs.py (its own settings were not tried)"),
        whole_weights_rule("torchtitan", f"{_TITAN}: components/lora.py"),
        context_style_rule(
            "torchtitan", ("ring", "ring-plain"), f"{_TITAN}: config/configs.py (context_parallel_load_balancer)"
        ),
        *_plain_sharding("torchtitan", f"{_TITAN}: config/configs.py, ParallelismConfig"),
        no_vocabulary_parallel("torchtitan"),
        joint_offload_rule("torchtitan", f"{_TITAN}: config/configs.py, enable_cpu_offload"),
        no_offload_rule("torchtitan", "activation_offload", "it has no word", f"{_TITAN}: distributed/"),
        host_only_rule("torchtitan", f"{_TITAN}: config/configs.py"),
    ),
    rank_orders=(("tensor", "context", "data", "pipeline"),),
    layer_splits=splits_by_weights,
    pipeline_schedules=("none", "1f1b", "interleaved", "dualpipe-v"),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=1,
    precisions=("bf16",),
    notes=(
        "Selective recomputation keeps the outputs of chosen operators, not all but the attention core: its memory and "
        "time are those of another set than the estimate's.",
        "dualpipe-v is planned where fixed.pipeline_schedule asks for it; it cannot be combined with torch.compile "
        "(torch 2.13: distributed/pipelining/schedules.py, _check_torch_compile_compatibility).",
        "Stages of unequal length come from the weights of the embedding and the LM head, in layers; any other split "
        "would need module names per stage, which the command line cannot express.",
    ),
)

DEEPSPEED = FrameworkRules(
    name="deepspeed",
    version="0.19.8",
    rules=(
        *ANY_FRAMEWORK.rules,
        _one(
            "pipeline_parallel",
            "deepspeed",
            "stages are built in code (PipelineModule)",
            f"{_SPEED}: runtime/config.py",
        ),
        _one("context_parallel", "deepspeed", "sequences are split in code (Ulysses)", f"{_SPEED}: runtime/config.py"),
        _one("expert_parallel", "deepspeed", "experts are placed in code (deepspeed.moe)", f"{_SPEED}: moe/layer.py"),
        _one("expert_tensor_parallel", "deepspeed", "experts are not split", f"{_SPEED}: moe/layer.py"),
        _whole_sequences("AutoTP keeps whole sequences", f"{_SPEED}: runtime/tensor_parallel/config.py"),
        LegalityRule(
            name="shards_are_whole",
            holds=lambda _, config: (config.zero_stage == 0) | (config.data_parallel_shard == config.data_parallel),
            message="states are sharded over all of data_parallel: data_parallel_shard must equal it",
            stage="run time",
            source=f"{_SPEED}: runtime/zero/stage_1_and_2.py",
        ),
        LegalityRule(
            name="tensor_parallel_without_zero_3",
            holds=lambda _, config: (config.tensor_parallel == 1) | (config.zero_stage < _ZERO_3),
            message="tensor_parallel (AutoTP) needs zero_stage 0, 1 or 2",
            stage="run time",
            source=f"{_SPEED}: docs, tutorials/autotp-training (read, not run)",
        ),
        *expert_transport_rules("deepspeed", f"{_SPEED}: moe/layer.py"),
        capacity_rule("deepspeed", "experts are built in code (deepspeed.moe)", f"{_SPEED}: moe/layer.py"),
        *switch_rules("deepspeed", f"{_SPEED}: runtime/config.py (its own settings were not tried)"),
        whole_weights_rule("deepspeed", f"{_SPEED}: runtime/config.py (weights are those of the user's script)"),
        *_plain_sharding("deepspeed", f"{_SPEED}: runtime/zero/config.py", hpz=True),
        no_vocabulary_parallel("deepspeed"),
        offload_rule("deepspeed", (1, 2, 3), f"{_SPEED}: runtime/zero/offload_config.py"),
        LegalityRule(
            name="nvme_needs_zero_3",
            holds=lambda _, config: np.not_equal(config.offload_to, "nvme") | (config.zero_stage == _ZERO_3),
            message="offload to NVMe needs zero_stage 3",
            stage="run time",
            source=f"{_SPEED}: runtime/zero/offload_config.py (read, not run)",
        ),
    ),
    rank_orders=(("tensor", "context", "data", "pipeline"),),
    layer_splits=equal_layers,
    pipeline_schedules=("none",),
    shards_over_context_parallel=False,
    vocab_multiple_per_tensor_parallel=1,
    recompute_modes=("none", "full"),
    precisions=("bf16", "fp16"),
    sequence_parallel=False,
)

ACCELERATE = FrameworkRules(
    name="accelerate",
    version="1.15.0",
    rules=(
        *ANY_FRAMEWORK.rules,
        _one("pipeline_parallel", "accelerate", "FSDP2 has no stages", f"{_ACCELERATE}: parallelism_config.py"),
        _one("expert_parallel", "accelerate", "experts are not spread", f"{_ACCELERATE}: parallelism_config.py"),
        _one("expert_tensor_parallel", "accelerate", "experts are not split", f"{_ACCELERATE}: parallelism_config.py"),
        _whole_sequences("it has no word", f"{_ACCELERATE}: parallelism_config.py"),
        LegalityRule(
            name="sequence_divisible_by_its_splits",
            holds=_sequence_splits,
            message="sequence_length must be a multiple of 2 × context_parallel",
            stage="run time",
            source="torch 2.13: distributed/tensor/experimental/_context_parallel (head-tail balancing; read, not run)",
        ),
        LegalityRule(
            name="replicas_are_sharded",
            holds=lambda _, config: (config.data_parallel == 1) | (config.data_parallel_shard > 1),
            message="data_parallel > 1 needs data_parallel_shard > 1",
            stage="parser",
            source=f"{_ACCELERATE}: parallelism_config.py, ParallelismConfig.__post_init__",
        ),
        LegalityRule(
            name="fully_sharded",
            holds=lambda _, config: config.zero_stage >= _ZERO_2,
            message="FSDP2 shards optimizer states and gradients together: zero_stage 2 or 3",
            stage="parser",
            source=f"{_ACCELERATE}: utils/dataclasses.py, FullyShardedDataParallelPlugin",
        ),
        *expert_transport_rules("accelerate", f"{_ACCELERATE}: parallelism_config.py"),
        *switch_rules("accelerate", f"{_ACCELERATE}: utils/dataclasses.py"),
        capacity_rule("accelerate", "experts are those of the user's model", f"{_ACCELERATE}: parallelism_config.py"),
        context_style_rule("accelerate", ("ring",), f"{_ACCELERATE}: parallelism_config.py (cp_size)"),
        *_plain_sharding("accelerate", f"{_ACCELERATE}: utils/dataclasses.py, FullyShardedDataParallelPlugin"),
        no_vocabulary_parallel("accelerate"),
        joint_offload_rule("accelerate", f"{_ACCELERATE}: utils/dataclasses.py (fsdp_offload_params moves all)"),
        host_only_rule("accelerate", f"{_ACCELERATE}: utils/dataclasses.py"),
    ),
    rank_orders=(("tensor", "context", "data", "pipeline"),),
    layer_splits=equal_layers,
    pipeline_schedules=("none",),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=1,
    recompute_modes=("none", "full"),
    precisions=("bf16", "fp16"),
    sequence_parallel=False,
    quantised_weights=True,
)


def _data_parallel_only(framework: str, source: str) -> tuple[LegalityRule, ...]:
    """Rules of a trainer that is planned for with replicas and shards alone, on weights that fit a device's layers."""
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel")
    reason = f"plans for {framework} have data parallelism alone"
    return (
        *ANY_FRAMEWORK.rules,
        *(_one(degree, framework, reason, source) for degree in degrees),
        _whole_sequences(reason, source),
        *expert_transport_rules(framework, source),
        *switch_rules(framework, source),
        capacity_rule(framework, "experts are those of the checkpoint", source),
        *_plain_sharding(framework, source),
        no_vocabulary_parallel(framework),
        joint_offload_rule(framework, source),
        host_only_rule(framework, source),
    )


AXOLOTL = FrameworkRules(
    name="axolotl",
    version="0.19.0",
    rules=(
        *_data_parallel_only("axolotl", f"{_AXOLOTL}: utils/schemas/config.py (its other degrees were not tried)"),
        LegalityRule(
            name="replicated_or_sharded",
            holds=lambda _, config: np.where(
                config.zero_stage >= _ZERO_2, config.data_parallel_shard > 1, config.zero_stage == 0
            ),
            message="zero_stage 0 (replicas), or 2 and 3 (FSDP2) with data_parallel_shard > 1",
            stage="parser",
            source=f"{_AXOLOTL}: utils/schemas/fsdp.py, utils/trainer.py (setup_parallelism_envs)",
        ),
        no_offload_rule("axolotl", "activation_offload", "its own ways of it were not tried", f"{_AXOLOTL}: schemas/"),
    ),
    rank_orders=(("tensor", "context", "data", "pipeline"),),
    layer_splits=equal_layers,
    pipeline_schedules=("none",),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=1,
    recompute_modes=("none", "full"),
    precisions=("bf16", "fp16"),
    sequence_parallel=False,
    quantised_weights=True,
)

TORCHTUNE = FrameworkRules(
    name="torchtune",
    version="0.6.1",
    rules=(
        *_data_parallel_only("torchtune", f"{_TUNE}: recipes/lora_finetune_distributed.py"),
        LegalityRule(
            name="model_has_a_builder",
            holds=lambda shape, config: (config.tensor_parallel >= 1) & (shape.slug in TORCHTUNE_BUILDERS),
            message=f"torchtune builds its own models: one of {', '.join(TORCHTUNE_BUILDERS)}",
            stage="parser",
            source=f"{_TUNE}: torchtune/models/*/_model_builders.py",
        ),
        LegalityRule(
            name="sharded_over_all",
            holds=lambda _, config: np.where(
                config.data_parallel > 1,
                (config.zero_stage >= _ZERO_2) & (config.data_parallel_shard == config.data_parallel),
                config.zero_stage == 0,
            ),
            message="several devices always shard (FSDP2: zero_stage 2 or 3, data_parallel_shard = data_parallel), one "
            "device never (zero_stage 0)",
            stage="run time",
            source=f"{_TUNE}: recipes/lora_finetune_distributed.py, _setup_model",
        ),
        LegalityRule(
            name="offload_needs_shards",
            holds=lambda _, config: np.logical_not(config.parameter_offload) | (config.data_parallel > 1),
            message="parameter_offload (fsdp_cpu_offload) needs several devices",
            stage="run time",
            source=f"{_TUNE}: recipes/lora_finetune_single_device.py (no such key)",
        ),
    ),
    rank_orders=(("tensor", "context", "data", "pipeline"),),
    layer_splits=equal_layers,
    pipeline_schedules=("none",),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=1,
    recompute_modes=("none", "full"),
    precisions=("bf16",),
    sequence_parallel=False,
    quantised_weights=True,
)
