"""How much must any split of the layers recompute to stay within memory? A bound that costs no dynamic programme.

*Notation.* As in :mod:`.uneven`: stage i needs b_i bytes, and s_i more for each of its n_i layers; recompute of a layer
saves at most a_i. M is the limit.

*Objective.* R = min Σ r_i subject to b_i + n_i·s_i − r_i·a_i ≤ M, 0 ≤ r_i ≤ n_i, Σ n_i = L, over real n and r: no
split recomputes fewer layers of a micro-batch, over all stages.

*Solution.* A stage takes (M − b_i)/s_i layers for nothing and (M − b_i)/(s_i − a_i) at most; each beyond the former
costs s_i/a_i. The cheapest are filled first, which is exact for a linear objective over intervals. R is infinite where
all stages together cannot hold L layers.

*Fewest in flight.* Of the schedules that run forwards ahead, 1F1B keeps the fewest micro-batches in flight on each
stage, whatever the chunks (p − i, where interleaving keeps p + (p − 2i − 1)/v): R under 1F1B bounds R of all of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.stage_costs import SplitCosts

# Keeps R below its exact value, whose sums run in another order.
ROUNDING = 1e-9
# Candidates looked at together; keeps arrays of [stages, n] small.
ROWS_AT_ONCE = 4096
LEAST_IN_FLIGHT = "1f1b"
_AHEAD = frozenset({LEAST_IN_FLIGHT, "interleaved"})


def fewest_in_flight(split: PipelineSplit) -> PipelineSplit:
    """The split whose schedule keeps no more micro-batches in flight on any stage; layers and classes stay."""
    if split.schedule not in _AHEAD:
        return split
    return replace(split, schedule=LEAST_IN_FLIGHT, virtual_pipeline_stages=1)


def least_recompute_s(problem: TrainingProblem, batch: Candidates) -> FloatArray:
    """Time of the least recompute, over the stages of one micro-batch together, s [n]; infinite where nothing fits.

    Args:
        problem: the question.
        batch: candidates under any split of their layers over the same stages.
    """
    batch = replace(batch, split=fewest_in_flight(batch.split))
    pieces = [_least_s(problem, batch.take(slice(i, i + ROWS_AT_ONCE))) for i in range(0, len(batch), ROWS_AT_ONCE)]
    return np.concatenate([*pieces, np.zeros(0)])


def _least_s(problem: TrainingProblem, batch: Candidates) -> FloatArray:
    costs = SplitCosts(problem, batch)
    memory = costs.memory()
    least = least_recomputed(
        room_bytes=problem.limits.memory_bytes - memory.base_bytes,
        layer_bytes=memory.layer_bytes.min(axis=1),
        saved_bytes=memory.saved_bytes,
        num_layers=len(costs.kind_of),
    )
    some = (least > 0.0) & np.isfinite(least)
    return np.where(some, np.where(some, least, 0.0) * costs.again_s(), least) if some.any() else least


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
    fits = (room_bytes >= 0.0).all(axis=0)
    room = np.maximum(room_bytes, 0.0)
    left, saves = layer_bytes - saved_bytes, saved_bytes > 0.0
    free = np.minimum(np.divide(room, layer_bytes, out=np.full_like(room, np.inf), where=layer_bytes > 0.0), num_layers)
    most = np.minimum(np.divide(room, left, out=np.full_like(room, np.inf), where=left > 0.0), num_layers)
    price = np.divide(layer_bytes, saved_bytes, out=np.zeros_like(room), where=saves)
    order = np.argsort(price, axis=0)  # stages that save nothing take nothing beyond what is free
    more = np.take_along_axis(np.where(saves, most - free, 0.0), order, axis=0)
    lacking = np.maximum(num_layers * (1.0 - ROUNDING) - free.sum(axis=0), 0.0)
    taken = np.clip(lacking - (np.cumsum(more, axis=0) - more), 0.0, more)
    least = (taken * np.take_along_axis(price, order, axis=0)).sum(axis=0) * (1.0 - ROUNDING)
    return np.where(fits & (more.sum(axis=0) >= lacking), least, np.inf)
