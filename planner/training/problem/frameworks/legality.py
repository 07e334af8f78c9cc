"""Predicates over the choices of a training configuration, and the rules that several frameworks share.

A predicate takes a model and one configuration, or columns of many (:mod:`.rules`); a function whose name ends in
``rule`` makes the rule of one framework.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.layers import mamba2
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.switches import (
    ALL_TO_ALL,
    DEEPEP,
    DENSE_MLP,
    EXPERT_ACTIVATION,
    EXPERT_LAYER,
    FRAMEWORKS_OWN,
    LATENT_PROJECTION,
    LAYER_NORM,
    SHARED_EXPERTS,
    USUAL_MODULES,
)

ZERO_3 = 3


def is_one_of(choice: Any, values: Sequence[Any]) -> Any:
    """Whether a choice, or each row of its column, has one of a few values; numpy.isin sorts them first."""
    return reduce(operator.or_, (choice == value for value in values), False)


def recurrent_heads(shape: ModelShape, config: Any) -> Any:
    """Every rank of tensor × context parallelism has the same number of whole heads of the recurrent layers."""
    recurrent = None if shape.blocks is None else shape.blocks.recurrent
    heads = 0 if recurrent is None else recurrent.num_heads
    return heads % (config.tensor_parallel * config.context_parallel) == 0


def state_space_groups(shape: ModelShape, config: Any) -> Any:
    """Every tensor-parallel rank has whole groups of heads that share B and C (Mamba-2)."""
    recurrent = None if shape.blocks is None else shape.blocks.recurrent
    groups = mamba2.sizes(recurrent).num_groups if recurrent is not None and recurrent.kind == "mamba-2" else 0
    return groups % config.tensor_parallel == 0


def exchanged_groups(shape: ModelShape, config: Any) -> Any:
    """Groups of heads that share B and C (Mamba-2) are split or repeated whole over the context-parallel ranks."""
    recurrent = None if shape.blocks is None else shape.blocks.recurrent
    if recurrent is None or recurrent.kind != "mamba-2":
        return config.context_parallel >= 1
    groups = np.maximum(mamba2.sizes(recurrent).num_groups // config.tensor_parallel, 1)
    return (groups % config.context_parallel == 0) | (config.context_parallel % groups == 0)


def kv_heads(shape: ModelShape, config: Any) -> Any:
    """Key/value heads are split or copied whole over the tensor-parallel devices."""
    if shape.attention is AttentionKind.MULTI_HEAD_LATENT:
        return config.tensor_parallel >= 1
    heads = shape.num_key_value_heads
    return (heads % config.tensor_parallel == 0) | (config.tensor_parallel % heads == 0)


def mlp_width(shape: ModelShape, config: Any) -> Any:
    """Dense and shared MLPs are split evenly over the tensor-parallel devices."""
    width = shape.intermediate_size if shape.num_dense_layers else 0
    shared = 0 if shape.moe is None else shape.moe.shared_intermediate_size
    return (width % config.tensor_parallel == 0) & (shared % config.tensor_parallel == 0)


def expert_width(shape: ModelShape, config: Any) -> Any:
    """Each expert is split evenly over its tensor-parallel devices."""
    width = 0 if shape.moe is None else shape.moe.expert_intermediate_size
    return width % config.expert_tensor_parallel == 0


def experts(shape: ModelShape, config: Any) -> Any:
    """Experts are spread evenly; a dense model has none."""
    if shape.moe is None:
        return (config.expert_parallel == 1) & (config.expert_tensor_parallel >= 1)
    return shape.moe.num_experts % config.expert_parallel == 0


def expert_groups(shape: ModelShape, config: Any) -> Any:
    """Expert groups divide the devices of one pipeline stage."""
    if shape.moe is None:
        return config.tensor_parallel >= 1
    stage = config.tensor_parallel * config.context_parallel * config.data_parallel
    return stage % (config.expert_parallel * config.expert_tensor_parallel) == 0


def expert_bias(shape: ModelShape, config: Any) -> Any:
    """Experts with biases are whole."""
    biased = shape.moe is not None and shape.moe.expert_bias
    return (config.expert_tensor_parallel == 1) | (not biased)


def shard_groups(shape: ModelShape, config: Any) -> Any:
    """The groups, data_parallel / data_parallel_shard of them, also divide the replicas of the experts."""
    whole = config.data_parallel % config.data_parallel_shard == 0
    if shape.moe is not None:
        stage = config.tensor_parallel * config.context_parallel * config.data_parallel
        replicas = stage // (config.expert_parallel * config.expert_tensor_parallel)
        # replicas % groups == 0, without dividing by the number of groups (which may be 0 in an illegal column)
        whole = whole & (replicas * config.data_parallel_shard % config.data_parallel == 0)
    return whole | (config.zero_stage == 0)


def sequence(shape: ModelShape, config: Any) -> Any:
    """Each part of a sequence is split evenly over the tensor-parallel devices."""
    per_device = config.sequence_length // config.context_parallel
    split_evenly = per_device % config.tensor_parallel == 0
    return split_evenly | np.logical_not(config.sequence_parallel)


def moe_sequence_parallel(shape: ModelShape, config: Any) -> Any:
    """Experts together with tensor parallelism need sequence parallelism."""
    return (config.tensor_parallel == 1) | config.sequence_parallel | (shape.moe is None)


STYLE = ("context_parallel_style", "context_parallel_heads")


def head_exchange(config: Any) -> Any:
    """Ranks of a context-parallel group that exchange heads for tokens; 1 in a ring."""
    whole = config.context_parallel_style == "all-to-all"
    if isinstance(whole, bool):  # one style for all rows
        return config.context_parallel if whole else config.context_parallel_heads
    return np.where(whole, config.context_parallel, config.context_parallel_heads)


def query_heads_exchange(shape: ModelShape, config: Any) -> Any:
    """Query heads are split evenly over tensor parallelism and the exchange of heads."""
    return shape.num_attention_heads % (config.tensor_parallel * head_exchange(config)) == 0


def kv_heads_exchange(shape: ModelShape, config: Any) -> Any:
    """Key/value heads divide, or are copied whole; those of latent attention are as many as the queries'."""
    if shape.attention is AttentionKind.MULTI_HEAD_LATENT:
        return config.tensor_parallel >= 1
    heads, ranks = shape.num_key_value_heads, config.tensor_parallel * head_exchange(config)
    return (heads % ranks == 0) | (ranks % heads == 0) | (head_exchange(config) == 1)


