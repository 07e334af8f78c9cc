"""How much must any split of the layers recompute to stay within memory? A bound that costs no dynamic programme.

*Notation.* As in :mod:`.uneven`: stage i needs b_i bytes, and s_i more for each of its n_i layers; recompute of a layer
saves at most a_i. M is the limit.

*Objective.* R = min Σ r_i subject to b_i + n_i·s_i − r_i·a_i ≤ M, 0 ≤ r_i ≤ n_i, Σ n_i = L, over real n and r: no
split recomputes fewer layers of a micro-batch, over all stages.

*Solution.* A stage takes (M − b_i)/s_i layers for nothing and (M − b_i)/(s_i − a_i) at most; each beyond the former
costs s_i/a_i. The cheapest are filled first, which is exact for a linear objective over intervals. R is infinite where
all stages together cannot hold L layers.

*Kinds of layer.* Where layers differ, the time of R is the greatest of: all L layers as small, as small when recomputed
and as quickly recomputed as any kind, and the layers of each kind alone, as if the others needed nothing. DeepSeek-V3's
three dense layers need a fraction of what its 58 with experts need: as 61 dense layers the model fits everywhere.

*One stage.* That holds given layers and lacks E bytes recomputes the cheapest kinds first, c_k seconds for a_k bytes: a
knapsack whose relaxation is exact up to the last layer, and exact with whole layers where only one kind is there.

*Fewest in flight.* Of the schedules that run forwards ahead, 1F1B keeps the fewest micro-batches in flight on each
stage, whatever the chunks (p − i, where interleaving keeps p + (p − 2i − 1)/v): R under 1F1B bounds R of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.stage_bytes import StageBytes
from meshplan.planner.training.search.layers.stage_costs import SplitCosts

# Keeps R below its exact value, whose sums run in another order.
ROUNDING = 1e-9
# Candidates looked at together; keeps arrays of [stages, n] small.
ROWS_AT_ONCE = 4096
LEAST_IN_FLIGHT = "1f1b"
_AHEAD = frozenset({LEAST_IN_FLIGHT, "interleaved"})


def fewest_in_flight(split: PipelineSplit) -> PipelineSplit:
    """The split whose schedule keeps no more micro-batches in flight on any stage; layers and classes stay."""
    schedule, chunks = flown_as(split)
    return replace(split, schedule=schedule, virtual_pipeline_stages=chunks)


def flown_as(split: PipelineSplit) -> tuple[str, int]:
    """Schedule and chunks on each stage of :func:`fewest_in_flight`."""
    return (LEAST_IN_FLIGHT, 1) if split.schedule in _AHEAD else (split.schedule, split.virtual_pipeline_stages)


def least_recompute_s(
    problem: TrainingProblem, batch: Candidates, again_s: FloatArray | None = None, *, any_recompute: bool = False
) -> FloatArray:
    """Time of the least recompute, over the stages of one micro-batch together, s [n]; infinite where nothing fits.

    Args:
        problem: the question.
        batch: candidates under any split of their layers over the same stages.
        again_s: time of recompute of a layer of each kind, where it is known, [kinds, n].
        any_recompute: candidates without recompute stand for those that recompute every layer, too.
    """
    batch, pieces = replace(batch, split=fewest_in_flight(batch.split)), []
    for i in range(0, len(batch), ROWS_AT_ONCE):
        rows = slice(i, i + ROWS_AT_ONCE)
        costs = SplitCosts(problem, batch.take(rows))
        own_s = costs.again_s() if again_s is None else again_s[:, rows]
        memory = costs.memory_of_any_recompute() if any_recompute else costs.memory()
        pieces.append(least_of_kinds_s(memory, own_s, costs.kind_of, problem.limits.memory_bytes))
    return np.concatenate([*pieces, np.zeros(0)])


def least_of_kinds_s(memory: StageBytes, again_s: FloatArray, kind_of: Sequence[int], limit_bytes: float) -> FloatArray:
    """Time of the least recompute where layers may differ in kind, s [n]; infinite where nothing fits.

    Args:
        memory: of the stages.
        again_s: time of recompute of a layer of each kind, [kinds, n].
        kind_of: kind of each layer.
        limit_bytes: M.
    """
    room_bytes, as_one = limit_bytes - memory.base_bytes, memory.of_the_least_layer()
    groups = [(as_one, 0, again_s.min(axis=0), len(kind_of))]
    if len(again_s) > 1:
        groups += [(memory, kind, again_s[kind], kind_of.count(kind)) for kind in range(len(again_s))]
    bounds = []
    for bytes_, kind, each_s, count in groups:
        least = least_recomputed(
            room_bytes=room_bytes,
            layer_bytes=bytes_.layer_bytes[:, kind],
            saved_bytes=bytes_.saved_bytes[:, kind],
            num_layers=count,
        )
        bounds.append(np.where(np.isfinite(least), np.where(np.isfinite(least), least, 0.0) * each_s, np.inf))
    return np.maximum.reduce(bounds)


def stage_recompute_s(
    lacking_bytes: FloatArray, counts: IntArray, *, again_s: FloatArray, saved_bytes: FloatArray
) -> FloatArray:
    """Least time of the recompute that brings a stage within memory, [s, n]; infinite where none does.

    Args:
        lacking_bytes: E for each set of layers that it may hold, [s, n]; 0 where nothing lacks.
        counts: layers of each kind in each set, [kinds, s].
        again_s: c of each kind, [kinds, n].
        saved_bytes: a of each kind, [kinds, n].
    """
    there = counts.any(axis=1)
    if len(again_s) > 1 and np.count_nonzero(there) == 1:
        counts, again_s, saved_bytes = counts[there], again_s[there], saved_bytes[there]
    saves = saved_bytes > 0.0
    each = np.where(saves, saved_bytes, 1.0)
    if len(again_s) == 1:  # most calls: nothing to choose from
        whole = lacking_bytes / each[0]
        np.ceil(np.multiply(whole, 1.0 - ROUNDING, out=whole), out=whole)
        beyond = whole > np.where(saves[0], counts.T, 0)
        whole *= again_s[0]
        whole[beyond] = np.inf
        return whole
    order = np.argsort(np.where(saves, again_s / each, np.inf), axis=0)
    is_one = bool((order == order[:, :1]).all())  # then whole lines are taken, not an element for each candidate
    seconds, left = np.zeros_like(lacking_bytes), lacking_bytes
    for kind in order[:, 0].tolist() if is_one else order:
        if is_one:
            saved, again = each[kind], again_s[kind]
            own = np.where(saves[kind], counts[kind][:, None], 0)
        else:
            saved, again, usable = (np.take_along_axis(of, kind[None], axis=0)[0] for of in (each, again_s, saves))
            own = np.where(usable, counts[kind].T, 0)
        taken = np.minimum(left / saved, own)
        seconds = seconds + taken * again
        left = left - taken * saved
    beyond = left > ROUNDING * np.maximum(lacking_bytes, 1.0)
    for kind in range(len(again_s)):
        alone = (counts[kind] > 0) & (counts.sum(axis=0) == counts[kind])
        if alone.any():
            whole = np.ceil(lacking_bytes[alone] / each[kind] * (1.0 - ROUNDING))
            seconds[alone] = whole * again_s[kind]
            beyond[alone] |= whole > counts[kind][alone][:, None]
    return np.where(beyond, np.inf, seconds)


def least_recomputed(
    *, room_bytes: FloatArray, layer_bytes: FloatArray, saved_bytes: FloatArray, num_layers: int
) -> FloatArray:
    """R of the module docstring, [n].

    Args:
        room_bytes: M − b of each stage, [p, n].
        layer_bytes: s, [p, n].
        saved_bytes: a, [p, n].
        num_layers: L.
    """
    room, saves = np.maximum(room_bytes, 0.0), saved_bytes > 0.0
    left = layer_bytes - saved_bytes
    free = np.minimum(np.divide(room, layer_bytes, out=np.full_like(room, np.inf), where=layer_bytes > 0.0), num_layers)
    most = np.minimum(np.divide(room, left, out=np.full_like(room, np.inf), where=left > 0.0), num_layers)
    more = np.where(saves, most - free, 0.0)  # stages that save nothing take nothing beyond what is free
    lacking = np.maximum(num_layers * (1.0 - ROUNDING) - free.sum(axis=0), 0.0)
    fits = (room_bytes >= 0.0).all(axis=0) & (more.sum(axis=0) >= lacking)
    least = np.where(fits, 0.0, np.inf)
    rows = np.flatnonzero(fits & (lacking > 0.0))  # few: most need nothing, or nothing helps
    if len(rows):
        saves, saved = saves[:, rows], saved_bytes[:, rows]
        price = np.divide(layer_bytes[:, rows], saved, out=np.zeros_like(saved), where=saves)
        order = np.argsort(price, axis=0)
        more = np.take_along_axis(more[:, rows], order, axis=0)
        taken = np.clip(lacking[rows] - (np.cumsum(more, axis=0) - more), 0.0, more)
        least[rows] = (taken * np.take_along_axis(price, order, axis=0)).sum(axis=0) * (1.0 - ROUNDING)
    return least
