"""All ways to split layers over stages, each of which holds no more than a time allows; the chunks of a stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import PipelineSplit
from meshplan.planner.training.pipeline.orders import stage_of_chunk

# Splits of one candidate that are all looked at; beyond, a bound is taken.
MOST_ENUMERATED = 2_000


def compositions(
    seconds: FloatArray,
    most_s: float,
    *,
    first: int,
    fewest: Sequence[int],
    layers: int,
    most_found: int = MOST_ENUMERATED,
) -> IntArray | None:
    """All splits whose stages take no longer than ``most_s``: layers of each, [p, N]; None where N is too large.

    Args:
        seconds: of a micro-batch on each stage, by its layers, [p, counts].
        most_s: a stage takes no longer.
        first: layers of the first column of ``seconds``.
        fewest: layers of each stage at least.
        layers: of all stages together.
        most_found: N is too large beyond.

    >>> compositions(np.array([[1.0, 2.0, 3.0]] * 2), 2.0, first=1, fewest=[1, 1], layers=3).T.tolist()
    [[2, 1], [1, 2]]
    """
    p = len(seconds)
    possible = [
        [
            first + column
            for column in np.flatnonzero(seconds[stage] <= most_s * (1.0 + 1e-9)).tolist()
            if first + column >= fewest[stage]
        ]
        for stage in range(p)
    ]
    if not all(possible):
        return np.zeros((p, 0), dtype=np.int64)
    counts = np.zeros((0, 1), dtype=np.int64)
    for stage, own in enumerate(possible):
        after = possible[stage + 1 :]
        least, most = sum(map(min, after)), sum(map(max, after))
        rest = layers - counts.sum(axis=0)
        grown = []
        for count in own:
            fits = (rest - count >= least) & (rest - count <= most)
            taken = counts[:, fits]
            grown.append(np.concatenate([taken, np.full((1, taken.shape[1]), count)]))
        counts = np.concatenate(grown, axis=1)
        if counts.shape[1] > most_found:
            return None
    return counts


def chunks_of(
    split: PipelineSplit, counts: Sequence[int], layers: int, leading: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Layers of each chunk for the given layers of each stage, as even as possible; None where one is missing.

    What is left over goes to the chunks in the middle of the model. There the long chunks of all stages follow each
    other, so that fewest short ones wait for them: where each of sixteen stages has chunks of one and of two layers,
    8 % and not 24 % more than the stages' own time (:mod:`~meshplan.planner.training.pipeline.unlike_chunks`).

    Args:
        split: stages and chunks.
        counts: layers of each stage.
        layers: of the model.
        leading: layers of another kind, which lead the model, on each of the first chunks: those before the last such
            chunk hold nothing else, and it holds them at least.
    """
    if sum(counts) != layers:  # the dynamic programme found none
        return None
    places = stage_of_chunk(split.schedule, split.pipeline_parallel, split.virtual_pipeline_stages)
    ends = () if split.vocabulary_parallel else (0, len(places) - 1)
    last = max((chunk for chunk, size in enumerate(leading) if size), default=-1)
    sizes = [0] * len(places)
    for stage, count in enumerate(counts):
        own = [chunk for chunk, place in enumerate(places) if place == stage]
        # The ends come last: they alone may stay empty.
        own.sort(key=lambda chunk: (chunk in ends, abs(2 * chunk - len(places) + 1), -chunk))
        held = [chunk for chunk in own if chunk < last]
        if last in own and count // len(own) < leading[last]:
            held.append(last)
        rest = count - sum(leading[chunk] for chunk in held)
        free = [chunk for chunk in own if chunk not in held]
        if rest < 0 or (rest and not free):
            return None
        for chunk in held:
            sizes[chunk] = leading[chunk]
        for index, chunk in enumerate(free):
            sizes[chunk] = rest // len(free) + (index < rest % len(free))
    if any(size == 0 for chunk, size in enumerate(sizes) if chunk not in ends):
        return None
    return tuple(sizes)
