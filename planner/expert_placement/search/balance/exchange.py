"""Exchanges between pairs of devices, many pairs at once.

Two devices hold 2s pieces; an exchange decides which s of them the first one keeps. The neighbourhood depends on s:

* every split, while there are at most :data:`MOST_SPLITS`: one matrix product gives the first device's load under each;
* otherwise every swap of one piece for one, and of two for two (a sample, where these exceed :data:`MOST_SWAPS`).

A pair is judged by the distance of the first device's load from its fair part of what both hold: the sum stays, so the
busier of the two becomes less busy. Exchanges that put two copies of one expert on a device are ruled out.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from math import comb, isqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import FloatArray, IntArray

MOST_SPLITS = 500  # 12 pieces into 6 and 6 with one piece fixed: 462
# Overhead of a pair of devices (gathering its pieces, carrying out the best), counted in exchanges …
PAIR_OVERHEAD = 100
# … and the cost of each load case where there are several, relative to a single one.
PASSES_PER_CASE = 2
MOST_SWAPS = 1300  # two for two with 9 slots a device: 36²
# Loads are normalised so that a perfectly balanced device takes 1; a distance above this is "never".
FORBIDDEN = np.float32(1e6)

# Gains below the rounding of double-precision sums are noise, and could cycle.
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
    """A neighbourhood of K exchanges between two devices; N pairs of devices at a time."""

    size: int  # K

    def outcomes(self, first: SmallFloats, second: SmallFloats, before: SmallFloats) -> SmallFloats:
        """[N, K] load of the first device after each exchange.

        Args:
            first: [N, s] piece sizes on the first device of each pair.
            second: [N, s] on the second.
            before: [N] load of the first device (or that load less a constant, which the outcome then is less, too).
        """
        ...

    def forbid(self, cost: SmallFloats, same: NDArray[np.bool_]) -> None:
        """Make exchanges that put two copies of an expert on a device too costly.

        Args:
            cost: [N, K] what each exchange costs; changed in place.
            same: [N, s, s] slot i of the first and slot j of the second device hold copies of one expert.
        """
        ...

    def apply(self, items: IntArray, code: IntArray) -> IntArray:
        """[N, 2s] what the slots of both devices hold after the exchange ``code`` [N], from what they hold before."""
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
        # [2s + 1, K] what each piece, and the load before, adds to the first device's load.
        signs = np.ones((2 * s + 1, len(kept)), dtype=np.float32)
        signs[: 2 * s] = inside.T
        signs[:s] -= 1.0
        self.signs = signs
        # [s * s, K] slot i of the first and slot j of the second device end on one device.
        together = (inside[:, :s, None] == inside[:, None, s:]).reshape(len(kept), s * s)
        self.together = np.ascontiguousarray(together.T.astype(np.float32))

    def outcomes(self, first: SmallFloats, second: SmallFloats, before: SmallFloats) -> SmallFloats:
        """See :class:`Exchange`."""
        return slim_product(np.concatenate([first, second, before[:, None]], axis=1), self.signs)

    def forbid(self, cost: SmallFloats, same: NDArray[np.bool_]) -> None:
        """See :class:`Exchange`."""
        flat = same.reshape(same.shape[0], -1)
        shared = np.flatnonzero(flat.any(axis=1))
        if shared.size:
            cost[shared] += FORBIDDEN * slim_product(flat[shared].astype(np.float32), self.together)

    def apply(self, items: IntArray, code: IntArray) -> IntArray:
        """See :class:`Exchange`."""
        return np.take_along_axis(items, self.order[code], axis=1)


class Swaps:
    """Every swap of one piece for one, and swaps of two for two."""

    def __init__(self, slots_per_device: int) -> None:
        s = slots_per_device
        self.slots_per_device = s
        twos = np.array(list(combinations(range(s), 2)))
        if twos.shape[0] ** 2 > MOST_SWAPS:
            # Slots are in no particular order, so any fixed sample of their pairs is as good as another.
            twos = np.random.default_rng(s).permutation(twos)[: isqrt(MOST_SWAPS)]
        self.groups = [np.repeat(np.arange(s)[:, None], 2, axis=1), twos]  # each [m, 2]: the slots that leave
        self.size = sum(len(group) ** 2 for group in self.groups)
        self.offsets = np.cumsum([0] + [len(group) ** 2 for group in self.groups])

    def outcomes(self, first: SmallFloats, second: SmallFloats, before: SmallFloats) -> SmallFloats:
        """See :class:`Exchange`."""
        result = np.empty((first.shape[0], self.size), dtype=np.float32)
        for group, low, high in zip(self.groups, self.offsets[:-1], self.offsets[1:], strict=True):
            out, back = first[:, group[:, 0]], second[:, group[:, 0]]
            if group[0, 0] != group[0, 1]:
                out, back = out + first[:, group[:, 1]], back + second[:, group[:, 1]]
            block = result[:, low:high].reshape(first.shape[0], len(group), len(group))
            np.add((before[:, None] - out)[:, :, None], back[:, None, :], out=block)
            result[:, low:high] = block.reshape(first.shape[0], -1)
        return result

    def forbid(self, cost: SmallFloats, same: NDArray[np.bool_]) -> None:
        """See :class:`Exchange`."""
        shared = np.flatnonzero(same.any(axis=(1, 2)))
        if not shared.size:
            return
        stays_first: NDArray[np.bool_] = np.logical_or.reduce(same[shared], axis=2)
        stays_second: NDArray[np.bool_] = np.logical_or.reduce(same[shared], axis=1)
        for group, low, high in zip(self.groups, self.offsets[:-1], self.offsets[1:], strict=True):
            out: NDArray[np.bool_] = np.logical_or.reduce(stays_first[:, group], axis=2)
            back: NDArray[np.bool_] = np.logical_or.reduce(stays_second[:, group], axis=2)
            forbidden = (out[:, :, None] | back[:, None, :]).reshape(shared.size, -1)
            cost[shared, low:high] += FORBIDDEN * forbidden

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
    """The neighbourhood for s slots per device.

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
        sizes: [C, B, E] load / replicas of each expert over the mean load of a unit of speed, in each load case.
        speed: [G].
    """

    def __init__(self, slots: IntArray, sizes: FloatArray, speed: FloatArray) -> None:
        self.slots = slots
        self.sizes = sizes
        self.small_sizes = sizes.astype(np.float32)
        self.speed = speed
        self.has_copies = slots.shape[1] * slots.shape[2] > sizes.shape[2]
        self.exchange = exchange_for(slots.shape[2], mirrored=not np.all(speed == speed[0]))
        rows = np.arange(slots.shape[0])[:, None, None]
        self.load = sizes[:, rows, slots].sum(axis=3)  # [C, B, G]
        self.time = (self.load / speed).max(axis=0)  # [B, G], the worst case

    def improve(self, row: IntArray, first: IntArray, second: IntArray, *, partners: int) -> None:
        """Exchange between pairs of devices where the busier one gains.

        Args:
            row: [N] row of each pair.
            first: [N] first device of each pair.
            second: [N] second device; no device may occur twice in a row but ``first`` in a run of ``partners`` pairs.
            partners: pairs that belong together, of which only the best one is carried out.
        """
        s = self.slots.shape[2]
        items = np.concatenate([self.slots[row, first], self.slots[row, second]], axis=1)
        piece = self.small_sizes[:, row[:, None], items]
        one_case = self.load.shape[0] == 1
        cost = (self._cost_one_case if one_case else self._cost_all_cases)(piece, row, first, second)
        if self.has_copies:
            self.exchange.forbid(cost, items[:, :s, None] == items[:, None, s:])
        code = cost.argmin(axis=1)
        outcome = cost[np.arange(code.size), code]
        if one_case:
            speeds = self.speed[first] + self.speed[second]
            fair = (self.load[0, row, first] + self.load[0, row, second]) / speeds
            outcome = fair + outcome / np.minimum(self.speed[first], self.speed[second])
        picked = np.arange(0, row.size, partners) + outcome.reshape(-1, partners).argmin(axis=1)
        before = np.maximum(self.time[row[picked], first[picked]], self.time[row[picked], second[picked]])
        picked = picked[outcome[picked] < before]
        items = self.exchange.apply(items[picked], code[picked])
        self._carry_out(row[picked], first[picked], second[picked], items)

    def work_of(self, num_pairs: int) -> float:
        """Exchanges looked at for so many pairs, overheads included; a measure of processor time."""
        num_cases = self.load.shape[0]
        passes = 1 if num_cases == 1 else PASSES_PER_CASE * num_cases
        return num_pairs * (self.exchange.size * passes + PAIR_OVERHEAD)

    def _cost_one_case(self, piece: SmallFloats, row: IntArray, first: IntArray, second: IntArray) -> SmallFloats:
        """[N, K] distance of the first device's load from its fair part: the nearer, the less busy the busier one."""
        s = self.slots.shape[2]
        mine, theirs = self.load[0, row, first], self.load[0, row, second]
        excess = mine - (mine + theirs) * (self.speed[first] / (self.speed[first] + self.speed[second]))
        cost = self.exchange.outcomes(piece[0, :, :s], piece[0, :, s:], excess.astype(np.float32))
        np.abs(cost, out=cost)
        return cost

    def _cost_all_cases(self, piece: SmallFloats, row: IntArray, first: IntArray, second: IntArray) -> SmallFloats:
        """[N, K] time of the busier device in the worst load case."""
        s = self.slots.shape[2]
        inverse_first = (1.0 / self.speed[first]).astype(np.float32)[:, None]
        inverse_second = (1.0 / self.speed[second]).astype(np.float32)[:, None]
        cost = np.zeros((row.size, self.exchange.size), dtype=np.float32)
        for case in range(piece.shape[0]):
            mine = self.load[case, row, first].astype(np.float32)
            together = mine + self.load[case, row, second].astype(np.float32)
            load = self.exchange.outcomes(piece[case, :, :s], piece[case, :, s:], mine)
            np.maximum(cost, load * inverse_first, out=cost)
            np.subtract(together[:, None], load, out=load)
            load *= inverse_second
            np.maximum(cost, load, out=cost)
        return cost

    def _carry_out(self, row: IntArray, first: IntArray, second: IntArray, items: IntArray) -> None:
        """Make the exchanges that still gain when summed in double precision."""
        s = self.slots.shape[2]
        size = self.sizes[:, row[:, None], items]
        load_first, load_second = size[..., :s].sum(axis=2), size[..., s:].sum(axis=2)
        time_first = (load_first / self.speed[first]).max(axis=0)
        time_second = (load_second / self.speed[second]).max(axis=0)
        before = np.maximum(self.time[row, first], self.time[row, second])
        kept = np.maximum(time_first, time_second) < before * (1.0 - LEAST_RELATIVE_GAIN)
        row, first, second = row[kept], first[kept], second[kept]
        self.slots[row, first], self.slots[row, second] = items[kept, :s], items[kept, s:]
        self.load[:, row, first], self.load[:, row, second] = load_first[:, kept], load_second[:, kept]
        self.time[row, first], self.time[row, second] = time_first[kept], time_second[kept]
