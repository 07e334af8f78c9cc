"""Exact reassignment of one layer's slots to devices, for many layers (or trials) at once.

Given what each expert gains on each device, the best assignment of slots to devices of fixed capacity is a
transportation problem. An assignment is optimal exactly when no cycle of moves d₁ → d₂ → … → d₁, one slot leaving each
device, gains anything; a cycle of two is a swap. So: the best slot to send from each device to each other one gives a
G × G matrix; while the matrix has a cycle of positive gain, carry it out. Swaps are taken first, many at once.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.problem.objectives import LEAST_GAIN

NEVER = -1e18  # gain of a move that would make a duplicate


def reassign(slots: IntArray, gain: FloatArray) -> None:
    """Make the assignment the best one, in place.

    Args:
        slots: [B, G, s] expert in each slot.
        gain: [B, E, G] worth of a copy of each expert on each device.
    """
    num_devices = slots.shape[1]
    if num_devices == 1:
        return
    scale = np.abs(gain).max(axis=(1, 2), initial=0.0)
    rows = np.flatnonzero(scale > 0)
    # Each swap gains more than the least, so the loop ends; the cap only guards against a mistake in that argument.
    for _ in range(slots[0].size * num_devices):
        if not rows.size:
            break
        swapped = swap_best_pairs(slots, gain, rows, LEAST_GAIN * scale)
        stuck = np.setdiff1d(rows, swapped, assume_unique=True)
        rotated = [row for row in stuck if rotate_best_cycle(slots[row], gain[row], LEAST_GAIN * scale[row])]
        rows = np.concatenate([swapped, np.array(rotated, dtype=np.int64)])


def swap_best_pairs(slots: IntArray, gain: FloatArray, rows: IntArray, least: FloatArray) -> IntArray:
    """Carry out the best swap of each two devices that are each other's best partner; the rows that had any.

    Such pairs share no device, so their gains add up.
    """
    num_devices = slots.shape[1]
    best, sender = best_moves(slots[rows], gain[rows])
    swap = best + best.transpose(0, 2, 1)
    partner = swap.argmax(axis=2)
    worth = np.take_along_axis(swap, partner[..., None], axis=2)[..., 0]
    device = np.arange(num_devices)
    # The pair of the row's largest gain is always mutual, but for ties; a row left out by one is not lost, because
    # the search for longer cycles comes next and finds pairs as well.
    mutual = np.take_along_axis(partner, partner, axis=1) == device
    some, one = np.nonzero(mutual & (device < partner) & (worth > least[rows][:, None]))
    two = partner[some, one]
    place_one, place_two = sender[some, one, two], sender[some, two, one]
    where = rows[some]
    moved = slots[where, one, place_one].copy()
    slots[where, one, place_one] = slots[where, two, place_two]
    slots[where, two, place_two] = moved
    return np.unique(where)


def assign_greedily(gain: FloatArray, slots_per_device: int) -> IntArray:
    """[B, G, s] a first assignment of experts without copies: each asks for its best device that has room.

    A device takes those that gain most there; the others ask again.

    Args:
        gain: [B, E, G].
        slots_per_device: s, with G s = E.
    """
    num_rows, num_experts, num_devices = gain.shape
    slots = np.zeros((num_rows, num_devices, slots_per_device), dtype=np.int64)
    used = np.zeros(num_rows * num_devices, dtype=np.int64)
    open_gain = gain.copy()
    row, expert = (index.ravel() for index in np.indices((num_rows, num_experts)))
    while row.size:
        asked = open_gain[row, expert].argmax(axis=1)
        worth = gain[row, expert, asked]
        device = row * num_devices + asked
        order = np.lexsort((-worth, device))
        row, expert, device = row[order], expert[order], device[order]
        rank = np.arange(row.size) - np.searchsorted(device, device, side="left")
        taken = rank + used[device] < slots_per_device
        place = used[device] + rank
        slots.reshape(-1, slots_per_device)[device[taken], place[taken]] = expert[taken]
        np.add.at(used, device[taken], 1)
        full_row, full_device = np.divmod(np.flatnonzero(used >= slots_per_device), num_devices)
        open_gain[full_row, :, full_device] = -np.inf
        row, expert = row[~taken], expert[~taken]
    return slots


def best_moves(slots: IntArray, gain: FloatArray) -> tuple[FloatArray, IntArray]:
    """[B, G, G] most that one slot gains by moving from the first device to the second, and [B, G, G] which slot."""
    num_rows, num_devices, _ = slots.shape
    rows = np.arange(num_rows)[:, None, None]
    worth = gain[rows, slots]  # [B, G, s, G]
    device = np.arange(num_devices)
    here = worth[:, device, :, device].transpose(1, 0, 2)  # [B, G, s]
    move = worth - here[..., None]
    holds = np.zeros((num_rows, gain.shape[1], num_devices), dtype=bool)
    holds[rows, slots, device[None, :, None]] = True
    move[holds[rows, slots]] = NEVER
    sender = move.argmax(axis=2)
    return np.take_along_axis(move, sender[:, :, None, :], axis=2)[:, :, 0, :], sender


def rotate_best_cycle(slots: IntArray, gain: FloatArray, least: float) -> bool:
    """Carry out one cycle of three or more devices that gains more than ``least``; False when there is none.

    Longest walks by the Floyd–Warshall recurrence; it stops at the first device that gains by walking back to itself.
    """
    num_devices = slots.shape[0]
    best, sender = (array[0] for array in best_moves(slots[None], gain[None]))
    walk = best.copy()
    np.fill_diagonal(walk, 0.0)
    if walk.max() <= least:  # no slot gains by leaving, so no cycle does
        return False
    follow = np.tile(np.arange(num_devices), (num_devices, 1))
    for middle in range(num_devices):
        through = walk[:, middle, None] + walk[None, middle, :]
        better = through > walk + least
        follow = np.where(better, follow[:, middle, None], follow)
        walk = np.where(better, through, walk)
        closed = np.flatnonzero(np.diagonal(walk) > least)
        if closed.size:
            return _rotate(slots, sender, follow, int(closed[0]))
    return False


def _rotate(slots: IntArray, sender: IntArray, follow: IntArray, start: int) -> bool:
    """Move one slot along each step of the cycle that ``follow`` describes."""
    cycle = [start]
    while (device := int(follow[cycle[-1], start])) not in cycle:
        cycle.append(device)
    cycle = cycle[cycle.index(device) :]
    if len(cycle) == 1:
        return False
    leaving = [int(sender[one, two]) for one, two in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    experts = [int(slots[device, place]) for device, place in zip(cycle, leaving, strict=True)]
    for position, (device, place) in enumerate(zip(cycle, leaving, strict=True)):
        slots[device, place] = experts[position - 1]
    return True
