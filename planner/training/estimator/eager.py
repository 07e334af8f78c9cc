"""What a layer keeps for its backward pass where operators run one by one, beyond what a fused layer keeps.

PyTorch without ``torch.compile`` records every operator. Of one token and layer, in bytes of 16-bit activations (h
hidden, w MLP width, s sequence shards, t tensor-parallel devices):

    RMSNorm     its input in fp32 beside the 16-bit one's place (4h for 2h)       2h/s each
                its normalised output, where its weight is trained                2h/s each
                both of queries and keys too, where they are normalised           (a + k)·d for h, /t
    gated MLP   the activation's output, which a fused kernel computes again      2w/t
    adapters    what dropout hands to each adapter and dropout's mask             3 · input widths
    4-bit       each product's input once more, where the last loss is still there    2 · inputs' widths
    on the MLP  its norm's output and its last product's input (counted by :mod:`.memory` as for trained products)

LayerNorm is one kernel that keeps its 16-bit input, fused or not. Nothing of this is kept by a layer that is
recomputed; the one that is running keeps it for a moment.

Assumes, without having read the sources again: LlamaRMSNorm and LlamaMLP of transformers (LitGPT's and torchtune's
alike), PEFT's ``lora_A(dropout(x))``, and that PyTorch's dropout keeps a mask of a byte an element and silu its input.
What supports it is measured: LitGPT's and torchtune's peaks, which nothing here was fitted to, and each layer of
Llama-3.2-1B in transformers 5.17 on an H100: 108.5 kB a token, counted and measured (tests/benchmarks/on_a_gpu.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.candidates import Candidates, LayerKind
from meshplan.planner.training.problem.problem import Phase, TrainingWorkload

FP32_BYTES = 4.0
DROPOUT_BYTES = BYTES_16_BIT + 1.0  # dropout's output and its mask


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerActivations:
    """What operators that run one by one keep beyond fused ones.

    Args:
        shape: the model.
        workload: what is trained, and whether operators run one by one.
        candidates: the batch.
        keeps_last_graph: of the framework's recipe.
    """

    shape: ModelShape
    workload: TrainingWorkload
    candidates: Candidates
    keeps_last_graph: bool = False

    def bytes_per_token(self, kind: LayerKind, sequence_shards: FloatArray) -> FloatArray:
        """Bytes of one token and layer, [n]; 0 where operators are fused.

        Args:
            kind: of layer.
            sequence_shards: devices over which norms are split, [n].
        """
        if not self.workload.is_eager:
            return np.zeros(len(self.candidates))
        count = kind.num_blocks * self.shape.norms_per_block
        norms = self._norm_bytes() * self.shape.hidden_size * count / sequence_shards
        rest = self._mlp_bytes(kind) + self._adapter_bytes(kind) + self._last_graph_bytes(kind)
        if kind.has_attention:
            rest += self._norm_bytes() * self.shape.normed_elements
        return norms + rest / self.candidates.tensor_parallel

    def _norm_bytes(self) -> float:
        """One norm, of each element that it normalises."""
        if self.shape.norm_bias:  # LayerNorm
            return 0.0
        upcast = FP32_BYTES - BYTES_16_BIT
        normalised = 0.0 if self.workload.phase.has_adapters else BYTES_16_BIT
        return upcast + normalised

    def _mlp_bytes(self, kind: LayerKind) -> float:
        """The activation's output of a dense gated MLP; experts run in kernels of their own."""
        if not kind.has_mlp or kind.is_moe or not self.shape.gated_mlp:
            return 0.0
        return BYTES_16_BIT * self.shape.intermediate_size

    def _adapter_bytes(self, kind: LayerKind) -> float:
        """What dropout keeps before the adapters of one layer; queries, keys and values share an input."""
        if not self.workload.phase.has_adapters:
            return 0.0
        shape, widths = self.shape, 0.0
        if kind.has_attention:
            widths += shape.hidden_size + shape.num_attention_heads * shape.head_dim
        if self.workload.adapts_mlp and kind.has_mlp and not kind.is_moe:
            widths += (shape.mlp_matrices - 1) * shape.hidden_size + shape.intermediate_size
        return DROPOUT_BYTES * widths

    def _last_graph_bytes(self, kind: LayerKind) -> float:
        """Inputs of the last micro-batch's 4-bit products, whose graph its loss holds while the next runs."""
        is_held = self.keeps_last_graph and self.workload.phase is Phase.QLORA and self.workload.frozen_weights == "nf4"
        if not is_held or not kind.has_attention or not kind.has_mlp:
            return 0.0
        shape = self.shape
        widths = 2 * shape.hidden_size + shape.num_attention_heads * shape.head_dim + shape.intermediate_size
        return BYTES_16_BIT * widths
