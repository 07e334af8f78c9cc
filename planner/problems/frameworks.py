"""What a training framework's own rules allow, beyond what the mathematics of parallelism asks.

Each rule is a named predicate over a model and the columns of a training configuration (the fields of
:class:`~meshplan.planner.problems.training.TrainingConfig`). The predicates use only ``% == <= & |``, so ``config``
may be one configuration or a struct of NumPy arrays with the same field names: the enumeration filters whole batches
with the very rules that the emitters check one plan against.
A rule is listed only where the framework was seen to refuse, or where its source raises at run time although its
parser accepts (``stage``). tests/conformance/megatron holds them against the framework itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshplan.catalogs.model_shapes import AttentionKind, ModelShape
from meshplan.planner.problems.practice import ALL_TO_ALL
from meshplan.planner.problems.precisions import PRECISIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalityRule:
    """One condition that a framework puts on a training configuration.

    Args:
        name: short, stable; rejected candidates are counted under it.
        holds: (model, configuration or columns) → whether it is met, element-wise.
        message: what is asked for, in our vocabulary.
        stage: where the framework notices: ``parser``, ``process groups`` or ``run time``.
        source: file of the framework and version.
    """

    name: str
    holds: Callable[[ModelShape, Any], Any]
    message: str
    stage: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRules:
    """A training framework as the planner sees it.

    Args:
        name: as in ``constraints.target`` of a spec.
        version: the release that the rules were checked against.
        rules: every rule that can refuse a configuration.
        rank_orders: parallel dimensions from the fastest-varying to the slowest, the default first.
        uneven_layers: stages may hold different numbers of layers.
        pipeline_schedules: what it can run, as named in :data:`meshplan.planner.estimators.pipeline.SCHEDULES`.
        shards_over_context_parallel: sharded states are split over data × context parallel devices, not data alone.
        vocab_multiple_per_tensor_parallel: the vocabulary is padded to this multiple × tensor_parallel.
        notes: traps that no rule expresses.
        recompute_modes: what ``activation_recompute`` may be.
        precisions: of matrix products.
        sequence_parallel: norms may be split over the tensor-parallel devices; off where there is no word for it.
        quantised_weights: frozen weights may lie in four bits.
    """

    name: str
    version: str
    rules: tuple[LegalityRule, ...]
    rank_orders: tuple[tuple[str, ...], ...]
    uneven_layers: bool
    pipeline_schedules: tuple[str, ...]
    shards_over_context_parallel: bool
    vocab_multiple_per_tensor_parallel: int
    notes: tuple[str, ...] = ()
    recompute_modes: tuple[str, ...] = ("none", "selective", "full")
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp8")
    sequence_parallel: bool = True
    quantised_weights: bool = False

    def broken(self, shape: ModelShape, config: Any) -> tuple[LegalityRule, ...]:
        """The rules that ONE configuration breaks; empty when the framework takes it."""
        return tuple(rule for rule in self.rules if not rule.holds(shape, config))

    def padded_vocab_size(self, vocab_size: int, tensor_parallel: int) -> int:
        """Rows of the embedding and of the LM head as the framework allocates them."""
        multiple = self.vocab_multiple_per_tensor_parallel * tensor_parallel
        return -(-vocab_size // multiple) * multiple


def rank_coordinates(order: Sequence[str], sizes: Sequence[int], rank: int) -> dict[str, int]:
    """Position of ``rank`` in each dimension of ``order`` (fastest-varying first).

    >>> rank_coordinates(("tensor", "data"), (4, 2), 6)
    {'tensor': 2, 'data': 1}
    """
    coordinates = {}
    for dimension, size in zip(order, sizes, strict=True):
        rank, coordinates[dimension] = divmod(rank, size)
    return coordinates


def _kv_heads(shape: ModelShape, config: Any) -> Any:
    if shape.attention is AttentionKind.MULTI_HEAD_LATENT:
        return config.tensor_parallel >= 1
    heads = shape.num_key_value_heads
    return (heads % config.tensor_parallel == 0) | (config.tensor_parallel % heads == 0)


def _mlp_width(shape: ModelShape, config: Any) -> Any:
    has_dense = shape.moe is None or not all(shape.moe.moe_layers)
    width = shape.intermediate_size if has_dense else 0
    shared = 0 if shape.moe is None else shape.moe.shared_intermediate_size
    return (width % config.tensor_parallel == 0) & (shared % config.tensor_parallel == 0)


def _expert_width(shape: ModelShape, config: Any) -> Any:
    width = 0 if shape.moe is None else shape.moe.expert_intermediate_size
    return width % config.expert_tensor_parallel == 0


def _experts(shape: ModelShape, config: Any) -> Any:
    if shape.moe is None:
        return (config.expert_parallel == 1) & (config.expert_tensor_parallel >= 1)
    return shape.moe.num_experts % config.expert_parallel == 0


def _expert_groups(shape: ModelShape, config: Any) -> Any:
    if shape.moe is None:
        return config.tensor_parallel >= 1
    stage = config.tensor_parallel * config.context_parallel * config.data_parallel
    return stage % (config.expert_parallel * config.expert_tensor_parallel) == 0


def _expert_bias(shape: ModelShape, config: Any) -> Any:
    biased = shape.moe is not None and shape.moe.expert_bias
    return (config.expert_tensor_parallel == 1) | (not biased)


def _shard_groups(shape: ModelShape, config: Any) -> Any:
    """The groups, data_parallel / data_parallel_shard of them, also divide the replicas of the experts."""
    whole = config.data_parallel % config.data_parallel_shard == 0
    if shape.moe is not None:
        stage = config.tensor_parallel * config.context_parallel * config.data_parallel
        replicas = stage // (config.expert_parallel * config.expert_tensor_parallel)
        # replicas % groups == 0, without dividing by the number of groups (which may be 0 in an illegal column)
        whole = whole & (replicas * config.data_parallel_shard % config.data_parallel == 0)
    return whole | (config.zero_stage == 0)


def _sequence(shape: ModelShape, config: Any) -> Any:
    per_device = config.sequence_length // config.context_parallel
    split_evenly = per_device % config.tensor_parallel == 0
    return split_evenly | np.logical_not(config.sequence_parallel)


def _moe_sequence_parallel(shape: ModelShape, config: Any) -> Any:
    return (config.tensor_parallel == 1) | config.sequence_parallel | (shape.moe is None)


def head_exchange(config: Any) -> Any:
    """Ranks of a context-parallel group that exchange heads for tokens; 1 in a ring."""
    whole = config.context_parallel_style == "all-to-all"
    if isinstance(whole, bool):  # one style for all rows
        return config.context_parallel if whole else config.context_parallel_heads
    return np.where(whole, config.context_parallel, config.context_parallel_heads)


def _query_heads_exchange(shape: ModelShape, config: Any) -> Any:
    return shape.num_attention_heads % (config.tensor_parallel * head_exchange(config)) == 0


def _kv_heads_exchange(shape: ModelShape, config: Any) -> Any:
    """Key/value heads divide, or are copied whole; those of latent attention are as many as the queries'."""
    if shape.attention is AttentionKind.MULTI_HEAD_LATENT:
        return config.tensor_parallel >= 1
    heads, ranks = shape.num_key_value_heads, config.tensor_parallel * head_exchange(config)
    return (heads % ranks == 0) | (ranks % heads == 0) | (head_exchange(config) == 1)


