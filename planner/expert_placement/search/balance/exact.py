"""The provably best placement of small layers (Mixtral sizes): all replica counts, then packing by depth-first search.

For each vector of counts (1 ≤ c_e ≤ G, Σ c = S) the pieces load / c are known, and a packing of them is looked for that
is better than the incumbent. A vector is discarded unseen when a simple bound on its packings reaches the incumbent:

* largest piece plus the s − 1 smallest ones of other experts;
* s = 2: the i-th largest piece together with the i-th smallest, for each i (some device holds a pair at least as
  large: among the i largest pieces one must meet a piece outside the i − 1 smallest, or two of them meet).

The search fills the device of the largest piece left. Its companions must keep the device below the incumbent *and*
above what the other devices could not carry. States that failed (the copies left of each expert) are not tried twice.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

MOST_COUNT_VECTORS = 20_000
MOST_SLOTS = 24
# States visited in one layer before it is left with a gap.
MOST_STATES = 20_000
PAIR = 2  # slots per device for which the pairing bound holds
# Improvements smaller than this are rounding.
LEAST_GAIN = 1e-10
# The last device takes exactly what is left, give or take the rounding of the sums.
ROUNDING = 1e-9


def is_small(num_experts: int, num_redundant: int, num_devices: int) -> bool:
    """Whether a layer of this shape can be solved exactly."""
    return (
        num_experts + num_redundant <= MOST_SLOTS
        and comb(num_redundant + num_experts - 1, num_experts - 1) <= MOST_COUNT_VECTORS
        and num_devices > 1
    )


@lru_cache(maxsize=8)
def count_vectors(num_experts: int, num_redundant: int, num_devices: int) -> IntArray:
    """[N, E] every vector of counts."""
    if num_experts == 1:
        return np.array([[1 + num_redundant]], dtype=np.int64)
    bars = np.array(list(combinations(range(num_redundant + num_experts - 1), num_experts - 1)), dtype=np.int64)
    bars = bars.reshape(-1, num_experts - 1)
    edges = np.concatenate(
        [np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), num_redundant + num_experts - 1)], axis=1
    )
    counts: IntArray = np.diff(edges, axis=1)  # 1 + the spare slots of each expert
    legal: IntArray = counts[counts.max(axis=1) <= num_devices]
    return legal


def best_layer(
    load: FloatArray, num_redundant: int, num_devices: int, incumbent: float, floor: float
) -> tuple[IntArray | None, float]:
    """A better placement of one layer, and a bound on all placements.

    Args:
        load: [E], normalised.
        num_redundant: spare slots.
        num_devices: devices of equal speed.
        incumbent: time of the busiest device to beat.
        floor: a bound known already; a placement that meets it ends the search.

    Returns:
        [G, s] placement, None when the incumbent is not beaten; and a time that no placement can beat.
    """
    vectors = count_vectors(load.size, num_redundant, num_devices)
    piece = load / vectors
    promising = piece.max(axis=1) < incumbent
    vectors, piece = vectors[promising], piece[promising]
    bounds = packing_bounds(vectors, piece, num_devices)
    best, found = incumbent, None
    search = PackingSearch(num_devices, vectors.sum(axis=1).max(initial=num_devices) // num_devices)
    for index in np.argsort(bounds, kind="stable"):
        if bounds[index] >= best - LEAST_GAIN or best <= floor * (1.0 + LEAST_GAIN):
            break
        while (packed := search.better(vectors[index], piece[index], best - LEAST_GAIN)) is not None:
            found = packed
            best = float(piece[index][packed].sum(axis=1).max())
            if best <= max(bounds[index], floor) + LEAST_GAIN:
                break
        if search.states_left <= 0:
            return found, max(floor, min(best, float(bounds[index])))
    return found, best


def packing_bounds(vectors: IntArray, piece: FloatArray, num_devices: int) -> FloatArray:
    """[N] time that no packing of the pieces of each count vector can beat."""
    num_vectors, num_experts = vectors.shape
    num_slots = int(vectors[0].sum()) if num_vectors else num_devices
    per_device = num_slots // num_devices
    repeated = np.repeat(piece.ravel(), vectors.ravel()).reshape(num_vectors, num_slots)
    repeated.sort(axis=1)
    bound: FloatArray = np.maximum(repeated.sum(axis=1) / num_devices, repeated[:, -1])
    if per_device == PAIR:
        bound = np.maximum(bound, (repeated + repeated[:, ::-1]).max(axis=1))
    by_expert = np.sort(piece, axis=1)
    if per_device <= num_experts:
        bound = np.maximum(bound, by_expert[:, -1] + by_expert[:, : per_device - 1].sum(axis=1))
    return bound


class PackingSearch:
    """Depth-first search for a packing of given pieces; counts its states over all calls."""

    def __init__(self, num_devices: int, per_device: int) -> None:
        self.num_devices = num_devices
        self.per_device = per_device
        self.states_left = MOST_STATES

    def better(self, counts: IntArray, piece: FloatArray, limit: float) -> IntArray | None:
        """[G, s] a packing in which every device stays below ``limit``; None when there is none (or no time)."""
        order: IntArray = np.argsort(-piece, kind="stable")
        self.sizes = [float(size) for size in piece[order]]
        self.limit = limit
        self.failed: set[tuple[int, ...]] = set()
        left = [int(count) for count in counts[order]]
        devices: list[tuple[int, ...]] = []
        if not self._fill(left, self.num_devices, sum(s * c for s, c in zip(self.sizes, left, strict=True)), devices):
            return None
        packed: IntArray = order[np.array(devices)]
        return packed

    def _fill(self, left: list[int], devices_left: int, load_left: float, devices: list[tuple[int, ...]]) -> bool:
        """Fill the remaining devices from the copies ``left``; False when it cannot be done."""
        if devices_left == 0:
            return True
        state = tuple(left)
        if state in self.failed or self.states_left <= 0:
            return False
        self.states_left -= 1
        # A copy of every expert that has as many copies left as there are devices must go on each of them.
        present = [expert for expert, count in enumerate(left) if count]
        lead = present[0]
        must = [expert for expert in present if left[expert] == devices_left and expert != lead]
        free = [expert for expert in present[1:] if left[expert] < devices_left]
        room = self.per_device - 1 - len(must)
        base = self.sizes[lead] + sum(self.sizes[expert] for expert in must)
        least = load_left - (devices_left - 1) * self.limit - ROUNDING
        if room >= 0 and left[lead] <= devices_left:
            for companions in combinations(free, room):
                load = base + sum(self.sizes[expert] for expert in companions)
                if not least < load < self.limit:
                    continue
                chosen = (lead, *must, *companions)
                for expert in chosen:
                    left[expert] -= 1
                devices.append(chosen)
                if self._fill(left, devices_left - 1, load_left - load, devices):
                    return True
                devices.pop()
                for expert in chosen:
                    left[expert] += 1
        self.failed.add(state)
        return False
