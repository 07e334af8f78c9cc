"""Switches of a framework: how it launches, carries and recomputes, and in which format it sums gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from meshplan.planner.core.arrays import IntArray

# Who carries tokens to their experts unless somebody else is asked.
ALL_TO_ALL = "alltoall"
DEEPEP = "deepep"
FUSED_DISPATCHERS = (DEEPEP, "hybridep")


class Launches(Enum):
    """How the host starts the kernels of a layer."""

    EAGER = "eager"  # one by one
    PARTLY_GRAPHED = "partly-graphed"  # some parts of a layer from CUDA graphs: attention and router, or the MLP
    GRAPHED = "graphed"  # the whole step from one CUDA graph


# What ``cuda_graphs`` may be → how the host starts kernels then.
CUDA_GRAPHS: Mapping[str, Launches] = {
    "none": Launches.EAGER,
    "partial": Launches.PARTLY_GRAPHED,
    "full": Launches.GRAPHED,
}
# What selective recompute may compute again, by Megatron-Core's names (0.19.2, transformer_config.py).
CORE_ATTENTION, LAYER_NORM, LATENT_PROJECTION = "core_attn", "layernorm", "mla_up_proj"
DENSE_MLP, EXPERT_ACTIVATION, SHARED_EXPERTS, EXPERT_LAYER = "mlp", "moe_act", "shared_experts", "moe"
RECOMPUTE_MODULES = (
    CORE_ATTENTION,
    LAYER_NORM,
    LATENT_PROJECTION,
    DENSE_MLP,
    EXPERT_ACTIVATION,
    SHARED_EXPERTS,
    EXPERT_LAYER,
)
USUAL_MODULES = (CORE_ATTENTION,)
# What JAX computes again of a layer whose checkpoint policy names what is saved; no plan asks for it: fused attention
# from its kept inputs, the product behind it, the activation function of a dense MLP.
FUSED_ATTENTION, OUTPUT_PROJECTION, MLP_ACTIVATION = "fused_attn", "out_proj", "mlp_act"
# Policy → what is not saved (MaxText, layers/decoders.py, 2025; praxis, layers/checkpoint_policy.py). A last product
# that nothing reads is left out, see ``recomputes_only_needed``.
SAVING_POLICIES: Mapping[str, tuple[str, ...]] = {
    "save_qkv_proj": (FUSED_ATTENTION, LAYER_NORM, OUTPUT_PROJECTION, DENSE_MLP),
    "save_qkv_out_proj": (FUSED_ATTENTION, LAYER_NORM, DENSE_MLP),
    "save_dot_only": (FUSED_ATTENTION, LAYER_NORM, MLP_ACTIVATION),
}


def in_order(modules: Iterable[str]) -> tuple[str, ...]:
    """The modules that are named, once each, in the order of :data:`RECOMPUTE_MODULES`."""
    named = frozenset(modules)
    return tuple(module for module in RECOMPUTE_MODULES if module in named)


# ``gradient_precision``: how gradients are kept and summed. "default" is the framework's own way.
FRAMEWORKS_OWN = "default"
GRADIENT_BYTES: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """What an optimizer keeps of a parameter, beside its gradient.

    Args:
        moment_bytes: its moments.
        keeps_master: with an fp32 copy of 16-bit weights, where the framework keeps one.
        step_bytes: what its step takes besides; None: as the framework's own.
    """

    moment_bytes: float
    keeps_master: bool = True
    step_bytes: float | None = None


# ``optimizer``: which states it keeps. "default" is AdamW as the framework lays it out. 16-bit AdamW: moments in the
# format of the weights and a temporary of one in PyTorch's multi-tensor step (torch/optim/adamw.py). 8-bit AdamW: two
# moments of a byte and an fp32 constant for every 256 of each (block-wise quantisation, arXiv:2110.02861; the block is
# assumed). Moments in bf16 beside an fp32 copy of the weights: DeepSeek-V3 (arXiv:2412.19437, section 3.3.3).
# Adafactor: a row and a column for each matrix, no first moment (arXiv:1804.04235).
ADAMW_8BIT, ADAMW_BF16_MOMENTS = "adamw-8bit", "adamw-bf16-moments"
OPTIMIZER_STATES: Mapping[str, OptimizerStates] = {
    ADAMW_BF16_MOMENTS: OptimizerStates(moment_bytes=4.0),
    "adamw-16bit": OptimizerStates(moment_bytes=4.0, keeps_master=False, step_bytes=2.0),
    ADAMW_8BIT: OptimizerStates(moment_bytes=2.0 * (1.0 + 4.0 / 256.0), step_bytes=0.0),
    "adafactor": OptimizerStates(moment_bytes=0.0),
    "sgd": OptimizerStates(moment_bytes=0.0),
}
OPTIMIZERS = (FRAMEWORKS_OWN, *OPTIMIZER_STATES)
# ``loss``: how the loss reads the logits: all of them in fp32, or a part of the tokens at once. "default" is the
# framework's own way.
WHOLE, CHUNKED = "whole", "chunked"
LOSSES = (FRAMEWORKS_OWN, WHOLE, CHUNKED)
# Whole and in 16 bits, because neither the model nor autocast widens the logits; no plan asks for it.
NARROW = "narrow"


# ``gathers``: how often FSDP gathers the parameters that it shards: for each pass over them, once a micro-batch
# (``reshard_after_forward`` false) or once a step, which then sums whole gradients and scatters them once.
EACH_PASS, EACH_MICRO_BATCH, ONCE_A_STEP = "pass", "micro-batch", "step"
GATHERS = (EACH_PASS, EACH_MICRO_BATCH, ONCE_A_STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPractice:
    """Switches of a framework that change how long a step takes, or what it holds, but not what it computes.

    Args:
        launches: see :class:`Launches`.
        fused_dispatch: kernels of their own put tokens in the order of the experts while they travel, and send one copy
            to each domain (DeepEP, HybridEP); otherwise tokens are sorted in memory and an all-to-all sends every copy.
        overlaps_experts: dispatch and combine of one micro-batch run during the compute of another.
        overlaps_shared_experts: the shared expert runs in a stream of its own while tokens travel; no plan asks for it.
        gathers: of :data:`GATHERS`; no plan asks for other than each pass, but by its ZeRO stage.
        local_microbatches: micro-batches after which a pipeline is flushed, the step's being accumulated over several
            flushes; 0 where it runs all of a step. No plan asks for fewer.
        optimizer: of :data:`OPTIMIZERS`; which states it keeps.
        loss: of :data:`LOSSES`, or :data:`NARROW` in a measured run.
        flash_attention: attention scores never leave the chip; None: as the framework does. No plan asks for less.
        optimizer_in_backward: each gradient is used and freed as soon as the backward pass has it.
        joins_attention: the model has one matrix for queries, keys and values, and so one adapter; no plan asks for it.
        experts_in_turn: a benchmark's gate deals each token the next experts in turn; no plan asks for it.
        expert_group_size: tokens that masks deal out to experts together (GShard); 0 where tokens are sorted. No plan
            asks for it.
    """

    launches: Launches = Launches.EAGER
    fused_dispatch: bool = False
    overlaps_experts: bool = False
    overlaps_shared_experts: bool = False
    gathers: str = EACH_PASS
    local_microbatches: int = 0
    optimizer: str = FRAMEWORKS_OWN
    loss: str = FRAMEWORKS_OWN
    optimizer_in_backward: bool = False
    experts_in_turn: bool = False
    expert_group_size: int = 0
    joins_attention: bool = False
    flash_attention: bool | None = None

    def in_a_flush(self, num_microbatches: IntArray) -> IntArray:
        """Micro-batches that run through a pipeline before it is flushed, [n]."""
        return np.minimum(num_microbatches, self.local_microbatches or num_microbatches)

    def fuses_attention(self, frameworks_own: bool) -> bool:
        """Whether attention scores never leave the chip: as stated, else what the framework does."""
        return frameworks_own if self.flash_attention is None else self.flash_attention


AS_IT_COMES = TrainingPractice()
