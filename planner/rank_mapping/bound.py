"""Lower bound on the objective of any rank mapping.

If the slowest ring takes at most ρ, every stage lies inside one strongly connected component (*part*) of the links
with ring_s ≤ ρ, so that each part holds a whole number of stages. As ρ grows, parts merge. For every range of ρ with
the same parts, T ≥ (lower end of the range) + (lower bound of the slowest pipeline given the parts); the bound is the
least over the ranges. Pipelines cross between parts at least (parts − 1) times, so slow links between islands count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from meshplan.planner.cluster.network.network import reached_from
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.objective import MAX_EXACT_RING_NODES, LinkCosts, best_ring

MAX_SUBGRADIENT_STEPS = 150
# Prim's tree costs n vector operations of length n; this keeps 1,024 nodes at a few seconds.
SUBGRADIENT_NODE_STEPS = 60_000
# Length of a subgradient step over that of the one before.
STEP_DECAY = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """Lower bounds in seconds: of the objective, of the slowest ring alone and of the slowest pipeline alone."""

    total_s: float
    ring_s: float
    pipeline_s: float


def lower_bound(costs: LinkCosts) -> LowerBound:
    """The bound of the module docstring."""
    single = np.zeros(costs.num_nodes, dtype=np.int64)
    free_pipeline_s = pipeline_bound_s(costs, single)
    if costs.num_pipelines == 1:
        return LowerBound(total_s=free_pipeline_s, ring_s=0.0, pipeline_s=free_pipeline_s)
    thresholds = np.unique(costs.ring_s[~np.eye(costs.num_nodes, dtype=bool)])
    first = _first(thresholds, lambda threshold: _parts(costs, threshold) is not None, at_least=0)
    ring_s, total = float(thresholds[first]), np.inf
    here = first
    while True:
        parts = _parts(costs, float(thresholds[here]))
        if parts is None:
            break
        num_parts = int(parts.max()) + 1
        range_ring_s = max(float(thresholds[here]), _forced_rings_s(costs, parts))
        if num_parts == 1:
            total = min(total, range_ring_s + free_pipeline_s)
            break
        after = _first(thresholds, partial(_merged, costs, num_parts), at_least=here)
        if range_ring_s < thresholds[after]:
            total = min(total, range_ring_s + max(free_pipeline_s, pipeline_bound_s(costs, parts)))
        here = after
    return LowerBound(total_s=float(total), ring_s=ring_s, pipeline_s=free_pipeline_s)


def pipeline_bound_s(costs: LinkCosts, parts: IntArray) -> float:
    """Lower bound of the slowest pipeline when each part of the nodes holds whole stages.

    The larger of two bounds: the most expensive node's cheapest pipeline, because every node is on some pipeline; and
    the mean over all pipelines, because the slowest is no faster than the mean.
    """
    if costs.num_stages == 1:
        return 0.0
    return max(_most_expensive_node_s(costs, parts), _mean_pipeline_s(costs, parts))


def _most_expensive_node_s(costs: LinkCosts, parts: IntArray) -> float:
    """Max over nodes of the cheapest walk of P nodes through it with at least (parts − 1) crossings.

    ``tail[s, c, v]`` is the cheapest walk of s hops that ends in v and crosses at least c times. A pipeline through
    v is two such walks that meet there.
    """
    hops, crossings = costs.num_stages - 1, int(parts.max())
    nodes = costs.num_nodes
    cost = costs.hop_s + np.diag(np.full(nodes, np.inf))
    within = parts[:, None] == parts
    crossing_cost = np.where(within, np.inf, cost)
    tail = np.full((hops + 1, crossings + 1, nodes), np.inf)
    tail[0, 0] = 0.0
    for hop in range(1, hops + 1):
        for crossed in range(crossings + 1):
            staying = (tail[hop - 1, crossed][:, None] + cost).min(axis=0)
            crossing = (tail[hop - 1, max(crossed - 1, 0)][:, None] + crossing_cost).min(axis=0)
            tail[hop, crossed] = np.minimum(staying, crossing)
    through = np.full(nodes, np.inf)
    for before in range(hops + 1):
        for crossed in range(crossings + 1):
            through = np.minimum(through, tail[before, crossed] + tail[hops - before, crossings - crossed])
    return float(through.max())


def _mean_pipeline_s(costs: LinkCosts, parts: IntArray) -> float:
    """Mean of all pipelines, bounded by Lagrangian relaxation over forests.

    The pipelines are a forest of n − d hops in which every node has one or two neighbours and at least
    d·(parts − 1) hops cross. With prices μ (for the number of neighbours) and λ (for crossings) taken into the hop
    costs, the cheapest such forest is the minimum spanning tree without its d − 1 most expensive hops. Subgradient
    steps raise the bound; the value of every step is valid.
    """
    nodes, pipelines = costs.num_nodes, costs.num_pipelines
    crossing = parts[:, None] != parts
    needed = pipelines * int(parts.max())
    price, reward = np.zeros(nodes), 0.0
    best = -np.inf
    steps = max(2, min(MAX_SUBGRADIENT_STEPS, SUBGRADIENT_NODE_STEPS // nodes))
    stride = float(np.median(costs.hop_s)) / 4.0
    for step in range(steps):
        weight = costs.hop_s + price[:, None] + price - reward * crossing
        left, right, cost = _spanning_tree(weight)
        kept = np.argsort(cost, kind="stable")[: nodes - pipelines]
        left, right = left[kept], right[kept]
        constant = reward * needed - 2.0 * np.maximum(price, 0.0).sum() + np.maximum(-price, 0.0).sum()
        best = max(best, float(cost[kept].sum() + constant))
        degree = np.bincount(left, minlength=nodes) + np.bincount(right, minlength=nodes)
        slope = np.where(price > 0.0, degree - 2, np.where(price < 0.0, degree - 1, np.clip(0, degree - 2, degree - 1)))
        short = needed - int(crossing[left, right].sum())
        length = stride * STEP_DECAY**step
        price = price + length * slope / max(1.0, float(np.sqrt((slope**2).mean())))
        reward = max(0.0, reward + length * float(np.sign(short)))
    return best / pipelines


def _spanning_tree(weight: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Prim's minimum spanning tree of a dense graph: ends and weights of its n − 1 edges."""
    nodes = len(weight)
    nearest = np.zeros(nodes, dtype=np.int64)
    distance = weight[0].copy()
    distance[0] = np.inf
    outside = np.ones(nodes, dtype=bool)
    outside[0] = False
    right = np.empty(nodes - 1, dtype=np.int64)
    left, cost = np.empty_like(right), np.empty(nodes - 1)
    for edge in range(nodes - 1):
        node = int(distance.argmin())
        left[edge], right[edge], cost[edge] = nearest[node], node, distance[node]
        outside[node] = False
        closer = outside & (weight[node] < distance)
        distance[closer] = weight[node][closer]
        nearest[closer] = node
        distance[node] = np.inf
    return left, right, cost


