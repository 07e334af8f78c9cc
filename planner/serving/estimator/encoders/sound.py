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

from typing import TYPE_CHECKING

import numpy as np

from meshplan.catalogs.models.audio import KERNEL, STRIDE
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.problem.quantization import Quantization

if TYPE_CHECKING:
    from meshplan.planner.serving.estimator.iteration import Worker

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


def cross_linear_s(worker: Worker, tokens: FloatArray) -> FloatArray:
    """Queries and outputs of all layers' cross-attention for the tokens of one batch."""
    shape, gemm, scheme = worker.shape, worker.operators.gemm_s, worker.quantization.attention
    h, width = shape.hidden_size, shape.num_attention_heads * shape.head_dim / worker.layout.tensor_parallel
    products = gemm(scheme, tokens, width, h) + gemm(scheme, tokens, h, width)
    moved = BYTES_16_BIT * tokens * _PASSES * (h + width)
    return shape.num_hidden_layers * (products + worker.operators.memory_op_s(moved, kernels=_KERNELS))


def cross_attention_s(worker: Worker, queries: FloatArray) -> FloatArray:
    """Attention of so many tokens, each to its own window or to one, at the rate of decodes; all layers."""
    shape, t = worker.shape, worker.layout.tensor_parallel
    one = worker.operators.decode_attention_s(
        queries,
        np.full_like(queries, float(frames(shape))),
        heads=shape.num_attention_heads // t,
        kv_heads=-(-shape.num_key_value_heads // t),
        head_dim=shape.head_dim,
        kv_bytes=worker.quantization.kv_bytes,
        window=None,
    )
    return shape.num_hidden_layers * one


def encode_s(worker: Worker, encoder: Worker) -> float:
    """Seconds that a worker spends on the window of one request.

    Args:
        worker: of the decoder.
        encoder: the same devices with the encoder's layers.
    """
    shape, audio, gemm = worker.shape, encoder.shape.audio, worker.operators.gemm_s
    read, h = np.array([float(frames(shape))]), shape.hidden_size
    layers = sum(encoder.dense_parts_s(read).values()) + encoder.attention.prefill_s(read)
    entry = gemm("bf16", read, h, KERNEL * h)
    if audio is not None:
        entry = entry + gemm("bf16", STRIDE * read, h, KERNEL * audio.num_mel_bins)
    kv_heads = -(-shape.num_key_value_heads // worker.layout.tensor_parallel)
    keys_values = gemm(worker.quantization.attention, read, 2.0 * kv_heads * shape.head_dim, h)
    return float((layers + entry + shape.num_hidden_layers * keys_values)[0])


def encode_flops(shape: ModelShape, tensor_parallel: int) -> float:
    """Multiplications of one window on one device, FLOP; 0 of a model that reads no sound."""
    read, encoder = float(frames(shape)), shape.encoder
    if encoder is None or not read:
        return 0.0
    attention = 4.0 * encoder.num_hidden_layers * read**2 * encoder.num_attention_heads * encoder.head_dim
    layers = 2.0 * read * sum(map(encoder.layer_parameters, range(encoder.num_hidden_layers)))
    return (attention + layers) / tensor_parallel + 2.0 * read * cross_parameters(shape, tensor_parallel)[1]
