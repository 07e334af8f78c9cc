"""Least stage-to-stage messages of decided pools, whatever their order and the split of the layers.

A pool in use lies beside another one, so that some stage waits for half of the cheaper crossing with every micro-batch.
A pool that must hold n stages, because the others cannot hold the layers, has n − 1 boundaries inside, and from three
stages on one with two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE
from meshplan.planner.training.mixed.bounds import Relaxed
from meshplan.planner.training.mixed.estimator import boundary_bytes, hop_s
from meshplan.planner.training.mixed.options import PoolOptions
from meshplan.planner.training.mixed.stages import MixedProblem
from meshplan.planner.training.problem.schedules import SCHEDULES

SCHEDULE = "1f1b"
# Stages from which on one of them has two boundaries inside the pool.
THREE = 3


def least_messages_s(
    problem: MixedProblem, options: Sequence[PoolOptions | None], table: Relaxed, chosen: Sequence[IntArray | None]
) -> FloatArray:
    """Lower bound of the exposed messages of each decision, [n]."""
    share = UNHIDDEN_SHARE if SCHEDULES[SCHEDULE].hides_neighbour_messages else 1.0
    waits = share * (table.num_microbatches - 1)
    rows = [np.zeros(1, np.int64) if one is None else one for one in chosen]
    devices, per_stage = [], []
    for own, rows_of, row in zip(options, table.pools, rows, strict=True):
        of_stage = np.zeros(len(rows_of.rows))
        if own is not None:
            of_stage[rows_of.rows >= 0] = own.devices[rows_of.rows[rows_of.rows >= 0]]
        devices.append(of_stage[row])
        per_stage.append(rows_of.capacity[row, -1] / np.maximum(rows_of.stages[row], 1.0))
    held = np.stack([one.capacity[row, -1] for one, row in zip(table.pools, rows, strict=True)])
    sequences = problem.any.workload.global_batch_size // table.num_microbatches
    whole = boundary_bytes(problem, sequences, 1)
    least = np.zeros(held.shape[1])
    for pool, own_devices in enumerate(devices):
        used = own_devices > 0
        others = held.sum(axis=0) - held[pool]
        needed = np.ceil((table.num_layers - others) / np.maximum(per_stage[pool], 1e-9))
        hop = _hops_s(problem, pool, pool, whole, own_devices, own_devices)
        inside = np.where(needed >= THREE, waits, waits / 2.0) + needed - 1.0
        least = np.maximum(least, np.where(used & (needed > 1), inside * hop, 0.0))
        crossing = np.full(len(used), np.inf)
        for other, other_devices in enumerate(devices):
            if other != pool:
                hop = _hops_s(problem, pool, other, whole, own_devices, other_devices)
                crossing = np.minimum(crossing, np.where(other_devices > 0, hop, np.inf))
        beside = used & np.isfinite(crossing)
        least = np.maximum(least, np.where(beside, (1.0 + waits / 2.0) * np.where(beside, crossing, 0.0), 0.0))
    return least


def _hops_s(
    problem: MixedProblem, first: int, second: int, whole: float, devices: FloatArray, others: FloatArray
) -> FloatArray:
    """Round trip between stages of two pools, or over the cheapest boundary inside one, [n]."""
    fewer = np.maximum(np.minimum(devices, others), 1.0)
    near, far = hop_s(problem, first, second, 0.0)
    near_byte, far_byte = (
        one - zero for one, zero in zip(hop_s(problem, first, second, 1.0), (near, far), strict=True)
    )
    outside = far + whole / fewer * far_byte
    if first != second:
        return outside
    inside = near + whole / fewer * near_byte
    # Stages no smaller than a node have nothing but boundaries between nodes.
    return np.where(devices >= problem.pools[first].machine.domain_size, outside, np.minimum(inside, outside))
