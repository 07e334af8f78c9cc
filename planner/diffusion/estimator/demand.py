"""What a batch asks of a device, for many degrees at once: FLOPs, bytes, launches, and the rates of the machine.

Nothing here depends on fitted constants, so that a fit prepares its runs once. With u, r, c, p and t the degrees of
Ulysses, ring, guidance, PipeFusion and tensor parallelism, one device sees of a batch of b items with g guidance passes

    b·g/c   sequences,    N/(u·r) of their N tokens,    L/p of the L blocks,    1/t of the weights.

PipeFusion sends a sequence through the stages as p patches; a patch attends to all tokens, with the keys and values
that the step before left of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from meshplan.catalogs.hardware import Device
from meshplan.catalogs.surfaces.gemm import base_time_s, gemm_surface
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.diffusion.estimator.blocks import BYTES, PassWork, pass_work
from meshplan.planner.diffusion.problem.degrees import Degrees
from meshplan.planner.diffusion.problem.job import Job

DTYPE, GEMM_KERNEL = "bf16", "bfloat16"
# Of a device without measured matrix products: share of the peak, share of the memory bandwidth, saturation length k₀,
# launch. Rounded from the surfaces of the devices that were measured (H100: 0.79, 0.80, 90, 3 µs).
_UNMEASURED_GEMM = (0.75, 0.8, 128.0, 3e-6)
# Neighbouring tiles of a video share a quarter of each side: (4/3)² as much is decoded (Diffusers' tile strides).
TILE_OVERLAP = (4.0 / 3.0) ** 2
# Steps that PipeFusion computes without stale keys and values, one stage after the other (xDiT's default).
WARMUP_STEPS = 1
# All-reduces of a block under tensor parallelism: after attention and after the feed-forward network.
_ALL_REDUCES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Of one step unless stated otherwise, on one device; [n] each.

    Args:
        gemm_s: matrix products by the shipped surfaces, s.
        attention_flops: FLOPs.
        exponentials: of softmax.
        elementwise_bytes: of small kernels.
        attention_bytes: one tensor of every split attention together, a rank's share.
        exchanged_bytes: sent by a rank in the all-to-alls of Ulysses.
        hop_bytes: sent by a rank in one hop of every ring: keys and values.
        reduced_bytes: sent by a rank for tensor parallelism and between guidance passes.
        launches: kernels.
        num_attentions: split attentions, one after the other.
        num_reduces: all-reduces of tensor parallelism.
        peers: of an all-to-all, u − 1.
        hops: of a ring, r − 1.
        is_ulysses: 1 where u > 1.
        is_ring: 1 where r > 1.
        effective_steps: steps of a pipeline that is full, which take as long.
        vae_flops: of a batch.
        text_flops: of a batch.
        image_ranks: images of a batch × ranks that share the host; 0 for videos.
        peak_flops_per_s: bf16, of the device.
        memory_bytes_per_s: of the device.
        ulysses_bytes_per_s: of the links that all-to-alls cross.
        ring_bytes_per_s: of the links that rings cross.
        reduce_bytes_per_s: of the links of tensor parallelism, or of guidance.
        power_limit_w: of the device; NaN where unknown.
        devices: of a replica.
        batch_size: items.
    """

    gemm_s: FloatArray
    attention_flops: FloatArray
    exponentials: FloatArray
    elementwise_bytes: FloatArray
    attention_bytes: FloatArray
    exchanged_bytes: FloatArray
    hop_bytes: FloatArray
    reduced_bytes: FloatArray
    launches: FloatArray
    num_attentions: FloatArray
    num_reduces: FloatArray
    peers: FloatArray
    hops: FloatArray
    is_ulysses: FloatArray
    is_ring: FloatArray
    effective_steps: FloatArray
    vae_flops: FloatArray
    text_flops: FloatArray
    image_ranks: FloatArray
    peak_flops_per_s: FloatArray
    memory_bytes_per_s: FloatArray
    ulysses_bytes_per_s: FloatArray
    ring_bytes_per_s: FloatArray
    reduce_bytes_per_s: FloatArray
    power_limit_w: FloatArray
    devices: FloatArray
    batch_size: FloatArray

    @classmethod
    def joined(cls, parts: Sequence[Demand]) -> Demand:
        """Several one after the other."""
        return cls(**{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)})


