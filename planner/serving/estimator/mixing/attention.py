"""Times of softmax attention over the KV cache: decodes by their context, whole prompts by their attended pairs.

Layers with equal windows are priced together; with an indexer attention reads what it selects. Latent attention has
kernels of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.layers.attention_form import AttentionForm
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.mixing.mixers import INDEXER_KERNELS, NORM_ELEMENTS, Mixers
from meshplan.planner.serving.estimator.operators import Operators

# Memory-bound kernels of the attention half of a layer (rotary embedding and cache write move their own width).
ATTENTION_KERNELS = 3.0


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttention:
    """Softmax attention of one worker: every method returns seconds, all layers together.

    Args:
        shape: the model.
        operators: kernel times of the device.
        mixers: of the same worker; its indexer says what attention reads.
        kv_bytes: bytes of one element of the KV cache.
        tensor_parallel: devices that divide the heads.
        context_parallel: devices that divide a context.
    """

    shape: ModelShape
    operators: Operators
    mixers: Mixers
    kv_bytes: float
    tensor_parallel: int
    context_parallel: int

    def decode_s(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        """Softmax attention of all layers for the decodes of one batch over ``context`` tokens each."""
        shape, t = self.shape, self.tensor_parallel
        if shape.attention_forms:
            return self._forms_decode_s(sequences, context)
        held = self.mixers.attended(context) / self.context_parallel
        if shape.latent is not None:
            latent = shape.latent
            one = self.operators.latent_decode_attention_s(
                sequences,
                held,
                heads=shape.num_attention_heads // t,
                width=latent.kv_lora_rank + latent.qk_rope_head_dim,
                rank=latent.kv_lora_rank,
                kv_bytes=self.kv_bytes,
            )
            return shape.num_attention_layers * one
        total = np.zeros_like(context)
        for window, count in self._windows().items():
            total = total + count * self.operators.decode_attention_s(
                sequences,
                held,
                heads=shape.num_attention_heads // t,
                kv_heads=-(-shape.num_key_value_heads // t),
                head_dim=shape.head_dim,
                kv_bytes=self.kv_bytes,
                window=window,
            )
        return total

    def prefill_s(self, prompt: FloatArray) -> FloatArray:
        """Attention of all layers for whole prompts of ``prompt`` tokens, one prompt at a time."""
        shape, t, held = self.shape, self.tensor_parallel, self.context_parallel
        heads = shape.num_attention_heads // t
        if shape.attention_forms:
            return self._forms_prefill_s(prompt)
        if shape.latent is not None:
            one = self.operators.latent_prefill_attention_s(
                prompt,
                heads=heads,
                query_dim=shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim,
                value_dim=shape.latent.v_head_dim,
                pairs=attended_pairs(prompt, self.mixers.top_k),
            )
            scored = shape.num_indexed_layers * self.mixers.indexer_prefill_s(attended_pairs(prompt, None))
            return (shape.num_attention_layers * one + scored) / held
        total = np.zeros_like(prompt)
        for window, count in self._windows().items():
            before = one_sided(window) if shape.bidirectional else window
            pairs = attended_pairs(prompt, before)
            seconds = self.operators.prefill_attention_s(
                prompt,
                heads=heads,
                kv_heads=-(-shape.num_key_value_heads // t),
                head_dim=shape.head_dim,
                window=before,
                pairs=pairs,
            )
            if shape.bidirectional:  # at the rate of causal kernels (assumption: none was timed without their mask)
                seconds = seconds * pairs_both_ways(prompt, window) / pairs
            total = total + count * seconds
        return total / held

    def form_linear_s(self, form: AttentionForm, scheme: str, tokens: FloatArray) -> FloatArray:
        """Projections, norms and rotary embedding of one layer whose attention has a form of its own."""
        moved, seconds = NORM_ELEMENTS * self.shape.hidden_size + form.streamed_elements, np.zeros_like(tokens)
        for matrix in form.matrices:
            inputs, outputs, count = matrix.on_device(self.tensor_parallel)
            seconds = seconds + count * self.operators.gemm_s(scheme, tokens, outputs, inputs)
            moved += outputs * count
        return seconds + self.operators.memory_op_s(BYTES_16_BIT * tokens * moved, kernels=ATTENTION_KERNELS)

    def _forms_decode_s(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        """Decodes where layers have attention of several forms; compressed entries by latent attention's kernels."""
        total, held = np.zeros_like(context), context / self.context_parallel
        for form, window, count in self.shape.attention_forms:
            heads = form.num_heads // self.tensor_parallel
            if form.shares_cache:
                entries = compressed_entries(form, held) if window is None else np.minimum(held, float(window))
                seconds = self.operators.latent_decode_attention_s(
                    sequences, entries, heads=heads, width=form.key_dim, rank=form.value_dim, kv_bytes=self.kv_bytes
                )
                if form.index_dim:
                    moved = sequences * held / form.compression * form.index_dim
                    seconds = seconds + self.operators.memory_op_s(moved, kernels=INDEXER_KERNELS)
            else:
                seconds = self.operators.decode_attention_s(
                    sequences,
                    held,
                    heads=heads,
                    kv_heads=-(-form.num_key_value_heads // self.tensor_parallel),
                    head_dim=(form.key_dim + form.value_dim) // 2,
                    kv_bytes=self.kv_bytes,
                    window=window,
                )
            total = total + count * seconds
        return total

    def _forms_prefill_s(self, prompt: FloatArray) -> FloatArray:
        """Whole prompts where the layers have attention of several forms."""
        total, whole = np.zeros_like(prompt), attended_pairs(prompt, None)
        for form, window, count in self.shape.attention_forms:
            heads = form.num_heads // self.tensor_parallel
            if form.shares_cache:
                pairs = compressed_pairs(form, prompt) if window is None else attended_pairs(prompt, window)
                seconds = self.operators.latent_prefill_attention_s(
                    prompt, heads=heads, query_dim=form.key_dim, value_dim=form.value_dim, pairs=pairs
                )
                seconds = seconds + self.mixers.scores_s(
                    whole / form.compression, num_heads=form.index_heads, head_dim=form.index_dim
                )
            else:
                seconds = self.operators.prefill_attention_s(
                    prompt,
                    heads=heads,
                    kv_heads=-(-form.num_key_value_heads // self.tensor_parallel),
                    head_dim=(form.key_dim + form.value_dim) // 2,
                    window=window,
                    pairs=attended_pairs(prompt, window),
                )
            total = total + count * seconds
        return total / self.context_parallel

    def _windows(self) -> Mapping[int | None, int]:
        shape = self.shape
        if not shape.sliding_windows:
            return {self.mixers.top_k: shape.num_attention_layers}
        return Counter(shape.window(layer) for layer in range(shape.num_hidden_layers) if shape.has_attention(layer))


def compressed_entries(form: AttentionForm, context: FloatArray) -> FloatArray:
    """Entries that a decode of ``context`` tokens attends to: its window, and all or the selected compressed ones."""
    entries = context / form.compression
    seen = np.minimum(entries, float(form.top_k)) if form.top_k else entries
    return np.minimum(context, float(form.window)) + seen


def compressed_pairs(form: AttentionForm, prompt: FloatArray) -> FloatArray:
    """(query, entry) pairs of a causal prompt: those within the window, and those of compressed entries."""
    reach = form.top_k * form.compression or None
    return attended_pairs(prompt, form.window) + attended_pairs(prompt, reach) / form.compression


def attended_pairs(prompt: FloatArray, window: int | None) -> FloatArray:
    """(query, key) pairs of a causal prompt: n·(n + 1)/2, minus those outside the window.

    >>> attended_pairs(np.array([4.0]), None).tolist(), attended_pairs(np.array([4.0]), 2).tolist()
    ([10.0], [7.0])
    """
    whole = prompt * (prompt + 1.0) / 2.0
    if window is None:
        return whole
    beyond = np.maximum(prompt - window, 0.0)
    return whole - beyond * (beyond + 1.0) / 2.0


def one_sided(window: int | None) -> int | None:
    """Tokens before and including each one, of a window that lies around it."""
    return None if window is None else window // 2 + 1


def pairs_both_ways(prompt: FloatArray, window: int | None) -> FloatArray:
    """(query, key) pairs of a text whose tokens attend to those after them, too: n², or those within the window.

    >>> pairs_both_ways(np.array([4.0]), None).tolist(), pairs_both_ways(np.array([4.0]), 2).tolist()
    ([16.0], [10.0])
    """
    return 2.0 * attended_pairs(prompt, one_sided(window)) - prompt
