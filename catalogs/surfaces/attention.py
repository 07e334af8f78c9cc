"""Times of the attention kernels of serving engines, interpolated from published measurements.

One surface per device, phase and framework, with one table for each type of the key-value cache. The formula::

    base = t₀ + ((FLOPs/R)⁴ + (bytes/B)⁴)^¼

    prefill: FLOPs = 4·u·s·ā·d,    bytes = u·d·(4·s + 2·(2 + kv)·s/g)        u = batch·heads
    decode:  FLOPs = 4·u·g·L·d,    bytes = u·d·(2·kv·L + 4·g)               u = batch·KV heads

with s new tokens, ā attended positions of a mean query, L = min(length, window), g heads per KV head, d the head's
width, kv the bytes of a cached element. The grid lies over u, L, length/L, g and d
(:mod:`meshplan.catalogs.surfaces.time_tables`); times rise with u, L and length/L. Windowed attention has a table of
its own, because engines run another kernel for it, even where the window is longer than the sequence.

Prefill was measured without earlier context. A chunk of s tokens after c others counts as u·s/(2c + s) sequences of
2c + s tokens: as many queries, attending to as many positions; it takes no less than reading its cache, and no less
than a chunk with less context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshplan.catalogs.surfaces.files import Row, Rows, SurfaceFile
from meshplan.catalogs.surfaces.grid import FloatArray
from meshplan.catalogs.surfaces.known_times import KnownTimes
from meshplan.catalogs.surfaces.time_tables import (
    Formula,
    Points,
    TablesByKey,
    TimeTable,
    rising_with_context,
    smooth_maximum,
    table_from_row,
)

SURFACES = SurfaceFile("attention_surfaces.json", key=("device", "phase", "framework"))
PHASES = ("prefill", "decode")
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}
QUERY_BYTES = 2.0  # queries and results
# Not along the group: engines have slow kernels for odd ones, and faster ones for more heads.
RISING = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSurface:
    """Attention of one layer on one device.

    Args:
        device: slug.
        phase: ``prefill`` or ``decode``.
        framework: ``trtllm``, ``vllm`` or ``sglang``.
        tables: (type of the key-value cache, windowed) → times.
        source: citation.
        known: what it was asked before.
    """

    device: str
    phase: str
    framework: str
    tables: Mapping[tuple[str, bool], TimeTable]
    source: str
    known: KnownTimes = field(default_factory=KnownTimes, repr=False, compare=False)

    def time_s(
        self,
        *,
        batch: ArrayLike,
        context: ArrayLike,
        num_heads: ArrayLike,
        num_kv_heads: ArrayLike,
        head_dim: ArrayLike,
        new_tokens: ArrayLike = 1,
        window: ArrayLike = 0,
        kv_dtype: str = "bf16",
    ) -> FloatArray:
        """Seconds of one layer's attention; arrays broadcast.

        Args:
            batch: sequences.
            context: tokens of each sequence that are in the cache already.
            num_heads: query heads on this device, after tensor parallelism.
            num_kv_heads: KV heads on this device.
            head_dim: width of a head.
            new_tokens: tokens of each sequence that are computed now; in decode, more than one (speculation) count as
                more queries for each KV head.
            window: positions that a token sees, itself included; 0 sees all.
            kv_dtype: type of the KV cache; one that was not measured takes the times of one that was.
        """
        return self.known.of(
            self._time_s,
            batch=batch,
            context=context,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            new_tokens=new_tokens,
            window=window,
            kv_dtype=kv_dtype,
        )

    def _time_s(self, *, kv_dtype: str, **sizes: ArrayLike) -> FloatArray:
        arrays = np.broadcast_arrays(*(np.asarray(size, float) for size in sizes.values()))
        shape = arrays[0].shape
        sequences, before, heads, kv_heads, width, new, seen = (array.ravel() for array in arrays)
        reach = np.where(seen > 0, seen, np.inf)
        times = np.empty(len(sequences))
        for windowed in np.unique(seen > 0):
            chosen = (seen > 0) == windowed
            table = self.table(kv_dtype, windowed=bool(windowed))
            request = Request(*(values[chosen] for values in (sequences, heads, kv_heads, width, new, reach)))
            answer = _decode_s if self.phase == "decode" else _prefill_s
            times[chosen] = answer(table, request, before[chosen], KV_BYTES.get(kv_dtype, 1.0))
        return times.reshape(shape)

    def table(self, kv_dtype: str, *, windowed: bool) -> TimeTable:
        """The table for a type of the cache, or the nearest that was measured."""
        for key in ((kv_dtype, windowed), (kv_dtype, False), ("bf16", windowed), ("bf16", False)):
            if key in self.tables:
                return self.tables[key]
        return next(iter(self.tables.values()))


class Request(NamedTuple):
    """What is computed, flat arrays; see :meth:`AttentionSurface.time_s`. ``reach`` is the window, or infinite."""

    batch: FloatArray
    heads: FloatArray
    kv_heads: FloatArray
    width: FloatArray
    new: FloatArray
    reach: FloatArray


def _decode_s(table: TimeTable, request: Request, before: FloatArray, _kv_bytes: float) -> FloatArray:
    length = before + request.new
    attended = np.minimum(length, request.reach)
    group = request.heads / request.kv_heads * request.new
    return table.time_s((request.batch * request.kv_heads, attended, length / attended, group, request.width))


def _prefill_s(table: TimeTable, request: Request, before: FloatArray, kv_bytes: float) -> FloatArray:
    return rising_with_context(partial(_equivalent_s, table, request, kv_bytes), before, request.new)


def _equivalent_s(table: TimeTable, request: Request, kv_bytes: float, before: FloatArray) -> FloatArray:
    units, attended, spread = equivalent_prefill(request.batch * request.heads, before, request.new, request.reach)
    times = table.time_s((units, attended, spread, request.heads / request.kv_heads, request.width))
    bandwidth, _, launch_s = table.parameters
    cached = request.batch * request.kv_heads * np.minimum(before, request.reach) * request.width
    return np.asarray(np.maximum(times, launch_s + 2.0 * kv_bytes * cached / bandwidth))


def equivalent_prefill(
    units: FloatArray, before: FloatArray, new: FloatArray, reach: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """u, L and length/L of the prefill without earlier context that has as many queries and attended positions.

    Queries that all see a full window have none: then it is as long as the chunk with its context, with as many pairs.

    Args:
        units: sequences times heads, [n].
        before: tokens of each sequence in the cache.
        new: tokens of each sequence that are computed.
        reach: window, infinite without one.
    """
    # The first queries still see everything: mean of min(before + i, reach) over i = 1 … new.
    growing = np.clip(reach - before, 0.0, new)
    total = growing * before + 0.5 * growing * (growing + 1.0)
    total = total + np.where(new > growing, (new - growing) * np.where(np.isfinite(reach), reach, 0.0), 0.0)
    mean = total / new
    # Mean of a sequence that starts empty: (s + 1)/2 below the window, w − w·(w − 1)/(2s) beyond it.
    length = 2.0 * mean - 1.0
    finite = np.where(np.isfinite(reach), reach, 1.0)
    beyond = length > reach
    slack = np.maximum(finite - mean, 1e-9)
    length = np.where(beyond, np.minimum(0.5 * finite * (finite - 1.0) / slack, before + new), length)
    length = np.maximum(length, 1.0)
    attended = np.minimum(length, reach)
    pairs = length * attended - 0.5 * attended * (attended - 1.0)
    return units * total / pairs, attended, length / attended


def attention_formula(phase: str, kv_dtype: str) -> Formula:
    """The formula of the module's text: (B, R, t₀) and (u, L, length/L, g, d) → seconds."""
    return partial(_prefill_time_s if phase == "prefill" else _decode_time_s, kv_bytes=KV_BYTES[kv_dtype])