def _forced_rings_s(costs: LinkCosts, parts: IntArray) -> float:
    """Slowest ring among the parts that hold exactly one stage, where the nodes of the ring are known."""
    size = costs.num_pipelines
    if size > MAX_EXACT_RING_NODES:
        return 0.0
    slowest = 0.0
    for part in np.flatnonzero(np.bincount(parts) == size):
        ring = best_ring(costs.ring_s, np.flatnonzero(parts == part))
        slowest = max(slowest, float(costs.ring_s[ring, np.roll(ring, -1)].max()))
    return slowest


def _parts(costs: LinkCosts, threshold_s: float) -> IntArray | None:
    """[n] strongly connected component of each node over links of at most the threshold.

    None when some component cannot hold whole stages (its size is not a multiple of d). Once all can, they can at every
    larger threshold, because components only merge.
    """
    links = costs.ring_s <= threshold_s
    np.fill_diagonal(links, val=False)
    labels = np.full(costs.num_nodes, -1, dtype=np.int64)
    if costs.num_pipelines > 1 and not (links.any(axis=0).all() and links.any(axis=1).all()):
        return None
    for label in range(costs.num_nodes):
        rest = np.flatnonzero(labels < 0)
        if not rest.size:
            break
        part = reached_from(links, int(rest[0])) & reached_from(links.T, int(rest[0]))
        if int(part.sum()) % costs.num_pipelines:
            return None
        labels[part] = label
    return labels


def _merged(costs: LinkCosts, num_parts: int, threshold_s: float) -> bool:
    """Whether fewer than ``num_parts`` parts remain."""
    parts = _parts(costs, threshold_s)
    return parts is not None and int(parts.max()) + 1 < num_parts


def _first(thresholds: FloatArray, holds: Callable[[float], bool], *, at_least: int) -> int:
    """Index of the first threshold for which the monotone condition holds; the last one if it never does."""
    low, high = at_least, len(thresholds) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(float(thresholds[middle])):
            high = middle
        else:
            low = middle + 1
    return low
