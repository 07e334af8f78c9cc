"""Which links the groups of ranks and the pipeline boundaries of a job use.

Ranks fill *slots* of D devices in order; a slot is a scale-up domain, and what is between two slots goes over the
network. A group has g members with stride s: its ranks are b·g·s + o + s·j for j = 0 … g − 1, with blocks b and offsets
o < s. A group may start anywhere in a slot, so that it may *straddle* slots that it does not fill: 3 ranks on slots of
8 are members 0–2, 3–5, then 6, 7 and 8.

What a group of each kind sends over the network:

- ring (all-reduce, gather, scatter): members on a slot drive their NICs together. A ring is cut by the slot that holds
  fewest of its members, c: each ring link carries 1/c of a byte per device for each byte of the ring.
- neighbours (a ring in which every member sends to the next one by itself): 1 byte per byte.
- all-to-all: a member sends (g − c)/g of its bytes to other slots, most where c, the members on its slot, is smallest.

All groups of a kind run at once, and the slowest decides; so c is the least over all groups that cross slots.

A boundary between pipeline stages of S devices joins rank q·S + o with rank (q + 1)·S + o: on slots of D > S devices,
some boundaries cross and some do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

RING, NEIGHBOURS, ALL_TO_ALL = "ring", "neighbours", "all-to-all"
# Boundaries as two arrays of slot numbers: before and after.
Boundaries = tuple[IntArray, IntArray]
_BITS = 20
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of jobs in the order of their ranks, tensor parallelism fastest. Arrays [n].

    Args:
        tensor: t.
        context: c.
        data: d.
        shard: data-parallel ranks that share one copy of the states, s.
        stages: p.
    """

    tensor: IntArray
    context: IntArray
    data: IntArray
    shard: IntArray
    stages: IntArray

    def take(self, rows: IntArray) -> Degrees:
        """Some of the jobs."""
        return Degrees(
            tensor=self.tensor[rows],
            context=self.context[rows],
            data=self.data[rows],
            shard=self.shard[rows],
            stages=self.stages[rows],
        )


