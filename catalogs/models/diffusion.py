"""Diffusion transformers: the shape of the transformer, its text encoders and the VAE that decodes.

The entries of ``seed/diffusion_models.yaml``. A model is known by its slug or by its Hugging Face id, in any case.

Kinds of blocks:

===========  =========================================================================================================
``double``   text and image have weights of their own and attend together (MMDiT, the first blocks of FLUX)
``single``   one set of weights for both, attention and feed-forward side by side (the later blocks of FLUX)
``joint``    one set of weights for both, one after the other (CogVideoX)
``cross``    image tokens attend to themselves, then to the text (PixArt, Wan)
``linear``   as ``cross`` with linear self-attention and a gated convolution (SANA)
===========  =========================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshplan.catalogs.errors import UnknownEntryError
from meshplan.catalogs.seed import SEED_FOLDER
from meshplan.catalogs.yaml_reader import load_yaml

MODEL_FILE = "diffusion_models.yaml"
# Kinds of blocks in which text tokens travel with the image's.
TOGETHER = ("double", "single", "joint")
_PUBLISHED_AT = "https://huggingface.co/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoder:
    """A model that reads the prompt once.

    Args:
        name: as published.
        parameters: of the encoder.
        tokens: length to which prompts are padded.
    """

    name: str
    parameters: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vae:
    """The autoencoder whose decoder turns latents into pixels.

    Args:
        name: as published.
        spatial_factor: pixels of a side for each latent of a side.
        latent_channels: channels of a latent.
        parameters: of encoder and decoder.
        decode_flops_per_pixel: FLOPs for one pixel of one frame, tiles without overlap.
        widest_channels: channels of the widest feature map at full resolution.
        feature_maps: such maps held at once at the fullest moment of decoding: tensors, and the copies of input and
            output in the layout of cuDNN's convolutions.
        temporal_factor: frames for each latent frame, after the first; 1 for images.
        tiled: pipelines decode video in overlapping tiles, one item at a time.
    """

    name: str
    spatial_factor: int
    latent_channels: int
    parameters: float
    decode_flops_per_pixel: float
    widest_channels: int
    feature_maps: float = 5.0
    temporal_factor: int = 1
    tiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the publisher's pipeline makes where nothing else is asked.

    Args:
        height: pixels.
        width: pixels.
        steps: denoising steps.
        frames: of a video; 1 for an image.
    """

    height: int
    width: int
    steps: int
    frames: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class XditSupport:
    """What xDiT does with the model; sequences are split (Ulysses, ring) for every one of them.

    Args:
        cfg_parallel: guidance passes on different devices.
        pipefusion: patches through a pipeline of layers.
        tensor_parallel: split weights.
        runner: name for its model runner; empty where only an example script starts the model.
        script: that script, below xDiT's checkout.
    """

    cfg_parallel: bool = False
    pipefusion: bool = False
    tensor_parallel: bool = False
    runner: str = ""
    script: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionModel:
    """One model.

    Args:
        slug: name in the catalog.
        name: as published.
        source: where its configuration is published.
        date: day on which it was read, ISO 8601.
        parameters: of the transformer.
        blocks: kind of block → how many, see the module.
        hidden_size: h.
        intermediate_size: of the feed-forward network.
        num_attention_heads: of self- or joint attention.
        head_dim: h / heads.
        patch_size: latents of a side for each token of a side.
        text_tokens: prompt tokens that the transformer sees.
        text_encoders: what reads the prompt.
        guidance_passes: forward passes of a step: 2 with classifier-free guidance.
        vae: what decodes.
        defaults: of the publisher's pipeline.
        xdit: what xDiT supports.
        dual_attention_layers: double blocks with a further self-attention of the image alone.
        cross_attention_heads: where cross-attention has heads of its own; 0 for as many as self-attention.
        qk_norm: how queries and keys are normed: ``none``, ``fused`` (one kernel) or ``unfused`` (kernel by kernel).
        rope: precision of rotary embeddings: ``none``, ``fp32``, ``fp64``.
        wide_norms: norms, modulation and residuals of the block are computed in fp32.
        guidance_batched: both passes are one batch; False where they run one after the other.
    """

    slug: str
    name: str
    source: str
    date: str
    parameters: float
    blocks: Mapping[str, int]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    head_dim: int
    patch_size: int
    text_tokens: int
    text_encoders: tuple[TextEncoder, ...]
    guidance_passes: int
    vae: Vae
    defaults: Defaults
    xdit: XditSupport
    dual_attention_layers: int = 0
    cross_attention_heads: int = 0
    qk_norm: str = "none"
    rope: str = "none"
    wide_norms: bool = False
    guidance_batched: bool = True

    @property
    def num_layers(self) -> int:
        """Blocks of every kind."""
        return sum(self.blocks.values())

    @property
    def is_video(self) -> bool:
        """Whether the model makes videos."""
        return self.vae.temporal_factor > 1

    @property
    def huggingface_id(self) -> str:
        """``organisation/model``."""
        return self.source.removeprefix(_PUBLISHED_AT)

    @property
    def resident_parameters(self) -> float:
        """Parameters of text encoders and VAE, which every rank holds."""
        return sum(encoder.parameters for encoder in self.text_encoders) + self.vae.parameters


@cache
def diffusion_models() -> Mapping[str, DiffusionModel]:
    """Slug → model, of all that ship."""
    entries = load_yaml((SEED_FOLDER / MODEL_FILE).read_bytes())["models"]
    return {slug: _model(slug, entry) for slug, entry in entries.items()}


def diffusion_model(written: str) -> DiffusionModel:
    """The model of a slug or a Hugging Face id, in any case.

    Raises:
        UnknownEntryError: there is none of that name.
    """
    models = diffusion_models()
    wanted = written.strip().lower()
    for model in models.values():
        if wanted in (model.slug, model.huggingface_id.lower(), model.huggingface_id.lower().rpartition("/")[2]):
            return model
    raise UnknownEntryError("diffusion model", wanted, models)


def _model(slug: str, entry: Mapping[str, Any]) -> DiffusionModel:
    parts = {
        "text_encoders": tuple(TextEncoder(**one) for one in entry["text_encoders"]),
        "vae": Vae(**entry["vae"]),
        "defaults": Defaults(**entry["defaults"]),
        "xdit": XditSupport(**entry["xdit"]),
    }
    return DiffusionModel(**{**entry, **parts, "slug": slug})
