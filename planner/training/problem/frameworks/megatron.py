"""Megatron-LM as the planner sees it, and what any framework would refuse.

Checked against the framework by tests/conformance/megatron.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.choice import RECOMPUTE_MODES
from meshplan.planner.training.problem.frameworks import legality
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.schedules import SCHEDULES

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
        holds=legality.kv_heads,
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
        source="the planner's own: what second copies together with offloaded ones do was not read",
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
        holds=legality.mlp_width,
        message="the MLP width (and that of the shared experts) must be a multiple of tensor_parallel",
        stage="run time",
        source=_LAYERS,
    ),
    LegalityRule(
        name="expert_width_divisible_by_expert_tensor_parallel",
        holds=legality.expert_width,
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
        holds=legality.moe_sequence_parallel,
        message="a mixture of experts with tensor_parallel > 1 trains only with sequence_parallel",
        stage="run time",
        source=f"{_CORE}: core/transformer/moe/moe_layer.py, MoELayer.forward",
    ),
    LegalityRule(
        name="sequence_divisible_by_tensor_parallel",
        holds=legality.sequence,
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
        holds=legality.windows,
        message="sliding windows cannot be combined with the ring (p2p) form of context parallelism",
        stage="run time",
        source=_TRANSFORMER_ENGINE,
    ),
    LegalityRule(
        name="attention_sinks_need_all_to_all",
        holds=lambda shape, config: (
            (config.context_parallel == 1)
            | (config.context_parallel_style == "all-to-all")
            | (not shape.attention_sinks)
        ),
        message="attention with sinks splits sequences only with context_parallel_style all-to-all",
        stage="run time",
        source="NeMo AutoModel documentation: TE context parallelism of models with sinks (a2a alone; not tried)",
    ),
    LegalityRule(
        name="query_heads_divide_for_all_to_all",
        holds=legality.query_heads_exchange,
        message="num_attention_heads must be a multiple of tensor_parallel × the context-parallel ranks that exchange "
        "heads (all of them in all-to-all, context_parallel_heads in all-to-all+ring)",
        stage="run time",
        source=_TRANSFORMER_ENGINE,
        about=legality.STYLE,
    ),
    LegalityRule(
        name="kv_heads_divide_for_all_to_all",
        holds=legality.kv_heads_exchange,
        message="num_key_value_heads must be a multiple or a divisor of tensor_parallel × the context-parallel ranks "
        "that exchange heads",
        stage="run time",
        source="DeepSpeed Ulysses (arXiv:2309.14509, §3.1): every rank attends with whole heads",
        about=legality.STYLE,
    ),
    LegalityRule(
        name="whole_kv_heads_for_all_to_all",
        holds=legality.whole_kv_heads,
        message="num_key_value_heads / tensor_parallel must be a multiple of the context-parallel ranks that exchange "
        "heads",
        stage="run time",
        source=_TRANSFORMER_ENGINE,
        about=legality.STYLE,
    ),
    LegalityRule(
        name="context_parallel_heads_are_part_of_the_group",
        holds=legality.two_dimensions,
        message="context_parallel_heads goes with context_parallel_style all-to-all+ring, where it is a divisor of "
        "context_parallel between 1 and context_parallel",
        stage="run time",
        source=_VALIDATE,
        about=legality.STYLE,
    ),
    LegalityRule(
        name="latent_attention_needs_a_ring",
        holds=legality.latent_exchange,
        message="multi-head latent attention cannot be combined with context_parallel_style all-to-all or all-gather",
        stage="run time",
        source=_TRANSFORMER_ENGINE,
        about=legality.STYLE,
    ),
    legality.context_style_rule(
        "megatron",
        ("ring", "all-gather", "all-to-all", "all-to-all+ring"),
        f"{_CORE}: training/arguments.py, --cp-comm-type (its ring splits causal work evenly)",
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
        name="chunks_between_the_ends_have_layers",
        holds=legality.full_chunks,
        message="a chunk without layers must be the first one, with the embedding, or the last one, with the LM head",
        stage="run time",
        source="the planner's own: megatron-core 0.19.2 takes an empty chunk anywhere, where it does nothing",
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
            | (np.isin(config.pipeline_schedule, ("1f1b", "v-half")) & (shape.num_nextn_predict_layers == 0))
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
        holds=legality.experts,
        message="num_experts must be a multiple of expert_parallel (1 for a dense model)",
        stage="parser",
        source=_VALIDATE,
    ),
    LegalityRule(
        name="expert_groups_divide_stage",
        holds=legality.expert_groups,
        message="expert_parallel × expert_tensor_parallel must divide the devices of one pipeline stage",
        stage="process groups",
        source=_GROUPS,
    ),
    LegalityRule(
        name="expert_bias_needs_whole_experts",
        holds=legality.expert_bias,
        message="experts with biases need expert_tensor_parallel = 1",
        stage="parser",
        source=_CONFIG,
    ),
    LegalityRule(
        name="shard_groups_divide_replicas",
        holds=legality.shard_groups,
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
        holds=legality.several_expert_ranks,
        message="expert_dispatcher deepep and hybridep need expert_parallel × expert_tensor_parallel > 1",
        stage="run time",
        source=f"{_CORE}: core/transformer/moe/token_dispatcher.py, MoEFlexTokenDispatcher",
    ),
    LegalityRule(
        name="expert_overlap_needs_chunks_and_expert_ranks",
        holds=legality.room_to_overlap,
        message="expert_parallel_overlap needs expert_parallel > 1 and, with several stages, virtual stages",
        stage="parser",
        source=_CONFIG,
    ),
    LegalityRule(
        name="deepep_pads_no_experts",
        holds=legality.capacity_travels,
        message="expert_dispatcher deepep does not pad experts to their capacity: use hybridep or alltoall",
        stage="parser",
        source=_CONFIG,
    ),
    LegalityRule(
        name="recompute_modules_exist",
        holds=legality.modules_exist,
        message="recompute_modules: mla_up_proj needs latent attention, mlp a dense layer, moe and moe_act experts, "
        "shared_experts a shared expert",
        stage="parser",
        source=_CONFIG,
        about=("recompute_modules",),
    ),
    LegalityRule(
        name="delayed_scaling_has_seen_its_tensors",
        holds=legality.outputs_can_be_quantised_again,
        message="recompute_modules: with precision fp8 (delayed scaling) neither moe_act nor layernorm can be computed "
        "again (workload.precision: mxfp8)",
        stage="parser",
        source=_CONFIG,
        about=("recompute_modules",),
    ),
    LegalityRule(
        name="experts_are_not_repeated",
        holds=legality.experts_are_not_repeated,
        message="recompute_modules: moe goes neither with expert_parallel_overlap nor with cuda_graphs partial",
        stage="parser",
        source=_CONFIG,
        about=("recompute_modules",),
    ),
    LegalityRule(
        name="one_graph_needs_fixed_shapes",
        holds=legality.shapes_are_fixed,
        message="cuda_graphs full needs a dense model, or experts of a fixed capacity (workload.drops_tokens)",
        stage="run time",
        source=f"{_CORE}: core/full_cuda_graph.py; token counts of dropless experts reach the host",
        about=("cuda_graphs",),
    ),
    LegalityRule(
        name="graphs_lie_inside_what_is_recomputed",
        holds=legality.graphs_and_recompute,
        message="cuda_graphs partial does not go with recompute of whole layers (activation_recompute: selective)",
        stage="parser",
        source=_CONFIG,
        about=("cuda_graphs",),
    ),
    legality.whole_weights_rule("megatron", f"{_CORE}: training/arguments.py"),
    LegalityRule(
        name="hierarchies_need_full_sharding",
        holds=legality.needs_full_sharding,
        message="zero_hpz_partition_size, outer_zero_stage and gathered_num_layers need zero_stage 3",
        stage="run time",
        source="DeepSpeed 0.19.8: runtime/zero/config.py; megatron-core 0.19.2: --outer-dp-sharding-strategy",
        about=("zero_hpz_partition_size", "outer_zero_stage", "gathered_num_layers"),
    ),
    LegalityRule(
        name="second_copies_divide_the_first",
        holds=legality.second_copies,
        message="zero_hpz_partition_size must divide data_parallel_shard × context_parallel and be smaller; with "
        "experts its ranks × tensor_parallel and the ranks of one set of experts must divide",
        stage="process groups",
        source="DeepSpeed 0.19.8: utils/groups.py, _create_zero_param_parallel_group",
        about=("zero_hpz_partition_size",),
    ),
    LegalityRule(
        name="outer_sharding_needs_groups",
        holds=lambda _, config: (config.outer_zero_stage == 0) | (config.data_parallel_shard < config.data_parallel),
        message="outer_zero_stage 1 needs data_parallel_shard smaller than data_parallel",
        stage="run time",
        source=f"{_CORE}: core/distributed/fsdp/src/megatron_fsdp/fully_shard.py",
        about=("outer_zero_stage",),
    ),
    legality.plain_sharding_rule(
        "megatron",
        "zero_hpz_partition_size",
        1,
        "Megatron-FSDP keeps no second copy",
        f"{_CORE}: training/arguments.py",
    ),
    legality.plain_sharding_rule(
        "megatron", "gathered_num_layers", 0, "one policy for all layers", f"{_CORE}: training/arguments.py"
    ),
    legality.no_vocabulary_parallel("megatron"),
    legality.offload_rule(
        "megatron", (1,), f"{_VALIDATE} (and core/optimizer/optimizer_config.py; Megatron-FSDP not tried)"
    ),
    legality.no_offload_rule("megatron", "parameter_offload", "it keeps parameters on the device", _VALIDATE),
    legality.no_offload_rule(
        "megatron",
        "activation_offload",
        "--cpu-offloading and --fine-grained-activation-offloading exclude recompute of whole layers",
        _CONFIG,
    ),
    legality.host_only_rule("megatron", _VALIDATE),
)

MEGATRON = FrameworkRules(
    name="megatron",
    version="0.19.2",
    rules=_MEGATRON_RULES,
    rank_orders=(("tensor", "context", "data", "pipeline"), ("tensor", "context", "pipeline", "data")),
    layer_splits=None,
    pipeline_schedules=("none", "1f1b", "interleaved"),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=128,
    recompute_modes=RECOMPUTE_MODES,
    precisions=PRECISIONS,
    notes=(
        "zero_stage 2 in 0.19.2 allocates all gradients of the model in one bucket, so its peak is not below that of "
        "zero_stage 1 (NVIDIA/Megatron-LM issue 6314; fsdp_unit_modules is empty unless optim_grads_params).",
        "Chunks without layers are accepted by the parser and by the layer count: that only the first and the last "
        "chunk may be without is the planner's own rule.",
        "The second rank order with several stages needs expert_parallel × expert_tensor_parallel = tensor_parallel × "
        "context_parallel; in a dense model that is context_parallel = 1.",
    ),
)

# Arithmetic of parallelism and of the model alone: what any framework would have to refuse.
_ARITHMETIC = frozenset(
    {
        "chunks_between_the_ends_have_layers",
        "dualpipe_v_fills_the_v",
        "sequence_divisible_by_twice_context_parallel",
        "vocabulary_parallel_has_an_order",
        "heads_divisible_by_tensor_parallel",
        "kv_heads_and_tensor_parallel_divide",
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
        "recompute_modules_exist",
        "one_graph_needs_fixed_shapes",
    }
)
ANY_FRAMEWORK = FrameworkRules(
    name="any",
    version="",
    rules=tuple(rule for rule in _MEGATRON_RULES if rule.name in _ARITHMETIC),
    rank_orders=(("tensor", "context", "data", "pipeline"),),
    layer_splits=None,
    pipeline_schedules=tuple(SCHEDULES),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=1,
    recompute_modes=RECOMPUTE_MODES,
    precisions=PRECISIONS,
    quantised_weights=True,
)
