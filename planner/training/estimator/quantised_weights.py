"""Frozen weights in four bits: what they take, and what using them costs (QLoRA, arXiv:2305.14314).

NF4 keeps 4 bits a parameter and a constant for every 64 of them; double quantisation keeps that constant in 8 bits and
one of 32 bits for every 256 constants (§3): 8/64 + 32/(64·256) = 0.127 bits. Only the linear layers of the transformer
blocks are quantised. Every product first writes its matrix out in 16 bits, forward, backward and when recomputed:

    bytes of a product of n×k weights, one way = n·k·(0.516 + 2)

Adapters sit on every linear layer (§4), so each keeps its input. No run of it was measured here.
"""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import StageClass
from meshplan.planner.training.problem.problem import Phase, TrainingWorkload

_BITS, _BLOCK, _CONSTANT_BITS, _SECOND_BLOCK, _SECOND_BITS = 4.0, 64.0, 8.0, 256.0, 32.0
NF4_BYTES = (_BITS + _CONSTANT_BITS / _BLOCK + _SECOND_BITS / (_BLOCK * _SECOND_BLOCK)) / 8.0
BYTES_16_BIT = 2.0
# A dequantised weight is written out and the quantised one read; reading it in the product is the product's own.
DEQUANTISE_BYTES = NF4_BYTES + BYTES_16_BIT
# Embeddings, LM head and norms beside quantised layers (PEFT, prepare_model_for_kbit_training: cast to fp32).
UNQUANTISED_BYTES = 4.0


def is_quantised(workload: TrainingWorkload) -> bool:
    """The frozen weights of the blocks lie in NF4."""
    return workload.phase is Phase.QLORA


def quantised_parameters(shape: ModelShape, stage: StageClass, tensor_parallel: FloatArray) -> FloatArray:
    """Parameters of a stage's linear layers on one rank, dense layers only, [n]."""
    layers = float(sum(stage.layers))
    return layers * (shape.attention_parameters + shape.dense_mlp_parameters) / np.asarray(tensor_parallel)


def dequantised_bytes(shape: ModelShape) -> float:
    """The largest matrix of a layer in 16 bits: what the product in use has beside the quantised weights."""
    heads = shape.num_attention_heads * shape.head_dim
    return BYTES_16_BIT * shape.hidden_size * max(shape.intermediate_size, heads)
