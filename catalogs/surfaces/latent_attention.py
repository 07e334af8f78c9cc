"""Times of multi-head latent attention (MLA), interpolated from published measurements.

As :mod:`meshplan.catalogs.surfaces.attention`, for DeepSeek's sizes: a cached row of 512 + 64 elements, heads of
128 + 64 elements (queries, keys) and 128 (values). The formula::

    base = t₀ + ((FLOPs/R)⁴ + (bytes/B)⁴)^¼

    prefill (keys and values expanded): FLOPs = b·h·s·(s + 1)·(192 + 128),   bytes = 2·b·h·s·(2·192 + 2·128)
    decode (absorbed):                  FLOPs = 2·b·h·L·(576 + 512),         bytes = b·(kv·576·L + 2·h·(576 + 512))

with b sequences, h heads on the device, s new tokens, L the length. The grid lies over b, h and s or L; times rise with
each. It is the attention alone: projections around it, and those that decodes absorb, are matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from meshplan.catalogs.surfaces.files import Row, Rows, SurfaceFile
from meshplan.catalogs.surfaces.grid import FloatArray
from meshplan.catalogs.surfaces.time_tables import (
    Formula,
    Points,
    TablesByKey,
    TimeTable,
    rising_with_context,
    smooth_maximum,
    table_from_row,
)

KERNEL = "kernel"  # scope of all rows that are read; files of older releases have whole blocks and products besides
FRAMEWORKS = ("trtllm", "sglang")  # of vLLM only whole blocks were timed
SURFACES = SurfaceFile("latent_surfaces.json", key=("device", "phase", "framework", "scope"), frameworks=FRAMEWORKS)
LATENT_DIM, ROPE_DIM, HEAD_DIM = 512, 64, 128
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}
RISING = (0, 1, 2)
_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSurface:
    """MLA of one layer on one device.

    Args:
        device: slug.
        phase: ``prefill`` or ``decode``.
        framework: ``trtllm`` or ``sglang``.
        tables: type of the cache → times.
        source: citation.
    """

    device: str
    phase: str
    framework: str
    tables: Mapping[str, TimeTable]
    source: str

    def time_s(
        self,
        *,
        batch: ArrayLike,
        context: ArrayLike,
        num_heads: ArrayLike,
        new_tokens: ArrayLike = 1,
        kv_dtype: str = "bf16",
    ) -> FloatArray:
        """Seconds of one layer; arrays broadcast.

        Args:
            batch: sequences.
            context: tokens of each sequence that are in the cache already.
            num_heads: heads on this device, after tensor parallelism.
            new_tokens: tokens of each sequence that are computed now; in decode, more than one count as more heads.
            kv_dtype: ``bf16`` or ``fp8``; one that was not measured takes the times of one that was.
        """
        arrays = np.broadcast_arrays(*(np.asarray(x, float) for x in (batch, context, num_heads, new_tokens)))
        shape = arrays[0].shape
        sequences, before, heads, new = (array.ravel() for array in arrays)
        table = self.tables.get(kv_dtype) or next(iter(self.tables.values()))
        if self.phase == "decode":
            return table.time_s((sequences, heads * new, before + new)).reshape(shape)

        def priced(earlier: FloatArray) -> FloatArray:
            # As many queries and attended positions without earlier context; see the attention surfaces.
            length = 2.0 * earlier + new
            return table.time_s((sequences * new / length, heads, length))

        return rising_with_context(priced, before, new).reshape(shape)


def latent_formula(phase: str, kv_dtype: str) -> Formula:
    """The formula of the module's text: (B, R, t₀) and (b, h, length) → seconds."""
    return _prefill_time_s if phase == "prefill" else partial(_decode_time_s, kv_bytes=KV_BYTES[kv_dtype])


def _prefill_time_s(parameters: FloatArray, points: Points) -> FloatArray:
    bandwidth, rate, launch_s = parameters
    sequences, heads, length = points
    per_pair = 2.0 * HEAD_DIM + ROPE_DIM
    compute = sequences * heads * length * (length + 1.0) * per_pair / rate
    moved = _ACTIVATION_BYTES * sequences * heads * length * 2.0 * per_pair
    return np.asarray(launch_s + smooth_maximum(compute, moved / bandwidth))


def _decode_time_s(parameters: FloatArray, points: Points, *, kv_bytes: float) -> FloatArray:
    bandwidth, rate, launch_s = parameters
    sequences, heads, length = points
    per_pair = 2.0 * LATENT_DIM + ROPE_DIM
    moved = sequences * (kv_bytes * (LATENT_DIM + ROPE_DIM) * length + _ACTIVATION_BYTES * heads * per_pair)
    return np.asarray(launch_s + smooth_maximum(2.0 * sequences * heads * length * per_pair / rate, moved / bandwidth))


def latent_attention_surface(device: str, phase: str, framework: str = "any") -> LatentAttentionSurface | None:
    """The shipped surface; None where there is none.

    Args:
        device: slug.
        phase: ``prefill`` or ``decode``.
        framework: ``trtllm``, ``sglang``, or ``any`` for the first of them that was measured there.
    """
    return next(SURFACES.measured(_surface, device, phase, framework, KERNEL), None)


def _table(row: Row) -> TimeTable:
    return table_from_row(row, formula=latent_formula(row["phase"], row["dtype"]), rising=RISING)


def _surface(rows: Rows) -> LatentAttentionSurface:
    first = rows[0]
    return LatentAttentionSurface(
        device=first["device"],
        phase=first["phase"],
        framework=first["framework"],
        tables=TablesByKey({row["dtype"]: row for row in rows}, _table),
        source=first["source"],
    )
