"""Selective recompute by module: what a layer no longer keeps, and what its backward pass computes again.

The modules are Megatron-Core's (0.19.2, core/transformer/transformer_config.py, ``recompute_modules``). Of one token
and layer, in bytes of 16-bit activations (h hidden, t tensor-parallel devices, s sequence shards, w MLP width):

    layernorm       outputs of its norms, 2h/s each                 again: the norms
    mla_up_proj     queries, keys, values of latent attention      again: the products that expand them
    mlp             both products of a dense MLP, 2·matrices·w/t   again: the MLP
    moe_act         each expert's activation output, 2w            again: the activation
    shared_experts  the shared expert, 2·matrices·w/t              again: the shared expert
    moe             all of the experts' activations                again: experts, their exchange and sorting
    core_attn       scores, where attention is not fused           again: attention (see :mod:`.memory`)

JAX's policies name what is saved instead (:data:`~meshplan.planner.training.problem.switches.SAVING_POLICIES`), so
that more is computed again, a query heads of d:

    fused_attn      output of attention, 2·a·d/t                   again: attention
    out_proj        sum of its product and the residual, 2h/s      again: the product
    mlp_act         output of the activation function, 2w/t        again: the function
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.candidates import Candidates, LayerKind
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.expert_load import arriving_load
from meshplan.planner.training.problem.problem import TrainingWorkload
from meshplan.planner.training.problem.switches import (
    CORE_ATTENTION,
    DENSE_MLP,
    EXPERT_ACTIVATION,
    EXPERT_LAYER,
    FUSED_ATTENTION,
    LATENT_PROJECTION,
    LAYER_NORM,
    MLP_ACTIVATION,
    OUTPUT_PROJECTION,
    SHARED_EXPERTS,
    USUAL_MODULES,
)

NORM_PASSES = 2.0  # a norm reads its input and writes its output


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecompute:
    """What selective recompute of the workload's modules does to a layer.

    Args:
        shape: the model.
        workload: which modules.
        candidates: the batch.
    """

    shape: ModelShape
    workload: TrainingWorkload
    candidates: Candidates

    @property
    def is_usual(self) -> bool:
        """Only the attention core, which the estimate of attention itself covers."""
        return self.workload.recompute_modules == USUAL_MODULES

    @property
    def repeats_attention(self) -> bool:
        """The attention core is among the modules."""
        return self._has(CORE_ATTENTION)

    @property
    def repeats_fused_attention(self) -> bool:
        """Attention is computed again though its kernels keep no scores."""
        return self._has(FUSED_ATTENTION)

    @property
    def repeats_experts(self) -> FloatArray:
        """How often experts and their exchange run again in the backward pass, [n]."""
        chosen = self.candidates.recompute == Recompute.SELECTIVE
        return (chosen & self._has(EXPERT_LAYER)).astype(np.float64)

    def dropped_bytes_per_token(self, kind: LayerKind, sequence_shards: FloatArray) -> FloatArray:
        """Bytes of one token and layer that are not kept, in 16-bit activations, [n].

        Args:
            kind: of layer.
            sequence_shards: devices over which norms are split, [n].
        """
        shape, t = self.shape, self.candidates.tensor_parallel
        dropped = np.zeros(len(self.candidates))
        if self._has(LAYER_NORM):
            dropped = dropped + kind.num_blocks * BYTES_16_BIT * shape.hidden_size / sequence_shards
        if self._has(LATENT_PROJECTION) and shape.latent is not None and kind.has_attention:
            latent = shape.latent
            query_key = latent.qk_nope_head_dim + latent.qk_rope_head_dim
            dropped = dropped + BYTES_16_BIT * shape.num_attention_heads * (2 * query_key + latent.v_head_dim) / t
        if kind.has_attention:
            heads = self._has(FUSED_ATTENTION) * shape.num_attention_heads * shape.head_dim / t
            summed = self._has(OUTPUT_PROJECTION) * shape.hidden_size / sequence_shards
            dropped = dropped + BYTES_16_BIT * (heads + summed)
        if not kind.is_moe or shape.moe is None:
            tensors = shape.mlp_matrices * self._has(DENSE_MLP) + self._has(MLP_ACTIVATION)
            return dropped + kind.has_mlp * tensors * BYTES_16_BIT * shape.intermediate_size / t
        shared = BYTES_16_BIT * shape.mlp_matrices * shape.moe.shared_intermediate_size / t
        if self._has(EXPERT_LAYER):
            return dropped + self.expert_bytes_per_token() + shared
        if self._has(EXPERT_ACTIVATION):
            width = shape.moe.expert_intermediate_size / self.candidates.expert_tensor_parallel
            dropped = dropped + self._copies() * BYTES_16_BIT * width
        return dropped + self._has(SHARED_EXPERTS) * shared

    def expert_bytes_per_token(self) -> FloatArray:
        """Activations of the routed experts of one token: inputs, outputs and what lies between, [n]."""
        moe = self.shape.moe
        if moe is None:
            return np.zeros(len(self.candidates))
        width = moe.expert_intermediate_size / self.candidates.expert_tensor_parallel
        matrices = self.shape.mlp_matrices
        return self._copies() * BYTES_16_BIT * (2.0 * self.shape.expert_hidden_size + matrices * width)

    def _copies(self) -> FloatArray:
        """Copies of one token that a device's experts work on, [n]."""
        moe, batch = self.shape.moe, self.candidates
        if moe is None:
            return np.zeros(len(batch))
        routed = moe.num_experts_per_token * batch.expert_tensor_parallel / batch.tensor_parallel
        return np.asarray(routed * arriving_load(self.workload, moe, batch.expert_parallel))

    def again_s(self, kind: LayerKind, compute: ComputeModel) -> FloatArray:
        """Time of what one layer computes again in its backward pass, without communication, s, [n]."""
        shape, wide = self.shape, compute.activation_bytes
        again = np.zeros(len(self.candidates))
        if self._has(LAYER_NORM):
            moved = kind.num_blocks * NORM_PASSES * wide * shape.hidden_size * compute.sharded_tokens
            again = again + compute.memory_op(moved).forward_s
        if self._has(LATENT_PROJECTION) and kind.has_attention:
            again = again + compute.latent_expansion().forward_s
        if self._has(OUTPUT_PROJECTION) and kind.has_attention:
            again = again + compute.attention_output().forward_s
        if not kind.is_moe or shape.moe is None:
            return again + (self._dense_mlp_s(kind, compute) if kind.has_mlp else 0.0)
        shared = shape.moe.shared_intermediate_size
        if shared and (self._has(SHARED_EXPERTS) or self._has(EXPERT_LAYER)):
            again = again + self._mlp_s(shared, compute)
        if self._has(EXPERT_LAYER):
            return again + compute.experts(shape.moe).forward_s + compute.expert_operators().forward_s
        if self._has(EXPERT_ACTIVATION):
            width = shape.moe.expert_intermediate_size / self.candidates.expert_tensor_parallel
            again = again + compute.activation(self._copies() * width).forward_s
        return again

    def _dense_mlp_s(self, kind: LayerKind, compute: ComputeModel) -> FloatArray:
        """What is computed again of a dense MLP; its last product only by frameworks that run a block to its end."""
        width = self.shape.intermediate_size
        if not self._has(DENSE_MLP):
            activated = compute.activation(width / self.candidates.tensor_parallel).forward_s
            return self._has(MLP_ACTIVATION) * activated
        left_out = compute.calibration.recipe.recomputes_only_needed and not self.workload.adapts_mlp
        return self._mlp_s(width, compute) - left_out * compute.closing_product(kind).forward_s

    def _mlp_s(self, width: int, compute: ComputeModel) -> FloatArray:
        """Forward pass of a dense or shared MLP."""
        activated = compute.activation(width / self.candidates.tensor_parallel)
        return compute.mlp(width).forward_s + activated.forward_s

    def _has(self, module: str) -> bool:
        return module in self.workload.recompute_modules
