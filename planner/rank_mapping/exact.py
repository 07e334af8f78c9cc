"""Exact rank mapping for few nodes: search over partial mappings, one pipeline at a time.

Two tables make it fast. ``ring_floor_s[S]`` is the least time of a ring through any d nodes that include the set S
(nodes are bits). The other lists every path of P nodes below a cost limit. A partial mapping is a set of used nodes,
the node set of every stage, and its slowest pipeline; it is extended by a path through its lowest unused node, and
pruned when slowest pipeline + max over stages of ring_floor_s reaches the target. A completed search without a result
proves that no mapping is better than the target, so increasing targets give increasing bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.objective import LinkCosts

MAX_EXACT_NODES = 16  # tables have 2^n rows
MAX_PATHS = 200_000
DEFAULT_WORK = 8_000_000  # pairs of a partial mapping and a path that are examined
PAIRS_AT_ONCE = 400_000
TARGET_STEPS = (0.25, 0.5, 0.75, 1.0)  # of the way from the bound to the incumbent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactResult:
    """Result of the exact search.

    Args:
        lines: [P, d] a mapping that, with its best rings, is better than the incumbent; None if none was found.
        bound_s: proven lower bound.
    """

    lines: IntArray | None
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Paths:
    """Oriented paths by their lowest node: bit masks [m], nodes [m, P], seconds [m]."""

    masks: IntArray
    nodes: IntArray
    seconds: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Partial:
    """Partial mappings with equally many pipelines: used [m], stage sets [m, P], slowest [m], nodes [m, r, P]."""

    used: IntArray
    stage_sets: IntArray
    slowest_s: FloatArray
    lines: IntArray


def improve_exactly(
    costs: LinkCosts, *, bound_s: float, pipeline_bound_s: float, incumbent_s: float, work: int = DEFAULT_WORK
) -> ExactResult:
    """Search for a faster mapping than the incumbent; raise the bound as far as the work limit allows.

    Args:
        costs: link costs of at most :data:`MAX_EXACT_NODES` nodes.
        bound_s: a proven lower bound of the objective.
        pipeline_bound_s: a proven lower bound of the slowest pipeline.
        incumbent_s: objective of the best mapping known.
        work: pairs to examine before giving up.
    """
    floor = ring_floor_s(costs)
    paths = _cheap_paths(costs, limit_s=incumbent_s - float(floor[0]))
    if paths is None:
        return ExactResult(lines=None, bound_s=bound_s)
    search = _Search(costs=costs, floor=floor, paths=paths, pipeline_bound_s=pipeline_bound_s, work=work)
    start = bound_s
    for share in TARGET_STEPS:
        target = start + share * (incumbent_s - start) if share < 1.0 else incumbent_s
        lines, value, finished = search.below(target)
        if lines is not None:
            if finished:
                return ExactResult(lines=lines, bound_s=value)
            return ExactResult(lines=lines, bound_s=bound_s)
        if not finished:
            break
        bound_s = max(bound_s, target)
    return ExactResult(lines=None, bound_s=bound_s)


def ring_floor_s(costs: LinkCosts) -> FloatArray:
    """[2^n] least ring time over the sets of d nodes that include each set; ∞ for sets larger than d.

    Bottleneck recursion over subsets as in ``best_ring``, for all sets at once, layer by layer of their size; every
    ring starts at its lowest node.
    """
    nodes, size = costs.num_nodes, costs.num_pipelines
    subsets = np.arange(1 << nodes)
    counts, lowest = _bit_tables(nodes)
    reach = np.full((1 << nodes, nodes), np.inf)
    reach[1 << np.arange(nodes), np.arange(nodes)] = 0.0
    for layer in range(1, size):
        members = subsets[counts == layer]
        for node in range(nodes):
            grown = members[(members >> node & 1 == 0) & (lowest[members] < node)]
            reach[grown | 1 << node, node] = np.maximum(reach[grown], costs.ring_s[:, node]).min(axis=1)
    full = subsets[counts == size]
    floor = np.full(1 << nodes, np.inf)
    floor[full] = np.maximum(reach[full], costs.ring_s[:, lowest[full]].T).min(axis=1)
    for node in range(nodes):
        halves = floor.reshape(-1, 2, 1 << node)
        np.minimum(halves[:, 0], halves[:, 1], out=halves[:, 0])
    return floor


def _bit_tables(nodes: int) -> tuple[IntArray, IntArray]:
    """Number of bits, and index of the lowest bit (0 for the empty set), of each number below 2^nodes."""
    counts = np.zeros(1, dtype=np.int64)
    lowest = np.zeros(1, dtype=np.int64)
    for node in range(nodes):
        counts = np.concatenate([counts, counts + 1])
        lowest = np.concatenate([lowest, [node], lowest[1:]])
    return counts, lowest


def _cheap_paths(costs: LinkCosts, *, limit_s: float) -> list[_Paths] | None:
    """Oriented paths below the limit, grouped by their lowest node; None when there are too many."""
    cheapest_hop = (
        float((costs.hop_s + np.diag(np.full(costs.num_nodes, np.inf))).min()) if costs.num_nodes > 1 else 0.0
    )
    nodes = np.arange(costs.num_nodes, dtype=np.int64)[:, None]
    masks, seconds = np.int64(1) << nodes[:, 0], np.zeros(costs.num_nodes)
    for length in range(1, costs.num_stages):
        grown_s = seconds[:, None] + costs.hop_s[nodes[:, -1]]
        room = limit_s - (costs.num_stages - 1 - length) * cheapest_hop
        fits = (masks[:, None] >> np.arange(costs.num_nodes) & 1 == 0) & (grown_s < room)
        which, node = np.nonzero(fits)
        if which.size > MAX_PATHS:
            return None
        nodes = np.concatenate([nodes[which], node[:, None]], axis=1)
        masks, seconds = masks[which] | np.int64(1) << node, grown_s[which, node]
    lowest = nodes.min(axis=1)
    return [
        _Paths(masks=masks[lowest == node], nodes=nodes[lowest == node], seconds=seconds[lowest == node])
        for node in range(costs.num_nodes)
    ]


class _Search:
    """Depth-first search over chunks of partial mappings."""

    def __init__(
        self, *, costs: LinkCosts, floor: FloatArray, paths: list[_Paths], pipeline_bound_s: float, work: int
    ) -> None:
        self.costs, self.floor, self.paths = costs, floor, paths
        self.pipeline_bound_s = pipeline_bound_s
        self.work_left = work
        self.everything = (1 << costs.num_nodes) - 1
        _, self.lowest_bit = _bit_tables(costs.num_nodes)

    def below(self, target_s: float) -> tuple[IntArray | None, float, bool]:
        """The best mapping faster than the target, its time, and whether the search was completed."""
        stages = self.costs.num_stages
        best: IntArray | None = None
        root = _Partial(
            used=np.zeros(1, dtype=np.int64),
            stage_sets=np.zeros((1, stages), dtype=np.int64),
            slowest_s=np.array([self.pipeline_bound_s]),
            lines=np.zeros((1, 0, stages), dtype=np.int64),
        )
        stack = [root]
        while stack:
            partial = stack.pop()
            if partial.used[0] == self.everything:
                total = partial.slowest_s + self.floor[partial.stage_sets].max(axis=1)
                first = int(total.argmin())
                if total[first] < target_s:
                    target_s, best = float(total[first]), partial.lines[first].T
                continue
            for chunk in self._grown(partial, target_s):
                stack.append(chunk)
                if self.work_left < 0:
                    return best, target_s, False
        return best, target_s, True

    def _grown(self, partial: _Partial, target_s: float) -> list[_Partial]:
        """All extensions by one pipeline that can still beat the target, in chunks."""
        lowest_unused = self.lowest_bit[~partial.used & self.everything]
        chunks: list[_Partial] = []
        for node in np.unique(lowest_unused):
            paths = self._usable(int(node), target_s, at_root=partial.lines.shape[1] == 0)
            members = np.flatnonzero(lowest_unused == node)
            rows = max(1, PAIRS_AT_ONCE // max(1, len(paths.masks)))
            for begin in range(0, len(members), rows):
                some = members[begin : begin + rows]
                self.work_left -= len(some) * len(paths.masks)
                if self.work_left < 0:
                    return chunks or [partial]
                grown = self._joined(partial, some, paths, target_s)
                if len(grown.used):
                    chunks.append(grown)
        return chunks

    def _usable(self, node: int, target_s: float, *, at_root: bool) -> _Paths:
        """Paths whose lowest node is this one; at the root only one path of each mirror pair (hops are symmetric)."""
        paths = self.paths[node]
        keep = paths.seconds + self.floor[0] < target_s
        if at_root:
            keep &= (paths.nodes == node).argmax(axis=1) <= (self.costs.num_stages - 1) / 2
        return _Paths(masks=paths.masks[keep], nodes=paths.nodes[keep], seconds=paths.seconds[keep])

    def _joined(self, partial: _Partial, some: IntArray, paths: _Paths, target_s: float) -> _Partial:
        row, path = np.nonzero(partial.used[some][:, None] & paths.masks == 0)
        row = some[row]
        slowest = np.maximum(partial.slowest_s[row], paths.seconds[path])
        sets = partial.stage_sets[row] | np.int64(1) << paths.nodes[path]
        alive = np.flatnonzero(slowest + self.floor[sets].max(axis=1) < target_s)
        row, path = row[alive], path[alive]
        self.work_left -= 4 * self.costs.num_stages * len(slowest)
        return _Partial(
            used=partial.used[row] | paths.masks[path],
            stage_sets=sets[alive],
            slowest_s=slowest[alive],
            lines=np.concatenate([partial.lines[row], paths.nodes[path][:, None]], axis=1),
        )
