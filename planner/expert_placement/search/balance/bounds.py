"""Lower bounds on the time of the busiest device."""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.expert_placement.search.balance.replicas import greedy_counts


def time_bound(load: FloatArray, num_redundant: int, speed: FloatArray) -> FloatArray:
    """[L] lower bound on the time of the busiest device, in units of the ideal time.

    Three arguments: the mean over devices is 1 whatever the placement; some device takes the largest piece, which no
    counts make smaller than the greedy ones do, along with s − 1 others, each at least an expert divided by all the
    copies it could have; and, without copies, :func:`crowding_bound`.

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
    if num_redundant == 0 and per_device > 1:
        bound = np.maximum(bound, crowding_bound(load, num_devices) / speed.max())
    return bound


def crowding_bound(load: FloatArray, num_devices: int) -> FloatArray:
    """[L] load that some device must take when every expert has one copy and every device s > 1 of them.

    For each i: either two of the i largest experts share a device, which then holds the (i − 1)-th and the i-th largest
    at least, and s − 2 more; or they lie on i devices, which hold i (s − 1) other experts, and the busiest of these
    takes their mean at least. The smaller of the two is a bound; more than G experts always share.

    Args:
        load: [L, E].
        num_devices: G.
    """
    num_layers, num_experts = load.shape
    per_device = num_experts // num_devices
    largest = -np.sort(-load, axis=1)
    smallest = np.concatenate([np.zeros((num_layers, 1)), np.cumsum(largest[:, ::-1], axis=1)], axis=1)
    rank = np.arange(1, num_devices + 1)
    spread = (np.cumsum(largest, axis=1)[:, :num_devices] + smallest[:, rank * (per_device - 1)]) / rank
    shared = largest[:, :num_devices] + largest[:, 1 : num_devices + 1] + smallest[:, per_device - 2, None]
    # Column i − 1 of `shared` is about the ranks i and i + 1, hence the i + 1 largest experts.
    either = np.minimum(spread[:, 1:], shared[:, :-1])
    bound: FloatArray = np.maximum(np.maximum(spread[:, 0], shared[:, -1]), either.max(axis=1, initial=0.0))
    return bound
