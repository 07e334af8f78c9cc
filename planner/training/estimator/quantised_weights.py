"""Frozen 4-bit weights: their memory and the cost of dequantising them (QLoRA, arXiv:2305.14314).

NF4 has 4 bits per parameter and a constant for every 64 parameters; double quantisation stores the constant in 8 bits,
with a 32-bit one for every 256 constants (§3): 8/64 + 32/(64·256) = 0.127 bits. Only the linear layers of the
transformer blocks are quantised. Every product first dequantises its matrix to 16 bits, in forward, backward and
recompute:

    bytes of a product of n×k weights, one way = n·k·(0.516 + 2)

Adapters are on every linear layer (§4), so each keeps its input. Not validated against a measured run.
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
# Read the quantised weight, write the dequantised one; reading that is part of the product.
DEQUANTISE_BYTES = NF4_BYTES + BYTES_16_BIT
# Embeddings, LM head and norms of a quantised model (PEFT, prepare_model_for_kbit_training: cast to fp32).
UNQUANTISED_BYTES = 4.0


def is_quantised(workload: TrainingWorkload) -> bool:
    """Whether the frozen weights of the blocks are in NF4."""
    return workload.phase is Phase.QLORA


def quantised_parameters(shape: ModelShape, stage: StageClass, tensor_parallel: FloatArray) -> FloatArray:
    """Parameters of a stage's linear layers on one rank, dense layers only, [n]."""
    layers = float(sum(stage.layers))
    return layers * (shape.attention_parameters + shape.dense_mlp_parameters) / np.asarray(tensor_parallel)


def dequantised_bytes(shape: ModelShape) -> float:
    """Bytes of the largest matrix of a layer in 16 bits: the buffer of the product that is running."""
    heads = shape.num_attention_heads * shape.head_dim
    return BYTES_16_BIT * shape.hidden_size * max(shape.intermediate_size, heads)
