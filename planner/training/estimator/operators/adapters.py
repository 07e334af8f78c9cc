"""Time of low-rank adapters beside the frozen matrices of a layer (LoRA, arXiv:2106.09685).

An adapter of rank r on a matrix of m inputs and n outputs adds ``B(A(dropout(x)))·scale`` to its output (PEFT,
tuners/lora/layer.py). Its two products are trained, in 16 bits whatever the frozen matrices are in; r is so small that
reading m and writing n elements takes their time. Around them, per token, elements that pass through memory:

    one by one   forward   dropout 2m, scale 2n, addition 3n   backward   scale 2n, dropout 2m, sum of gradients 3m
    fused        forward   n                                   backward   m

Fused, the second product of either pass adds to what is there, which it reads once more (a GEMM with β = 1), and there
is no dropout. Adapters sit on attention's four projections and, where ``adapts_mlp``, on a dense MLP; matrices that
read the same input are one where the framework joins them (Megatron-LM's linear_qkv and linear_fc1) or the model does.
Tensor parallelism splits the sides that it splits of the matrix. Kernel launches: :mod:`.layer_time`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import LayerKind
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.estimator.operators.products import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Elements moved around an adapter, per input and per output element of its matrix."""

    forward_inputs: float
    forward_outputs: float
    backward_inputs: float
    backward_outputs: float


ONE_BY_ONE = Passes(forward_inputs=2.0, forward_outputs=5.0, backward_inputs=5.0, backward_outputs=2.0)
FUSED = Passes(forward_inputs=0.0, forward_outputs=1.0, backward_inputs=1.0, backward_outputs=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModel:
    """Times of the adapters of one layer.

    Args:
        compute: prices products and memory traffic of the same batch.
    """

    compute: ComputeModel

    def products(self, kind: LayerKind) -> Cost:
        """The two products of every adapter of a layer."""
        compute, workload = self.compute, self.compute.workload
        ones = np.ones_like(compute.tokens)
        precision = workload.precision if workload.precision in ("fp16", "fp32") else "bf16"
        cost, rank = Cost(forward_s=0.0 * ones, backward_s=0.0 * ones), workload.lora_rank * ones
        for inputs, outputs in self._matrices(kind):
            for n, k in ((rank, inputs), (outputs, rank)):
                cost = cost + compute.gemm(compute.tokens, n, k, precision=precision, whole=True, is_trained=True)
        return cost

    def traffic(self, kind: LayerKind) -> Cost:
        """What moves through memory around them."""
        compute = self.compute
        passes = ONE_BY_ONE if compute.workload.is_eager else FUSED
        forward = backward = np.zeros_like(compute.tokens)
        for inputs, outputs in self._matrices(kind):
            forward = forward + passes.forward_inputs * inputs + passes.forward_outputs * outputs
            backward = backward + passes.backward_inputs * inputs + passes.backward_outputs * outputs
        moved = compute.activation_bytes * compute.tokens
        return Cost(
            forward_s=compute.memory_op(moved * forward, backward_ratio=0.0).forward_s,
            backward_s=compute.memory_op(moved * backward, backward_ratio=0.0).forward_s,
        )

    def _matrices(self, kind: LayerKind) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Inputs and outputs of every adapted matrix on one device, [n] each."""
        shape, workload, t = self.compute.shape, self.compute.workload, self.compute.candidates.tensor_parallel
        if not workload.phase.has_adapters:
            return
        joins = self.compute.calibration.recipe.joins_projections
        hidden = np.full_like(self.compute.tokens, float(shape.hidden_size))
        if kind.has_attention:
            queries, keys = (n * shape.head_dim / t for n in (shape.num_attention_heads, shape.num_key_value_heads))
            if joins or workload.practice.joins_attention:
                yield hidden, queries + 2.0 * keys
            else:
                yield from ((hidden, queries), (hidden, keys), (hidden, keys))
            yield queries, hidden
        if workload.adapts_mlp and kind.has_mlp and not kind.is_moe:
            width, first = shape.intermediate_size / t, shape.mlp_matrices - 1
            yield from [(hidden, first * width)] if joins else [(hidden, width)] * first
            yield width, hidden
