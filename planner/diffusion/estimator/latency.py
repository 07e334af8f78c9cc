r"""Latency of a batch, from prompt to decoded pictures, for many degrees at once.

One denoising step takes, on a device with peak P, memory bandwidth M and links of bandwidth B (efficiencies e)::

    matrix products   gemm_s / e_gemm
    attention         FLOPs/(P·e_attention) + exponentials/(P·x)
    small kernels     bytes/(M·e_elementwise)
    Ulysses           4·T·(u-1)/u / (B·e_link)  +  n_u·T/(M·e_elementwise)
    ring              n_r·T/(M·e) + (r-1)·n_m·T/(M·e) + (r-1)·max(0, 2·T/(B·e_link) - attention/r)
    device_s          their sum
    host_s            launches·t_launch + attentions·(t_x + (u-1)·t_u + (r-1)·t_hop)
    step_s            (device_s⁶ + host_s⁶)^(1/6) + attentions·([u>1]·d_u + [r>1]·d_r)

T is one tensor of all split attentions, a rank's share: an all-to-all moves queries, keys, values and the output, a hop
keys and values while attention over the block before runs. The host queues kernels ahead of the device, so that the
slower of the two sets the pace (an all-to-all of NCCL is a send and a receive for each peer). The last term is what an
exchange exposes however small it is. Around the steps::

    latency = steps·step_s + text encoders + VAE + images·ranks·t_image + t_fixed

Every rank runs text encoders and VAE, which therefore do not get faster with more devices.

Sources: DeepSpeed-Ulysses (arXiv:2309.14509) §3.2; Ring Attention (arXiv:2310.01889); USP (arXiv:2405.07719);
PipeFusion (arXiv:2405.14430). The constants: see the README of the kind.

Assumes: bf16, no ``torch.compile``, no step cache, no parallel VAE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.catalogs.constants.diffusion import DiffusionConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.diffusion.estimator.demand import Demand

# The sixth power rounds the corner between host and device by 12 % where both are equal.
CORNER = 6.0
# Text encoders are matrix products of a few hundred tokens: about half of the rate of long ones.
TEXT_ENCODER_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds of a batch, [n] each; parts of all steps together.

    Args:
        total_s: from prompt to decoded pictures.
        gemm_s: matrix products.
        attention_s: attention.
        elementwise_s: small kernels.
        exchange_s: all-to-alls, hops, their packing and merging, what they expose.
        host_s: waiting for the host to launch kernels.
        text_s: text encoders.
        vae_s: VAE.
        other_s: images on the host, and what a batch always takes.
    """

    total_s: FloatArray
    gemm_s: FloatArray
    attention_s: FloatArray
    elementwise_s: FloatArray
    exchange_s: FloatArray
    host_s: FloatArray
    text_s: FloatArray
    vae_s: FloatArray
    other_s: FloatArray

    def parts(self) -> Mapping[str, FloatArray]:
        """Name for people → seconds; they add up to the total."""
        return {
            "matrix products": self.gemm_s,
            "attention": self.attention_s,
            "small kernels": self.elementwise_s,
            "exchanges": self.exchange_s,
            "waiting for the host": self.host_s,
            "text encoders": self.text_s,
            "VAE": self.vae_s,
            "images, start": self.other_s,
        }


def latency(asked: Demand, constants: DiffusionConstants | Any) -> Latency:
    """Price what batches ask for.

    Args:
        asked: of n candidates.
        constants: floats, or arrays [n] where candidates are of several generations.
    """
    peak = asked.peak_flops_per_s
    memory = asked.memory_bytes_per_s * constants.elementwise_efficiency
    gemm = asked.gemm_s / constants.gemm_efficiency
    attention = asked.attention_flops / (peak * constants.attention_efficiency)
    attention = attention + asked.exponentials / (peak * constants.exponentials_per_flop)
    elementwise = asked.elementwise_bytes / memory
    exchange = _exchange_s(asked, constants, memory, attention)
    is_split = np.maximum(asked.is_ulysses, asked.is_ring)
    host = asked.launches * constants.launch_s + asked.num_attentions * (
        is_split * constants.exchange_host_s
        + asked.peers * constants.ulysses_host_s
        + asked.hops * constants.hop_host_s
    )
    host = host + asked.num_reduces * constants.ulysses_host_s
    exposed = asked.num_attentions * (
        asked.is_ulysses * constants.ulysses_exposed_s + asked.is_ring * constants.ring_exposed_s
    )
    device = gemm + attention + elementwise + exchange
    paced = (device**CORNER + host**CORNER) ** (1.0 / CORNER)
    text = asked.text_flops / (peak * constants.gemm_efficiency * TEXT_ENCODER_SHARE)
    vae = asked.vae_flops / (peak * constants.vae_efficiency)
    other = asked.image_ranks * constants.image_host_s + constants.fixed_s
    steps = asked.effective_steps
    return Latency(
        total_s=steps * (paced + exposed) + text + vae + other,
        gemm_s=steps * gemm,
        attention_s=steps * attention,
        elementwise_s=steps * elementwise,
        exchange_s=steps * (exchange + exposed),
        host_s=steps * (paced - device),
        text_s=text,
        vae_s=vae,
        other_s=other,
    )


def _exchange_s(
    asked: Demand, constants: DiffusionConstants | Any, memory: FloatArray, attention: FloatArray
) -> FloatArray:
    """[n] Device time of a step's exchanges; ``memory`` is the bandwidth that small kernels reach."""
    tensor = asked.attention_bytes / memory
    link = constants.link_efficiency
    ulysses = asked.exchanged_bytes / (asked.ulysses_bytes_per_s * link)
    ulysses = ulysses + asked.is_ulysses * constants.ulysses_passes * tensor
    hop = asked.hop_bytes / (asked.ring_bytes_per_s * link)
    late = np.maximum(hop - attention / (asked.hops + 1.0), 0.0)
    ring = asked.is_ring * constants.ring_passes * tensor
    ring = ring + asked.hops * (constants.merge_passes * tensor + late)
    return ulysses + ring + asked.reduced_bytes / (asked.reduce_bytes_per_s * link)
