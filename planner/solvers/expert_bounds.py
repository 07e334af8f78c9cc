"""Times that no placement can beat."""

from __future__ import annotations

import numpy as np
from meshplan.planner.problems.expert_objectives import FloatArray
from meshplan.planner.solvers.expert_replicas import greedy_counts


def time_bound(load: FloatArray, num_redundant: int, speed: FloatArray) -> FloatArray:
    """[L] lower bound on the time of the busiest device, in units of the ideal time.

    Two arguments: the mean over devices is 1 whatever the placement; and some device takes the largest piece, which
    no counts make smaller than the greedy ones do, along with s − 1 others, each at least an expert divided by all
    the copies it could have.

    Args:
        load: [L, E], normalised.
        num_redundant: spare slots of a layer.
        speed: [G].
    """
    num_devices = speed.size
    counts = greedy_counts(load, num_redundant, num_devices)
    largest = (load / counts).max(axis=1)
    per_device = (load.shape[1] + num_redundant) // num_devices
    most_copies = min(1 + num_redundant, num_devices)
    others = np.sort(load, axis=1)[:, : per_device - 1].sum(axis=1) / most_copies
    bound: FloatArray = np.maximum((largest + others) / speed.max(), (load.sum(axis=1) > 0).astype(np.float64))
    return bound