def _prefill_time_s(parameters: FloatArray, points: Points, *, kv_bytes: float) -> FloatArray:
    bandwidth, rate, launch_s = parameters
    units, attended, spread, group, width = points
    length = attended * spread
    pairs = length * attended - 0.5 * attended * (attended - 1.0)
    moved = units * width * length * (2.0 * QUERY_BYTES + 2.0 * (QUERY_BYTES + kv_bytes) / group)
    return np.asarray(launch_s + smooth_maximum(4.0 * units * pairs * width / rate, moved / bandwidth))


def _decode_time_s(parameters: FloatArray, points: Points, *, kv_bytes: float) -> FloatArray:
    bandwidth, rate, launch_s = parameters
    units, attended, _, group, width = points
    moved = units * width * (2.0 * kv_bytes * attended + 2.0 * QUERY_BYTES * group)
    return np.asarray(launch_s + smooth_maximum(4.0 * units * group * attended * width / rate, moved / bandwidth))


def attention_surface(device: str, phase: str, framework: str = "any") -> AttentionSurface | None:
    """The shipped surface; None where there is none.

    Args:
        device: slug.
        phase: ``prefill`` or ``decode``.
        framework: ``trtllm``, ``vllm``, ``sglang``, or ``any`` for the first of them that was measured there.
    """
    return next(SURFACES.measured(_surface, device, phase, framework), None)


def _table(row: Row) -> TimeTable:
    return table_from_row(row, formula=attention_formula(row["phase"], row["kv_dtype"]), rising=RISING)


def _surface(rows: Rows) -> AttentionSurface:
    first = rows[0]
    return AttentionSurface(
        device=first["device"],
        phase=first["phase"],
        framework=first["framework"],
        tables=TablesByKey({(row["kv_dtype"], row["windowed"]): row for row in rows}, _table),
        source=first["source"],
    )
