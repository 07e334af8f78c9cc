"""What any framework would have to refuse: arithmetic of parallelism and of the model alone.

Each source names where the refusal was seen; the rule holds wherever the same groups are formed.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.choice import RECOMPUTE_MODES
from meshplan.planner.training.problem.choices import ALL_STATES
from meshplan.planner.training.problem.frameworks import legality
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.schedules import SCHEDULES

# Where rules were seen; Megatron-LM's own (:mod:`.megatron`) name the same files.
CORE = "megatron-core 0.19.2"
CONFIG = f"{CORE}: core/transformer/transformer_config.py"
VALIDATE = f"{CORE}: training/arguments.py, validate_args"
TRANSFORMER_ENGINE = "Transformer Engine: pytorch/attention/dot_product_attention/context_parallel.py (read, not run)"
_GROUPS = f"{CORE}: core/parallel_state.py, initialize_model_parallel"

ARITHMETIC = (
    LegalityRule(
        name="heads_divisible_by_tensor_parallel",
        holds=lambda shape, config: shape.num_attention_heads % config.tensor_parallel == 0,
        message="num_attention_heads must be a multiple of tensor_parallel",
        stage="parser",
        source=CONFIG,
    ),
    LegalityRule(
        name="recurrent_heads_divisible_by_tensor_parallel",
        holds=legality.recurrent_heads,
        message="the heads of the recurrent layers must be a multiple of tensor_parallel × context_parallel",
        stage="run time",
        source="arithmetic: a rank holds whole heads and their states; where sequences are split, heads are exchanged "
        f"for tokens ({CONFIG}: linear_num_key_heads)",
    ),
    LegalityRule(
        name="kv_heads_and_tensor_parallel_divide",
        holds=legality.kv_heads,
        message="num_key_value_heads must be a multiple or a divisor of tensor_parallel",
        stage="parser",
        source=CONFIG,
    ),
    LegalityRule(
        name="parameter_offload_needs_zero_3",
        holds=lambda _, config: np.logical_not(config.parameter_offload) | (config.zero_stage == legality.ZERO_3),
        message="parameter_offload needs zero_stage 3: whole parameters stay on the device",
        stage="parser",
        source="ZeRO-Infinity, arXiv:2104.07857, section 5.1; deepspeed 0.19.8: runtime/zero/config.py",
    ),
    LegalityRule(
        name="part_of_the_states_moves_to_the_host",
        holds=lambda _, config: (
            np.equal(config.optimizer_offload_percent, ALL_STATES)
            | (np.logical_not(config.parameter_offload) & np.not_equal(config.offload_to, "nvme"))
        ),
        message="optimizer_offload_percent below 100 goes with offload_to host, and without parameter_offload",
        stage="parser",
        source="the planner's own: part of the states beside parameters off the device, or on NVMe, was not read",
        about=("optimizer_offload_percent",),
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
        name="offloaded_layers_are_kept",
        holds=legality.layers_wait_elsewhere,
        message="activation_offload_num_layers, at most the model's, needs activation_recompute none and "
        "pipeline_parallel 1",
        stage="parser",
        source=f"{CONFIG}, cpu_offloading_num_layers",
        about=("activation_offload_num_layers",),
    ),
    LegalityRule(
        name="quantised_weights_are_whole",
        holds=lambda _, config: (config.tensor_parallel == 1) | np.logical_not(config.quantised_weights),
        message="weights in four bits (QLoRA) are not split: tensor_parallel must be 1",
        stage="run time",
        source="bitsandbytes: matrices are stored as flat blocks of 64 (docs, 4-bit quantization; read, not run)",
    ),
    LegalityRule(
        name="sequence_divisible_by_twice_context_parallel",
        holds=lambda _, config: (
            (config.context_parallel == 1) | (config.sequence_length % (2 * config.context_parallel) == 0)
        ),
        message="sequence_length must be a multiple of 2 × context_parallel",
        stage="parser",
        source=VALIDATE,
    ),
    LegalityRule(
        name="query_heads_divide_for_all_to_all",
        holds=legality.query_heads_exchange,
        message="num_attention_heads must be a multiple of tensor_parallel × the context-parallel ranks that exchange "
        "heads (all of them in all-to-all, context_parallel_heads in all-to-all+ring)",
        stage="run time",
        source=TRANSFORMER_ENGINE,
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
        name="context_parallel_heads_are_part_of_the_group",
        holds=legality.two_dimensions,
        message="context_parallel_heads goes with context_parallel_style all-to-all+ring, where it is a divisor of "
        "context_parallel between 1 and context_parallel",
        stage="run time",
        source=VALIDATE,
        about=legality.STYLE,
    ),
    LegalityRule(
        name="interleaving_needs_pipeline",
        holds=lambda _, config: (config.virtual_pipeline_stages == 1) | (config.pipeline_parallel > 1),
        message="virtual_pipeline_stages > 1 needs pipeline_parallel > 1",
        stage="parser",
        source=VALIDATE,
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
            | (
                ((config.pipeline_schedule == "1f1b") | (config.pipeline_schedule == "v-half"))
                & (shape.num_nextn_predict_layers == 0)
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
        source=VALIDATE,
    ),
    LegalityRule(
        name="experts_divisible_by_expert_parallel",
        holds=legality.experts,
        message="num_experts must be a multiple of expert_parallel (1 for a dense model)",
        stage="parser",
        source=VALIDATE,
    ),
    LegalityRule(
        name="expert_groups_divide_stage",
        holds=legality.expert_groups,
        message="expert_parallel × expert_tensor_parallel must divide the devices of one pipeline stage",
        stage="process groups",
        source=_GROUPS,
    ),
    LegalityRule(
        name="shard_groups_divide_replicas",
        holds=legality.shard_groups,
        message="data_parallel / data_parallel_shard must be whole, and divide the expert replicas",
        stage="process groups",
        source=_GROUPS,
    ),
    LegalityRule(
        name="recompute_modules_exist",
        holds=legality.modules_exist,
        message="recompute_modules: mla_up_proj needs latent attention, mlp a dense layer, moe and moe_act experts, "
        "shared_experts a shared expert",
        stage="parser",
        source=CONFIG,
        about=("recompute_modules",),
    ),
    LegalityRule(
        name="one_graph_needs_fixed_shapes",
        holds=legality.shapes_are_fixed,
        message="cuda_graphs full needs a dense model, or experts of a fixed capacity (workload.drops_tokens)",
        stage="run time",
        source=f"{CORE}: core/full_cuda_graph.py; token counts of dropless experts reach the host",
        about=("cuda_graphs",),
    ),
    LegalityRule(
        name="gradients_used_at_once_are_not_summed",
        holds=lambda _, config: np.logical_not(config.optimizer_in_backward) | (config.num_microbatches == 1),
        message="optimizer_in_backward needs one micro-batch a step (global_batch_size = micro_batch_size × "
        "data_parallel)",
        stage="run time",
        source="torchtune 0.6.1: recipes/full_finetune_distributed.py",
        about=("optimizer_in_backward",),
    ),
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
        source=f"{CORE}: core/distributed/fsdp/src/megatron_fsdp/fully_shard.py",
        about=("outer_zero_stage",),
    ),
)

# What Megatron-LM alone lifts: it exchanges the heads of recurrent layers (:mod:`~.estimator.exchange.recurrent`).
WHOLE_RECURRENCES = LegalityRule(
    name="recurrent_layers_keep_whole_sequences",
    holds=lambda shape, config: (config.context_parallel == 1) | (shape.num_recurrent_layers == 0),
    message="recurrent layers need context_parallel 1",
    stage="run time",
    source="the planner's own: only Megatron-LM was read to exchange their heads (core/ssm/mamba_context_parallel.py)",
)

ANY_FRAMEWORK = FrameworkRules(
    name="any",
    version="",
    rules=(*ARITHMETIC, WHOLE_RECURRENCES),
    rank_orders=(("tensor", "context", "data", "pipeline"),),
    layer_splits=None,
    pipeline_schedules=tuple(SCHEDULES),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=1,
    recompute_modes=RECOMPUTE_MODES,
    precisions=PRECISIONS,
    quantised_weights=True,
)
