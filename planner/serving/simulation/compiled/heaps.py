"""Binary heaps in parts of arrays: the same order as :mod:`heapq`, since no two keys are equal."""

from __future__ import annotations

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.simulation.compiled.jit import machine_code


@machine_code
def push(heap: IntArray, num: int, key: int) -> None:
    """Add a key to a heap of ``num``."""
    place = num
    while place > 0:
        above = (place - 1) >> 1
        if heap[above] <= key:
            break
        heap[place] = heap[above]
        place = above
    heap[place] = key


@machine_code
def pop(heap: IntArray, num: int) -> int:
    """Take the least key from a heap of ``num``."""
    least = heap[0]
    _sink(heap, num - 1, 0, heap[num - 1])
    return least


@machine_code
def discard(heap: IntArray, num: int, key: int) -> None:
    """Take ``key``, which is there, from a heap of ``num``."""
    place = 0
    while heap[place] != key:
        place += 1
    last = heap[num - 1]
    if place == num - 1:
        return
    while place > 0 and heap[(place - 1) >> 1] > last:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    _sink(heap, num - 1, place, last)


@machine_code
def _sink(heap: IntArray, num: int, place: int, key: int) -> None:
    """Put a key where nothing is, and let smaller ones rise."""
    while True:
        below = 2 * place + 1
        if below >= num:
            break
        if below + 1 < num and heap[below + 1] < heap[below]:
            below += 1
        if key <= heap[below]:
            break
        heap[place] = heap[below]
        place = below
    if num > 0:
        heap[place] = key


@machine_code
def push_timed(times: FloatArray, keys: IntArray, num: int, time: float, key: int) -> None:
    """Add a time and a key to a heap of ``num`` such pairs."""
    place = num
    while place > 0:
        above = (place - 1) >> 1
        if times[above] < time or (times[above] == time and keys[above] <= key):
            break
        times[place], keys[place] = times[above], keys[above]
        place = above
    times[place], keys[place] = time, key


@machine_code
def pop_timed(times: FloatArray, keys: IntArray, num: int) -> None:
    """Take the earliest pair from a heap of ``num``; read it at place 0 before."""
    time, key, place = times[num - 1], keys[num - 1], 0
    while True:
        below = 2 * place + 1
        if below >= num - 1:
            break
        right = below + 1
        if right < num - 1 and (
            times[right] < times[below] or (times[right] == times[below] and keys[right] < keys[below])
        ):
            below = right
        if time < times[below] or (time == times[below] and key <= keys[below]):
            break
        times[place], keys[place] = times[below], keys[below]
        place = below
    times[place], keys[place] = time, key
