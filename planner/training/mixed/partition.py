"""Layers of each stage, once pools have their options and their order.

The slowest stage's time is one of few values (a layer count times a layer's time, and the ends). The least of them
under which all stages together hold the layers is found by bisection, and some of the next are tried, because a longer
τ may move layers to pools that take less for each. Layers that are too many are taken from where a layer takes
longest. Exact for τ; among splits with the same τ a greedy choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.mixed.options import FIRST, LAST, MIDDLE, WHOLE, PoolOptions
from meshplan.planner.training.pipeline.closed_forms import staged_pipeline_s

# Values of τ tried from the least one on.
TRIED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive stages of one pool under one option.

    Args:
        pool: index of the pool.
        row: index of the option.
        stages: how many.
    """

    pool: int
    row: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The layers of every stage.

    Args:
        stages: (block, layers) in pipeline order; each holds layers.
        num_microbatches: m.
        stages_s: what a micro-batch takes on each, forward and backward, [stages].
    """

    stages: tuple[tuple[Block, int], ...]
    num_microbatches: int
    stages_s: FloatArray


def fastest_first(splits: Sequence[Split]) -> list[tuple[float, Split]]:
    """Splits by what their pipelines take, s, without messages and the ending: the order of stages counts.

    1F1B hides the bubble of short stages behind a slow one, not before it: the same stages take up to (P − 1)·τ more in
    their worst order. Splits of as many stages and micro-batches are timed at once.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(splits):
        alike.setdefault((len(one.stages), one.num_microbatches), []).append(index)
    seconds = np.zeros(len(splits))
    for (_, rounds), rows in alike.items():
        stages_s = np.stack([splits[row].stages_s for row in rows], axis=1)
        seconds[rows] = staged_pipeline_s(
            "1f1b",
            virtual_pipeline_stages=1,
            num_microbatches=np.full(len(rows), rounds),
            stages_s=stages_s,
        )
    return [(float(seconds[row]), splits[row]) for row in np.argsort(seconds, kind="stable").tolist()]


def partitions(options: Sequence[PoolOptions | None], blocks: Sequence[Block], num_layers: int) -> Iterator[Split]:
    """Splits of the layers over consecutive blocks."""
    places = _places(blocks)
    layer_s, ends_s, most = _stages(options, places, num_layers)
    reach = np.minimum(most, num_layers)
    if reach.sum() < num_layers or (reach < 1).all():
        return
    taus = np.unique(
        np.concatenate([a * np.arange(1, int(n) + 1) + e for a, e, n in set(zip(layer_s, ends_s, reach, strict=True))])
    )

    def capacity(tau: float) -> FloatArray:
        return np.clip(np.floor((tau * (1 + 1e-12) - ends_s) / layer_s), 0, reach)

    low, high = 0, len(taus) - 1
    while low < high:
        middle = (low + high) // 2
        if capacity(taus[middle]).sum() >= num_layers:
            high = middle
        else:
            low = middle + 1
    seen, rounds = set(), _rounds(options, blocks)
    for tau in taus[low : low + TRIED]:
        layers = _trimmed(capacity(tau), layer_s, ends_s, num_layers)
        key = tuple(layers.tolist())
        if 0 in key:
            # Without its empty stages the pipeline has other ends, and fewer micro-batches in flight.
            yield from partitions(options, _without_empty(places, key), num_layers)
            return
        if key not in seen:
            seen.add(key)
            times = layers * layer_s + ends_s
            yield Split(
                stages=tuple((block, int(count)) for (block, _), count in zip(places, key, strict=True)),
                num_microbatches=rounds,
                stages_s=times,
            )


def _without_empty(places: Sequence[tuple[Block, int]], layers: Sequence[float]) -> list[Block]:
    """The blocks without the stages that hold no layer."""
    left = [block for (block, _), count in zip(places, layers, strict=True) if count]
    return [replace(block, stages=len(list(run))) for block, run in groupby(left)]


def _rounds(options: Sequence[PoolOptions | None], blocks: Sequence[Block]) -> int:
    own = options[blocks[0].pool]
    return 1 if own is None else int(own.num_microbatches[blocks[0].row])


def _places(blocks: Sequence[Block]) -> list[tuple[Block, int]]:
    """(block, micro-batches in flight without the limit m) of each stage."""
    total = sum(block.stages for block in blocks)
    stages = [block for block in blocks for _ in range(block.stages)]
    return [(block, total - index) for index, block in enumerate(stages)]


def _stages(
    options: Sequence[PoolOptions | None], places: Sequence[tuple[Block, int]], num_layers: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Time of a layer, what the ends add, and most layers by memory, of each stage."""
    layer_s, ends_s, most = [], [], []
    last = len(places) - 1
    for index, (block, ahead) in enumerate(places):
        own = options[block.pool]
        if own is None:
            raise AssertionError("a block is on a pool that has options")
        place = WHOLE if last == 0 else FIRST if index == 0 else LAST if index == last else MIDDLE
        flying = float(min(ahead, int(own.num_microbatches[block.row])))
        row = slice(block.row, block.row + 1)
        layer_s.append(float(own.layer_s[block.row]))
        ends_s.append(float(own.ends_s[place, block.row]))
        most.append(min(float(own.most_layers(place, flying, row)[0]), num_layers))
    return np.array(layer_s), np.array(ends_s), np.array(most)


def _trimmed(capacity: FloatArray, layer_s: FloatArray, ends_s: FloatArray, num_layers: int) -> FloatArray:
    """Capacities less what is too much: from the pools where a layer takes longest, there from the slowest stage."""
    layers = capacity.copy()
    surplus = int(layers.sum()) - num_layers
    for cost in sorted(set(layer_s.tolist()), reverse=True):
        own = np.flatnonzero(layer_s == cost)
        # The ends keep a layer: they hold the embedding and the LM head.
        while surplus > 0:
            least = np.where((own == 0) | (own == len(layers) - 1), 1, 0)
            open_ = own[layers[own] > least]
            if not len(open_):
                break
            times = layers[open_] * layer_s[open_] + ends_s[open_]
            layers[open_[int(np.argmax(times))]] -= 1
            surplus -= 1
    return layers