def demand(job: Job, machine: Machine, degrees: Degrees) -> Demand:
    """What batches of a job ask of the devices of a machine."""
    work, model, device = pass_work(job), job.model, machine.device
    u, r, p, t = (getattr(degrees, name).astype(float) for name in ("ulysses", "ring", "pipefusion", "tensor_parallel"))
    batch = degrees.batch_size.astype(float)
    sequences = batch * model.guidance_passes / degrees.cfg_parallel
    calls = np.ones_like(batch)  # forward calls of a step, one after the other
    if not model.guidance_batched:
        calls = model.guidance_passes / degrees.cfg_parallel
    share = sequences / (u * r * p * t)
    attention_bytes = work.attention_bytes * share
    is_guided = degrees.cfg_parallel > 1
    noise_bytes = batch * job.latent_elements * BYTES * is_guided
    reduces = _ALL_REDUCES * model.num_layers / p * (t > 1)
    hidden_bytes = job.tokens * model.hidden_size * BYTES * sequences / (u * r)
    ones = np.ones_like(batch)
    return Demand(
        gemm_s=_gemm_s(work, device, degrees, sequences),
        attention_flops=work.attention_flops * share,
        exponentials=work.exponentials * share,
        # norms and residuals are not split by tensor parallelism, heads and activations are: about half
        elementwise_bytes=work.elementwise_bytes * share * (1.0 + t) / 2.0,
        attention_bytes=attention_bytes,
        exchanged_bytes=4.0 * attention_bytes * (u - 1.0) / u,
        hop_bytes=2.0 * attention_bytes * (r > 1),
        reduced_bytes=reduces * 2.0 * (t - 1.0) / t * hidden_bytes + noise_bytes,
        launches=work.launches * calls,
        num_attentions=work.num_attentions * calls,
        num_reduces=reduces * calls + is_guided,
        peers=u - 1.0,
        hops=r - 1.0,
        is_ulysses=(u > 1).astype(float),
        is_ring=(r > 1).astype(float),
        effective_steps=job.steps + (min(WARMUP_STEPS, job.steps) + 1.0 / p) * (p - 1.0),
        vae_flops=_vae_flops(job) * batch,
        text_flops=sum(2.0 * one.parameters * one.tokens for one in model.text_encoders)
        * model.guidance_passes
        * batch,
        image_ranks=(0.0 if job.frames > 1 else 1.0) * batch * np.minimum(degrees.devices, machine.devices_per_host),
        peak_flops_per_s=device.peak_flops_per_s[DTYPE] * ones,
        memory_bytes_per_s=device.memory_bandwidth_bytes_per_s * ones,
        ulysses_bytes_per_s=_link(machine, degrees, "ulysses"),
        ring_bytes_per_s=_link(machine, degrees, "ring"),
        reduce_bytes_per_s=np.where(
            t > 1, _link(machine, degrees, "tensor_parallel"), _link(machine, degrees, "cfg_parallel")
        ),
        power_limit_w=(np.nan if device.tdp_w is None else device.tdp_w) * ones,
        devices=degrees.devices.astype(float),
        batch_size=batch,
    )


def _vae_flops(job: Job) -> float:
    vae = job.model.vae
    return vae.decode_flops_per_pixel * job.pixels * (TILE_OVERLAP if vae.tiled else 1.0)


def _link(machine: Machine, degrees: Degrees, degree: str) -> FloatArray:
    """[n] Bandwidth of the links that a degree's groups cross: the network where they leave the domain."""
    inside = degrees.extent(degree) <= machine.domain_size
    return np.where(inside, machine.scale_up_bytes_per_s, max(machine.scale_out_bytes_per_s, 1.0))


def _gemm_s(work: PassWork, device: Device, degrees: Degrees, sequences: FloatArray) -> FloatArray:
    """[n] Matrix products of one step: p patches through L/p blocks."""
    total = np.zeros_like(sequences)
    patches = degrees.pipefusion
    for product in work.products:
        split = degrees.sequence_split * patches if product.is_split else np.ones_like(patches)
        rows = np.maximum(product.tokens * sequences / split, 1.0)
        columns = product.outer / degrees.tensor_parallel
        times = np.where(product.is_split, patches, 1) * product.count / degrees.pipefusion
        total = total + times * _product_s(device, rows, columns, product.inner)
    return total


def _product_s(device: Device, rows: FloatArray, columns: FloatArray, inner: int) -> FloatArray:
    """Seconds of rows × inner by inner × columns, from the device's surface, its curve or its datasheet."""
    surface = gemm_surface(device.slug, GEMM_KERNEL)
    if surface is not None:
        return surface.time_s(rows, columns, inner)
    share, memory_share, saturation, launch_s = _UNMEASURED_GEMM
    rate, bandwidth, saturation = device.gemm_curves.get(
        DTYPE,
        (
            share * device.peak_flops_per_s[DTYPE],
            memory_share * device.memory_bandwidth_bytes_per_s,
            saturation,
        ),
    )
    shape = (np.asarray(rows, float), np.asarray(columns, float), np.full_like(rows, float(inner)))
    return base_time_s(np.array([rate, bandwidth, saturation, launch_s]), *shape, element_bytes=BYTES)
