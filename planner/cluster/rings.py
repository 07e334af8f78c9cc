"""How many rings devices without a switch have: as many as their links carry at once.

*Notation.* n_ij links join members i and j, each with its bandwidth in both directions. A *ring* r passes every member
once, from each to the next, a_ijr times over the links from i to j: once between neighbours of the ring, or, where no
ring of linked pairs exists, along the fewest links between two that have none. Rings carry the shares x_r of the data:

    max Σ_r x_r   with   Σ_r a_ijr·x_r ≤ n_ij  for each i and j,   x_r ≥ 0

*Bound.* Every ring leaves every part of the members, so that no packing beats the least cut. It may miss it: the eight
dies of four MI250X have a least cut of five links and four rings, which are those of RCCL. Where all rings weighing the
same reach the cut, they are the optimum, and nothing is solved.

Sources: NCCL's and RCCL's rings: Li et al., arXiv:1903.04611, section 2 (six over eight V100); ROCm/rccl,
src/graph/rome_models.cc, rome_model_71, ringBase (four over eight dies).

Assumes: the library finds the packing. Of more than :data:`MOST_MEMBERS` members the cut is taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, permutations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.milp import Program, solve_relaxed

# Members of a group whose rings are listed: one of three, 7! = 5,040 of eight; two have a pair of links alone.
LEAST_MEMBERS, MOST_MEMBERS = 3, 8
_EQUAL = 1e-9


def num_rings(links: IntArray, least_cut: int) -> float:
    """The most rings over all members.

    Args:
        links: [k, k] links between members, which connect them.
        least_cut: links that leave some part of the members, the least of any.

    >>> num_rings(np.array([[0, 2], [2, 0]]), 2)
    2.0
    >>> num_rings(np.array([[0, 1, 3], [1, 0, 3], [3, 3, 0]]), 4)
    2.0
    """
    if not LEAST_MEMBERS <= len(links) <= MOST_MEMBERS:
        return float(least_cut)
    loads = np.array(list(_loads(links)))
    used = loads.any(axis=0)
    loads, free = loads[:, used], links.ravel()[used].astype(np.float64)
    alike = len(loads) / float((loads.sum(axis=0) / free).max())
    if alike >= least_cut - _EQUAL:
        return float(least_cut)
    return round(-solve_relaxed(packing_program(loads, free)).objective, 9)


def _loads(links: IntArray) -> Iterator[IntArray]:
    """[k²] links that each ring passes, from each member to each; rings of linked pairs where there are any."""
    import networkx as nx  # start-up: 0.2 s

    tours = [(0, *rest, 0) for rest in permutations(range(1, len(links)))]
    direct = [tour for tour in tours if all(links[hop] for hop in pairwise(tour))]
    ways = dict(nx.all_pairs_shortest_path(nx.from_numpy_array(links)))
    for tour in direct or tours:
        load = np.zeros_like(links)
        for first, second in pairwise(tour):
            for hop in pairwise(ways[first][second]):
                load[hop] += 1
        yield load.ravel()


def packing_program(loads: FloatArray, free: FloatArray) -> Program:
    """The linear program above; its optimum is the negative of the number of rings.

    Args:
        loads: [R, n] links of each pair that each ring passes.
        free: [n] links of each pair.
    """
    program = Program()
    for ring in range(len(loads)):
        program.column(f"ring {ring}", 0.0, np.inf, cost=-1.0)
    for number, links in enumerate(free):
        column = loads[:, number]
        rings = np.flatnonzero(column)
        program.row(f"links {number}", {int(ring): float(column[ring]) for ring in rings}, high=float(links))
    return program
