"""The proof of a rank mapping of few nodes: no mapping is faster, or here is one.

Ring times are taken in ranges [ρ, ρ′], from the least that lets all nodes be divided into rings of it. In a range only
the sets of d nodes with a ring time ≤ ρ′ can be stages, and only paths below target − ρ pipelines: as one family grows
the other shrinks, and where mappings are as good as the best one, one of the two is small. So each range is enumerated
by what is fewer, sets (:mod:`.by_stages`) or paths (:mod:`.by_pipelines`). Where neither is small enough (one bad link
decides and everything else is free), the range is taken apart: each of its sets in turn is the slowest ring, which
leaves few paths. A range that is searched to the end holds no mapping faster than the best one.

Work is counted, not timed, so that every run stops at the same place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.rank_mapping.exact.by_pipelines import ByPipelines, cheap_paths
from meshplan.planner.rank_mapping.exact.by_stages import ByStages
from meshplan.planner.rank_mapping.exact.found import Found
from meshplan.planner.rank_mapping.exact.tables import bit_tables, covered, paths_ahead_s, ring_floor_s
from meshplan.planner.rank_mapping.objective import LinkCosts

# Work of one proof: about 1.3 processor seconds (2026-11, 2.x GHz server core) in units of a pair of a partial mapping
# and a path; a matching of a stage costs as much as this many.
DEFAULT_WORK = 90_000_000
WORK_PER_MATCHING = 7
# Most work on a range before it is taken apart.
RANGE_WORK = 20_000_000
# Sets of a range's end over those of its beginning, times the same of the paths: more ranges, or more in each.
RANGE_GROWTH = 1.3
RANGE_LEAST_SETS = 3
# Share of all pairs of paths that fit together, roughly: what the estimate of an enumeration of paths is made with.
FITTING_SHARE = 0.075
MOST_LEVELS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactResult:
    """Result of the exact search.

    Args:
        lines: [P, d] a mapping that, with its best rings, is better than the incumbent; None if none was found.
        bound_s: proven lower bound.
    """

    lines: IntArray | None
    bound_s: float


def improve_exactly(
    costs: LinkCosts,
    *,
    bound_s: float,
    pipeline_bound_s: float,
    incumbent_s: float,
    work: int = DEFAULT_WORK,
    budget: Budget | None = None,
) -> ExactResult:
    """Search for a faster mapping than the incumbent; raise the bound as far as the work limit allows.

    Args:
        costs: link costs of at most :data:`~meshplan.planner.rank_mapping.exact.tables.MAX_EXACT_NODES` nodes.
        bound_s: a proven lower bound of the objective.
        pipeline_bound_s: a proven lower bound of the slowest pipeline.
        incumbent_s: objective of the best mapping known.
        work: see :data:`DEFAULT_WORK`.
        budget: of the whole answer; once it is spent the search ends with what is proven.
    """
    order = _dearest_first(costs)
    renamed = LinkCosts(
        num_stages=costs.num_stages,
        num_pipelines=costs.num_pipelines,
        hop_s=costs.hop_s[np.ix_(order, order)],
        ring_s=costs.ring_s[np.ix_(order, order)],
    )
    search = _Search(renamed, pipeline_bound_s, incumbent_s, work, budget or Budget())
    proven_s = search.run()
    lines = None if search.lines is None else order[search.lines]
    return ExactResult(lines=lines, bound_s=max(bound_s, min(proven_s, search.best_s)))


def _dearest_first(costs: LinkCosts) -> IntArray:
    """[n] the nodes with the slowest links first: fewest pipelines go through them, so they are decided first."""
    alone = np.diag(np.full(costs.num_nodes, np.inf))
    dear = np.zeros(costs.num_nodes)
    if costs.num_stages > 1:
        dear += (costs.hop_s + alone).min(axis=0)
    if costs.num_pipelines > 1:
        dear += np.maximum((costs.ring_s + alone).min(axis=0), (costs.ring_s + alone).min(axis=1))
    return np.argsort(-dear, kind="stable")


class _Search:
    """The search of the module's text; ``best_s`` and ``lines`` are the best mapping so far."""

    def __init__(
        self, costs: LinkCosts, pipeline_bound_s: float, incumbent_s: float, work: int, budget: Budget
    ) -> None:
        self.costs, self.best_s, self.work_left = costs, incumbent_s, work
        self.lines: IntArray | None = None
        floor, ahead = ring_floor_s(costs), paths_ahead_s(costs)
        counts, _ = bit_tables(costs.num_nodes)
        sets = np.flatnonzero(counts == costs.num_pipelines)
        sets = sets[np.argsort(floor[sets], kind="stable")]
        self.sets, self.sets_s = sets, floor[sets]
        whole_s = ahead[-1][:, -1].min() if costs.num_stages > 1 else 0.0
        self.least_pipeline_s = max(pipeline_bound_s, float(whole_s))
        self.rings_s = self._possible_rings()
        self.paths = None
        if len(self.rings_s):
            self.paths = cheap_paths(costs, ahead, limit_s=incumbent_s - float(self.rings_s[0]))
        self.by_stages, self.by_pipelines = ByStages(costs, ahead, budget), ByPipelines(costs, floor, budget)

    def _possible_rings(self) -> FloatArray:
        """Ring times that the slowest ring of a faster mapping may have, ascending."""
        values = np.unique(self.sets_s)
        values = values[values + self.least_pipeline_s < self.best_s]
        low, high = 0, len(values)
        while low < high:
            middle = (low + high) // 2
            family = self.sets[: self._num_sets(values[middle])]
            if covered(family, self.costs.num_nodes, self.costs.num_stages)[-1]:
                high = middle
            else:
                low = middle + 1
        return np.asarray(values[low:])

    def run(self) -> float:
        """Search all ranges, or until the work is spent; a proven bound of the objective."""
        if self.paths is not None:  # every node is on some pipeline
            reached = np.bitwise_or.accumulate(self.paths.masks)
            first = int(np.searchsorted(reached == (1 << self.costs.num_nodes) - 1, True))
            if first == len(reached):
                return self.best_s
            self.least_pipeline_s = max(self.least_pipeline_s, float(self.paths.seconds[first]))
        begin = 0
        while begin < len(self.rings_s) and self.rings_s[begin] + self.least_pipeline_s < self.best_s:
            end = self._end_of_range(begin)
            if not self._range(float(self.rings_s[begin]), float(self.rings_s[end])):
                unproven = self._taken_apart(float(self.rings_s[begin]), float(self.rings_s[end]))
                if unproven is not None:
                    return unproven + self.least_pipeline_s
            begin = end + 1
        return self.best_s

    def _num_sets(self, ring_s: float) -> int:
        return int(np.searchsorted(self.sets_s, ring_s, side="right"))

    def _num_paths(self, ring_s: float) -> int:
        """Paths that leave room for a ring."""
        return 0 if self.paths is None else int(np.searchsorted(self.paths.seconds, self.best_s - ring_s))

    def _end_of_range(self, begin: int) -> int:
        """Index of the last ring time of the range that starts with this one."""
        sets, paths = self._num_sets(self.rings_s[begin]), self._num_paths(self.rings_s[begin])
        end = begin
        while end + 1 < len(self.rings_s):
            more, fewer = self._num_sets(self.rings_s[end + 1]), max(1, self._num_paths(self.rings_s[end + 1]))
            if more > sets + RANGE_LEAST_SETS and more * max(1, paths) > RANGE_GROWTH * sets * fewer:
                break
            end += 1
        return end

    def _range(self, low_s: float, high_s: float) -> bool:
        """Search a range; False where its share of the work did not suffice."""
        num_sets, work = self._num_sets(high_s), min(self.work_left, RANGE_WORK)
        if self._path_pairs(low_s) < WORK_PER_MATCHING * self.by_stages.matchings(num_sets) and self.paths is not None:
            found = self.by_pipelines.below(
                self.paths.take(slice(0, self._num_paths(low_s))),
                rings_s=(low_s, high_s),
                least_pipeline_s=self.least_pipeline_s,
                target_s=self.best_s,
                work=work,
            )
            return self._keep(found, found.work)
        if not len(self.by_stages.orders):
            return False
        found = self.by_stages.below(
            self.sets[:num_sets],
            self.sets_s[:num_sets],
            least_ring_s=low_s,
            target_s=self.best_s,
            work=int(min(self.work_left, RANGE_WORK) // WORK_PER_MATCHING),
        )
        return self._keep(found, WORK_PER_MATCHING * found.work)

    def _path_pairs(self, low_s: float) -> float:
        """Roughly how many pairs an enumeration of paths looks at; ∞ where there are too many paths to list."""
        if self.paths is None:
            return np.inf
        through_one_node = self._num_paths(low_s) / self.costs.num_pipelines
        return float(FITTING_SHARE * through_one_node ** min(MOST_LEVELS, self.costs.num_pipelines))

    def _taken_apart(self, low_s: float, high_s: float) -> float | None:
        """Search a range set by set, each as the slowest ring; the first ring time left unproven, None for none."""
        if self.paths is None:
            return low_s
        stages = self.costs.num_stages
        for index in range(int(np.searchsorted(self.sets_s, low_s)), self._num_sets(high_s)):
            ring, ring_s = self.sets[index], float(self.sets_s[index])
            if ring_s + self.least_pipeline_s >= self.best_s:
                return None
            paths = self.paths.take(slice(0, self._num_paths(ring_s)))
            common = paths.masks & ring
            for stage in range((stages + 1) // 2):  # a mirror image has it in the other half
                # Every pipeline has exactly one node of this ring, at its stage.
                crossing = (common & (common - 1) == 0) & (common == np.int64(1) << paths.nodes[:, stage])
                found = self.by_pipelines.below(
                    paths.take(crossing),
                    rings_s=(ring_s, ring_s),
                    least_pipeline_s=self.least_pipeline_s,
                    target_s=self.best_s,
                    work=self.work_left,
                    mirrored=2 * stage + 1 == stages,
                )
                if not self._keep(found, found.work + len(paths.masks)):
                    return ring_s
        return None

    def _keep(self, found: Found, work: int) -> bool:
        self.work_left -= work
        if found.lines is not None:
            self.lines, self.best_s = found.lines, found.value_s
        return found.finished