def _two_dimensions(_: ModelShape, config: Any) -> Any:
    """Heads are exchanged by a proper part of the group in the two-dimensional style, and by no part otherwise."""
    both, heads = config.context_parallel_style == "all-to-all+ring", config.context_parallel_heads
    inside = (config.context_parallel % heads == 0) & (heads > 1) & (heads < config.context_parallel)
    return (inside & both) | ((heads == 1) & np.logical_not(both))


def context_style_rule(framework: str, known: Sequence[str], source: str) -> LegalityRule:
    """The framework has words for these ways of context parallelism only."""
    return LegalityRule(
        name=f"{framework}_context_parallel_styles",
        holds=lambda _, config: (config.context_parallel == 1) | np.isin(config.context_parallel_style, known),
        message=f"context_parallel_style must be {' or '.join(known)}",
        stage="parser",
        source=source,
    )


def _whole_kv_heads(shape: ModelShape, config: Any) -> Any:
    """Transformer Engine copies no key/value heads for the exchange; below tensor_parallel heads Megatron has one."""
    heads = np.maximum(shape.num_key_value_heads // config.tensor_parallel, 1)
    return (heads % head_exchange(config) == 0) | (shape.attention is AttentionKind.MULTI_HEAD_LATENT)


def _latent_exchange(shape: ModelShape, config: Any) -> Any:
    is_latent = shape.attention is AttentionKind.MULTI_HEAD_LATENT
    style = config.context_parallel_style
    return (config.context_parallel == 1) | (not is_latent) | ((style != "all-to-all") & (style != "all-gather"))


def _windows(shape: ModelShape, config: Any) -> Any:
    style = config.context_parallel_style
    whole = (style == "all-to-all") | (style == "all-gather") | (config.context_parallel == 1)
    return whole | all(window is None for window in shape.sliding_windows)


def _needs_full_sharding(_: ModelShape, config: Any) -> Any:
    asked = (config.zero_hpz_partition_size > 1) | (config.outer_zero_stage > 0) | (config.gathered_num_layers > 0)
    return np.logical_not(asked) | (config.zero_stage == _ZERO_3)


def _second_copies(shape: ModelShape, config: Any) -> Any:
    """The neighbours that hold a second copy divide the ranks that share the first one, and are fewer."""
    size, ranks = config.zero_hpz_partition_size, config.data_parallel_shard * config.context_parallel
    fits = (ranks % size == 0) & (size < ranks)
    if shape.moe is not None:
        block, spread = size * config.tensor_parallel, config.expert_parallel * config.expert_tensor_parallel
        fits = fits & ((block % spread == 0) | (spread % block == 0))
    return fits | (size == 1)


def plain_sharding_rule(framework: str, name: str, usual: int, reason: str, source: str) -> LegalityRule:
    """The framework has no word for a way to shard states: it stays at its default."""
    return LegalityRule(
        name=f"{framework}_has_no_{name}",
        holds=lambda _, config: getattr(config, name) == usual,
        message=f"{name} must be {usual}: {reason}",
        stage="parser",
        source=source,
    )


def offload_rule(framework: str, zero_stages: Sequence[int], source: str) -> LegalityRule:
    """Optimizer states off the device need one of ``zero_stages``."""
    return LegalityRule(
        name=f"{framework}_optimizer_offload",
        holds=lambda _, config: np.logical_not(config.optimizer_offload) | np.isin(config.zero_stage, zero_stages),
        message=f"optimizer_offload needs zero_stage {' or '.join(map(str, zero_stages))}",
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


def no_offload_rule(framework: str, choice: str, reason: str, source: str) -> LegalityRule:
    """The framework has no word for an offload: ``parameter_offload`` or ``activation_offload``."""
    return LegalityRule(
        name=f"{framework}_has_no_{choice}",
        holds=lambda _, config: np.logical_not(getattr(config, choice)),
        message=f"{choice}: {reason}",
        stage="parser",
        source=source,
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
    """The framework has no word for experts of a fixed capacity."""
    return LegalityRule(
        name=f"{framework}_has_no_expert_capacity",
        holds=lambda _, config: np.asarray(config.expert_capacity_factor) == 0,
        message=f"expert_capacity_factor: {reason} (workload.drops_tokens: false)",
        stage="parser",
        source=source,
    )


def expert_transport_rules(framework: str, source: str) -> tuple[LegalityRule, ...]:
    """The framework has no word for who carries tokens to experts, nor for when."""
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


def _several_expert_ranks(_: ModelShape, config: Any) -> Any:
    ranks = config.expert_parallel * config.expert_tensor_parallel
    return (ranks > 1) | (np.asarray(config.expert_dispatcher) == ALL_TO_ALL)


def _room_to_overlap(_: ModelShape, config: Any) -> Any:
    chunks = (config.pipeline_parallel == 1) | (config.virtual_pipeline_stages > 1)
    return np.logical_not(config.expert_parallel_overlap) | (chunks & (config.expert_parallel > 1))


def _capacity_travels(_: ModelShape, config: Any) -> Any:
    return (np.asarray(config.expert_capacity_factor) == 0) | (np.asarray(config.expert_dispatcher) != "deepep")


def without_layer_recompute(rules: FrameworkRules) -> FrameworkRules:
    """The framework where tokens travel beside the compute of another micro-batch: layers are not computed again.

    Source: megatron-core 0.19.2, core/transformer/transformer_config.py.
    """
    left = tuple(mode for mode in rules.recompute_modes if mode in ("none", "selective"))
    return replace(rules, recompute_modes=left)


def no_vocabulary_parallel(framework: str) -> LegalityRule:
    """No framework that is planned for splits the vocabulary over pipeline stages."""
    return LegalityRule(
        name=f"{framework}_has_no_vocabulary_parallel",
        holds=lambda _, config: np.logical_not(config.vocabulary_parallel) | (config.num_microbatches < 0),
        message=f"vocabulary_parallel: {framework} does not have it ('constraints.target: any' prices it)",
        stage="parser",
        source="github.com/sail-sg/VocabularyParallelism is a fork of Megatron-LM (read, not run)",
    )


_ZERO_2, _ZERO_3 = 2, 3
_CORE = "megatron-core 0.19.2"
_CONFIG = f"{_CORE}: core/transformer/transformer_config.py"
_VALIDATE = f"{_CORE}: training/arguments.py, validate_args"
_GROUPS = f"{_CORE}: core/parallel_state.py, initialize_model_parallel"
_TRANSFORMER_ENGINE = "Transformer Engine: pytorch/attention/dot_product_attention/context_parallel.py (read, not run)"
_LAYERS = f"{_CORE}: core/tensor_parallel/layers.py, divide"

_MEGATRON_RULES = (
    LegalityRule(
        name="heads_divisible_by_tensor_parallel",
        holds=lambda shape, config: shape.num_attention_heads % config.tensor_parallel == 0,
        message="num_attention_heads must be a multiple of tensor_parallel",
        stage="parser",
        source=_CONFIG,
    ),
    LegalityRule(
        name="kv_heads_and_tensor_parallel_divide",
        holds=_kv_heads,
        message="num_key_value_heads must be a multiple or a divisor of tensor_parallel",
        stage="parser",
        source=_CONFIG,
    ),
    LegalityRule(
        name="parameter_offload_needs_zero_3",
        holds=lambda _, config: np.logical_not(config.parameter_offload) | (config.zero_stage == _ZERO_3),
        message="parameter_offload needs zero_stage 3: whole parameters stay on the device",
        stage="parser",
        source="ZeRO-Infinity, arXiv:2104.07857, section 5.1; deepspeed 0.19.8: runtime/zero/config.py",
    ),
    LegalityRule(
        name="parameter_offload_keeps_no_copies",
        holds=lambda _, config: (
            np.logical_not(config.parameter_offload)
            | ((config.zero_hpz_partition_size == 1) & (config.gathered_num_layers == 0))
        ),
        message="parameter_offload keeps no parameters on the device: zero_hpz_partition_size 1, gathered_num_layers 0",
        stage="parser",
        source="the planner's own: what second copies beside offloaded ones do was not read",
    ),
    LegalityRule(
        name="activation_offload_needs_full_recompute",
        holds=lambda _, config: (
            np.logical_not(config.activation_offload) | np.equal(config.activation_recompute, "full")
        ),
        message="activation_offload moves the inputs of recomputed layers: activation_recompute must be full",
        stage="parser",
        source="accelerate 1.15.0: utils/dataclasses.py, FullyShardedDataParallelPlugin",
    ),
    LegalityRule(
        name="quantised_weights_are_whole",
        holds=lambda _, config: (config.tensor_parallel == 1) | np.logical_not(config.quantised_weights),
        message="weights in four bits (QLoRA) are not split: tensor_parallel must be 1",
        stage="run time",
        source="bitsandbytes: matrices are stored as flat blocks of 64 (docs, 4-bit quantization; read, not run)",
    ),
    LegalityRule(
        name="mlp_width_divisible_by_tensor_parallel",
        holds=_mlp_width,
        message="the MLP width (and that of the shared experts) must be a multiple of tensor_parallel",
        stage="run time",
        source=_LAYERS,
    ),
    LegalityRule(
        name="expert_width_divisible_by_expert_tensor_parallel",
        holds=_expert_width,
        message="the expert width must be a multiple of expert_tensor_parallel",
        stage="run time",
        source=_LAYERS,
    ),
    LegalityRule(
        name="sequence_parallel_needs_tensor_parallel",
        holds=lambda _, config: (config.tensor_parallel > 1) | np.logical_not(config.sequence_parallel),
        message="sequence_parallel needs tensor_parallel > 1 (it is switched off silently)",
        stage="parser",
        source=_VALIDATE,
    ),
    LegalityRule(
        name="moe_tensor_parallel_needs_sequence_parallel",
        holds=_moe_sequence_parallel,
        message="a mixture of experts with tensor_parallel > 1 trains only with sequence_parallel",
        stage="run time",
        source=f"{_CORE}: core/transformer/moe/moe_layer.py, MoELayer.forward",
    ),
    LegalityRule(
        name="sequence_divisible_by_tensor_parallel",
        holds=_sequence,
        message="sequence_length / context_parallel must be a multiple of tensor_parallel under sequence_parallel",
        stage="run time",
        source=f"{_CORE}: core/tensor_parallel/mappings.py",
    ),
    LegalityRule(
        name="sequence_divisible_by_twice_context_parallel",
        holds=lambda _, config: (
            (config.context_parallel == 1) | (config.sequence_length % (2 * config.context_parallel) == 0)
        ),
        message="sequence_length must be a multiple of 2 × context_parallel",
        stage="parser",
        source=_VALIDATE,
    ),
    LegalityRule(
        name="sliding_windows_need_whole_sequences",
        holds=_windows,
        message="sliding windows cannot be combined with the ring (p2p) form of context parallelism",
        stage="run time",
        source=_TRANSFORMER_ENGINE,
    ),
    LegalityRule(
        name="query_heads_divide_for_all_to_all",
        holds=_query_heads_exchange,
        message="num_attention_heads must be a multiple of tensor_parallel × the context-parallel ranks that exchange "
        "heads (all of them in all-to-all, context_parallel_heads in all-to-all+ring)",
        stage="run time",
        source=_TRANSFORMER_ENGINE,
    ),
    LegalityRule(
        name="kv_heads_divide_for_all_to_all",
        holds=_kv_heads_exchange,
        message="num_key_value_heads must be a multiple or a divisor of tensor_parallel × the context-parallel ranks "
        "that exchange heads",
        stage="run time",
        source="DeepSpeed Ulysses (arXiv:2309.14509, §3.1): every rank attends with whole heads",
    ),
    LegalityRule(
        name="whole_kv_heads_for_all_to_all",
        holds=_whole_kv_heads,
        message="num_key_value_heads / tensor_parallel must be a multiple of the context-parallel ranks that exchange "
        "heads",
        stage="run time",
        source=_TRANSFORMER_ENGINE,
    ),
    LegalityRule(
        name="context_parallel_heads_are_part_of_the_group",
        holds=_two_dimensions,
        message="context_parallel_heads goes with context_parallel_style all-to-all+ring, where it is a divisor of "
        "context_parallel between 1 and context_parallel",
        stage="parser",
        source=_VALIDATE,
    ),
    LegalityRule(
        name="latent_attention_needs_a_ring",
        holds=_latent_exchange,
        message="multi-head latent attention cannot be combined with context_parallel_style all-to-all or all-gather",
        stage="run time",
        source=_TRANSFORMER_ENGINE,
    ),
    context_style_rule(
        "megatron",
        ("ring", "all-gather", "all-to-all", "all-to-all+ring"),
        f"{_CORE}: training/arguments.py, --cp-comm-type (its ring deals causal work evenly)",
    ),
    LegalityRule(
        name="interleaving_needs_pipeline",
        holds=lambda _, config: (config.virtual_pipeline_stages == 1) | (config.pipeline_parallel > 1),
        message="virtual_pipeline_stages > 1 needs pipeline_parallel > 1",
        stage="parser",
        source=_VALIDATE,
    ),
    LegalityRule(
        name="interleaving_microbatches_multiple_of_pipeline",
        holds=lambda _, config: (
            (config.virtual_pipeline_stages == 1) | (config.num_microbatches % config.pipeline_parallel == 0)
        ),
        message="interleaving needs num_microbatches that are a multiple of pipeline_parallel",
        stage="run time",
        source=f"{_CORE}: core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving",
    ),
    LegalityRule(
        name="dualpipe_v_fills_the_v",
        holds=lambda _, config: (
            (config.num_microbatches >= 2 * config.pipeline_parallel) | (config.pipeline_schedule != "dualpipe-v")
        ),
        message="dualpipe-v needs num_microbatches of 2 × pipeline_parallel or more",
        stage="run time",
        source="torch 2.13: distributed/pipelining/schedules.py, ScheduleDualPipeV.__init__ (read, not run)",
    ),
    LegalityRule(
        name="vocabulary_parallel_has_an_order",
        holds=lambda shape, config: (
            np.logical_not(config.vocabulary_parallel)
            | (
                np.isin(config.pipeline_schedule, ("1f1b", "v-half"))
                & (shape.num_nextn_predict_layers == 0)
                & (config.num_microbatches >= 1)
            )
        ),
        message="vocabulary_parallel needs pipeline_schedule 1f1b or v-half and a model without multi-token prediction",
        stage="run time",
        source="Yeung et al., arXiv:2411.05288, §5",
    ),
    LegalityRule(
        name="global_batch_divisible",
        holds=lambda _, config: (
            config.global_batch_size == config.micro_batch_size * config.data_parallel * config.num_microbatches
        ),
        message="global_batch_size must be micro_batch_size × data_parallel × num_microbatches",
        stage="parser",
        source=_VALIDATE,
    ),
    LegalityRule(
        name="experts_divisible_by_expert_parallel",
        holds=_experts,
        message="num_experts must be a multiple of expert_parallel (1 for a dense model)",
        stage="parser",
        source=_VALIDATE,
    ),
    LegalityRule(
        name="expert_groups_divide_stage",
        holds=_expert_groups,
        message="expert_parallel × expert_tensor_parallel must divide the devices of one pipeline stage",
        stage="process groups",
        source=_GROUPS,
    ),
    LegalityRule(
        name="expert_bias_needs_whole_experts",
        holds=_expert_bias,
        message="experts with biases need expert_tensor_parallel = 1",
        stage="parser",
        source=_CONFIG,
    ),
    LegalityRule(
        name="shard_groups_divide_replicas",
        holds=_shard_groups,
        message="data_parallel / data_parallel_shard must be whole, and divide the expert replicas",
        stage="process groups",
        source=_GROUPS,
    ),
    LegalityRule(
        name="zero_2_saves_nothing",
        holds=lambda _, config: config.zero_stage != _ZERO_2,
        message="zero_stage 2 allocates all gradients of the model in one bucket here: use stage 1 or 3",
        stage="run time",
        source=f"{_CORE}: core/distributed/fsdp/mcore_fsdp_adapter.py (NVIDIA/Megatron-LM issue 6314)",
    ),
    LegalityRule(
        name="zero_2_and_3_need_one_stage",
        holds=lambda _, config: (config.zero_stage <= 1) | (config.pipeline_parallel == 1),
        message="zero_stage 2 and 3 (Megatron-FSDP) need pipeline_parallel = 1",
        stage="run time",
        source=f"{_CORE}: core/distributed/fsdp/mcore_fsdp_adapter.py, _get_dp_tp_mesh",
    ),
    LegalityRule(
        name="fused_dispatch_needs_several_expert_ranks",
        holds=_several_expert_ranks,
        message="expert_dispatcher deepep and hybridep need expert_parallel × expert_tensor_parallel > 1",
        stage="run time",
        source=f"{_CORE}: core/transformer/moe/token_dispatcher.py, MoEFlexTokenDispatcher",
    ),
    LegalityRule(
        name="expert_overlap_needs_chunks_and_expert_ranks",
        holds=_room_to_overlap,
        message="expert_parallel_overlap needs expert_parallel > 1 and, with several stages, virtual stages",
        stage="parser",
        source=_CONFIG,
    ),
    LegalityRule(
        name="deepep_pads_no_experts",
        holds=_capacity_travels,
        message="expert_dispatcher deepep does not pad experts to their capacity: use hybridep or alltoall",
        stage="parser",
        source=_CONFIG,
    ),
    whole_weights_rule("megatron", f"{_CORE}: training/arguments.py"),
    LegalityRule(
        name="hierarchies_need_full_sharding",
        holds=_needs_full_sharding,
        message="zero_hpz_partition_size, outer_zero_stage and gathered_num_layers need zero_stage 3",
        stage="parser",
        source="DeepSpeed 0.19.8: runtime/zero/config.py; megatron-core 0.19.2: --outer-dp-sharding-strategy",
    ),
    LegalityRule(
        name="second_copies_divide_the_first",
        holds=_second_copies,
        message="zero_hpz_partition_size must divide data_parallel_shard × context_parallel and be smaller; with "
        "experts its ranks × tensor_parallel and the ranks of one set of experts must divide",
        stage="process groups",
        source="DeepSpeed 0.19.8: utils/groups.py, _create_zero_param_parallel_group",
    ),
    LegalityRule(
        name="outer_sharding_needs_groups",
        holds=lambda _, config: (config.outer_zero_stage == 0) | (config.data_parallel_shard < config.data_parallel),
        message="outer_zero_stage 1 needs data_parallel_shard smaller than data_parallel",
        stage="run time",
        source=f"{_CORE}: core/distributed/fsdp/src/megatron_fsdp/fully_shard.py",
    ),
    plain_sharding_rule(
        "megatron",
        "zero_hpz_partition_size",
        1,
        "Megatron-FSDP keeps no second copy",
        f"{_CORE}: training/arguments.py",
    ),
    plain_sharding_rule(
        "megatron", "gathered_num_layers", 0, "one policy for all layers", f"{_CORE}: training/arguments.py"
    ),
    no_vocabulary_parallel("megatron"),
    offload_rule("megatron", (1,), f"{_VALIDATE} (and core/optimizer/optimizer_config.py; Megatron-FSDP not tried)"),
    no_offload_rule("megatron", "parameter_offload", "it keeps parameters on the device", _VALIDATE),
    no_offload_rule(
        "megatron",
        "activation_offload",
        "--cpu-offloading and --fine-grained-activation-offloading exclude recompute of whole layers",
        _CONFIG,
    ),
    host_only_rule("megatron", _VALIDATE),
)

MEGATRON = FrameworkRules(
    name="megatron",
    version="0.19.2",
    rules=_MEGATRON_RULES,
    rank_orders=(("tensor", "context", "data", "pipeline"), ("tensor", "context", "pipeline", "data")),
    uneven_layers=True,
    pipeline_schedules=("none", "1f1b", "interleaved"),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=128,
    recompute_modes=("none", "selective", "block", "full"),
    precisions=PRECISIONS,
    notes=(
        "zero_stage 2 in 0.19.2 allocates all gradients of the model in one bucket, so its peak is not below that of "
        "zero_stage 1 (NVIDIA/Megatron-LM issue 6314; fsdp_unit_modules is empty unless optim_grads_params).",
        "Chunks without layers are accepted by the parser and by the layer count: at least one layer a chunk "
        "is the planner's own rule.",
        "The second rank order with several stages needs expert_parallel × expert_tensor_parallel = tensor_parallel × "
        "context_parallel; in a dense model that is context_parallel = 1.",
    ),
)

# Arithmetic of parallelism and of the model alone: what any framework would have to refuse.
_ARITHMETIC = frozenset(
    {
        "dualpipe_v_fills_the_v",
        "vocabulary_parallel_has_an_order",
        "heads_divisible_by_tensor_parallel",
        "kv_heads_and_tensor_parallel_divide",
        "pipeline_at_most_layers",
        "interleaving_needs_pipeline",
        "global_batch_divisible",
        "experts_divisible_by_expert_parallel",
        "expert_groups_divide_stage",
        "shard_groups_divide_replicas",
        "quantised_weights_are_whole",
        "parameter_offload_needs_zero_3",
        "parameter_offload_keeps_no_copies",
        "activation_offload_needs_full_recompute",
        "query_heads_divide_for_all_to_all",
        "kv_heads_divide_for_all_to_all",
        "context_parallel_heads_are_part_of_the_group",
        "hierarchies_need_full_sharding",
        "second_copies_divide_the_first",
        "outer_sharding_needs_groups",
    }
)
ANY_FRAMEWORK = FrameworkRules(
    name="any",
    version="",
    rules=tuple(rule for rule in _MEGATRON_RULES if rule.name in _ARITHMETIC),
    rank_orders=(("tensor", "context", "data", "pipeline"),),
    uneven_layers=True,
    pipeline_schedules=(
        "none",
        "gpipe",
        "1f1b",
        "interleaved",
        "zb-h1",
        "zb-1p",
        "zb-2p",
        "zb-v",
        "v-half",
        "v-min",
        "dualpipe-v",
        "hanayo",
    ),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=1,
    recompute_modes=("none", "selective", "block", "full"),
    precisions=PRECISIONS,
    quantised_weights=True,
)
