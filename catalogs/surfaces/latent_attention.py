"""Times of multi-head latent attention (MLA), interpolated from published measurements.

As :mod:`meshplan.catalogs.surfaces.attention`, for DeepSeek's sizes: a cached row of 512 + 64 elements, heads of
128 + 64 elements (queries, keys) and 128 (values). The formula::

    base = t₀ + ((FLOPs/R)⁴ + (bytes/B)⁴)^¼

    prefill (keys and values expanded): FLOPs = b·h·s·(s + 1)·(192 + 128),   bytes = 2·b·h·s·(2·192 + 2·128)
    decode (absorbed):                  FLOPs = 2·b·h·L·(576 + 512),         bytes = b·(kv·576·L + 2·h·(576 + 512))

with b sequences, h heads on the device, s new tokens, L the length. The grid lies over b, h and s or L; times rise with
each. The scope ``kernel`` is the attention alone. The scope ``module`` is the whole attention block of DeepSeek-V3 with
its projections (hidden size 7168) in the type of ``gemm``.

The two batched products that absorb the up-projections in decode have a surface of their own:
:class:`LatentProjectionSurface`, over heads and tokens, FLOPs = 2·tokens·h·128·512 each, the weights h·128·512
elements.
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

PROJECTION = "projection"  # scope of the rows of the batched products, whose phase is a side
# vLLM comes last: of the kernels without the block around them, its tables have the batched products only.
SURFACES = SurfaceFile(
    "latent_surfaces.json",
    key=("device", "phase", "framework", "scope"),
    frameworks=("trtllm", "sglang", "vllm"),
)
LATENT_DIM, ROPE_DIM, HEAD_DIM = 512, 64, 128
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0}
RISING = (0, 1, 2)
_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSurface:
    """MLA of one layer on one device.

    Args:
        device: slug.
        phase: ``prefill`` or ``decode``.
        framework: ``trtllm``, ``sglang`` or ``vllm``.
        scope: ``kernel`` or ``module``.
        tables: (type of the cache, kernel of the module's products or ``""``) → times.
        source: citation.
    """

    device: str
    phase: str
    framework: str
    scope: str
    tables: Mapping[tuple[str, str], TimeTable]
    source: str

    def time_s(
        self,
        *,
        batch: ArrayLike,
        context: ArrayLike,
        num_heads: ArrayLike,
        new_tokens: ArrayLike = 1,
        kv_dtype: str = "bf16",
        gemm: str = "",
    ) -> FloatArray:
        """Seconds of one layer; arrays broadcast.

        Args:
            batch: sequences.
            context: tokens of each sequence that are in the cache already.
            num_heads: heads on this device, after tensor parallelism.
            new_tokens: tokens of each sequence that are computed now; in decode, more than one count as more heads.
            kv_dtype: ``bf16`` or ``fp8``; one that was not measured takes the times of one that was.
            gemm: kernel of the products of a module: ``bfloat16``, ``fp8_block``, ``nvfp4``.
        """
        arrays = np.broadcast_arrays(*(np.asarray(x, float) for x in (batch, context, num_heads, new_tokens)))
        shape = arrays[0].shape
        sequences, before, heads, new = (array.ravel() for array in arrays)
        table = self.table(kv_dtype, gemm)
        if self.phase == "decode":
            return table.time_s((sequences, heads * new, before + new)).reshape(shape)

        def priced(earlier: FloatArray) -> FloatArray:
            # As many queries and attended positions without earlier context; see the attention surfaces.
            length = 2.0 * earlier + new
            return table.time_s((sequences * new / length, heads, length))

        return rising_with_context(priced, before, new).reshape(shape)

    def table(self, kv_dtype: str, gemm: str = "") -> TimeTable:
        """The table for a type of the cache and kernel of the products, or the nearest that was measured."""
        wanted = [(kv_dtype, gemm), *(key for key in self.tables if key[1] == gemm)]
        wanted += [key for key in self.tables if key[0] == kv_dtype] + list(self.tables)
        return next(self.tables[key] for key in wanted if key in self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProjectionSurface:
    """One of the two batched products around the latent kernel in decode.

    Args:
        device: slug.
        side: ``pre`` (queries into the latent space) or ``post`` (results out of it).
        framework: ``trtllm``, ``sglang`` or ``vllm``.
        tables: type of the weights → times.
        source: citation.
    """

    device: str
    side: str
    framework: str
    tables: Mapping[str, TimeTable]
    source: str

    def time_s(self, *, num_tokens: ArrayLike, num_heads: ArrayLike, dtype: str = "bf16") -> FloatArray:
        """Seconds for ``num_tokens`` and ``num_heads`` of this device; arrays broadcast."""
        heads, tokens = np.broadcast_arrays(np.asarray(num_heads, float), np.asarray(num_tokens, float))
        table = self.tables.get(dtype) or next(iter(self.tables.values()))
        return table.time_s((heads.ravel(), tokens.ravel())).reshape(tokens.shape)


def latent_formula(phase: str, kv_dtype: str) -> Formula:
    """The formula of the module's text: (B, R, t₀) and (b, h, length) → seconds."""
    return _prefill_time_s if phase == "prefill" else partial(_decode_time_s, kv_bytes=KV_BYTES[kv_dtype])


def projection_formula(dtype: str) -> Formula:
    """(B, R, t₀) and (heads, tokens) → seconds of one batched product."""
    return partial(_projection_time_s, weight_bytes=WEIGHT_BYTES[dtype])


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


def _projection_time_s(parameters: FloatArray, points: Points, *, weight_bytes: float) -> FloatArray:
    bandwidth, rate, launch_s = parameters
    heads, tokens = points
    weights = heads * HEAD_DIM * LATENT_DIM
    moved = weight_bytes * weights + _ACTIVATION_BYTES * tokens * heads * (HEAD_DIM + LATENT_DIM)
    return np.asarray(launch_s + smooth_maximum(2.0 * tokens * weights / rate, moved / bandwidth))


def latent_attention_surface(
    device: str, phase: str, framework: str = "any", *, scope: str = "kernel"
) -> LatentAttentionSurface | None:
    """The shipped surface; None where there is none.

    Args:
        device: slug.
        phase: ``prefill`` or ``decode``.
        framework: ``trtllm``, ``sglang``, ``vllm``, or ``any`` for the first of them that was measured there.
        scope: ``kernel`` or ``module``; see the module's text.
    """
    return next(SURFACES.measured(_surface, device, phase, framework, scope), None)


def latent_projection_surface(device: str, side: str, framework: str = "any") -> LatentProjectionSurface | None:
    """The shipped surface of the batched products, ``side`` being ``pre`` or ``post``; None where there is none."""
    return next(SURFACES.measured(_projection, device, side, framework, PROJECTION), None)


def _table(row: Row) -> TimeTable:
    return table_from_row(row, formula=latent_formula(row["phase"], row["dtype"]), rising=RISING)


def _surface(rows: Rows) -> LatentAttentionSurface:
    first = rows[0]
    return LatentAttentionSurface(
        device=first["device"],
        phase=first["phase"],
        framework=first["framework"],
        scope=first["scope"],
        tables=TablesByKey({(row["dtype"], row["gemm"]): row for row in rows}, _table),
        source=first["source"],
    )


def _projection(rows: Rows) -> LatentProjectionSurface:
    first = rows[0]
    return LatentProjectionSurface(
        device=first["device"],
        side=first["phase"],
        framework=first["framework"],
        tables={
            row["dtype"]: table_from_row(row, formula=projection_formula(row["dtype"]), rising=(0, 1)) for row in rows
        },
        source=first["source"],
    )
