"""The plain problem as one mixed-integer program, to hold the search over fleets against.

The program is that of :mod:`meshplan.planner.gpu_allocation.nodes.program`, with an offer and a kind for each
type. It has a column for every servable (type, bucket): it is for checking, not for large questions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshplan.planner.core.milp import solve_program
from meshplan.planner.gpu_allocation.nodes.problem import lifted
from meshplan.planner.gpu_allocation.nodes.program import fleet_program
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """What a solver proved to be optimal.

    Args:
        cost: USD/h; None when no fleet carries the load.
        counts: [types] one cheapest fleet; empty when there is none.
    """

    cost: float | None
    counts: tuple[int, ...]


def prove(problem: GpuAllocationProblem, backend: str) -> Proven:
    """Solve the plain program to proven optimality.

    Args:
        problem: the question.
        backend: one of :data:`~meshplan.planner.core.milp.BACKENDS`.

    Raises:
        SolverError: the solver stopped without a proof.
    """
    built = fleet_program(lifted(problem))
    solved = solve_program(built.program, backend)
    if not solved.values:
        return Proven(cost=None, counts=())
    counts = tuple(round(solved.values[column]) for column in built.replicas[0])
    prices = [one.usd_per_hour for one in problem.gpu_types]
    return Proven(cost=math.fsum(n * price for n, price in zip(counts, prices, strict=True)), counts=counts)
