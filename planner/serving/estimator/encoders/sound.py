"""An encoder of sound and the attention to its output (Whisper): time, weights, cache.

A request is one window of sound, F frames after the convolutions (:mod:`meshplan.catalogs.models.audio`), and a short
prompt. Before the prompt is prefilled its window passes the encoder's L_e layers, each as a text encoder's over F
tokens, and each of the L_d decoder layers makes its keys and values of the output, once. These stay in the KV cache
until the request ends, whatever it writes::

    encode   convolutions [2F, h, 3m], [F, h, 3h] · L_e layers over F tokens, F² pairs · L_d·[F, 2kd/t, h]
    a token  queries and output of L_d layers, [T, ad/t, h] and [T, h, ad/t] · attention to F keys, as a decode's
    cache    2·⌈k/t⌉·d·F·L_d elements a request

vLLM 0.33.0 runs the encoder on the tensor-parallel devices (models/whisper.py; it declares no pipeline support),
neither cuts prompts nor caches prefixes (config/scheduler.py), and takes as many windows into an iteration as
``max_num_batched_tokens`` has room for their frames, one at least (v1/core/encoder_cache_manager.py). Launches of the
encoder's kernels are not counted. No run was compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.audio import KERNEL, STRIDE
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.operators import Operators
from meshplan.planner.serving.problem.quantization import Quantization

# Memory-bound work beside the products of cross-attention: a norm, and queries that are written and read.
_KERNELS = 2.0
_PASSES = 3.0


def frames(shape: ModelShape) -> int:
    """F, vectors that a window of sound becomes; 0 of a model that reads none."""
    encoder = shape.encoder
    return 0 if encoder is None or encoder.audio is None else encoder.num_position_embeddings


def windows_of_an_iteration(num_frames: int, max_batched_tokens: int) -> int:
    """Windows that vLLM encodes in one iteration at most."""
    return max(max_batched_tokens // num_frames, 1)


def cross_parameters(shape: ModelShape, tensor_parallel: int) -> tuple[float, float]:
    """Parameters of all layers' cross-attention on one device: applied to tokens, and to what the encoder read."""
    if shape.encoder is None:
        return 0.0, 0.0
    each = float(shape.num_hidden_layers * shape.hidden_size * shape.head_dim)
    heads, kv_heads = shape.num_attention_heads / tensor_parallel, -(-shape.num_key_value_heads // tensor_parallel)
    return 2.0 * each * heads, 2.0 * each * kv_heads


def cross_cache_bytes(shape: ModelShape, quantization: Quantization, *, tensor_parallel: int) -> float:
    """Keys and values of what one request's encoder read, on one device, all layers, bytes."""
    heads = -(-shape.num_key_value_heads // tensor_parallel)
    return 2.0 * heads * shape.head_dim * quantization.kv_bytes * frames(shape) * shape.num_hidden_layers


def encode_flops(shape: ModelShape, tensor_parallel: int) -> float:
    """Multiplications of one window on one device, FLOP; 0 of a model that reads no sound."""
    read, encoder = float(frames(shape)), shape.encoder
    if encoder is None or not read:
        return 0.0
    attention = 4.0 * encoder.num_hidden_layers * read**2 * encoder.num_attention_heads * encoder.head_dim
    layers = 2.0 * read * sum(map(encoder.layer_parameters, range(encoder.num_hidden_layers)))
    return (attention + layers) / tensor_parallel + 2.0 * read * cross_parameters(shape, tensor_parallel)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention:
    """Attention of the decoder's layers to what an encoder read: every method returns seconds, all layers together.

    Args:
        shape: the decoder, with its encoder.
        operators: kernel times of the device.
        scheme: format of the attention's weights.
        kv_bytes: bytes of one element of the KV cache.
        tensor_parallel: devices that divide the heads.
    """

    shape: ModelShape
    operators: Operators
    scheme: str
    kv_bytes: float
    tensor_parallel: int

    def linear_s(self, tokens: FloatArray) -> FloatArray:
        """Queries and outputs for the tokens of one batch."""
        shape, gemm = self.shape, self.operators.gemm_s
        h, width = shape.hidden_size, shape.num_attention_heads * shape.head_dim / self.tensor_parallel
        products = gemm(self.scheme, tokens, width, h) + gemm(self.scheme, tokens, h, width)
        moved = BYTES_16_BIT * tokens * _PASSES * (h + width)
        return shape.num_hidden_layers * (products + self.operators.memory_op_s(moved, kernels=_KERNELS))

    def attention_s(self, queries: FloatArray) -> FloatArray:
        """Attention of so many tokens, each to its own window or to one, at the rate of decodes."""
        one = self.operators.decode_attention_s(
            queries,
            np.full_like(queries, float(frames(self.shape))),
            heads=self.shape.num_attention_heads // self.tensor_parallel,
            kv_heads=self._kv_heads,
            head_dim=self.shape.head_dim,
            kv_bytes=self.kv_bytes,
            window=None,
        )
        return self.shape.num_hidden_layers * one

    def around_encoder_s(self, read: FloatArray) -> FloatArray:
        """What lies around the encoder's layers: the convolutions before, the decoder's keys and values after them."""
        shape, gemm = self.shape, self.operators.gemm_s
        audio = None if shape.encoder is None else shape.encoder.audio
        seconds = gemm("bf16", read, shape.hidden_size, KERNEL * shape.hidden_size)
        if audio is not None:
            seconds = seconds + gemm("bf16", STRIDE * read, shape.hidden_size, KERNEL * audio.num_mel_bins)
        keys_values = gemm(self.scheme, read, 2.0 * self._kv_heads * shape.head_dim, shape.hidden_size)
        return seconds + shape.num_hidden_layers * keys_values

    @property
    def _kv_heads(self) -> int:
        return -(-self.shape.num_key_value_heads // self.tensor_parallel)
