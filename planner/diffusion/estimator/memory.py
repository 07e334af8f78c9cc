"""Memory of the busiest rank, for many degrees at once: a typical figure, and a bound that plans are admitted on.

Weights and what every rank holds beside them (bf16)::

    2·W/(p·t)  transformer      2·E  text encoders and VAE

Activations are the larger of two phases, which do not overlap:

- denoising: a token holds, for every sequence that is computed together, the larger of two moments of a block;
  PipeFusion also keeps the keys and values of all tokens in each of its L/p blocks::

      feed-forward network   2·f + 4·h   its input and output beside four tensors of the hidden size; 2·h more where a
                                         block has a second attention; 6·f where the network is a gated convolution
      rotation in fp32       14·h        residual, norm, queries, keys, values, and four tensors twice as wide; f more
                                         where the network runs beside attention

- decoding: five feature maps of the widest layer at full resolution, three of them tensors of the decoder, two the
  copies of input and output in the layout of cuDNN's convolutions; nine where norms are conditioned on the latents
  (CogVideoX); tiled decoders hold one tile of one item, and all decoded items in fp32.

The bound takes 1.15 of the activations (allocator rounding, workspaces of kernels) and adds a context of 1.5 GB, and
0.5 GB of communication buffers where devices exchange.

Counted operator by operator on Diffusers 0.42.1 (sizes without data, two blocks of each kind), in numbers of the hidden
size: FLUX.1 17.3, HunyuanVideo 18.2, CogVideoX-2B 12.1 and 5B 13.0, SD 3.5 Medium 13.4 and Large 12.4, PixArt 12.4, Wan
1.3B 15.9 and 14B 11.1, SANA 14.6; the image decoder 3.0 maps, tiles of HunyuanVideo 3.6 GB and of CogVideoX 4.0 GB.
Measured on one H200 (tests/data/h200_runs.jsonl): beyond the weights FLUX.1 held 2.60 GB at its peak and SD 3.5 Medium
3.06 GB, 4.8 and 5.7 maps of 0.54 GB.

Assumes: no offloading; text encoders stay on the device, as xDiT leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.diffusion import DiffusionModel
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.diffusion.estimator.blocks import BYTES
from meshplan.planner.diffusion.problem.degrees import Degrees
from meshplan.planner.diffusion.problem.job import Job

# Of a block's two moments, in tensors of the hidden size and of the feed-forward network; see the module.
_HIDDEN_TENSORS, _SECOND_ATTENTION, _ROTATION_TENSORS = 4.0, 2.0, 14.0
_NETWORK_TENSORS, _GATED_TENSORS = 2.0, 6.0
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
    denoising = tokens / p * _numbers_of_a_token(model, t) * BYTES
    kept = tokens * 2.0 * model.hidden_size / t * BYTES * model.num_layers / p
    denoising = denoising + np.where(p > 1, kept, 0.0)
    maps = vae.feature_maps * vae.widest_channels * BYTES
    pixels = np.minimum(_TILE_PIXELS, job.pixels) if vae.tiled else batch * job.pixels
    decoding = pixels * maps + batch * job.pixels * _COLOURS * _FP32_BYTES
    ones = np.ones_like(batch)
    return Memory(
        transformer_bytes=model.parameters * BYTES / (p * t),
        resident_bytes=model.resident_parameters * BYTES * ones,
        activation_bytes=np.maximum(denoising, decoding),
        fixed_bytes=CONTEXT_BYTES + EXCHANGE_BYTES * (degrees.devices > 1),
    )


def _numbers_of_a_token(model: DiffusionModel, tensor_parallel: FloatArray) -> FloatArray:
    """What a block holds of one token at its fullest, [n]."""
    h, f = float(model.hidden_size), model.intermediate_size / tensor_parallel
    if "linear" in model.blocks:
        return _GATED_TENSORS * f
    network = _NETWORK_TENSORS * f + _HIDDEN_TENSORS * h + _SECOND_ATTENTION * h * (model.dual_attention_layers > 0)
    if model.rope == "none":
        return network
    beside = f if "single" in model.blocks else 0.0
    return np.maximum(network, _ROTATION_TENSORS * h + beside)
