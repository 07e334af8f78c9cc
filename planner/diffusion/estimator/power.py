"""Average power of a device over a batch, by what it does in which share of the time.

    P / limit = waiting + Σ share of the time in kernels of class k × power of class k

A device that waits for its host or for another device takes the waiting share alone. The classes are matrix products,
attention, small kernels, exchanges and the VAE; the constants are shares of the board's limit.
"""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.constants.diffusion import DiffusionConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.diffusion.estimator.latency import Latency


def power_share(taken: Latency, constants: DiffusionConstants | Any) -> FloatArray:
    """[n] Power of one device over its limit."""
    busy = (
        taken.gemm_s * constants.gemm_share
        + taken.attention_s * constants.attention_share
        + taken.elementwise_s * constants.elementwise_share
        + taken.exchange_s * constants.exchange_share
        + (taken.vae_s + taken.text_s) * constants.vae_share
    )
    return constants.waiting_share + busy / taken.total_s
