"""Local search around a fleet: one replica out for up to two in, or two out for up to one, filtered by known cuts.

Every price vector w that the relaxation has used gives a valid inequality Σ_g u_g · w_g · m_g ≥ L(w), which every
feasible fleet satisfies. Checking candidates against the few hundred most recent cuts discards almost all cheaper
neighbours without solving a routing problem. The survivors are routed in order of decreasing slack; each infeasible one
adds the cut that excludes it.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.gpu_allocation.replicas.instance import Instance
from meshplan.planner.gpu_allocation.replicas.relaxation import WHOLE, balance

# Cuts kept: the newest, which come from the boxes now searched.
_MOST_CUTS = 400
# Cuts with the least slack at the given fleet, against which neighbours are filtered first.
_NARROW_CUTS = 40
# Routings tried in one round of exchanges.
_MOST_TRIALS = 12
# Estimated seconds to list and filter the neighbours of a fleet.
_FILTER_S, _FILTER_S_PER_ENTRY = 0.004, 1.5e-7


class CutPool:
    """Valid inequalities a · m ≥ 1 on the usable replicas of a fleet."""

    def __init__(self, num_types: int) -> None:
        self._cuts: list[FloatArray] = []
        self._num_types = num_types

    def add(self, cut: FloatArray) -> None:
        """Keep cut · m ≥ 1."""
        self._cuts.append(cut)
        if len(self._cuts) > 2 * _MOST_CUTS:
            del self._cuts[:_MOST_CUTS]

    def matrix(self) -> FloatArray:
        """[cuts, types] a of the remembered inequalities a · m ≥ 1."""
        return np.array(self._cuts[-_MOST_CUTS:]).reshape(-1, self._num_types)


def improve(
    instance: Instance, usable: FloatArray, cost: float, cutoff: float, pool: CutPool
) -> tuple[FloatArray | None, float]:
    """Look for a fleet cheaper than ``cutoff`` around ``usable``.

    Args:
        instance: the problem.
        usable: [types] a feasible fleet.
        cost: what it costs, USD/h.
        cutoff: what the new one may cost at most, USD/h.
        pool: cuts; each infeasible candidate adds one.

    Returns:
        The fleet found, or None, and the estimated work, s.
    """
    candidates = _cheaper_neighbours(instance, usable, cost, cutoff)
    work_s = _FILTER_S + _FILTER_S_PER_ENTRY * candidates.size
    cuts = pool.matrix()
    cuts = cuts[np.argsort(cuts @ usable, kind="stable")]  # the tightest here exclude most neighbours
    narrow, rest = cuts[:_NARROW_CUTS], cuts[_NARROW_CUTS:]
    candidates = candidates[_room(candidates, narrow) >= 1.0 - WHOLE]
    room = np.minimum(_room(candidates, narrow), _room(candidates, rest))
    for _ in range(_MOST_TRIALS):
        left = room >= 1.0 - WHOLE
        candidates, room = candidates[left], room[left]
        if not len(candidates):
            break
        chosen = int(room.argmax())
        routed = balance(instance.load, instance.utilization * candidates[chosen], decide=True)
        if routed is not None:
            work_s += routed.work_s
            if routed.peak <= 1.0:
                return candidates[chosen], work_s
            cut = instance.utilization * routed.prices / routed.least
            pool.add(cut)
            room = np.minimum(room, candidates @ cut)
        room[chosen] = 0.0
    return None, work_s


def _room(candidates: FloatArray, cuts: FloatArray) -> FloatArray:
    """[candidates] the least slack of each over the cuts."""
    if not len(cuts):
        return np.full(len(candidates), np.inf)
    room: FloatArray = (candidates @ cuts.T).min(axis=1)
    return room


def _cheaper_neighbours(instance: Instance, usable: FloatArray, cost: float, cutoff: float) -> FloatArray:
    """[neighbours, types] fleets that cost less than ``cutoff``, a change of one or two replicas away."""
    most, price = instance.most, instance.price
    changes = _changes(len(price), np.flatnonzero(usable > 0).tolist(), np.flatnonzero(usable < most).tolist())
    if instance.spare == 0:  # prefilter without the spares' steps
        changes = changes[cost + changes @ price < cutoff]
    fleets: FloatArray = usable + changes
    legal: npt.NDArray[np.bool_] = np.all((fleets >= 0) & (fleets <= most), axis=1)
    fleets = fleets[legal]
    costs = (fleets + instance.spare * (fleets > 0)) @ price
    return fleets[costs < cutoff]


def _changes(num_types: int, out: list[int], into: list[int]) -> FloatArray:
    """[changes, types]: one replica out and up to two in, or two out and up to one in."""

    def steps(types: list[int], sizes: tuple[int, ...]) -> FloatArray:
        rows = [
            np.bincount(chosen, minlength=num_types) if chosen else np.zeros(num_types)
            for size in sizes
            for chosen in combinations_with_replacement(types, size)
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, num_types)

    def pairs(removed: FloatArray, added: FloatArray) -> FloatArray:
        crossed: FloatArray = (added[None, :, :] - removed[:, None, :]).reshape(-1, num_types)
        return crossed

    return np.concatenate(
        [pairs(steps(out, (1,)), steps(into, (0, 1, 2))), pairs(steps(out, (2,)), steps(into, (0, 1)))]
    )
