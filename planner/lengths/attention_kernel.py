"""Forward time of causal attention of one document on one context-parallel rank, by length and group size.

A rank of a group of c has q = l/c queries in two zig-zag chunks, which attend to k = l·(1 + 1/c)/2 keys at most:
q·k − q²/2 = l²/2c pairs, every rank as many. A tile of :data:`TILE_QUERIES` queries of one head runs on one
multiprocessor and goes through its keys, after a start that takes as long as κ keys:

    t = t₀ + (A^e + B^e)^(1/e)        A = 4·d·heads·(pairs + κ·q)·⌈q⌉/q / R        B = β·4·d·TILE·(k + κ)·132 / R

A: all tiles at the full rate R; B: the longest tile alone. The exponent is below 1, so that both count where both are
large: few tiles neither fill the device nor overlap.

The constants are fitted to 176 timings of FlashAttention on H100 (:data:`SOURCE`), lengths 64 to 65,536, c and tensor
parallelism 1 to 8, 64 heads of 128 before it. Held out: see ``tests/benchmarks/lengths.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshplan.planner.core.arrays import FloatArray

SOURCE = "DistCA, github.com/hao-ai-lab/distca at 039f2e4: causal attention forward, H100, FlashAttention varlen, bf16"
TILE_QUERIES = 128
MULTIPROCESSORS = 132  # of an H100 SXM
FLOPS_PER_PAIR = 4.0  # multiply and add, for the score and for the weighted value


class KernelConstants(NamedTuple):
    """Constants of the module's text.

    Args:
        rate_flops_per_s: R.
        launch_s: t₀.
        exponent: e.
        start_keys: κ.
        tile_share: β.
    """

    rate_flops_per_s: float
    launch_s: float
    exponent: float
    start_keys: float
    tile_share: float


H100 = KernelConstants(356e12, 17.9e-6, 0.626, 443.0, 0.0841)


def attention_forward_s(
    length: ArrayLike,
    context_parallel: ArrayLike = 1,
    *,
    heads: ArrayLike,
    head_dim: int = 128,
    constants: KernelConstants = H100,
) -> FloatArray:
    """Seconds of one layer's attention, forward, on one rank; arrays broadcast.

    Args:
        length: tokens of the document.
        context_parallel: ranks c that share it.
        heads: query heads on the rank, after tensor parallelism.
        head_dim: width of a head.
        constants: see :class:`KernelConstants`.
    """
    tokens, ranks = np.asarray(length, dtype=np.float64), np.asarray(context_parallel, dtype=np.float64)
    rate, launch_s, exponent, start, share = constants
    queries = np.maximum(tokens / ranks, 1.0)
    padded = np.ceil(queries / TILE_QUERIES) * TILE_QUERIES
    keys = tokens * (0.5 + 0.5 / ranks)
    pairs = queries * keys - 0.5 * queries**2
    per_pair = FLOPS_PER_PAIR * head_dim / rate
    all_tiles = per_pair * np.asarray(heads) * (pairs * padded / queries + start * padded)
    one_tile = share * per_pair * TILE_QUERIES * MULTIPROCESSORS * (keys + start)
    return np.asarray(launch_s + (all_tiles**exponent + one_tile**exponent) ** (1.0 / exponent))


def split_slowdown(length: ArrayLike, context_parallel: ArrayLike, *, heads: ArrayLike, head_dim: int) -> FloatArray:
    """Attention of a document on c ranks over a c-th of its time on one: what splitting it loses in the kernel.

    The launch is left out: documents of a micro-batch share it.

    Args:
        length: tokens of the document.
        context_parallel: ranks c.
        heads: query heads on a rank.
        head_dim: width of a head.
    """
    without = H100._replace(launch_s=0.0)
    ranks = np.asarray(context_parallel, dtype=np.float64)
    alone = attention_forward_s(length, 1, heads=heads, head_dim=head_dim, constants=without)
    split = attention_forward_s(length, ranks, heads=heads, head_dim=head_dim, constants=without)
    return np.maximum(split * ranks / alone, 1.0)