def two_dimensions(_: ModelShape, config: Any) -> Any:
    """Heads are exchanged by a proper part of the group in the two-dimensional style, and by no part otherwise."""
    both, heads = config.context_parallel_style == "all-to-all+ring", config.context_parallel_heads
    inside = (config.context_parallel % heads == 0) & (heads > 1) & (heads < config.context_parallel)
    return (inside & both) | ((heads == 1) & np.logical_not(both))


def context_style_rule(framework: str, known: Sequence[str], source: str) -> LegalityRule:
    """The framework has flags for these styles of context parallelism only."""
    return LegalityRule(
        name=f"{framework}_context_parallel_styles",
        holds=lambda _, config: (config.context_parallel == 1) | is_one_of(config.context_parallel_style, known),
        message=f"context_parallel_style must be {' or '.join(known)}",
        stage="parser",
        source=source,
        about=STYLE,
    )


def whole_kv_heads(shape: ModelShape, config: Any) -> Any:
    """Transformer Engine copies no key/value heads for the exchange; below tensor_parallel heads Megatron has one."""
    heads = np.maximum(shape.num_key_value_heads // config.tensor_parallel, 1)
    return (heads % head_exchange(config) == 0) | (shape.attention is AttentionKind.MULTI_HEAD_LATENT)


def latent_exchange(shape: ModelShape, config: Any) -> Any:
    """Latent attention exchanges neither heads nor gathers its sequence."""
    is_latent = shape.attention is AttentionKind.MULTI_HEAD_LATENT
    style = config.context_parallel_style
    return (config.context_parallel == 1) | (not is_latent) | ((style != "all-to-all") & (style != "all-gather"))


def windows(shape: ModelShape, config: Any) -> Any:
    """Sliding windows see whole sequences."""
    style = config.context_parallel_style
    whole = (style == "all-to-all") | (style == "all-gather") | (config.context_parallel == 1)
    return whole | all(window is None for window in shape.sliding_windows)


def needs_full_sharding(_: ModelShape, config: Any) -> Any:
    """Hierarchies of shards need zero_stage 3."""
    asked = (config.zero_hpz_partition_size > 1) | (config.outer_zero_stage > 0) | (config.gathered_num_layers > 0)
    return np.logical_not(asked) | (config.zero_stage == ZERO_3)


def second_copies(shape: ModelShape, config: Any) -> Any:
    """The neighbours that hold a second copy divide the ranks that share the first one, and are fewer."""
    size, ranks = config.zero_hpz_partition_size, config.data_parallel_shard * config.context_parallel
    fits = (ranks % size == 0) & (size < ranks)
    if shape.moe is not None:
        block, spread = size * config.tensor_parallel, config.expert_parallel * config.expert_tensor_parallel
        fits = fits & ((block % spread == 0) | (spread % block == 0))
    return fits | (size == 1)


def plain_sharding_rule(framework: str, name: str, usual: int, reason: str, source: str) -> LegalityRule:
    """The framework has no flag for a way to shard states: it stays at its default."""
    return LegalityRule(
        name=f"{framework}_has_no_{name}",
        holds=lambda _, config: getattr(config, name) == usual,
        message=f"{name} must be {usual}: {reason}",
        stage="parser",
        source=source,
        about=(name,),
    )


def full_chunks(_: ModelShape, config: Any) -> Any:
    """Every chunk has a layer; the first one may have the embedding alone, the last one the LM head."""
    layers = config.layers_per_chunk
    return all(layers if config.vocabulary_parallel else layers[1:-1])


def offload_rule(framework: str, zero_stages: Sequence[int], source: str) -> LegalityRule:
    """Optimizer states off the device need one of ``zero_stages``."""
    return LegalityRule(
        name=f"{framework}_optimizer_offload",
        holds=lambda _, config: np.logical_not(config.optimizer_offload) | is_one_of(config.zero_stage, zero_stages),
        message=f"optimizer_offload needs zero_stage {' or '.join(map(str, zero_stages))}",
        about=("optimizer_offload",),
        stage="parser",
        source=source,
    )


def joint_offload_rule(framework: str, source: str) -> LegalityRule:
    """One switch moves parameters, gradients and optimizer states together."""
    return LegalityRule(
        name=f"{framework}_offloads_all_states",
        holds=lambda _, config: np.equal(config.optimizer_offload, config.parameter_offload),
        message=f"{framework} offloads parameters and optimizer states together or neither",
        stage="parser",
        source=source,
    )


def layers_wait_elsewhere(shape: ModelShape, config: Any) -> Any:
    """Layers whose activations are offloaded are of one stage that recomputes nothing."""
    count = config.activation_offload_num_layers
    is_plain = np.equal(config.activation_recompute, "none") & (config.pipeline_parallel == 1)
    return (count == 0) | (is_plain & (count <= shape.num_hidden_layers))


def no_offload_rule(framework: str, choice: str, reason: str, source: str) -> LegalityRule:
    """The framework has no flag for an offload: of parameters, or one of the two ways to offload activations."""
    return LegalityRule(
        name=f"{framework}_has_no_{choice}",
        holds=lambda _, config: np.logical_not(getattr(config, choice)),
        message=f"{choice}: {reason}",
        stage="parser",
        source=source,
        about=(choice,),
    )


def host_only_rule(framework: str, source: str) -> LegalityRule:
    """The framework offloads to host memory alone."""
    return LegalityRule(
        name=f"{framework}_has_no_nvme",
        holds=lambda _, config: np.not_equal(config.offload_to, "nvme"),
        message=f"{framework} offloads to host memory, not to NVMe (constraints.offload_to: host)",
        stage="parser",
        source=source,
    )


def whole_weights_rule(framework: str, source: str) -> LegalityRule:
    """The framework has no frozen weights in four bits."""
    return LegalityRule(
        name=f"{framework}_has_no_quantised_weights",
        holds=lambda _, config: np.logical_not(config.quantised_weights),
        message=f"quantised_weights: {framework} has no weights in four bits (workload.phase: lora)",
        stage="parser",
        source=source,
    )


def capacity_rule(framework: str, reason: str, source: str) -> LegalityRule:
    """The framework has no flag for experts of a fixed capacity."""
    return LegalityRule(
        name=f"{framework}_has_no_expert_capacity",
        holds=lambda _, config: np.asarray(config.expert_capacity_factor) == 0,
        message=f"expert_capacity_factor: {reason} (workload.drops_tokens: false)",
        stage="parser",
        source=source,
    )


def expert_transport_rules(framework: str, source: str) -> tuple[LegalityRule, ...]:
    """The framework has no flag for the expert dispatcher, nor for its overlap with compute."""
    return (
        LegalityRule(
            name=f"{framework}_has_one_expert_dispatcher",
            holds=lambda _, config: np.asarray(config.expert_dispatcher) == ALL_TO_ALL,
            message=f"expert_dispatcher: {framework} plans are made for {ALL_TO_ALL} alone",
            stage="parser",
            source=source,
        ),
        LegalityRule(
            name=f"{framework}_has_no_expert_overlap",
            holds=lambda _, config: np.logical_not(config.expert_parallel_overlap),
            message=f"expert_parallel_overlap: {framework} has no word for it",
            stage="parser",
            source=source,
        ),
    )


def switch_rules(framework: str, source: str) -> tuple[LegalityRule, ...]:
    """Plans for the framework are made without CUDA graphs, with its own modules of recompute and its own gradients."""
    return (
        _kept(
            f"{framework}_has_no_recompute_modules",
            "recompute_modules",
            USUAL_MODULES,
            f"{framework} has no names for parts of a layer (Megatron-LM has)",
            source,
        ),
        _kept(
            f"{framework}_has_its_own_gradients",
            "gradient_precision",
            FRAMEWORKS_OWN,
            f"plans for {framework} are made with its own format alone",
            source,
        ),
        _kept(
            f"{framework}_has_no_cuda_graphs",
            "cuda_graphs",
            "none",
            f"plans for {framework} are made without",
            source,
        ),
    )


def own_loss_rules(framework: str, source: str) -> tuple[LegalityRule, ...]:
    """Plans for the framework are made with its own loss, and with an optimizer that follows the backward pass."""
    return (
        _kept(
            f"{framework}_has_its_own_loss",
            "loss",
            FRAMEWORKS_OWN,
            f"plans for {framework} are made with its own alone (torchtune has both)",
            source,
        ),
        _kept(
            f"{framework}_has_no_optimizer_in_backward",
            "optimizer_in_backward",
            False,
            f"plans for {framework} are made without (torchtune has it)",
            source,
        ),
    )


def _kept(name: str, choice: str, value: object, message: str, source: str) -> LegalityRule:
    """A framework has no word for another value of a choice."""
    return LegalityRule(
        name=name,
        holds=lambda _, config: np.asarray(getattr(config, choice) == value),
        message=f"{choice}: {message}",
        stage="parser",
        source=source,
        about=(choice,),
    )


def own_optimizer_rule(framework: str, source: str) -> LegalityRule:
    """Plans for the framework are made with the optimizer states that it keeps unless told otherwise."""
    message = f"plans for {framework} are made with its own AdamW alone (megatron has moments in bf16)"
    return _kept(f"{framework}_has_its_own_optimizer", "optimizer", FRAMEWORKS_OWN, message, source)


def modules_exist(shape: ModelShape, config: Any) -> Any:
    """What is recomputed must be there: latent attention, dense layers, experts, a shared expert."""
    is_there = {
        LATENT_PROJECTION: shape.latent is not None,
        DENSE_MLP: shape.num_dense_layers > 0,
        EXPERT_ACTIVATION: shape.moe is not None,
        EXPERT_LAYER: shape.moe is not None,
        SHARED_EXPERTS: shape.moe is not None and shape.moe.shared_intermediate_size > 0,
    }
    return np.asarray(all(is_there.get(module, True) for module in config.recompute_modules))


def outputs_can_be_quantised_again(_: ModelShape, config: Any) -> Any:
    """fp8 with delayed scaling, which plans in fp8 are for, has seen the outputs that would be made again."""
    made_again = {EXPERT_ACTIVATION, LAYER_NORM} & set(config.recompute_modules)
    return np.not_equal(config.precision, "fp8") | (not made_again)


def experts_are_not_repeated(_: ModelShape, config: Any) -> Any:
    """Neither overlap of the exchange nor graphs of the router go with recompute of the whole layer of experts."""
    is_graphed = np.equal(config.cuda_graphs, "partial")
    return np.logical_not(config.expert_parallel_overlap | is_graphed) | (EXPERT_LAYER not in config.recompute_modules)


def shapes_are_fixed(shape: ModelShape, config: Any) -> Any:
    """The step is one graph only if no shape depends on the router."""
    is_fixed = (np.asarray(config.expert_capacity_factor) > 0) | (shape.moe is None)
    return np.not_equal(config.cuda_graphs, "full") | is_fixed


def graphs_and_recompute(_: ModelShape, config: Any) -> Any:
    """Recompute of whole layers covers graphs of their parts."""
    whole = np.equal(config.activation_recompute, "full") | np.equal(config.activation_recompute, "block")
    return np.logical_not(whole) | np.not_equal(config.cuda_graphs, "partial")


def several_expert_ranks(_: ModelShape, config: Any) -> Any:
    """Fused dispatch needs somebody to send to."""
    ranks = config.expert_parallel * config.expert_tensor_parallel
    return (ranks > 1) | (np.asarray(config.expert_dispatcher) == ALL_TO_ALL)


def room_to_overlap(_: ModelShape, config: Any) -> Any:
    """Overlap needs expert ranks and, with several stages, several chunks."""
    chunks = (config.pipeline_parallel == 1) | (config.virtual_pipeline_stages > 1)
    return np.logical_not(config.expert_parallel_overlap) | (chunks & (config.expert_parallel > 1))


def capacity_travels(_: ModelShape, config: Any) -> Any:
    """DeepEP pads no experts."""
    return (np.asarray(config.expert_capacity_factor) == 0) | (np.asarray(config.expert_dispatcher) != DEEPEP)


def no_vocabulary_parallel(framework: str) -> LegalityRule:
    """No framework that is planned for splits the vocabulary over pipeline stages."""
    return LegalityRule(
        name=f"{framework}_has_no_vocabulary_parallel",
        holds=lambda _, config: np.logical_not(config.vocabulary_parallel),
        message=f"vocabulary_parallel: {framework} does not have it ('constraints.target: any' prices it)",
        stage="parser",
        source="github.com/sail-sg/VocabularyParallelism is a fork of Megatron-LM (read, not run)",
    )
