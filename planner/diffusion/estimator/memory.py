"""Memory of the busiest rank, for many degrees at once: a typical figure, and a bound that plans are admitted on.

Weights and what every rank holds beside them (bf16)::

    2·W/(p·t)  transformer      2·E  text encoders and VAE

Activations are the larger of two phases, which do not overlap:

- denoising: a token holds the feed-forward network's input and output and four tensors of the hidden size,
  2·f + 4·h numbers, for every sequence that is computed together; PipeFusion also keeps the keys and values of all
  tokens in each of its L/p blocks.
- decoding: three feature maps of the widest layer at full resolution; tiled decoders hold one tile of one item, and all
  decoded items in fp32.

The bound takes 1.15 of the activations (allocator rounding, workspaces of kernels) and adds a context of 1.5 GB, and
0.5 GB of communication buffers where devices exchange.

Assumes: no offloading; text encoders stay on the device, as xDiT leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.diffusion.estimator.blocks import BYTES
from meshplan.planner.diffusion.problem.degrees import Degrees
from meshplan.planner.diffusion.problem.job import Job

_HIDDEN_TENSORS, _FEATURE_MAPS = 4.0, 3.0
# Pixels of a decoder's tile: Diffusers decodes 256 × 256 at a time, of some sixteen frames.
_TILE_PIXELS = 256.0 * 256.0 * 16.0
_COLOURS, _FP32_BYTES = 3.0, 4.0
ACTIVATION_MARGIN = 1.15
CONTEXT_BYTES, EXCHANGE_BYTES = 1.5e9, 0.5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the busiest rank, [n] each.

    Args:
        transformer_bytes: its weights.
        resident_bytes: text encoders and VAE.
        activation_bytes: of the larger phase.
        fixed_bytes: context and communication buffers.
    """

    transformer_bytes: FloatArray
    resident_bytes: FloatArray
    activation_bytes: FloatArray
    fixed_bytes: FloatArray

    @property
    def typical_bytes(self) -> FloatArray:
        """[n] What a run is expected to take."""
        return self.transformer_bytes + self.resident_bytes + self.activation_bytes + self.fixed_bytes

    @property
    def bound_bytes(self) -> FloatArray:
        """[n] What plans are admitted on."""
        return self.typical_bytes + (ACTIVATION_MARGIN - 1.0) * self.activation_bytes


def memory(job: Job, degrees: Degrees) -> Memory:
    """Memory of a rank under each of the degrees."""
    model, vae = job.model, job.model.vae
    p, t = degrees.pipefusion.astype(float), degrees.tensor_parallel.astype(float)
    batch = degrees.batch_size.astype(float)
    together = batch * (model.guidance_passes if model.guidance_batched else 1) / degrees.cfg_parallel
    tokens = job.tokens * np.maximum(together, batch / degrees.cfg_parallel) / degrees.sequence_split
    numbers = 2.0 * model.intermediate_size / t + _HIDDEN_TENSORS * model.hidden_size
    denoising = tokens / p * numbers * BYTES
    kept = tokens * 2.0 * model.hidden_size / t * BYTES * model.num_layers / p
    denoising = denoising + np.where(p > 1, kept, 0.0)
    maps = _FEATURE_MAPS * vae.widest_channels * BYTES
    pixels = np.minimum(_TILE_PIXELS, job.pixels) if vae.tiled else batch * job.pixels
    decoding = pixels * maps + batch * job.pixels * _COLOURS * _FP32_BYTES
    ones = np.ones_like(batch)
    return Memory(
        transformer_bytes=model.parameters * BYTES / (p * t),
        resident_bytes=model.resident_parameters * BYTES * ones,
        activation_bytes=np.maximum(denoising, decoding),
        fixed_bytes=CONTEXT_BYTES + EXCHANGE_BYTES * (degrees.devices > 1),
    )
