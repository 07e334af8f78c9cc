"""How long a step waits because micro-batches differ in attention, from the distribution of documents.

A micro-batch takes 1 − φ + φ·x of the mean one: φ is the share of attention in it, x the causal pairs of its sequences
over the mean. The step of R data-parallel ranks is the longest of their pipelines (:mod:`.uneven`); its expectation
over draws of sequences, less the step with equal micro-batches, is the waiting, worked out for some shares of attention
and read linearly between them.

A rank of many micro-batches is simulated in blocks b of a few rounds: T = Σ T(b, b + 1) − Σ T(b), neighbours together
less the inner ones alone, so that what waits across a border counts.

Assumes: sequences fall to ranks and micro-batches as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.packing import PackedDocuments
from meshplan.planner.training.pipeline.uneven import uneven_pipeline_units

# Shares of attention at which waiting is worked out.
SHARES = (0.0, 0.25, 0.5, 1.0)
# Sequences that are drawn for a layout, and samples of a step at least and at most.
DRAWN_SEQUENCES, LEAST_SAMPLES, MOST_SAMPLES = 2**13, 8, 512
# Micro-batches of a block at least and at most, in stages; blocks up to which a rank is simulated as a whole.
BLOCK_ROUNDS, BLOCKS_APART = (2, 4), 2
# Layouts that are remembered: those of a search or two.
REMEMBERED = 4096


class Layout(NamedTuple):
    """What the waiting of a step depends on beside the documents.

    Args:
        schedule: pipeline schedule.
        pipeline_parallel: stages.
        virtual_pipeline_stages: chunks per stage.
        data_parallel: ranks R.
        num_microbatches: m of each rank.
        micro_batch_size: sequences of a micro-batch.
    """

    schedule: str
    pipeline_parallel: int
    virtual_pipeline_stages: int
    data_parallel: int
    num_microbatches: int
    micro_batch_size: int


def relative_pairs(documents: PackedDocuments, windows: Sequence[tuple[int | None, int]]) -> FloatArray:
    """Attention of each sampled sequence over the mean.

    Args:
        documents: sequences.
        windows: (attention window, number of layers).
    """
    pairs = sum((layers * documents.pairs(window) for window, layers in windows), np.zeros(1))
    return np.asarray(pairs / pairs.mean())


@lru_cache(maxsize=REMEMBERED)
def waiting_units(
    documents: PackedDocuments, windows: tuple[tuple[int | None, int], ...], layout: Layout
) -> tuple[float, ...]:
    """Waiting of a step at each of :data:`SHARES`, in units of the mean micro-batch on one stage."""
    sizes = drawn_sizes(documents, windows, layout)
    samples, ranks, m = sizes.shape
    if layout.pipeline_parallel == 1:  # linear in the share
        whole = float(sizes.sum(axis=-1).max(axis=-1).mean()) - m
        return tuple(max(share * whole, 0.0) for share in SHARES)
    block = _block(layout)
    every = np.concatenate([1.0 - share + share * sizes.reshape(-1, m) for share in SHARES[1:]])
    even = float(_in_blocks(layout, np.ones((1, m)), block)[0])
    excess = (_in_blocks(layout, every, block) - even).reshape(len(SHARES) - 1, samples, ranks)
    units = excess.max(axis=2).mean(axis=1)
    return (0.0, *np.maximum(units, 0.0).tolist())


def _in_blocks(layout: Layout, sizes: FloatArray, block: int) -> FloatArray:
    """Time of each row of micro-batches, in units of the mean one, [rows]; what fills no block counts as the others."""
    schedule, p, v = layout.schedule, layout.pipeline_parallel, layout.virtual_pipeline_stages
    rows, m = sizes.shape
    count = m // block
    if count <= BLOCKS_APART:
        return uneven_pipeline_units(schedule, p, v, sizes)
    parts = sizes[:, : count * block].reshape(rows, count, block)
    together = np.concatenate([parts[:, :-1], parts[:, 1:]], axis=2).reshape(-1, 2 * block)
    pairs = uneven_pipeline_units(schedule, p, v, together).reshape(rows, -1).sum(axis=1)
    inner = uneven_pipeline_units(schedule, p, v, parts[:, 1:-1].reshape(-1, block)).reshape(rows, -1).sum(axis=1)
    return np.asarray((pairs - inner) * (m / (count * block)))


def drawn_sizes(documents: PackedDocuments, windows: tuple[tuple[int | None, int], ...], layout: Layout) -> FloatArray:
    """Attention of every micro-batch of some steps over the mean, [samples, ranks, micro-batches]."""
    relative = relative_pairs(documents, windows)
    shape = (layout.data_parallel, layout.num_microbatches, layout.micro_batch_size)
    samples = min(max(DRAWN_SEQUENCES // int(np.prod(shape)), LEAST_SAMPLES), MOST_SAMPLES)
    drawn = relative[_places(samples * int(np.prod(shape)), len(relative))]
    sizes = drawn.reshape(samples, *shape).mean(axis=-1)
    return np.asarray(sizes / sizes.mean())


def _places(count: int, size: int) -> IntArray:
    """Which sequences are drawn: every one as often, in another order each time round."""
    rng = np.random.default_rng(0)
    rounds = -(-count // size)
    return np.concatenate([rng.permutation(size) for _ in range(rounds)])[:count]


def _block(layout: Layout) -> int:
    """Micro-batches of a block: the shortest of some rounds that divides m, else the shortest."""
    p, (least, most) = layout.pipeline_parallel, BLOCK_ROUNDS
    sizes = range(least * p, most * p + 1, p)
    return next((size for size in sizes if layout.num_microbatches % size == 0), sizes[0])


def waiting_s(
    documents: PackedDocuments,
    windows: tuple[tuple[int | None, int], ...],
    layouts: Sequence[Layout],
    attention_share: FloatArray,
    micro_batch_s: FloatArray,
) -> FloatArray:
    """Waiting of a step, s [n].

    Args:
        documents: what sequences hold.
        windows: (attention window, number of layers).
        layouts: of each candidate, n of them.
        attention_share: φ [n].
        micro_batch_s: the mean micro-batch on the slowest stage, forward and backward, s [n].
    """
    units = _units(documents, windows, layouts)
    place = np.searchsorted(SHARES[1:-1], attention_share)
    low, high = np.array(SHARES)[place], np.array(SHARES)[place + 1]
    part = (attention_share - low) / (high - low)
    rows = np.arange(len(units))
    return np.asarray(((1.0 - part) * units[rows, place] + part * units[rows, place + 1]) * micro_batch_s)


def least_waiting_s(
    documents: PackedDocuments,
    windows: tuple[tuple[int | None, int], ...],
    layouts: Sequence[Layout],
    attention_s: FloatArray,
) -> FloatArray:
    """Waiting of a step at least, whatever else a micro-batch takes, s [n].

    Waiting over attention is no less than at one of :data:`SHARES`, between which waiting is linear.

    Args:
        documents: what sequences hold.
        windows: (attention window, number of layers).
        layouts: of each candidate, n of them.
        attention_s: attention of the mean micro-batch on some stage, s [n].
    """
    slopes = _units(documents, windows, layouts)[:, 1:] / np.array(SHARES[1:])
    return np.asarray(slopes.min(axis=1) * attention_s)


def _units(
    documents: PackedDocuments, windows: tuple[tuple[int | None, int], ...], layouts: Sequence[Layout]
) -> FloatArray:
    """Waiting of every candidate at each of :data:`SHARES`, [n, shares]."""
    found = {one: waiting_units(documents, windows, one) for one in dict.fromkeys(layouts)}
    return np.array([found[one] for one in layouts])
