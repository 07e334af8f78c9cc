"""Mappings with fast pipelines, pipeline by pipeline: cheap where few paths of P nodes are fast.

A partial mapping is a set of used nodes, the node set of every stage, and its slowest pipeline. It is extended by the
paths through its lowest unused node, and dropped where the slowest pipeline and the fastest ring that can still
include each stage's nodes leave no room under the target. Partial mappings with the same stage sets differ in their
slowest pipeline alone, so the fastest stands for all. Some thousand at a time are completed before the others, so that
memory stays small and good mappings are found early.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.rank_mapping.exact.found import Found
from meshplan.planner.rank_mapping.exact.tables import bit_tables
from meshplan.planner.rank_mapping.objective import LinkCosts

MAX_PATHS = 200_000
PAIRS_AT_ONCE = 400_000
STATES_AT_ONCE = 200_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paths:
    """Oriented paths: bit masks [m], nodes [m, P], seconds [m]."""

    masks: IntArray
    nodes: IntArray
    seconds: FloatArray

    def take(self, which: IntArray | BoolArray | slice) -> Paths:
        """Some of the paths."""
        return Paths(masks=self.masks[which], nodes=self.nodes[which], seconds=self.seconds[which])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Partial:
    """Partial mappings with equally many pipelines: used [m], stage sets [m, P], slowest [m], nodes [m, r, P]."""

    used: IntArray
    stage_sets: IntArray
    slowest_s: FloatArray
    lines: IntArray


def cheap_paths(costs: LinkCosts, ahead_s: list[FloatArray], *, limit_s: float) -> Paths | None:
    """Oriented paths below the limit, fastest first; None when there are more than :data:`MAX_PATHS`.

    Args:
        costs: link costs.
        ahead_s: :func:`~meshplan.planner.rank_mapping.exact.tables.paths_ahead_s`.
        limit_s: time of a path.
    """
    count = costs.num_nodes
    bits = np.int64(1) << np.arange(count)
    nodes = np.arange(count, dtype=np.int64)[:, None]
    masks, seconds = bits, np.zeros(count)
    for length in range(1, costs.num_stages):
        left = min(costs.num_stages - 1 - length, len(ahead_s) - 1)
        grown_s = seconds[:, None] + costs.hop_s[nodes[:, -1]]
        rest = ahead_s[left][np.arange(count), (1 << count) - 1 ^ (masks[:, None] | bits)]
        which, node = np.nonzero((masks[:, None] & bits == 0) & (grown_s + rest < limit_s))
        if which.size > MAX_PATHS:
            return None
        nodes = np.concatenate([nodes[which], node[:, None]], axis=1)
        masks, seconds = masks[which] | bits[node], grown_s[which, node]
    order = np.argsort(seconds, kind="stable")
    return Paths(masks=masks[order], nodes=nodes[order], seconds=seconds[order])


class ByPipelines:
    """The enumeration of the module's text.

    Args:
        costs: link costs of at most 16 nodes.
        floor_s: :func:`~meshplan.planner.rank_mapping.exact.tables.ring_floor_s`.
        budget: of the whole answer; once it is spent, an enumeration gives up.
    """

    def __init__(self, costs: LinkCosts, floor_s: FloatArray, budget: Budget) -> None:
        self.costs, self.floor_s, self.budget = costs, floor_s, budget
        self.everything = (1 << costs.num_nodes) - 1
        _, self.lowest_bit = bit_tables(costs.num_nodes)

    def below(
        self,
        paths: Paths,
        *,
        rings_s: tuple[float, float],
        least_pipeline_s: float,
        target_s: float,
        work: int,
        mirrored: bool = True,
    ) -> Found:
        """The best mapping faster than the target.

        Args:
            paths: the pipelines to choose from.
            rings_s: what the slowest ring is counted as at least, and what it may take at most.
            least_pipeline_s: what the slowest pipeline is counted as at least.
            target_s: time to beat.
            work: pairs of a partial mapping and a path, weighted by what they cost, to look at before giving up.
            mirrored: whether the mirror image of a mapping is as good, so that one of the two is enough.
        """
        stages = self.costs.num_stages
        lowest = self.lowest_bit[paths.masks]
        self.paths = [paths.take(lowest == node) for node in range(self.costs.num_nodes)]
        if mirrored:  # at the root, whose first pipeline goes through node 0
            half = (self.paths[0].nodes == 0).argmax(axis=1) <= (stages - 1) / 2
            self.paths[0] = self.paths[0].take(half)
        self.rings_s, self.target_s, self.work, self.most_work = rings_s, target_s, 0, work
        self.best: IntArray | None = None
        root = _Partial(
            used=np.zeros(1, dtype=np.int64),
            stage_sets=np.zeros((1, stages), dtype=np.int64),
            slowest_s=np.array([least_pipeline_s]),
            lines=np.zeros((1, 0, stages), dtype=np.int8),
        )
        finished = self._complete(root)
        return Found(lines=self.best, value_s=self.target_s, finished=finished, work=self.work)

    def _complete(self, states: _Partial) -> bool:
        """Complete the partial mappings and keep the best; False where the work ran out."""
        if states.lines.shape[1] == self.costs.num_pipelines:
            values = states.slowest_s + self.floor_s[states.stage_sets].max(axis=1)
            best = int(values.argmin())
            if values[best] < self.target_s:
                self.best, self.target_s = states.lines[best].T.astype(np.int64), float(values[best])
            return True
        lowest_unused = self.lowest_bit[~states.used & self.everything]
        parts: list[_Partial] = []
        total = 0
        for node in np.unique(lowest_unused):
            paths = self.paths[node]
            members = np.flatnonzero(lowest_unused == node)
            rows = max(1, PAIRS_AT_ONCE // max(1, len(paths.masks)))
            for begin in range(0, len(members), rows):
                parts.append(self._joined(states, members[begin : begin + rows], paths))
                total += len(parts[-1].used)
                if self.work > self.most_work or self.budget.stopped:
                    return False
                if total > STATES_AT_ONCE:
                    if not self._complete(_distinct(parts)):
                        return False
                    parts, total = [], 0
        return not total or self._complete(_distinct(parts))

    def _joined(self, states: _Partial, some: IntArray, paths: Paths) -> _Partial:
        """Some partial mappings, each with every path that fits."""
        row, path = np.nonzero(states.used[some][:, None] & paths.masks == 0)
        self.work += len(some) * len(paths.masks) + 4 * self.costs.num_stages * len(row)
        row = some[row]
        slowest = np.maximum(states.slowest_s[row], paths.seconds[path])
        sets = states.stage_sets[row] | np.int64(1) << paths.nodes[path]
        ring = self.floor_s[sets].max(axis=1)
        least, most = self.rings_s
        alive = np.flatnonzero((ring <= most) & (slowest + np.maximum(ring, least) < self.target_s))
        row, path = row[alive], path[alive]
        return _Partial(
            used=states.used[row] | paths.masks[path],
            stage_sets=sets[alive],
            slowest_s=slowest[alive],
            lines=np.concatenate([states.lines[row], paths.nodes[path][:, None].astype(np.int8)], axis=1),
        )


def _distinct(parts: list[_Partial]) -> _Partial:
    """All partial mappings, fastest first; of those with the same stage sets only the fastest."""
    sets = np.concatenate([part.stage_sets for part in parts])
    slowest = np.concatenate([part.slowest_s for part in parts])
    by = np.lexsort((slowest, *sets.T))
    by = by[np.concatenate([[True], (sets[by[1:]] != sets[by[:-1]]).any(axis=1)])]
    by = by[np.argsort(slowest[by], kind="stable")]
    return _Partial(
        used=np.concatenate([part.used for part in parts])[by],
        stage_sets=sets[by],
        slowest_s=slowest[by],
        lines=np.concatenate([part.lines for part in parts])[by],
    )
