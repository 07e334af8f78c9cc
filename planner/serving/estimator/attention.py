"""Times of softmax attention over the KV cache: decodes by their context, whole prompts by their attended pairs.

Layers with equal windows are priced together; with an indexer attention reads what it selects. Latent attention has
kernels of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.mixers import Mixers
from meshplan.planner.serving.estimator.operators import Operators


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
        if shape.latent is not None:
            one = self.operators.latent_prefill_attention_s(
                prompt,
                heads=heads,
                query_dim=shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim,
                value_dim=shape.latent.v_head_dim,
                pairs=attended_pairs(prompt, self.mixers.top_k),
            )
            return (
                shape.num_attention_layers * (one + self.mixers.indexer_prefill_s(attended_pairs(prompt, None))) / held
            )
        total = np.zeros_like(prompt)
        for window, count in self._windows().items():
            total = total + count * self.operators.prefill_attention_s(
                prompt,
                heads=heads,
                kv_heads=-(-shape.num_key_value_heads // t),
                head_dim=shape.head_dim,
                window=window,
                pairs=attended_pairs(prompt, window),
            )
        return total / held

    def _windows(self) -> Mapping[int | None, int]:
        shape = self.shape
        if not shape.sliding_windows:
            return {self.mixers.top_k: shape.num_attention_layers}
        return Counter(shape.window(layer) for layer in range(shape.num_hidden_layers) if shape.has_attention(layer))


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
