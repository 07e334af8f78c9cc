"""Megatron-LM as the planner sees it: what it refuses beyond arithmetic, and what it can run.

Checked against the framework by tests/conformance/megatron.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.choice import RECOMPUTE_MODES
from meshplan.planner.training.problem.frameworks import legality
from meshplan.planner.training.problem.frameworks.arithmetic import (
    ARITHMETIC,
    CONFIG,
    CORE,
    TRANSFORMER_ENGINE,
    VALIDATE,
)
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.switches import ADAMW_BF16_MOMENTS, FRAMEWORKS_OWN

_ZERO_2 = 2
# Layers that stay: the one in use, and the one whose activations are copied.
LAYERS_IN_TRANSFER = 2
_LAYERS = f"{CORE}: core/tensor_parallel/layers.py, divide"

_OWN = (
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
        name="state_space_groups_divisible_by_tensor_parallel",
        holds=legality.state_space_groups,
        message="the groups of the state-space layers must be a multiple of tensor_parallel",
        stage="run time",
        source=f"{CORE}: core/ssm/mamba_mixer.py, MambaMixer",
    ),
    LegalityRule(
        name="state_space_groups_and_context_parallel_divide",
        holds=legality.exchanged_groups,
        message="the groups of the state-space layers / tensor_parallel must be a multiple or a divisor of "
        "context_parallel",
        stage="run time",
        source=f"{CORE}: core/ssm/mamba_context_parallel.py, MambaContextParallel",
    ),
    LegalityRule(
        name="sequence_parallel_needs_tensor_parallel",
        holds=lambda _, config: (config.tensor_parallel > 1) | np.logical_not(config.sequence_parallel),
        message="sequence_parallel needs tensor_parallel > 1 (it is switched off silently)",
        stage="parser",
        source=VALIDATE,
    ),
    LegalityRule(
        name="moe_tensor_parallel_needs_sequence_parallel",
        holds=legality.moe_sequence_parallel,
        message="a mixture of experts with tensor_parallel > 1 trains only with sequence_parallel",
        stage="run time",
        source=f"{CORE}: core/transformer/moe/moe_layer.py, MoELayer.forward",
    ),
    LegalityRule(
        name="sequence_divisible_by_tensor_parallel",
        holds=legality.sequence,
        message="sequence_length / context_parallel must be a multiple of tensor_parallel under sequence_parallel",
        stage="run time",
        source=f"{CORE}: core/tensor_parallel/mappings.py",
    ),
    LegalityRule(
        name="sliding_windows_need_whole_sequences",
        holds=legality.windows,
        message="sliding windows cannot be combined with the ring (p2p) form of context parallelism",
        stage="run time",
        source=TRANSFORMER_ENGINE,
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
        name="whole_kv_heads_for_all_to_all",
        holds=legality.whole_kv_heads,
        message="num_key_value_heads / tensor_parallel must be a multiple of the context-parallel ranks that exchange "
        "heads",
        stage="run time",
        source=TRANSFORMER_ENGINE,
        about=legality.STYLE,
    ),
    LegalityRule(
        name="latent_attention_needs_a_ring",
        holds=legality.latent_exchange,
        message="multi-head latent attention cannot be combined with context_parallel_style all-to-all or all-gather",
        stage="run time",
        source=TRANSFORMER_ENGINE,
        about=legality.STYLE,
    ),
    legality.context_style_rule(
        "megatron",
        ("ring", "all-gather", "all-to-all", "all-to-all+ring"),
        f"{CORE}: training/arguments.py, --cp-comm-type (its ring splits causal work evenly)",
    ),
    LegalityRule(
        name="interleaving_microbatches_multiple_of_pipeline",
        holds=lambda _, config: (
            (config.virtual_pipeline_stages == 1) | (config.num_microbatches % config.pipeline_parallel == 0)
        ),
        message="interleaving needs num_microbatches that are a multiple of pipeline_parallel",
        stage="run time",
        source=f"{CORE}: core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving",
    ),
    LegalityRule(
        name="expert_bias_needs_whole_experts",
        holds=legality.expert_bias,
        message="experts with biases need expert_tensor_parallel = 1",
        stage="parser",
        source=CONFIG,
    ),
    LegalityRule(
        name="zero_2_saves_nothing",
        holds=lambda _, config: config.zero_stage != _ZERO_2,
        message="zero_stage 2 allocates all gradients of the model in one bucket here: use stage 1 or 3",
        stage="run time",
        source=f"{CORE}: core/distributed/fsdp/mcore_fsdp_adapter.py (NVIDIA/Megatron-LM issue 6314)",
    ),
    LegalityRule(
        name="zero_2_and_3_need_one_stage",
        holds=lambda _, config: (config.zero_stage <= 1) | (config.pipeline_parallel == 1),
        message="zero_stage 2 and 3 (Megatron-FSDP) need pipeline_parallel = 1",
        stage="run time",
        source=f"{CORE}: core/distributed/fsdp/mcore_fsdp_adapter.py, _get_dp_tp_mesh",
    ),
    *legality.own_loss_rules("megatron", f"{CONFIG} (fusions of the loss were not tried)"),
    LegalityRule(
        name="megatron_has_moments_in_bf16",
        holds=lambda _, config: (
            np.equal(config.optimizer, FRAMEWORKS_OWN) | np.equal(config.optimizer, ADAMW_BF16_MOMENTS)
        ),
        message=f"optimizer: plans for megatron are made with its own AdamW or with {ADAMW_BF16_MOMENTS}",
        stage="parser",
        source=f"{CORE}: training/arguments.py (--exp-avg-dtype; its other optimizers were not tried)",
        about=("optimizer",),
    ),
    LegalityRule(
        name="moments_in_bf16_are_distributed",
        holds=lambda _, config: (
            np.equal(config.optimizer, FRAMEWORKS_OWN)
            | ((config.zero_stage == 1) & np.logical_not(config.optimizer_offload))
        ),
        message=f"optimizer {ADAMW_BF16_MOMENTS} needs zero_stage 1 (the distributed optimizer) on the devices",
        stage="parser",
        source=f"{CORE}: training/arguments.py, --use-precision-aware-optimizer; states on the host stay fp32",
    ),
    LegalityRule(
        name="fused_dispatch_needs_several_expert_ranks",
        holds=legality.several_expert_ranks,
        message="expert_dispatcher deepep and hybridep need expert_parallel × expert_tensor_parallel > 1",
        stage="run time",
        source=f"{CORE}: core/transformer/moe/token_dispatcher.py, MoEFlexTokenDispatcher",
    ),
    LegalityRule(
        name="expert_overlap_needs_chunks_and_expert_ranks",
        holds=legality.room_to_overlap,
        message="expert_parallel_overlap needs expert_parallel > 1 and, with several stages, virtual stages",
        stage="parser",
        source=CONFIG,
    ),
    LegalityRule(
        name="deepep_pads_no_experts",
        holds=legality.capacity_travels,
        message="expert_dispatcher deepep does not pad experts to their capacity: use hybridep or alltoall",
        stage="parser",
        source=CONFIG,
    ),
    LegalityRule(
        name="delayed_scaling_has_seen_its_tensors",
        holds=legality.outputs_can_be_quantised_again,
        message="recompute_modules: with precision fp8 (delayed scaling) neither moe_act nor layernorm can be computed "
        "again (workload.precision: mxfp8)",
        stage="parser",
        source=CONFIG,
        about=("recompute_modules",),
    ),
    LegalityRule(
        name="experts_are_not_repeated",
        holds=legality.experts_are_not_repeated,
        message="recompute_modules: moe goes neither with expert_parallel_overlap nor with cuda_graphs partial",
        stage="parser",
        source=CONFIG,
        about=("recompute_modules",),
    ),
    LegalityRule(
        name="graphs_lie_inside_what_is_recomputed",
        holds=legality.graphs_and_recompute,
        message="cuda_graphs partial does not go with recompute of whole layers (activation_recompute: selective)",
        stage="parser",
        source=CONFIG,
        about=("cuda_graphs",),
    ),
    legality.whole_weights_rule("megatron", f"{CORE}: training/arguments.py"),
    legality.plain_sharding_rule(
        "megatron",
        "zero_hpz_partition_size",
        1,
        "Megatron-FSDP keeps no second copy",
        f"{CORE}: training/arguments.py",
    ),
    legality.plain_sharding_rule(
        "megatron", "gathered_num_layers", 0, "one policy for all layers", f"{CORE}: training/arguments.py"
    ),
    legality.no_vocabulary_parallel("megatron"),
    legality.offload_rule(
        "megatron", (1,), f"{VALIDATE} (and core/optimizer/optimizer_config.py; Megatron-FSDP not tried)"
    ),
    legality.no_offload_rule("megatron", "parameter_offload", "it keeps parameters on the device", VALIDATE),
    legality.no_offload_rule(
        "megatron",
        "activation_offload",
        "--cpu-offloading and --fine-grained-activation-offloading exclude recompute of whole layers",
        CONFIG,
    ),
    LegalityRule(
        name="megatron_offloads_layers",
        holds=lambda shape, config: (
            (config.activation_offload_num_layers == 0)
            | (
                (config.activation_offload_num_layers <= shape.num_hidden_layers - LAYERS_IN_TRANSFER)
                & (config.zero_stage <= 1)
                & np.not_equal(config.cuda_graphs, "partial")
            )
        ),
        message="activation_offload_num_layers leaves two layers of the model on the device, with zero_stage 0 or 1 "
        "and without cuda_graphs partial",
        stage="parser",
        source=f"{CONFIG}, cpu_offloading_num_layers (all but one layer would copy and compute in turn; Megatron-FSDP "
        "was not tried)",
        about=("activation_offload_num_layers",),
    ),
    legality.host_only_rule("megatron", VALIDATE),
)

# Where attention keeps to documents.
_DOCUMENTS = LegalityRule(
    name="documents_are_not_padded_for_context_parallel",
    holds=lambda _, config: config.context_parallel == 1,
    message="documents that attention keeps to need context_parallel 1: ranks share each of them, which would have to "
    "be a multiple of 2 × context_parallel tokens, and pre-training data are not padded "
    "(or workload.sequence_lengths.cross_document_attention: true)",
    stage="run time",
    source="megatron-core 0.19.2: core/utils.py, _get_batch_on_this_cp_rank_per_document_balancing; "
    "core/datasets/gpt_dataset.py, inter_document_masking",
)

MEGATRON = FrameworkRules(
    name="megatron",
    version="0.19.2",
    rules=(*ARITHMETIC, *_OWN),
    rank_orders=(("tensor", "context", "data", "pipeline"), ("tensor", "context", "pipeline", "data")),
    layer_splits=None,
    pipeline_schedules=("none", "1f1b", "interleaved"),
    shards_over_context_parallel=True,
    vocab_multiple_per_tensor_parallel=128,
    recompute_modes=RECOMPUTE_MODES,
    precisions=PRECISIONS,
    document_rules=(_DOCUMENTS,),
    one_queue_architectures=frozenset({"volta", "turing", "ampere", "ada", "hopper"}),  # CUDA_DEVICE_MAX_CONNECTIONS
    notes=(
        "zero_stage 2 in 0.19.2 allocates all gradients of the model in one bucket, so its peak is not below that of "
        "zero_stage 1 (NVIDIA/Megatron-LM issue 6314; fsdp_unit_modules is empty unless optim_grads_params).",
        "Chunks without layers are accepted by the parser and by the layer count: that only the first and the last "
        "chunk may be without is the planner's own rule.",
        "The second rank order with several stages needs expert_parallel × expert_tensor_parallel = tensor_parallel × "
        "context_parallel; in a dense model that is context_parallel = 1.",
    ),
)
