"""What the frameworks on PyTorch's own FSDP have in common: TorchTitan, DeepSpeed, Accelerate, Axolotl, torchtune.

A choice that a framework has no flag for is refused, so that a plan made for it can be launched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.legality import (
    capacity_rule,
    expert_transport_rules,
    host_only_rule,
    joint_offload_rule,
    no_vocabulary_parallel,
    plain_sharding_rule,
    switch_rules,
)
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.layers import equal_layers

ZERO_1, ZERO_2, ZERO_3 = 1, 2, 3
# Ranks are numbered by a device mesh: tensor parallelism the fastest.
MESH_ORDERS = (("tensor", "context", "data", "pipeline"),)


def sequence_splits(_: ModelShape, config: Any) -> Any:
    """A sequence is a multiple of 2 × context_parallel where that splits it, and of the devices that split norms."""
    # Factors are written without branches, for columns.
    split = config.context_parallel * (1 + (config.context_parallel > 1))
    by_tensor = 1 + (config.tensor_parallel - 1) * config.sequence_parallel
    return config.sequence_length % (split * by_tensor) == 0


def only_one(field: str, framework: str, reason: str, source: str, stage: str = "parser") -> LegalityRule:
    """The framework has no flag for more than one of ``field``."""
    return LegalityRule(
        name=f"{framework}_has_no_{field}",
        holds=lambda _, config: getattr(config, field) == 1,
        message=f"{field} must be 1: {reason}",
        stage=stage,
        source=source,
    )


def whole_sequences(reason: str, source: str) -> LegalityRule:
    """The framework does not split activations along the sequence between tensor-parallel ranks."""
    return LegalityRule(
        name="no_sequence_parallel",
        holds=lambda _, config: np.logical_not(config.sequence_parallel),
        message=f"sequence_parallel must be off: {reason} (fixed.sequence_parallel: false)",
        stage="parser",
        source=source,
    )


def plain_sharding(framework: str, source: str, *, hpz: bool = False) -> tuple[LegalityRule, ...]:
    """No optimizer sharding over groups, one policy for all layers, a second copy of parameters only with ``hpz``."""
    outer = plain_sharding_rule(framework, "outer_zero_stage", 0, "copies of states are whole", source)
    gathered = plain_sharding_rule(
        framework, "gathered_num_layers", 0, "one policy for all layers (all that stay gathered: zero_stage 2)", source
    )
    second = plain_sharding_rule(framework, "zero_hpz_partition_size", 1, "it has no word", source)
    return (outer, gathered) if hpz else (outer, gathered, second)


def data_parallel_only(framework: str, source: str, *, splits_sequences: bool = False) -> tuple[LegalityRule, ...]:
    """Rules of a trainer that is planned for with replicas and shards alone, on weights that fit a device's layers.

    With ``splits_sequences`` context parallelism goes with them, under rules of the framework's own.
    """
    degrees = ["tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel"]
    reason = f"plans for {framework} have data parallelism alone"
    if splits_sequences:
        degrees.remove("context_parallel")
        reason = f"plans for {framework} have data and context parallelism alone"
    return (
        *ANY_FRAMEWORK.rules,
        *(only_one(degree, framework, reason, source) for degree in degrees),
        whole_sequences(reason, source),
        *expert_transport_rules(framework, source),
        *switch_rules(framework, source),
        capacity_rule(framework, "experts are those of the checkpoint", source),
        *plain_sharding(framework, source),
        no_vocabulary_parallel(framework),
        joint_offload_rule(framework, source),
        host_only_rule(framework, source),
    )


def without_stages(
    *,
    name: str,
    version: str,
    rules: tuple[LegalityRule, ...],
    shards_over_context_parallel: bool,
    precisions: tuple[str, ...],
    quantised_weights: bool = False,
    is_eager: bool = False,
    context_parallel_style: str = "ring",
    full_rules: tuple[LegalityRule, ...] = (),
) -> FrameworkRules:
    """A framework without pipeline stages: layers are recomputed whole or not at all, and no norm is split."""
    return FrameworkRules(
        name=name,
        version=version,
        rules=rules,
        rank_orders=MESH_ORDERS,
        layer_splits=equal_layers,
        pipeline_schedules=("none",),
        shards_over_context_parallel=shards_over_context_parallel,
        vocab_multiple_per_tensor_parallel=1,
        recompute_modes=("none", "full"),
        precisions=precisions,
        sequence_parallel=False,
        quantised_weights=quantised_weights,
        is_eager=is_eager,
        context_parallel_style=context_parallel_style,
        full_rules=full_rules,
    )
