"""Communication time of a rank mapping: link costs, exact evaluation, best rings.

Notation and objective: :mod:`meshplan.planner.rank_mapping.solve`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.problem import RankMappingProblem

# Largest ring whose best order is found by the subset recursion for many mappings: 2^d · d² steps per stage.
MAX_EXACT_RING_NODES = 8

NUM_NODES_WITH_ONE_RING = 2  # one or two nodes can stand in one order only


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCosts:
    """Cost of each link, in seconds: all that the objective needs of the network.

    Args:
        num_stages: P.
        num_pipelines: d.
        hop_s: [n, n] symmetric, round trips of all exposed micro-batches between two neighbouring stages.
        ring_s: [n, n] directed, a ring all-reduce over d nodes if this is its slowest link.
    """

    num_stages: int
    num_pipelines: int
    hop_s: FloatArray
    ring_s: FloatArray

    @classmethod
    def of(cls, problem: RankMappingProblem) -> LinkCosts:
        """Link costs of a problem; the diagonals are 0 and never used."""
        pipelines = problem.data_parallel_nodes
        bandwidth = problem.bandwidth_bytes_per_s
        one_way_s = problem.latency_s + problem.pipeline_message_bytes / bandwidth
        hop_s = problem.num_microbatches_exposed * (one_way_s + one_way_s.T)
        ring_s = 2.0 * (pipelines - 1) / pipelines * problem.data_parallel_message_bytes / bandwidth
        np.fill_diagonal(hop_s, 0.0)
        np.fill_diagonal(ring_s, 0.0)
        return cls(num_stages=problem.pipeline_parallel, num_pipelines=pipelines, hop_s=hop_s, ring_s=ring_s)

    @property
    def num_nodes(self) -> int:
        """N = P·d."""
        return self.num_stages * self.num_pipelines

    def pipeline_times_s(self, lines: IntArray) -> FloatArray:
        """[…, d] time of each pipeline.

        Args:
            lines: […, P, d] node of each (stage, pipeline).
        """
        return np.asarray(self.hop_s[lines[..., :-1, :], lines[..., 1:, :]].sum(axis=-2))

    def ring_times_s(self, rings: IntArray) -> FloatArray:
        """[…, P] time of each stage's ring; 0 for a ring of one node.

        Args:
            rings: […, P, d] nodes of each stage in ring order.
        """
        return np.asarray(self.ring_s[rings, np.roll(rings, -1, axis=-1)].max(axis=-1))

    def objective_s(self, lines: IntArray, rings: IntArray) -> float:
        """Slowest pipeline plus slowest ring, seconds."""
        return float(self.pipeline_times_s(lines).max() + self.ring_times_s(rings).max())


def best_ring(ring_s: FloatArray, nodes: IntArray) -> IntArray:
    """The ring order of ``nodes`` whose slowest directed link is fastest, by dynamic programming over subsets.

    ``reach[S, v]`` is the least bottleneck of a path from the first node through all of S that ends in v;
    ``reach[S ∪ w, w] = min_v max(reach[S, v], cost[v, w])``. Ties fall to the lowest index.
    """
    size = len(nodes)
    if size <= NUM_NODES_WITH_ONE_RING:
        return nodes
    cost = ring_s[np.ix_(nodes, nodes)]
    subsets = np.arange(1, 1 << size, 2)  # all with the first node
    counts = (subsets[:, None] >> np.arange(size) & 1).sum(axis=1)
    reach = np.full((1 << size, size), np.inf)
    reach[1, 0] = 0.0
    for layer in range(1, size):
        members = subsets[counts == layer]
        for node in range(1, size):
            grown = members[members >> node & 1 == 0]
            reach[grown | 1 << node, node] = np.maximum(reach[grown], cost[:, node]).min(axis=1)
    subset = (1 << size) - 1
    last = 1 + int(np.maximum(reach[subset, 1:], cost[1:, 0]).argmin())
    order = []
    while last:
        order.append(last)
        subset &= ~(1 << last)
        last = int(np.maximum(reach[subset], cost[:, last]).argmin())
    return np.asarray(nodes[[0, *reversed(order)]])


def best_rings(ring_s: FloatArray, rings: IntArray) -> IntArray:
    """The best order of each stage's ring up to :data:`MAX_EXACT_RING_NODES` nodes, else the given order."""
    if rings.shape[-1] > MAX_EXACT_RING_NODES:
        return rings
    return np.stack([best_ring(ring_s, np.sort(ring)) for ring in rings])
