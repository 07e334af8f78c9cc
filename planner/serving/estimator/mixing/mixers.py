"""Times of what mixes tokens beside softmax attention: recurrent mixers, and the indexer of sparse attention.

For the T tokens of one batch, per layer and device, with h hidden size and t tensor-parallel devices:

- recurrent mixer: its input, inner and output products; convolution, gates and gated norm as memory-bound kernels; the
  recurrence. A prompt computes that in chunks; a decode reads and writes its state, whatever its context. Where the
  engine's kernel was timed (:mod:`meshplan.catalogs.surfaces.recurrent`: gated and Kimi delta rules), both take t₀ +
  E/r for E updated elements of states. Elsewhere a scan reaches a share of the matrix units' peak, and an update is
  bound by memory, or by the engine's launch shape (``state_updates_per_s`` of ``engines.yaml``: Mamba).
- indexer: its projections on every device; a decode reads one cached key for each token of its context, a prompt
  multiplies its heads with all of the causal half.

No constant is fitted to served runs of such models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.efficiency import KERNEL_S
from meshplan.catalogs.models.layers.recurrent import STATE_BYTES, RecurrentMixer
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.surfaces.recurrent import DECODE, PREFILL, RecurrentKernel, scan_flops_per_s
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.operators import Operators, peak_flops_per_s

# Hidden-size elements that a norm with residual moves per token.
NORM_ELEMENTS = 4.0
# Kernels of a recurrent mixer beside its products and its recurrence: norm, convolution, gates, gated norm; of an
# indexer's scores. Counted from the equations, not from an engine.
RECURRENT_KERNELS, INDEXER_KERNELS = 4.0, 2.0
# Share of the vector units' peak that a scan reaches which multiplies no matrices (Mamba-1). Assumed.
VECTOR_SCAN_SHARE = 0.25
# Share of the peak that an indexer's scores reach. Assumed, below FlashAttention's half: their products are small.
SCORES_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Mixers:
    """Recurrent mixers and indexer of one worker: every method returns seconds, zeros where the model has none.

    Args:
        shape: the model.
        operators: kernel times of the device.
        scheme: format of the weights.
        tensor_parallel: devices that divide the heads.
        context_parallel: devices that divide a context.
        state_updates_per_s: elements of states that the engine's kernel updates a second at most, where it was not
            timed.
    """

    shape: ModelShape
    operators: Operators
    scheme: str
    tensor_parallel: int
    context_parallel: int
    state_updates_per_s: float = math.inf

    @property
    def recurrent(self) -> RecurrentMixer | None:
        """Sizes of the recurrent mixers; None without one."""
        return None if self.shape.blocks is None else self.shape.blocks.recurrent

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
        recurrent = self.recurrent
        if recurrent is None:
            return np.zeros_like(tokens)
        h, t, gemm = self.shape.hidden_size, self.tensor_parallel, self.operators.gemm_s
        seconds = gemm(self.scheme, tokens, recurrent.split_outputs / t + recurrent.copied_outputs, h)
        seconds = seconds + gemm(self.scheme, tokens, h, recurrent.output_inputs / t)
        if recurrent.inner_weights:
            inner = recurrent.inner_weights / recurrent.inner_inputs / t
            seconds = seconds + gemm(self.scheme, tokens, inner, recurrent.inner_inputs)
        moved = BYTES_16_BIT * tokens * (NORM_ELEMENTS * h + recurrent.streamed_elements / t)
        scan = self._scan_s(recurrent, tokens)
        return seconds + scan + self.operators.memory_op_s(moved, kernels=RECURRENT_KERNELS)

    def _scan_s(self, recurrent: RecurrentMixer, tokens: FloatArray) -> FloatArray:
        """The recurrence of a prompt's tokens in one layer, without its start."""
        if kernel := self._kernel(PREFILL):
            return tokens * recurrent.state_elements / self.tensor_parallel / kernel.elements_per_s
        if recurrent.multiplies_matrices:
            rate = scan_flops_per_s(peak_flops_per_s(self.operators.device, "bf16"))
        else:
            rate = VECTOR_SCAN_SHARE * peak_flops_per_s(self.operators.device, "fp32")
        return tokens * recurrent.scan_flops_per_token / self.tensor_parallel / rate

    @property
    def prefill_start_s(self) -> float:
        """Launch and tail of the scans of all layers, where an iteration has any."""
        kernel = self._kernel(PREFILL)
        return self.shape.num_recurrent_layers * (KERNEL_S if kernel is None else kernel.start_s)

    def decode_s(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        """Recurrent states read and written, and indexers' scores, of the decodes of one batch, all layers."""
        return self._states_s(sequences) + self._indexer_decode_s(sequences, context)

    def _states_s(self, sequences: FloatArray) -> FloatArray:
        """One update of each sequence's states in place of the scan that :meth:`linear_s` counts for its token."""
        recurrent = self.recurrent
        if recurrent is None:
            return np.zeros_like(sequences)
        elements = sequences * recurrent.state_elements / self.tensor_parallel
        if kernel := self._kernel(DECODE):
            update = kernel.time_s(elements)
        else:
            update = self.operators.memory_op_s(2.0 * STATE_BYTES * elements, kernels=1.0)
            update = np.maximum(update, KERNEL_S + elements / self.state_updates_per_s)
        kept = 2.0 * BYTES_16_BIT * sequences * recurrent.convolution_elements / self.tensor_parallel
        convolved = self.operators.memory_op_s(kept, kernels=0.0)
        net = update + convolved - self._scan_s(recurrent, sequences)
        return self.shape.num_recurrent_layers * np.maximum(net, 0.0)

    def _kernel(self, phase: str) -> RecurrentKernel | None:
        """The timed recurrence of this kind of layer; None without one."""
        recurrent = self.recurrent
        return None if recurrent is None else self.operators.recurrence(recurrent.kind, phase)

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
        return flops / (SCORES_SHARE * peak_flops_per_s(self.operators.device, "fp8"))
