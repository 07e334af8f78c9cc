"""Exchanges between pairs of devices, many pairs at once.

Two devices hold 2s pieces; which s of them should the first one keep? Two neighbourhoods answer, by the size of s:

* every split, while there are at most :data:`MOST_SPLITS`: one matrix product gives the first device's load under each;
* otherwise every swap of one piece for one, and of two for two while these are at most :data:`MOST_SWAPS`.

A pair is judged by the distance of the first device's load from its fair part of what both hold: the sum stays, so the
busier of the two becomes less busy. Exchanges that put two copies of one expert on a device are ruled out.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Protocol

import numpy as np
from meshplan.planner.problems.expert_objectives import FloatArray, IntArray
from numpy.typing import NDArray

MOST_SPLITS = 500  # 12 pieces into 6 and 6 with one piece fixed: 462
MOST_SWAPS = 1300  # two for two with 9 slots a device: 36²
# Loads are normalised so that a perfectly balanced device takes 1; a distance above this is "never".
FORBIDDEN = np.float32(1e6)

# Gains below the rounding of double-precision sums are noise, and could go round in circles.
LEAST_RELATIVE_GAIN = 1e-12

# OpenBLAS runs a product of up to 2^18 multiplications on the calling thread. Larger ones wake its worker threads,
# which cost several times the processor time of these slim matrices; so products are cut into blocks of rows.
MOST_MULTIPLICATIONS = 2**18

SmallFloats = NDArray[np.float32]


def slim_product(left: SmallFloats, right: SmallFloats) -> SmallFloats:
    """``left @ right`` for a tall ``left``, in blocks of rows."""
    rows = left.shape[0]
    block = max(1, MOST_MULTIPLICATIONS // right.size)
    if rows <= block:
        return left @ right
    whole = rows - rows % block
    product = np.empty((rows, right.shape[1]), dtype=np.float32)
    np.matmul(
        left[:whole].reshape(-1, block, right.shape[0]), right, out=product[:whole].reshape(-1, block, right.shape[1])
    )
    np.matmul(left[whole:], right, out=product[whole:])
    return product


class Exchange(Protocol):
    """A neighbourhood of a pair of devices; N pairs at a time."""

    size: int  # exchanges looked at for one pair, a measure of the work

    def best(
        self, first: SmallFloats, second: SmallFloats, excess: SmallFloats, same: NDArray[np.bool_] | None
    ) -> tuple[IntArray, SmallFloats]:
        """The exchange that leaves the first device of each pair nearest to its fair part.

        Args:
            first: [N, s] piece sizes on the first device of each pair.
            second: [N, s] on the second.
            excess: [N] load of the first device above its fair part.
            same: [N, s, s] slot i of the first and slot j of the second hold copies of one expert; None for nowhere.

        Returns:
            [N] code of the exchange, and [N] what distance from the fair part it leaves.
        """
        ...

    def apply(self, items: IntArray, code: IntArray) -> IntArray:
        """[N, 2s] what the slots of both devices hold after the exchange ``code``, from what they hold before."""
        ...


class Splits:
    """Every split of the 2s pieces."""

    def __init__(self, slots_per_device: int, *, mirrored: bool) -> None:
        s = slots_per_device
        kept = [chosen for chosen in combinations(range(2 * s), s) if mirrored or 0 in chosen]
        inside = np.zeros((len(kept), 2 * s), dtype=bool)
        inside[np.repeat(np.arange(len(kept)), s), np.array(kept).ravel()] = True
        self.size = len(kept)
        # [K, 2s] the pieces that the first device keeps, then the others.
        self.order = np.argsort(~inside, axis=1, kind="stable")
        # [2s + 1, K] what an exchange adds to the first device's load; the last row adds the present excess.
        signs = np.ones((2 * s + 1, len(kept)), dtype=np.float32)
        signs[: 2 * s] = inside.T
        signs[:s] -= 1.0
        self.signs = signs
        # [s * s, K] slot i of the first and slot j of the second device end on one device.
        together = (inside[:, :s, None] == inside[:, None, s:]).reshape(len(kept), s * s)
        self.together = np.ascontiguousarray(together.T.astype(np.float32))

    def best(
        self, first: SmallFloats, second: SmallFloats, excess: SmallFloats, same: NDArray[np.bool_] | None
    ) -> tuple[IntArray, SmallFloats]:
        """See :class:`Exchange`."""
        distance = slim_product(np.concatenate([first, second, excess[:, None]], axis=1), self.signs)
        np.abs(distance, out=distance)
        if same is not None:
            flat = same.reshape(same.shape[0], -1)
            shared = np.flatnonzero(flat.any(axis=1))
            if shared.size:
                distance[shared] += FORBIDDEN * slim_product(flat[shared].astype(np.float32), self.together)
        code = distance.argmin(axis=1)
        return code, distance[np.arange(code.size), code]

    def apply(self, items: IntArray, code: IntArray) -> IntArray:
        """See :class:`Exchange`."""
        return np.take_along_axis(items, self.order[code], axis=1)


class Swaps:
    """Every swap of one piece for one, and of two for two where they are few."""

    def __init__(self, slots_per_device: int) -> None:
        s = slots_per_device
        self.slots_per_device = s
        groups = [[(slot, slot) for slot in range(s)]]
        if comb(s, 2) ** 2 <= MOST_SWAPS:
            groups.append(list(combinations(range(s), 2)))
        self.groups = [np.array(group) for group in groups]  # each [m, 2]: the slots that leave
        self.size = sum(len(group) ** 2 for group in self.groups)
        self.offsets = np.cumsum([0] + [len(group) ** 2 for group in self.groups])

    def best(
        self, first: SmallFloats, second: SmallFloats, excess: SmallFloats, same: NDArray[np.bool_] | None
    ) -> tuple[IntArray, SmallFloats]:
        """See :class:`Exchange`."""
        leaving, coming = first, second
        if same is not None:
            leaving = first + FORBIDDEN * same.any(axis=2)
            coming = second - FORBIDDEN * same.any(axis=1)
        codes, distances = [], []
        for group, offset in zip(self.groups, self.offsets, strict=False):
            out, back = leaving[:, group[:, 0]], coming[:, group[:, 0]]
            if group[0, 0] != group[0, 1]:
                out, back = out + leaving[:, group[:, 1]], back + coming[:, group[:, 1]]
            distance = (excess[:, None] - out)[:, :, None] + back[:, None, :]
            np.abs(distance, out=distance)
            flat = distance.reshape(distance.shape[0], -1)
            chosen = flat.argmin(axis=1)
            codes.append(chosen + offset)
            distances.append(flat[np.arange(chosen.size), chosen])
        pick = np.arange(codes[0].size)
        nearest = np.array(distances).argmin(axis=0)
        return np.array(codes)[nearest, pick], np.array(distances)[nearest, pick]

    def apply(self, items: IntArray, code: IntArray) -> IntArray:
        """See :class:`Exchange`."""
        after = items.copy()
        for group, low, high in zip(self.groups, self.offsets[:-1], self.offsets[1:], strict=True):
            rows = np.flatnonzero((code >= low) & (code < high))
            out, back = np.divmod(code[rows] - low, len(group))
            for place in range(group.shape[1]):
                mine, theirs = group[out, place], self.slots_per_device + group[back, place]
                after[rows, mine], after[rows, theirs] = items[rows, theirs], items[rows, mine]
        return after


@lru_cache(maxsize=32)
def exchange_for(slots_per_device: int, *, mirrored: bool) -> Exchange:
    """The neighbourhood for s slots a device.

    Args:
        slots_per_device: s.
        mirrored: the devices differ in speed, so a split and its mirror image are two different exchanges.
    """
    splits = comb(2 * slots_per_device, slots_per_device) // (1 if mirrored else 2)
    if splits <= MOST_SPLITS:
        return Splits(slots_per_device, mirrored=mirrored)
    return Swaps(slots_per_device)


class PairBalancer:
    """Rows of placements (a row is one layer, or one trial of a layer) that improve by exchanges.

    Args:
        slots: [B, G, s] expert in each slot; changed in place.
        sizes: [B, E] load / replicas of each expert over the mean load of a unit of speed.
        speed: [G].
    """

    def __init__(self, slots: IntArray, sizes: FloatArray, speed: FloatArray) -> None:
        self.slots = slots
        self.sizes = sizes
        self.small_sizes = sizes.astype(np.float32)
        self.speed = speed
        self.uniform = bool(np.all(speed == speed[0]))
        self.has_copies = slots.shape[1] * slots.shape[2] > sizes.shape[1]
        self.exchange = exchange_for(slots.shape[2], mirrored=not self.uniform)
        rows = np.arange(slots.shape[0])[:, None, None]
        self.load = sizes[rows, slots].sum(axis=2)
        self.time = self.load / speed

    def improve(self, row: IntArray, first: IntArray, second: IntArray, *, partners: int) -> IntArray:
        """Exchange between pairs of devices where the busier one gains.

        Args:
            row: [N] row of each pair.
            first: [N] first device of each pair.
            second: [N] second device; no device may occur twice in a row but ``first`` in a run of ``partners`` pairs.
            partners: pairs that belong together, of which only the best one is carried out.

        Returns:
            The rows that changed (with repetitions).
        """
        s = self.slots.shape[2]
        items = np.concatenate([self.slots[row, first], self.slots[row, second]], axis=1)
        piece = self.small_sizes[row[:, None], items]
        together = self.load[row, first] + self.load[row, second]
        speeds = self.speed[first] + self.speed[second]
        excess = self.load[row, first] - together * (self.speed[first] / speeds)
        same = items[:, :s, None] == items[:, None, s:] if self.has_copies else None
        code, distance = self.exchange.best(piece[:, :s], piece[:, s:], excess.astype(np.float32), same)
        outcome = together / speeds + distance / np.minimum(self.speed[first], self.speed[second])
        picked = np.arange(0, row.size, partners) + outcome.reshape(-1, partners).argmin(axis=1)
        before = np.maximum(self.time[row[picked], first[picked]], self.time[row[picked], second[picked]])
        picked = picked[outcome[picked] < before]
        return self._carry_out(
            row[picked], first[picked], second[picked], self.exchange.apply(items[picked], code[picked])
        )

    def _carry_out(self, row: IntArray, first: IntArray, second: IntArray, items: IntArray) -> IntArray:
        """Make the exchanges that still gain when summed in double precision."""
        s = self.slots.shape[2]
        size = self.sizes[row[:, None], items]
        load_first, load_second = size[:, :s].sum(axis=1), size[:, s:].sum(axis=1)
        time_first, time_second = load_first / self.speed[first], load_second / self.speed[second]
        before = np.maximum(self.time[row, first], self.time[row, second])
        kept = np.maximum(time_first, time_second) < before * (1.0 - LEAST_RELATIVE_GAIN)
        row, first, second = row[kept], first[kept], second[kept]
        self.slots[row, first], self.slots[row, second] = items[kept, :s], items[kept, s:]
        self.load[row, first], self.load[row, second] = load_first[kept], load_second[kept]
        self.time[row, first], self.time[row, second] = time_first[kept], time_second[kept]
        return row
