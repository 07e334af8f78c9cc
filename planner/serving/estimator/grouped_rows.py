"""Rows that a grouped product of experts computes where it takes them in blocks and nobody tells it how many there are.

DeepGEMM multiplies the tokens of a device's E_d experts as one product whose rows are dealt to experts in blocks of b =
128. A CUDA graph is captured without knowing which experts the router chooses, so vLLM reserves the most rows that T
tokens with k choices can need (``compute_aligned_M``; T is that of the whole group, as all of them might choose here)::

    rows = ⌈(T·k + E_d·(b − 1))/b⌉·b

Blocks that no token uses are marked. Blackwell's kernel does not look: it multiplies them with the first expert's
weights (``sm100_fp8_gemm_1d1d.cuh``). Hopper's skips them, so that blocks in use (u = b rows) take the time. There two
warp groups multiply u = 64 rows of a block each, and one whose first row is unused does not (``is_computation_valid``):
that saves power but hardly time, as the other goes on. Either way u·Σ_j P(N > j·u) rows of an expert that N tokens
choose: 1 − (1 − k/E)^T for j = 0; for the others N is taken to be normal with mean and variance T·k/E, its
distribution the logistic one that is within 0.01 of it.

Sources: vllm-project/vllm, fused_moe/deep_gemm_utils.py; deepseek-ai/DeepGEMM, common/scheduler.cuh; read 2026-11-26.
Assumes even routing, and that loading a block which is then skipped costs nothing.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray

# Format of the experts that are multiplied so.
GROUPED_SCHEME = "fp8_block"
# Generation whose kernel skips rows that no token uses, and how many it multiplies at once (WGMMA's M).
SKIPPING, MULTIPLIED_ROWS = "hopper", 64
# 1/(1 + exp(−1.702·z)) is within 0.01 of the normal distribution (Camilli 1994). Further rows beyond the mean are rare.
LOGISTIC_SLOPE = 1.702
BEYOND_MEAN = 4


def most_rows(tokens: FloatArray, *, top_k: int, local_experts: float, block_rows: int) -> FloatArray:
    """Rows of one layer's experts on one device where all blocks that could be needed are computed, [n].

    >>> most_rows(np.array([8.0]), top_k=8, local_experts=64, block_rows=128)
    array([8192.])
    """
    most = tokens * top_k + local_experts * (block_rows - 1)
    return np.asarray(np.ceil(most / block_rows) * block_rows)


def used_rows(
    tokens: FloatArray, *, top_k: int, num_experts: float, local_experts: float, unit_rows: int
) -> FloatArray:
    """Rows of the units in use, [n]; ``tokens`` are all that choose among ``num_experts``."""
    mean = tokens * top_k / num_experts
    used = 1.0 - (1.0 - top_k / num_experts) ** tokens
    for filled in range(1, int(np.max(mean, initial=0.0) / unit_rows) + BEYOND_MEAN):
        z = (mean - filled * unit_rows) / np.sqrt(np.maximum(mean, 1.0))
        used = used + 0.5 * (1.0 + np.tanh(0.5 * LOGISTIC_SLOPE * z))
    return np.asarray(local_experts * unit_rows * used)
