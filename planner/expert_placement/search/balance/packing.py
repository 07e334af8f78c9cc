"""First placements: longest processing time first, and a round-robin order that is always legal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.search.balance.replicas import pieces_in_order


def assign_round_robin(counts: IntArray, num_devices: int) -> IntArray:
    """Assign the pieces to the devices in turn: always legal, for any counts from 1 to ``num_devices``.

    The copies of an expert follow each other, so at most ``num_devices`` of them go to as many different devices.

    Returns:
        [L, G, s] expert in each slot.
    """
    num_layers, num_experts = counts.shape
    repeated = np.repeat(np.tile(np.arange(num_experts), num_layers), counts.ravel()).reshape(num_layers, -1)
    return np.ascontiguousarray(repeated.reshape(num_layers, -1, num_devices).transpose(0, 2, 1))


def longest_first(
    load: FloatArray, counts: IntArray, device_speed: FloatArray, *, copies_may_meet: bool = False
) -> IntArray:
    """Place the pieces by falling size, each on the device that is least busy with it and has a free slot.

    This is the packing rule of EPLB with two changes: a device that holds a copy of the expert is skipped, and device
    speeds are taken into account. A layer that runs into a dead end (no device is left for a copy) is assigned
    round-robin.

    Args:
        load: [L, E].
        counts: [L, E] replicas.
        device_speed: [G].
        copies_may_meet: put two copies of an expert on one device, as EPLB does; the outcome is not legal.

    Returns:
        [L, G, s] expert in each slot.
    """
    num_layers = load.shape[0]
    num_devices = device_speed.size
    order = pieces_in_order(load, counts)
    num_slots = order.shape[1]
    per_device = num_slots // num_devices
    piece = np.take_along_axis(load / counts, order, axis=1)
    first_copy = np.ones(order.shape, dtype=bool)
    first_copy[:, 1:] = order[:, 1:] != order[:, :-1]
    any_copies: NDArray[np.bool_] = np.logical_or.reduce(~first_copy, axis=0) & (not copies_may_meet)

    rows = np.arange(num_layers)
    inverse_speed = 1.0 / device_speed
    uniform = bool(np.all(device_speed == device_speed[0]))
    busy = np.zeros((num_layers, num_devices))
    used = np.zeros((num_layers, num_devices), dtype=np.int64)
    blocked = np.zeros((num_layers, num_devices))
    slots = np.zeros((num_layers, num_devices, per_device), dtype=np.int64)
    for turn in range(num_slots):
        now = busy if uniform else busy + piece[:, turn, None] * inverse_speed
        if any_copies[turn] or (turn + 1 < num_slots and any_copies[turn + 1]):
            blocked[first_copy[:, turn]] = 0.0
            device = (now + blocked).argmin(axis=1)
            blocked[rows, device] = np.inf
        else:
            device = now.argmin(axis=1)
        place = np.minimum(used[rows, device], per_device - 1)
        slots[rows, device, place] = order[:, turn]
        used[rows, device] += 1
        grown = busy[rows, device] + piece[:, turn] * inverse_speed[device]
        busy[rows, device] = np.where(used[rows, device] >= per_device, np.inf, grown)
    return slots if copies_may_meet else replace_illegal(slots, used, counts)


def replace_illegal(slots: IntArray, used: IntArray, counts: IntArray) -> IntArray:
    """Layers whose devices are over-full or hold a duplicate, assigned round-robin instead."""
    by_device = np.sort(slots, axis=2)
    illegal = (used != slots.shape[2]).any(axis=1) | (by_device[..., 1:] == by_device[..., :-1]).any(axis=(1, 2))
    if illegal.any():
        slots[illegal] = assign_round_robin(counts[illegal], slots.shape[1])
    return slots
