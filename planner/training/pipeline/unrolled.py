"""Pipelines without a closed form: simulation of the schedule for many candidates at once.

m·max t + β·(Σ t − max t) is exact for equal stages and too long otherwise, because a slow stage hides the bubbles of
the others; and the bubble of V-Min or Hanayo grows with m if F, B and W differ. Here the longest path through the
schedule (:mod:`.precedence`) is computed with arrays over candidates. Of many micro-batches only the first k are
simulated:

    T(m) = T(k) + (m − k)·d,    k = min(m, ROUNDS·p)

Written orders repeat with every micro-batch and their slowest stage never waits: d = max t. In searched orders it may
wait: k is at least :data:`SEARCHED_MICROBATCHES`, and d is the mean interval between micro-batches that leave the
pipeline in the middle of the simulation.

Without a flush (zero-bubble schedules) a step takes as long as the stage with the longest time from its first to its
last operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.pipeline.list_scheduling import Nominal
from meshplan.planner.training.pipeline.lookup import UNFLUSHED, pipeline_order
from meshplan.planner.training.pipeline.orders import BACKWARD, FORWARD, WEIGHT, Op, PipelineOrder
from meshplan.planner.training.pipeline.precedence import passes_in_order
from meshplan.planner.training.problem.schedules import SCHEDULES

# Rounds of p micro-batches after which each further micro-batch adds max t: exact if one stage is clearly the slowest;
# if another is nearly as slow, the time is up to 1 % too long (tests check both, over random stage times).
ROUNDS = 3
# With three rounds, 1 in 40 random cases of DualPipeV is 1.1 % too long; the worst stages found for ZB-H1 1.2 %.
MORE_ROUNDS = {"dualpipe-v": 4, "zb-h1": 4, "zb-1p": 4}
# Least number of simulated micro-batches of a searched order; fewer do not reach its steady state.
SEARCHED_MICROBATCHES = 128
SEARCHED = frozenset({"dualpipe", *(name for name, row in SCHEDULES.items() if row.is_list_scheduled)})
# More stages take a second and more of NumPy for a batch of candidates; they keep the upper bound.
MOST_STAGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkColumns:
    """Times of one micro-batch on each model chunk, s, [chunks, n].

    Args:
        forward_s: F.
        input_gradient_s: the part of the backward that earlier chunks wait for.
        weight_gradient_s: the rest of it.
    """

    forward_s: FloatArray
    input_gradient_s: FloatArray
    weight_gradient_s: FloatArray


class _Step(NamedTuple):
    """One operation, or a pair that runs as one.

    Args:
        stage: stage that runs it.
        passes: rows of :func:`_seconds` whose times it takes, in sequence.
        waits_for: numbers of the operations on other stages whose results it needs.
        results: numbers of its own operations whose results other stages need, each once.
        leaves: whether the micro-batch leaves the pipeline with it.
    """

    stage: int
    passes: tuple[int, ...]
    waits_for: tuple[int, ...]
    results: tuple[int, ...]
    leaves: bool


def rounds_of(schedule: str) -> int:
    """Rounds of p micro-batches that are simulated."""
    return MORE_ROUNDS.get(schedule, ROUNDS)


def unrolled_s(schedule: str, p: int, v: int, times: ChunkColumns, m: IntArray, nominal: Nominal) -> FloatArray:
    """Time of a step, s, [n].

    Args:
        schedule: see :func:`~meshplan.planner.training.pipeline.lookup.pipeline_order`.
        p: stages.
        v: chunks per stage.
        times: times of each chunk.
        m: micro-batches, [n].
        nominal: relative times of F, B and W for which a searched order is made.
    """
    few = np.minimum(m, max(rounds_of(schedule) * p, SEARCHED_MICROBATCHES if schedule in SEARCHED else 0))
    seconds = np.zeros(times.forward_s.shape[1:])
    slowest = np.zeros_like(seconds)
    for count in np.unique(few).tolist():
        rows = few == count
        order = pipeline_order(schedule, p, v, int(count), nominal=nominal)
        parts = ChunkColumns(
            forward_s=times.forward_s[:, rows],
            input_gradient_s=times.input_gradient_s[:, rows],
            weight_gradient_s=times.weight_gradient_s[:, rows],
        )
        seconds[rows], settled = _run(order, _steps(schedule, p, v, int(count), nominal), parts, schedule)
        slowest[rows] = _slowest_s(order, parts)
        if schedule in SEARCHED:
            slowest[rows] = np.maximum(slowest[rows], settled)
    return seconds + (m - few) * slowest


def _slowest_s(order: PipelineOrder, times: ChunkColumns) -> FloatArray:
    """Time of the slowest stage per micro-batch, [n]; each path gets an equal share of the micro-batches."""
    chunks = times.forward_s + times.input_gradient_s + times.weight_gradient_s
    stages = np.zeros((len(order.stages), *chunks.shape[1:]))
    for chunk, stage in enumerate(order.stage_of_chunk):
        stages[stage] += chunks[chunk]
    return stages.max(axis=0) / len(order.paths)


def _run(
    order: PipelineOrder, steps: tuple[_Step, ...], times: ChunkColumns, schedule: str
) -> tuple[FloatArray, FloatArray]:
    """Time of the whole simulation, and interval between micro-batches in the middle of it, [n] each."""
    p, m = len(order.stages), len(order.path_of_microbatch)
    seconds = _seconds(times)
    clock = [np.zeros(times.forward_s.shape[1:])] * p
    end: dict[int, FloatArray] = {}
    left: list[FloatArray] = []
    for stage, passes, waits_for, results, leaves in steps:
        now = clock[stage]
        for source in waits_for:
            now = np.maximum(now, end.pop(source))
        for row in passes:
            now = now + seconds[row]
        clock[stage] = now
        for result in results:
            end[result] = now
        if leaves:
            left.append(now)
    gone, (first, last) = np.sort(left, axis=0), (m // 2, m - 1 - m // 4)
    settled = (gone[last] - gone[first]) / max(last - first, 1)
    if schedule not in UNFLUSHED:
        return np.max(clock, axis=0), settled
    begin = np.cumsum(times.forward_s[:p], axis=0) - times.forward_s[:p]
    return (np.stack(clock) - begin).max(axis=0), settled


def _seconds(times: ChunkColumns) -> list[FloatArray]:
    """Times of F, B, W and the unsplit backward, chunk by chunk, [n] each."""
    whole = times.input_gradient_s + times.weight_gradient_s
    kinds = np.stack([times.forward_s, times.input_gradient_s, times.weight_gradient_s, whole], axis=1)
    return list(kinds.reshape(-1, *kinds.shape[2:]))


def _row(order: PipelineOrder, op: Op) -> int:
    """Row of :func:`_seconds` with the time of an operation."""
    kind = 0 if op.kind == FORWARD else 2 if op.kind == WEIGHT else 3 if order.contains_weights(op) else 1
    return 4 * op.chunk + kind


@cache
def _steps(schedule: str, p: int, v: int, m: int, nominal: Nominal) -> tuple[_Step, ...]:
    """The schedule as one list in which every operation comes after its inputs."""
    order = pipeline_order(schedule, p, v, m, nominal=nominal)
    passes = passes_in_order(order)
    number_of = {op: number for number, op in enumerate(op for one in passes for op in one.ops)}
    far = [
        tuple(number_of[source] for source in inputs if order.stage_of_chunk[source.chunk] != stage)
        for stage, _, inputs in passes
    ]
    awaited = {source for sources in far for source in sources}
    first = {path[0] for path in order.paths}
    return tuple(
        _Step(
            stage=stage,
            passes=tuple(_row(order, op) for op in ops),
            waits_for=sources,
            results=tuple(number_of[op] for op in ops if number_of[op] in awaited),
            leaves=any(op.kind == BACKWARD and op.chunk in first for op in ops),
        )
        for (stage, ops, _), sources in zip(passes, far, strict=True)
    )
