"""Vision towers: the encoder that some models have in front, which turns an image into tokens of the language model.

An image of W × H pixels is cut into patches of p × p pixels; the tower's L transformer layers attend over all patches
of an image (in some layers over a window), and a merger makes one token of m × m patches. The tower is read from the
``vision_config`` of a ``config.json``; families differ in what their merger holds and how an image is resized.

Source: configuration, modelling and image-processing files of ``qwen2_5_vl``, ``qwen3_vl``, ``llama4`` and ``gemma3``
(with ``siglip``) in Hugging Face transformers. The parameters of towers and language models add up to what the
published checkpoints hold. Text around an image (start, end, line and tile ends) is left to the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.models.fields import shorten

SECTION = "vision_config"
_LLAMA4_TILES = 16  # max_patches of transformers' Llama 4 image processor
MOST_SIZE = 1_000_000  # as for the sizes of language models: beyond it a value is a mistake
MOST_PARAMETERS = 10**9  # published towers of these families hold 0.4 to 0.7 billion


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower:
    """One vision encoder with its merger.

    Args:
        num_layers: L.
        hidden_size: h.
        intermediate_size: f.
        gated_mlp: three matrices instead of two.
        parameters: of the tower and its merger.
        merger_parameters: of those, the merger's (all mergers', where layers in between have their own).
        patch_size: p, pixels.
        merged: m, patches along one side that become one token.
        image_size: pixels of a side to which every image (or tile) is resized; 0: images keep their proportions.
        most_tiles: squares of that size that an image is cut into, at most; with more than one, one of the whole image
            comes on top (Llama 4). 0: it is not cut.
        least_pixels: of an image that keeps its proportions; smaller ones are enlarged.
        most_pixels: larger ones are made smaller.
        window_patches: patches that a layer with windows attends over; 0: all attend over the whole image.
        num_full_layers: layers without windows.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    gated_mlp: bool
    parameters: int
    merger_parameters: int
    patch_size: int
    merged: int
    image_size: int = 0
    most_tiles: int = 0
    least_pixels: int = 0
    most_pixels: int = 0
    window_patches: int = 0
    num_full_layers: int = 0

    def patches(self, width: int, height: int) -> int:
        """Patches of an image after it was resized.

        Sides are rounded to multiples of p·m; where the area is outside the limits, both are scaled by the root of the
        ratio first (``smart_resize`` of Qwen's image processors).
        """
        if self.image_size:
            cut = self._tiles(width, height) if self.most_tiles else 1
            return (cut + (cut > 1)) * (self.image_size // self.patch_size) ** 2
        unit = self.patch_size * self.merged
        wide, high = (max(round(side / unit), 1) * unit for side in (width, height))
        if wide * high > self.most_pixels:
            ratio = math.sqrt(width * height / self.most_pixels)
            wide, high = (max(math.floor(side / ratio / unit), 1) * unit for side in (width, height))
        elif wide * high < self.least_pixels:
            ratio = math.sqrt(self.least_pixels / (width * height))
            wide, high = (math.ceil(side * ratio / unit) * unit for side in (width, height))
        return (wide // self.patch_size) * (high // self.patch_size)

    def _tiles(self, width: int, height: int) -> int:
        """Tiles of the canvas that an image is fitted into.

        Of all a × b tiles within the limit that which enlarges the image least, or else shrinks it least; of several
        the smallest (``get_best_fit`` of transformers' Llama 4 image processor).
        """
        canvases = [(a, b) for a in range(1, self.most_tiles + 1) for b in range(1, self.most_tiles // a + 1)]
        scales = {(a, b): min(a * self.image_size / width, b * self.image_size / height) for a, b in canvases}
        enlarging = [scale for scale in scales.values() if scale >= 1.0]
        chosen = min(enlarging) if enlarging else max(scales.values())
        return min(a * b for (a, b), scale in scales.items() if scale == chosen)

    def tokens(self, width: int, height: int) -> int:
        """Tokens of the language model that an image becomes."""
        return self.patches(width, height) // self.merged**2

    def attended_pairs(self, patches: int) -> float:
        """(query, key) pairs of all layers for one image."""
        full = self.num_full_layers if self.window_patches else self.num_layers
        near = min(self.window_patches, patches) if self.window_patches else patches
        return float(full * patches * patches + (self.num_layers - full) * patches * near)


def vision_tower(config: Mapping[str, object], hidden_size: int, problems: list[Problem]) -> VisionTower | None:
    """The tower of a configuration; None where it has none, or one of a family that is not read.

    Args:
        config: the whole ``config.json``.
        hidden_size: of the language model.
        problems: what is wrong with the section is added.
    """
    section = config.get(SECTION)
    if not isinstance(section, Mapping):
        return None
    # The model's own type counts: SigLIP stands before many models, which cut and merge images each in another way.
    own = section.get("model_type")
    family = str(config.get("model_type") or own or "").removesuffix("_text")
    reader = _READERS.get(family)
    if reader is None or own not in (None, family, _TOWERS.get(family)):
        return None
    found = _Sizes(section, problems)
    tower = reader(found, config, hidden_size)
    if found.is_wrong:
        return None
    if tower.parameters > MOST_PARAMETERS:
        message = f"its sizes make {tower.parameters:,} parameters, more than the {MOST_PARAMETERS:,} that are believed"
        problems.append(Problem(path=SECTION, message=message))
        return None
    return tower


class _Sizes:
    """Whole numbers of a section; a bad one is a problem and reads as 1."""

    def __init__(self, section: Mapping[str, object], problems: list[Problem]) -> None:
        self._section, self._problems, self.is_wrong = section, problems, False

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self._section.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SIZE:
            return value
        self.is_wrong = True
        stated = "is missing" if value is None else f"is {shorten(value)}"
        message = f"must be a whole number from 1 to {MOST_SIZE}, {stated}"
        self._problems.append(Problem(path=f"{SECTION}.{key}", message=message))
        return 1

    def number_of(self, key: str, default: int, most: int) -> int:
        """Length of a list of layers."""
        value = self._section.get(key)
        return min(len(value), most) if isinstance(value, list | tuple) else default


def _linear(rows: int, columns: int) -> int:
    """A matrix with its bias."""
    return rows * columns + columns


def _qwen2_5_vl(sizes: _Sizes, config: Mapping[str, object], hidden_size: int) -> VisionTower:
    """RMS norms, gated MLPs with biases, windows in most layers, no learned positions, one merger."""
    layers, h, f = sizes("depth", 32), sizes("hidden_size", 1280), sizes("intermediate_size", 3420)
    p, m, window = sizes("patch_size", 14), sizes("spatial_merge_size", 2), sizes("window_size", 112)
    out = sizes("out_hidden_size", hidden_size)
    entry = sizes("in_channels", 3) * sizes("temporal_patch_size", 2) * p * p * h
    layer = 2 * h + _linear(h, 3 * h) + _linear(h, h) + 2 * _linear(h, f) + _linear(f, h)
    merger = h + _linear(m * m * h, m * m * h) + _linear(m * m * h, out)
    return VisionTower(
        num_layers=layers,
        hidden_size=h,
        intermediate_size=f,
        gated_mlp=True,
        parameters=entry + layers * layer + merger,
        merger_parameters=merger,
        patch_size=p,
        merged=m,
        least_pixels=56 * 56,  # min_pixels and max_pixels of the family's preprocessor_config.json
        most_pixels=12_845_056,
        window_patches=(window // p) ** 2,
        num_full_layers=sizes.number_of("fullatt_block_indexes", 4, layers),
    )


def _qwen3_vl(sizes: _Sizes, config: Mapping[str, object], hidden_size: int) -> VisionTower:
    """Layer norms, plain MLPs, learned positions, a merger at the end and one after each of some layers (DeepStack)."""
    layers, h, f = sizes("depth", 27), sizes("hidden_size", 1152), sizes("intermediate_size", 4304)
    p, m, out = sizes("patch_size", 16), sizes("spatial_merge_size", 2), sizes("out_hidden_size", hidden_size)
    entry = _linear(sizes("in_channels", 3) * sizes("temporal_patch_size", 2) * p * p, h)
    entry += sizes("num_position_embeddings", 2304) * h
    merged = m * m * h
    products = _linear(merged, merged) + _linear(merged, out)
    deep = sizes.number_of("deepstack_visual_indexes", 3, layers)
    merger = 2 * h + products + deep * (2 * merged + products)
    return VisionTower(
        num_layers=layers,
        hidden_size=h,
        intermediate_size=f,
        gated_mlp=False,
        parameters=entry + layers * _plain_layer(h, f) + merger,
        merger_parameters=merger,
        patch_size=p,
        merged=m,
        least_pixels=65_536,  # size.shortest_edge and size.longest_edge of the family's preprocessor_config.json
        most_pixels=16_777_216,
    )


def _siglip(sizes: _Sizes, config: Mapping[str, object], hidden_size: int) -> VisionTower:
    """SigLIP in front of Gemma 3: every image has the same size, and pools to the same number of tokens."""
    layers, h, f = sizes("num_hidden_layers", 27), sizes("hidden_size", 1152), sizes("intermediate_size", 4304)
    p, side = sizes("patch_size", 14), sizes("image_size", 896)
    tokens = config.get("mm_tokens_per_image")
    tokens = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else 256
    entry = _linear(sizes("num_channels", 3) * p * p, h) + (side // p) ** 2 * h
    merger = h * hidden_size + h
    return VisionTower(
        num_layers=layers,
        hidden_size=h,
        intermediate_size=f,
        gated_mlp=False,
        parameters=entry + layers * _plain_layer(h, f) + 2 * h + merger,
        merger_parameters=merger,
        patch_size=p,
        merged=max(side // p // max(math.isqrt(tokens), 1), 1),
        image_size=side,
    )


def _llama4(sizes: _Sizes, config: Mapping[str, object], hidden_size: int) -> VisionTower:
    """Every tile attends to itself alone; patches are shuffled together (``pixel_shuffle_ratio``), then two matrices.

    The class token of a tile, which is dropped after the layers, is left out of the work (1 of 577).
    """
    section = config.get(SECTION)
    ratio = section.get("pixel_shuffle_ratio", 0.5) if isinstance(section, Mapping) else 0.5
    merged = round(1.0 / ratio) if isinstance(ratio, float) and 0.0 < ratio <= 1.0 else 1
    layers, h, f = sizes("num_hidden_layers", 34), sizes("hidden_size", 768), sizes("intermediate_size", 5632)
    p, side = sizes("patch_size", 14), sizes("image_size", 448)
    inner, outer = sizes("projector_input_dim", 4096), sizes("projector_output_dim", 4096)
    merger = merged**2 * h * inner + inner * outer + outer * hidden_size
    entry = sizes("num_channels", 3) * p * p * h + ((side // p) ** 2 + 2) * h
    return VisionTower(
        num_layers=layers,
        hidden_size=h,
        intermediate_size=f,
        gated_mlp=False,
        parameters=entry + layers * _plain_layer(h, f) + 4 * h + merger,
        merger_parameters=merger,
        patch_size=p,
        merged=merged,
        image_size=side,
        most_tiles=_LLAMA4_TILES,
        window_patches=(side // p) ** 2,
    )


def _plain_layer(h: int, f: int) -> int:
    """Two layer norms, attention and an MLP of two matrices, all with biases."""
    return 4 * h + 4 * _linear(h, h) + _linear(h, f) + _linear(f, h)


_READERS: Mapping[str, Callable[[_Sizes, Mapping[str, object], int], VisionTower]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "gemma3": _siglip,
    "llama4": _llama4,
}
# What the section of a family calls its tower, where that is another name.
_TOWERS: Mapping[str, str] = {"gemma3": "siglip_vision_model", "llama4": "llama4_vision_model"}
