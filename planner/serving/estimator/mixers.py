"""Times of what mixes tokens beside softmax attention: recurrent mixers, and the indexer of sparse attention.

For the T tokens of one batch, per layer and device, with h hidden size and t tensor-parallel devices:

- recurrent mixer: its input, inner and output products; convolution, gates and gated norm as memory-bound kernels; the
  scan at a share of the matrix units' peak. A decode reads and writes its state, whatever its context.
- indexer: its projections on every device; a decode reads one cached key for each token of its context, a prompt
  multiplies its heads with all of the causal half.

No kernel timings of these are shipped, and no constant is fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.operators import Operators, peak_flops_per_s

# Hidden-size elements that a norm with residual moves per token.
NORM_ELEMENTS = 4.0
# Kernels of a recurrent mixer beside its products: norm, convolution, gates, scan, gated norm; of an indexer's scores.
# Counted from the equations, not from an engine.
RECURRENT_KERNELS, INDEXER_KERNELS = 5.0, 2.0
# Share of the peak that chunked scans and indexer scores reach. Assumed, below FlashAttention's half: their products
# are small, and several kernels stand between them. Neither measured nor fitted.
SCAN_EFFICIENCY = 0.25


@dataclass(frozen=True, kw_only=True)
class Mixers:
    """Recurrent mixers and indexer of one worker: every method returns seconds, zeros where the model has none.

    Args:
        shape: the model.
        operators: kernel times of the device.
        scheme: format of the weights.
        tensor_parallel: devices that divide the heads.
        context_parallel: devices that divide a context.
    """

    shape: ModelShape
    operators: Operators
    scheme: str
    tensor_parallel: int
    context_parallel: int

    @property
    def top_k(self) -> int | None:
        """Tokens that an indexer lets attention see; None without one."""
        indexer = None if self.shape.blocks is None else self.shape.blocks.indexer
        return None if indexer is None else indexer.top_k

    def attended(self, context: FloatArray) -> FloatArray:
        """Tokens of a context that softmax attention reads."""
        return context if self.top_k is None else np.minimum(context, float(self.top_k))

    def linear_s(self, tokens: FloatArray) -> FloatArray:
        """Indexers' projections and recurrent mixers of all layers for the tokens of one batch."""
        indexers = self.shape.num_indexed_layers * self._indexer_linear_s(tokens)
        return indexers + self.shape.num_recurrent_layers * self._recurrent_s(tokens)

    def _indexer_linear_s(self, tokens: FloatArray) -> FloatArray:
        indexer = None if self.shape.blocks is None else self.shape.blocks.indexer
        if indexer is None:
            return np.zeros_like(tokens)
        gemm = self.operators.gemm_s
        queries = gemm(self.scheme, tokens, indexer.num_heads * indexer.head_dim, indexer.query_inputs)
        return queries + gemm(self.scheme, tokens, indexer.head_dim + indexer.num_heads, self.shape.hidden_size)

    def _recurrent_s(self, tokens: FloatArray) -> FloatArray:
        recurrent = None if self.shape.blocks is None else self.shape.blocks.recurrent
        if recurrent is None:
            return np.zeros_like(tokens)
        h, t, gemm = self.shape.hidden_size, self.tensor_parallel, self.operators.gemm_s
        seconds = gemm(self.scheme, tokens, recurrent.split_outputs / t + recurrent.copied_outputs, h)
        seconds = seconds + gemm(self.scheme, tokens, h, recurrent.output_inputs / t)
        if recurrent.inner_weights:
            inner = recurrent.inner_weights / recurrent.inner_inputs / t
            seconds = seconds + gemm(self.scheme, tokens, inner, recurrent.inner_inputs)
        moved = BYTES_16_BIT * tokens * (NORM_ELEMENTS * h + recurrent.streamed_elements / t)
        scanned = tokens * recurrent.scan_flops_per_token / t
        peak = "bf16" if recurrent.multiplies_matrices else "fp32"
        scan = scanned / (SCAN_EFFICIENCY * peak_flops_per_s(self.operators.device, peak))
        return seconds + scan + self.operators.memory_op_s(moved, kernels=RECURRENT_KERNELS)

    def decode_s(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        """Recurrent states read and written, and indexers' scores, of the decodes of one batch, all layers."""
        return self._states_s(sequences) + self._indexer_decode_s(sequences, context)

    def _states_s(self, sequences: FloatArray) -> FloatArray:
        if self.shape.blocks is None or not self.shape.num_recurrent_layers:
            return np.zeros_like(sequences)
        moved = 2.0 * sequences * self.shape.blocks.recurrent_state_bytes / self.tensor_parallel
        return self.shape.num_recurrent_layers * self.operators.memory_op_s(moved, kernels=0.0)

    def _indexer_decode_s(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        indexer = None if self.shape.blocks is None else self.shape.blocks.indexer
        if indexer is None:
            return np.zeros_like(context)
        moved = sequences * context / self.context_parallel * indexer.cache_bytes_per_token
        return self.shape.num_indexed_layers * self.operators.memory_op_s(moved, kernels=INDEXER_KERNELS)

    def indexer_prefill_s(self, pairs: FloatArray) -> FloatArray:
        """An indexer's scores of whole prompts in one layer, over all causal (query, key) pairs, in 8 bits."""
        indexer = None if self.shape.blocks is None else self.shape.blocks.indexer
        if indexer is None:
            return np.zeros_like(pairs)
        return self.scores_s(pairs, num_heads=indexer.num_heads, head_dim=indexer.head_dim)

    def scores_s(self, pairs: FloatArray, *, num_heads: int, head_dim: int) -> FloatArray:
        """Scores of so many (query, key) pairs by an indexer's heads, in 8 bits."""
        flops = 2.0 * pairs * num_heads * head_dim
        return flops / (SCAN_EFFICIENCY * peak_flops_per_s(self.operators.device, "fp8"))
