"""What is made: the size of an image or a video, and the tokens that a transformer sees of it."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.models.diffusion import TOGETHER, DiffusionModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One item: what a model denoises.

    Args:
        model: the transformer, its encoders and its VAE.
        height: pixels.
        width: pixels.
        frames: 1 for an image.
        steps: denoising steps.
    """

    model: DiffusionModel
    height: int
    width: int
    frames: int
    steps: int

    @property
    def image_tokens(self) -> int:
        """Tokens of one item: latent frames × patches.

        A causal video VAE keeps the first frame and packs each further ``temporal_factor`` frames into one.
        """
        vae = self.model.vae
        side = vae.spatial_factor * self.model.patch_size
        latent_frames = 1 + (self.frames - 1) // vae.temporal_factor
        return latent_frames * (self.height // side) * (self.width // side)

    @property
    def tokens(self) -> int:
        """Tokens of the sequence that is split: the text travels along in joint attention."""
        together = any(kind in TOGETHER for kind in self.model.blocks)
        return self.image_tokens + (self.model.text_tokens if together else 0)

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return self.height * self.width * self.frames

    @property
    def latent_elements(self) -> int:
        """Numbers that a denoising step predicts."""
        return self.image_tokens * self.model.patch_size**2 * self.model.vae.latent_channels
