"""How many copies of each expert: replica counts for all layers at once.

Only the counts decide the largest piece (load / replicas) that some device must take, and the number of ways in which
pieces can be combined. Every function respects 1 ≤ count ≤ devices, so that no device needs two copies.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray


def greedy_counts(load: FloatArray, num_redundant: int, num_devices: int, *, shift: float = 0.0) -> IntArray:
    """Give each spare slot to the expert with the largest load / (replicas + shift).

    With shift 0 this is the replication rule of EPLB and minimises the largest piece (an exchange argument: a slot
    taken from its last receiver makes a piece at least as large as the largest one left). A positive shift spares
    slots on the heaviest experts and spends them on the middle ones.

    Args:
        load: [L, E].
        num_redundant: spare slots of each layer.
        num_devices: cap of each count.
        shift: see above.

    Returns:
        [L, E] replicas.
    """
    num_layers, num_experts = load.shape
    counts = np.ones((num_layers, num_experts), dtype=np.int64)
    rows = np.arange(num_layers)
    priority = load / (1.0 + shift)
    if num_devices == 1:
        return counts
    for _ in range(num_redundant):
        chosen = priority.argmax(axis=1)
        counts[rows, chosen] += 1
        now = counts[rows, chosen]
        priority[rows, chosen] = np.where(now < num_devices, load[rows, chosen] / (now + shift), -1.0)
    return counts


def filling_counts(load: FloatArray, num_redundant: int, num_devices: int, *, pieces_per_device: int) -> IntArray:
    """Copies that cut heavy experts into pieces of which ``pieces_per_device`` just fill a device.

    Two experts of 20 devices' load each in 30 copies leave no device room for both, and none full; in 20 copies they
    fill their devices. The slots that are left go to the lighter experts, greedily.

    Args:
        load: [L, E], normalised: a perfectly balanced device takes 1.
        num_redundant: spare slots of each layer.
        num_devices: cap of each count.
        pieces_per_device: see above.

    Returns:
        [L, E] replicas; the greedy ones in layers that lack the slots.
    """
    heavy = load * pieces_per_device > 1.0
    counts = np.where(heavy, np.ceil(load * pieces_per_device), 1.0)
    counts = np.clip(counts, 1, num_devices).astype(np.int64)
    left = num_redundant + load.shape[1] - counts.sum(axis=1)
    rows = np.flatnonzero(left > 0)
    priority = np.where(heavy & ~heavy.all(axis=1, keepdims=True), -1.0, load / counts)
    for _ in range(num_redundant):
        if not rows.size:
            break
        chosen = priority[rows].argmax(axis=1)
        spread = counts[rows, chosen] < num_devices
        counts[rows[spread], chosen[spread]] += 1
        left[rows[spread]] -= 1
        priority[rows, chosen] = np.where(
            counts[rows, chosen] < num_devices, load[rows, chosen] / counts[rows, chosen], -2.0
        )
        rows = rows[left[rows] > 0]
    unfit = left != 0
    if unfit.any():
        counts[unfit] = greedy_counts(load[unfit], num_redundant, num_devices)
    return counts


def pieces_in_order(load: FloatArray, counts: IntArray) -> IntArray:
    """[L, S] experts by falling load / count, the replicas of an expert side by side."""
    order = np.argsort(-(load / counts), axis=1, kind="stable")
    repeated = np.repeat(order.ravel(), np.take_along_axis(counts, order, axis=1).ravel())
    return repeated.reshape(load.shape[0], -1)
