"""Zero-bubble pipelines whose stages differ: ZB-H1's order run through, for many candidates at once.

The closed form m·max t + β·(Σ t − max t) is exact for stages that are alike and too long otherwise, because a slow
stage hides the bubbles of the others. Here the order of :func:`~meshplan.planner.estimators.schedules.zb_h1` is run
operation by operation over columns of candidates (longest path; arXiv:2401.10241, §2.1). The steady state adds max t a
micro-batch, so no more than :data:`ROUNDS` · p micro-batches need to be run:

    T(m) = T(k) + (m − k)·max t,  k = min(m, ROUNDS·p)

Without the flush (ZB-1p: stages follow each other into the next step) a step takes as long as the stage with the
longest time from its first to its last operation.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from meshplan.planner.estimators.candidates import FloatArray, IntArray
from meshplan.planner.estimators.schedules import BACKWARD, FORWARD, Op, zb_h1

# From here on a micro-batch more adds max t: exact where one stage is clearly the slowest; where another is nearly as
# slow, that one may rule for longer, and the time is up to 1 % too long (tests hold both, over random stage times).
ROUNDS = 3
# More stages take a second and more of NumPy for a batch of candidates; they keep the upper bound.
MOST_STAGES = 16


def unlike_stages_s(
    forward_s: FloatArray, input_gradient_s: FloatArray, weight_gradient_s: FloatArray, m: IntArray, *, flushed: bool
) -> FloatArray:
    """Seconds of a step, [n].

    Args:
        forward_s: of one micro-batch on each stage, [p, n].
        input_gradient_s: the part of the backward that earlier stages wait for, [p, n].
        weight_gradient_s: the rest of it, [p, n].
        m: micro-batches, [n].
        flushed: all stages start the optimizer together.
    """
    p = len(forward_s)
    few = np.minimum(m, ROUNDS * p)
    seconds = np.zeros(forward_s.shape[1:])
    for count in np.unique(few).tolist():
        rows = few == count
        parts = (forward_s[:, rows], input_gradient_s[:, rows], weight_gradient_s[:, rows])
        seconds[rows] = _run(*parts, int(count), flushed=flushed)
    slowest = (forward_s + input_gradient_s + weight_gradient_s).max(axis=0)
    return seconds + (m - few) * slowest


def _run(
    forward_s: FloatArray, input_gradient_s: FloatArray, weight_gradient_s: FloatArray, m: int, *, flushed: bool
) -> FloatArray:
    p = len(forward_s)
    clock = np.zeros_like(forward_s)
    end: dict[Op, FloatArray] = {}
    for op, stage, source in _operations(p, m):
        ready = end.pop(source) if source is not None else clock[stage]
        seconds = forward_s if op.kind == FORWARD else input_gradient_s if op.kind == BACKWARD else weight_gradient_s
        clock[stage] = np.maximum(clock[stage], ready) + seconds[stage]
        end[op] = clock[stage].copy()
    if flushed:
        return clock.max(axis=0)
    begin = np.cumsum(forward_s, axis=0) - forward_s
    return (clock - begin).max(axis=0)


@cache
def _operations(p: int, m: int) -> tuple[tuple[Op, int, Op | None], ...]:
    """Operations in an order in which every input comes first: operation, stage, what it waits for on another stage."""
    stages = zb_h1(p, m).stages
    done: set[Op] = set()
    listed: list[tuple[Op, int, Op | None]] = []
    place = [0] * p
    while len(listed) < sum(map(len, stages)):
        for i, ops in enumerate(stages):
            while place[i] < len(ops):
                op = ops[place[i]]
                source = _source(op, p)
                if source is not None and source not in done:
                    break
                listed.append((op, i, source))
                done.add(op)
                place[i] += 1
    return tuple(listed)


def _source(op: Op, p: int) -> Op | None:
    """What an operation waits for besides those before it on its stage."""
    if op.kind == FORWARD and op.chunk > 0:
        return Op(FORWARD, op.chunk - 1, op.microbatch)
    if op.kind == BACKWARD and op.chunk < p - 1:
        return Op(BACKWARD, op.chunk + 1, op.microbatch)
    return None
