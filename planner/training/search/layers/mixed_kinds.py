"""The slowest stage where chunks mix kinds of layer: bounds for stages that take layers from several places.

*Notation.* As in :mod:`.uneven`. A stage of v chunks takes layers from v places of the model, so that the recurrence
over layers in order does not say which kinds it holds.

*Bound.* Layers of the other kinds only add to a stage: the recurrence over the layers of the main kind, the one that
takes most of the time, bounds D_p(L). A stage holds at least as many of them as it has chunks that can hold nothing
else. Where all other layers lead the model, as dense layers before those with experts do, they lie on the first chunks,
which are on stages of their own: the first chunk holds any number of them, each further one takes one or more until
none is left. D_p(L) is the least over these few ways, each with its layers as part of the stage.

Assumes: leading layers that are recomputed cost nothing, and keep what recompute leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.search.layers.recurrence import Recurrence, longest_stage
from meshplan.planner.training.search.layers.stage_costs import SplitCosts, StageCosts

# Leading layers whose ways are all tried: 2^n of them.
MOST_LEADING = 4


def main_kind_s(recurrence: Recurrence, each: StageCosts, most_s: FloatArray) -> FloatArray:
    """D of the layers of the main kind alone, [n]: no more than D_p(L).

    Args:
        recurrence: of the batch.
        each: costs with all kinds.
        most_s: a stage takes no longer for a micro-batch, [n].
    """
    return _alone(recurrence, each, most_s).solve()[0]


def leading_layers_s(
    recurrence: Recurrence, each: StageCosts, most_s: FloatArray
) -> tuple[FloatArray, IntArray, IntArray]:
    """D_p(L) where all layers of other kinds lead the model, [n], else −∞; all layers of each stage, and the leading
    ones of each of the first chunks, [p, n] each.

    Args:
        recurrence: of the batch.
        each: costs with all kinds.
        most_s: a stage takes no longer for a micro-batch, [n].
    """
    shape = len(each.base_s), len(most_s)
    ways = list(_ways(recurrence, each, most_s))
    least, chosen = np.full(shape[1], np.inf if ways else -np.inf), np.zeros(shape, dtype=np.int64)
    on_chunks = np.zeros_like(chosen)
    for sizes, way in ways:
        seconds, few, _ = way.solve()
        own = np.array([*sizes, *[0] * (shape[0] - len(sizes))])[:, None]
        better = seconds < least
        chosen, on_chunks = np.where(better, few + own, chosen), np.where(better, own, on_chunks)
        least = np.minimum(least, seconds)
    return least, chosen, on_chunks


def leading_by_slowest_s(recurrence: Recurrence, each: StageCosts, most_s: FloatArray) -> FloatArray:
    """The same D_p(L) with what passes that run ahead wait for the slowest stage, [n]; else −∞.

    The slowest stage takes less than half a layer more than k layers of the main kind, or that and less than a layer
    more, and so on: each is a bound of its own, of which one holds.

    Args:
        recurrence: of the batch.
        each: costs with all kinds.
        most_s: a stage takes no longer for a micro-batch, [n].
    """
    main = each.main_kind()
    least = np.full(len(most_s), -np.inf)
    for index, (_, way) in enumerate(_ways(recurrence, each, most_s)):
        fewest = each.kind_of.count(main) // len(each.base_s)
        edges = [(count + 0.5) * each.layer_s[main] for count in range(fewest, way.longest + 1)]
        own = way.least_s(np.stack([np.zeros_like(least), *edges, np.full_like(least, np.inf)]))
        least = np.minimum(least, own) if index else own
    return least


def _ways(recurrence: Recurrence, each: StageCosts, most_s: FloatArray) -> Iterator[tuple[tuple[int, ...], Recurrence]]:
    """Leading layers of each of the first chunks, with the recurrence over the others; none where none lead."""
    p, main = len(each.base_s), each.main_kind()
    leading = len(each.kind_of) - each.kind_of.count(main)
    if main in each.kind_of[:leading] or not 0 < leading <= MOST_LEADING or leading >= p:
        return
    alone = _alone(recurrence, each, most_s)
    for sizes in first_chunks(leading):
        yield sizes, replace(alone, costs=_with_leading(alone.costs, each, sizes))


def first_chunks(layers: int) -> Iterator[tuple[int, ...]]:
    """How the leading layers may lie on the first chunks: any number on the first, one or more on each further one.

    >>> list(first_chunks(2))
    [(2,), (1, 1), (0, 2), (0, 1, 1)]
    """

    def rest(left: int) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for size in range(left, 0, -1):
            yield from ((size, *after) for after in rest(left - size))

    for first in range(layers, -1, -1):
        yield from ((first, *after) for after in rest(layers - first))


def _alone(recurrence: Recurrence, each: StageCosts, most_s: FloatArray) -> Recurrence:
    """The recurrence over the layers of the main kind."""
    stages: SplitCosts = recurrence.stages
    costs, fewest = each.of_kind(each.main_kind()), stages.fewest_of(each.main_kind())
    longest = longest_stage(costs, fewest, most_s, stages.split.virtual_pipeline_stages)
    return replace(recurrence, costs=costs, fewest=fewest, longest=longest)


def _with_leading(costs: StageCosts, each: StageCosts, sizes: Sequence[int]) -> StageCosts:
    """Costs of the main kind with the leading layers, so many on each of the first stages, as part of these."""
    base_s, base_bytes = costs.base_s.copy(), costs.base_bytes.copy()
    kept_bytes, begin = each.layer_bytes - each.saved_bytes, 0
    for stage, size in enumerate(sizes):
        for kind in each.kind_of[begin : begin + size]:
            base_s[stage] += each.layer_s[kind]
            base_bytes[stage] += kept_bytes[stage, kind]
        begin += size
    return replace(costs, base_s=base_s, base_bytes=base_bytes)