def fewest_on_a_slot(size: IntArray, stride: IntArray, world_size: IntArray, domain_size: int) -> IntArray:
    """Members on the slot that holds fewest, of all groups that cross slots, [n]; ``size`` where none crosses.

    Slots that groups fill evenly have a closed form; so have groups that run through all positions in a slot: every
    s-th device of a slot is one of d = D/s *lanes*, a group starts on a multiple of gcd(g, d), and the worst has that
    many members on its first slot. Everything else is counted once for each distinct group.

    Args:
        size: members g [n].
        stride: s [n].
        world_size: ranks of the job [n].
        domain_size: devices of a slot, D.
    """
    size, stride, world_size = np.broadcast_arrays(size, stride, world_size)
    lanes = np.maximum(domain_size // np.maximum(stride, 1), 1)
    shared = np.gcd(size, lanes)
    fewest = np.where(stride >= domain_size, 1, shared)
    fewest = np.where(world_size <= domain_size, size, fewest)
    even = (stride >= domain_size) | (size == 1) | (world_size <= domain_size)
    divides = domain_size % np.maximum(stride, 1) == 0
    closed = even | (divides & (world_size // (size * stride) >= lanes // shared))
    closed |= divides & ((shared == size) | (shared == lanes))
    if closed.all():
        return fewest
    fewest = fewest.copy()
    rows = np.flatnonzero(~closed)
    # Degrees are below 2^20 (the spec's limit on devices), so three of them are one whole number.
    keys = (size[rows].astype(np.int64) << _BITS | stride[rows]) << _BITS | world_size[rows]
    distinct, which = np.unique(keys, return_inverse=True)
    counted = [
        group_span(key >> 2 * _BITS, key >> _BITS & _MASK, key & _MASK, domain_size)[0] for key in distinct.tolist()
    ]
    fewest[rows] = np.array(counted, dtype=fewest.dtype)[which.ravel()]
    return fewest


def most_on_a_slot(size: IntArray, stride: IntArray, domain_size: int) -> IntArray:
    """Members on the slot that holds most, of all groups, [n]: the first group starts at the beginning of a slot."""
    return np.minimum(size, -(-domain_size // np.maximum(stride, 1)))


@lru_cache(maxsize=65536)
def group_span(size: int, stride: int, world_size: int, domain_size: int) -> tuple[int, int]:
    """Fewest members on a slot of the groups that cross slots (``size`` where none does), and most slots of a group.

    >>> group_span(3, 1, 24, 8)  # members 6 and 7 on one slot, 8 on the next
    (1, 2)
    """
    block = size * stride
    repeats = min(max(world_size // block, 1), domain_size // math.gcd(block, domain_size))
    bases = np.arange(repeats, dtype=np.int64) * block % domain_size
    starts = np.unique((bases[:, None] + np.arange(min(stride, domain_size), dtype=np.int64)) % domain_size)[:, None]
    last = (starts + stride * (size - 1)) // domain_size
    most_slots = int(last.max()) + 1 if stride < domain_size else size
    starts, last = starts[last[:, 0] > 0], last[last[:, 0] > 0]
    if not len(starts):
        return size, 1

    def before(slot: IntArray) -> IntArray:
        """Members before the first device of a slot."""
        return -((starts - slot * domain_size) // stride)

    ends = min(int(before(np.ones_like(last)).min()), int((size - before(last)).min()))
    # Between the ends the counts repeat after stride / gcd(stride, D) slots.
    period = stride // math.gcd(stride, domain_size)
    inner = np.arange(1, min(int(last.max()) - 1, period) + 1, dtype=np.int64)[None]
    counts = np.where((inner < last) & (stride < domain_size), before(inner + 1) - before(inner), size)
    return max(min(ends, int(counts.min(initial=size))), 1), most_slots


def network_share(kind: str, size: IntArray, fewest: IntArray) -> FloatArray:
    """Bytes that a device sends over the network for each byte of a group of that kind, [n]; 0 where none crosses.

    Args:
        kind: :data:`RING`, :data:`NEIGHBOURS` or :data:`ALL_TO_ALL`.
        size: members [n].
        fewest: see :func:`fewest_on_a_slot` [n].
    """
    if kind == ALL_TO_ALL:
        return np.asarray((size - fewest) / size)
    each = 1.0 / fewest if kind == RING else np.ones(np.shape(fewest))
    return np.where(fewest < size, each, 0.0)


@lru_cache(maxsize=1024)
def slot_boundaries(num_stages: int, stage_devices: int, domain_size: int, *, wraps: bool = False) -> Boundaries:
    """[P − 1, r] slots on both sides of each stage boundary, for the r pipelines that differ in their slots.

    With ``wraps`` also the boundary from the last stage to the first, [P, r].
    """
    offset = np.arange(0, stage_devices, math.gcd(stage_devices, domain_size), dtype=np.int64)
    stages = np.arange(num_stages if wraps else num_stages - 1, dtype=np.int64)[:, None]
    following = (stages + 1) % num_stages
    return (stages * stage_devices + offset) // domain_size, (following * stage_devices + offset) // domain_size


@lru_cache(maxsize=4096)
def crossing_pipelines(num_stages: int, stage_devices: int, domain_size: int, *, wraps: bool) -> IntArray:
    """[k, 3] the distinct (stage, pipeline) by what they wait for: boundaries that cross slots, of all P − 1 that the
    pipeline fills over; boundaries of the stage that cross; and those that do not.
    """
    if stage_devices >= domain_size:
        beside = 2 if wraps or num_stages > 2 else 1  # noqa: PLR2004  (a stage between two others)
        return np.array([[num_stages - 1, beside, 0]])
    before, after = slot_boundaries(num_stages, stage_devices, domain_size, wraps=wraps)
    crosses = (before != after).astype(np.int64)
    fill = np.broadcast_to(crosses[: num_stages - 1].sum(axis=0), (num_stages, crosses.shape[1]))
    far, near = _beside(crosses, wraps=wraps), _beside(1 - crosses, wraps=wraps)
    return np.array(sorted(set(zip(fill.ravel().tolist(), far.ravel().tolist(), near.ravel().tolist(), strict=True))))


def _beside(boundaries: IntArray, *, wraps: bool) -> IntArray:
    """[P, …] sum over the boundaries before and after each stage, from [P − 1, …] (with ``wraps`` [P, …])."""
    if wraps:
        return np.asarray(boundaries + np.roll(boundaries, 1, axis=0))
    none = np.zeros_like(boundaries[:1])
    return np.concatenate([none, boundaries]) + np.concatenate([boundaries, none])
