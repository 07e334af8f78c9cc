"""A pipeline whose micro-batches differ: time of a step for many rows of micro-batches at once.

Every operation starts as early as its stage's order and its inputs allow, as in :mod:`.simulation`, with the time of
its micro-batch: forward and backward of micro-batch j take x_j times those of the mean one, on every stage. Times are
in units of the mean micro-batch on one stage, forward and backward.

A stage alternates between micro-batches that are p apart, so a long one makes all stages wait, again and again: without
an order, m micro-batches of p stages take almost as long as if each were the longest of its p neighbours. In order of
size, neighbours are alike, and little is left of it.

Assumes: equal stages; messages between them are priced elsewhere.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.pipeline.closed_forms import FORWARD_SHARE
from meshplan.planner.training.pipeline.lookup import UNFLUSHED, nominal_times, pipeline_order, weight_gradient_share
from meshplan.planner.training.pipeline.orders import FORWARD, WEIGHT, Op
from meshplan.planner.training.pipeline.precedence import passes_in_order

_Step = tuple[int, tuple[tuple[Op, float], ...], tuple[Op, ...]]


@cache
def _program(schedule: str, p: int, v: int, m: int) -> tuple[_Step, ...]:
    """(stage, operations with their times, inputs) of every pass, in an order in which all inputs come first."""
    order = pipeline_order(schedule, p, v, m, nominal=nominal_times(schedule, FORWARD_SHARE))
    weight = weight_gradient_share(schedule, FORWARD_SHARE)
    share = p / len(order.stage_of_chunk)

    def seconds(op: Op) -> float:
        if op.kind == FORWARD:
            return share * FORWARD_SHARE
        if op.kind == WEIGHT:
            return share * weight
        return share * (1.0 - FORWARD_SHARE - (0.0 if order.contains_weights(op) else weight))

    return tuple((one.stage, tuple((op, seconds(op)) for op in one.ops), one.inputs) for one in passes_in_order(order))


def uneven_pipeline_units(schedule: str, p: int, v: int, sizes: FloatArray) -> FloatArray:
    """Time of a step, in units of the mean micro-batch on one stage, [rows].

    Args:
        schedule: a key of :data:`~meshplan.planner.training.problem.schedules.SCHEDULES`.
        p: stages.
        v: chunks per stage.
        sizes: x_j of every micro-batch in the order in which they run, [rows, m].
    """
    if p == 1:
        return np.asarray(sizes.sum(axis=-1))
    if schedule == "interleaved":
        # It takes groups of p: the last one is filled up with micro-batches that take no time.
        sizes = np.pad(sizes, ((0, 0), (0, -sizes.shape[1] % p)))
    rows, m = sizes.shape
    column = np.ascontiguousarray(sizes.T)
    first: list[FloatArray | None] = [None] * p
    clock: list[FloatArray] = [np.zeros(rows)] * p
    ended: dict[Op, FloatArray] = {}
    for stage, ops, inputs in _program(schedule, p, v, m):
        begin = clock[stage]
        for source in inputs:
            begin = np.maximum(begin, ended[source])
        if first[stage] is None:
            first[stage] = begin
        for op, units in ops:
            begin = begin + units * column[op.microbatch]
        clock[stage] = begin
        ended.update(dict.fromkeys((op for op, _ in ops), begin))
    if schedule in UNFLUSHED:
        return np.maximum.reduce([end - start for end, start in zip(clock, first, strict=True) if start is not None])
    return np.maximum.reduce(clock)
