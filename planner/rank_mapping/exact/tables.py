"""Tables over all 2^n sets of nodes (a set is a number, a node one of its bits), which make the exact search fast."""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.rank_mapping.objective import LinkCosts

MAX_EXACT_NODES = 16  # the tables have 2^n rows
# Hops that the look-ahead of unfinished pipelines counts at most: a table of n · 2^n times (8 MB) for each.
MOST_HOPS_AHEAD = 7
PAIRS_AT_ONCE = 1_000_000  # pairs of sets in one array


def bit_tables(nodes: int) -> tuple[IntArray, IntArray]:
    """Number of bits, and index of the lowest bit (0 for the empty set), of each number below 2^nodes."""
    counts = np.zeros(1, dtype=np.int64)
    lowest = np.zeros(1, dtype=np.int64)
    for node in range(nodes):
        counts = np.concatenate([counts, counts + 1])
        lowest = np.concatenate([lowest, [node], lowest[1:]])
    return counts, lowest


def ring_floor_s(costs: LinkCosts) -> FloatArray:
    """[2^n] least ring time over the sets of d nodes that include each set; ∞ for sets larger than d.

    Bottleneck recursion over subsets as in ``best_ring``, for all sets at once, layer by layer of their size; every
    ring starts at its lowest node.
    """
    nodes, size = costs.num_nodes, costs.num_pipelines
    subsets = np.arange(1 << nodes)
    counts, lowest = bit_tables(nodes)
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


def paths_ahead_s(costs: LinkCosts) -> list[FloatArray]:
    """[hops][n, 2^n] the cheapest path of so many hops that leaves a node and visits nodes of a set once each.

    ``ahead[h][v, S] = min over w in S of hop(v, w) + ahead[h − 1][w, S − w]`` (Held and Karp, J. SIAM 10, 1962);
    ∞ where S has fewer nodes than hops. The last table, of :data:`MOST_HOPS_AHEAD` hops, stands for longer paths too.
    """
    nodes = costs.num_nodes
    tables = [np.zeros((nodes, 1 << nodes))]
    for _ in range(min(costs.num_stages - 1, MOST_HOPS_AHEAD)):
        table = np.full_like(tables[-1], np.inf)
        for node in range(nodes):
            into = table.reshape(nodes, -1, 2, 1 << node)[:, :, 1]
            rest = tables[-1][node].reshape(-1, 2, 1 << node)[:, 0]
            np.minimum(into, costs.hop_s[:, node, None, None] + rest, out=into)
        tables.append(table)
    return tables


def covered(sets: IntArray, num_nodes: int, num_sets: int) -> BoolArray:
    """[2^n] whether a set of nodes is a union of at most ``num_sets`` disjoint sets of a family."""
    table = np.zeros(1 << num_nodes, dtype=bool)
    table[0] = True
    unions = np.zeros(1, dtype=np.int64)
    for _ in range(num_sets):
        grown = np.zeros(1 << num_nodes, dtype=bool)
        for some in np.array_split(unions, -(-len(unions) * len(sets) // PAIRS_AT_ONCE) or 1):
            apart = some[:, None] & sets == 0
            grown[(some[:, None] | sets)[apart]] = True
        unions = np.flatnonzero(grown)
        table[unions] = True
    return table
