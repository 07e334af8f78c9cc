"""Mappings with fast rings, stage by stage: cheap where few sets of d nodes have a fast ring.

A partial mapping of the first stages is extended by every set of the family whose nodes are free, whose complement can
still be divided into sets of the family, and by every matching of its nodes to the pipelines. It is dropped where some
pipeline's time and the cheapest path ahead of it through the free nodes leave no room under the target. With one or
two pipelines, partial mappings of the same nodes that are slower in every pipeline are dropped too: with one this is
the recursion of Held and Karp.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.rank_mapping.exact.found import Found
from meshplan.planner.rank_mapping.exact.tables import covered
from meshplan.planner.rank_mapping.objective import LinkCosts

MAX_PIPELINES = 5  # matchings of a stage: d!
MATCHINGS_AT_ONCE = 400_000
MOST_STATES = 1_000_000  # about 100 MB of partial mappings
PIPELINES_COMPARED = 2
NODE_BASE = 16  # of a key made of nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stages:
    """Partial mappings: used nodes [m] as bits, times [m, d], slowest ring [m], nodes [m, stages, d]."""

    used: IntArray
    times_s: FloatArray
    ring_s: FloatArray
    nodes: IntArray

    def take(self, rows: IntArray) -> _Stages:
        """Some of the rows."""
        return _Stages(
            used=self.used[rows], times_s=self.times_s[rows], ring_s=self.ring_s[rows], nodes=self.nodes[rows]
        )


class ByStages:
    """The enumeration of the module's text.

    Args:
        costs: link costs of at most 16 nodes.
        ahead_s: :func:`~meshplan.planner.rank_mapping.exact.tables.paths_ahead_s`.
        budget: of the whole answer; once it is spent, an enumeration gives up.
    """

    def __init__(self, costs: LinkCosts, ahead_s: list[FloatArray], budget: Budget) -> None:
        self.costs, self.ahead_s, self.budget = costs, ahead_s, budget
        self.everything = (1 << costs.num_nodes) - 1
        few = costs.num_pipelines <= MAX_PIPELINES
        self.orders = np.array(list(permutations(range(costs.num_pipelines))) if few else [], dtype=np.int64)

    def matchings(self, num_sets: int) -> float:
        """Roughly how many matchings of the first two stages a family of so many sets has; ∞ where d is too large."""
        nodes, size = self.costs.num_nodes, self.costs.num_pipelines
        if not len(self.orders):
            return np.inf
        apart = np.prod([(nodes - size - i) / (nodes - i) for i in range(size)])
        return float(num_sets**2 * apart * len(self.orders))

    def below(self, sets: IntArray, sets_s: FloatArray, *, least_ring_s: float, target_s: float, work: int) -> Found:
        """The best mapping faster than the target whose rings are all in the family.

        Args:
            sets: [m] the family: sets of d nodes.
            sets_s: [m] their ring times.
            least_ring_s: what the slowest ring is counted as at least; mappings with a faster one may be missed.
            target_s: time to beat.
            work: matchings to look at before giving up.
        """
        stages = self.costs.num_stages
        cover = covered(sets, self.costs.num_nodes, stages)
        kept = cover[self.everything ^ sets] & cover[-1]
        sets, sets_s = sets[kept], sets_s[kept]
        states = _Stages(
            used=np.zeros(1, dtype=np.int64),
            times_s=np.zeros((1, self.costs.num_pipelines)),
            ring_s=np.array([least_ring_s]),
            nodes=np.zeros((1, 0, self.costs.num_pipelines), dtype=np.int8),
        )
        done = 0
        for _ in range(stages):
            grown, more = self._next_stage(states, sets, sets_s, cover, target_s, work - done)
            done += more
            if grown is None or not len(grown.used):
                return Found(lines=None, value_s=target_s, finished=grown is not None, work=done)
            states = grown
        values = states.times_s.max(axis=1) + states.ring_s
        best = int(values.argmin())
        if values[best] >= target_s:  # by the rounding of sums in another order
            return Found(lines=None, value_s=target_s, finished=True, work=done)
        return Found(lines=states.nodes[best].astype(np.int64), value_s=float(values[best]), finished=True, work=done)

    def _next_stage(
        self, states: _Stages, sets: IntArray, sets_s: FloatArray, cover: BoolArray, target_s: float, work: int
    ) -> tuple[_Stages | None, int]:
        """Every extension by one stage, and the matchings looked at; None where there are too many."""
        stages, size = self.costs.num_stages, self.costs.num_pipelines
        stage = states.nodes.shape[1]
        used, which = np.unique(states.used, return_inverse=True)
        fits = used[:, None] & sets == 0
        fits &= cover[self.everything ^ used[:, None] ^ np.where(fits, sets, 0)]
        if stage == (stages - 1) // 2:  # of a mapping and its mirror image, the one with node 0 in the first half
            fits &= (used[:, None] | sets) & 1 == 1
        members = np.nonzero(sets[:, None] >> np.arange(self.costs.num_nodes) & 1)[1].reshape(-1, size)
        matchings = len(self.orders) if stage else 1
        ends = np.cumsum(fits.sum(axis=1)[which])
        blocks = np.unique(np.searchsorted(ends, np.arange(0, ends[-1] + 1, max(1, MATCHINGS_AT_ONCE // matchings))))
        parts: list[_Stages] = []
        done = total = 0
        for rows in np.split(np.arange(len(which)), blocks):
            row, chosen = np.nonzero(fits[which[rows]])
            done += len(row) * matchings
            part = self._matched(states.take(rows[row]), sets[chosen], sets_s[chosen], members[chosen], target_s)
            total += len(part.used)
            if done > work or total > MOST_STATES or self.budget.stopped:
                return None, done
            parts.append(part)
        grown = _Stages(
            used=np.concatenate([part.used for part in parts]),
            times_s=np.concatenate([part.times_s for part in parts]),
            ring_s=np.concatenate([part.ring_s for part in parts]),
            nodes=np.concatenate([part.nodes for part in parts]),
        )
        if size <= PIPELINES_COMPARED and 0 < stage < stages - 1 and len(grown.used):
            grown = grown.take(_undominated(grown))
        return grown, done

    def _matched(
        self, states: _Stages, sets: IntArray, sets_s: FloatArray, members: IntArray, target_s: float
    ) -> _Stages:
        """Each partial mapping with each matching of the nodes of its next set, where there is room for it.

        Args:
            states: [p] partial mappings.
            sets: [p] next set of each.
            sets_s: [p] its ring time.
            members: [p, d] its nodes.
            target_s: time to beat.
        """
        stage, size = states.nodes.shape[1], self.costs.num_pipelines
        used, ring = states.used | sets, np.maximum(states.ring_s, sets_s)
        left = min(self.costs.num_stages - 1 - stage, len(self.ahead_s) - 1)
        ahead = self.ahead_s[left][members, (self.everything ^ used)[:, None]]
        room = target_s - ring
        if stage == 0:  # pipelines have no names yet: one order of the nodes stands for all
            alive = np.flatnonzero((ahead < room[:, None]).all(axis=1))
            first = members[alive][:, None].astype(np.int8)
            return _Stages(used=used[alive], times_s=np.zeros((len(alive), size)), ring_s=ring[alive], nodes=first)
        last = states.nodes[:, -1].astype(np.int64)
        times = states.times_s[:, :, None] + self.costs.hop_s[last[:, :, None], members[:, None, :]]
        fits = times + ahead[:, None, :] < room[:, None, None]
        alive = np.flatnonzero(fits.any(axis=1).all(axis=1) & fits.any(axis=2).all(axis=1))
        matched = np.ones((len(alive), len(self.orders)), dtype=bool)
        for pipeline in range(size):
            matched &= fits[alive, pipeline][:, self.orders[:, pipeline]]
        row, order = np.nonzero(matched)
        row, order = alive[row], self.orders[order]
        new = np.take_along_axis(members[row], order, axis=1)[:, None].astype(np.int8)
        return _Stages(
            used=used[row],
            times_s=times[row[:, None], np.arange(size), order],
            ring_s=ring[row],
            nodes=np.concatenate([states.nodes[row], new], axis=1),
        )


def _undominated(states: _Stages) -> IntArray:
    """Rows that no other one beats in every time, of those with the same nodes, last stage and slowest ring."""
    last = states.nodes[:, -1].astype(np.int64)
    order = np.argsort(last, axis=1)
    last, times = np.take_along_axis(last, order, axis=1), np.take_along_axis(states.times_s, order, axis=1)
    rings, ring = np.unique(states.ring_s, return_inverse=True)
    key = states.used
    for column in last.T:
        key = key * NODE_BASE + column
    key = key * len(rings) + ring
    by = np.lexsort((times[:, -1], times[:, 0], key))
    key, second = key[by], times[by, -1]
    first_of_key = np.concatenate([[True], key[1:] != key[:-1]])
    # The first time rises within a key, so a row survives where its last time is below all before it; keys are kept
    # apart by an offset that falls from key to key.
    offset = second - (2.0 * float(second.max()) + 1.0) * np.cumsum(first_of_key)
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(offset)[:-1]])
    return by[first_of_key | (offset < least_before)]
