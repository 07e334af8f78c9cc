"""The same problem as one plain mixed-integer program: the referee of the search over fleets.

Variables     n_g whole, 0 ≤ n_g ≤ max_count_g;  y_g ∈ {0, 1} type in use (only with spares);  0 ≤ x_gb ≤ 1
Objective     min Σ_g c_g · n_g
Constraints   Σ_g x_gb = 1 for each bucket b with traffic
              Σ_b load_gb · x_gb ≤ u_g · (n_g − spare · y_g)
              n_g ≤ (spare + most useful replicas of g) · y_g

Two unrelated solvers read it, SCIP through OR-tools and CBC through PuLP. Both allow 1e-6 of infeasibility, and the
program has a column for every servable (type, bucket): it is for checking, not for large questions. HiGHS is left out:
through ``pywraplp`` it keeps a relative gap of 1e-4 whatever is asked, and it writes a banner to standard output.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SolverError
from meshplan.planner.problems.gpu_allocation import GpuAllocationProblem
from meshplan.planner.solvers.gpu_allocation_instance import Instance, instance_of

BACKENDS = ("scip", "cbc")


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
        backend: one of :data:`BACKENDS`.

    Raises:
        SolverError: the solver stopped without a proof.
    """
    if backend not in BACKENDS:
        raise SolverError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    instance = instance_of(problem)
    if not instance.servable.any(axis=0).all():
        return Proven(cost=None, counts=())
    counts = _with_scip(instance) if backend == "scip" else _with_cbc(instance)
    if counts is None:
        return Proven(cost=None, counts=())
    return Proven(cost=math.fsum(np.array(counts) * instance.price), counts=counts)


def _most_rented(instance: Instance) -> list[int]:
    return [int(most) + instance.spare if most > 0 else 0 for most in instance.most]


def _with_scip(instance: Instance) -> tuple[int, ...] | None:
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver.CreateSolver("SCIP")
    if solver is None:
        raise SolverError("OR-tools was built without SCIP; install ortools >= 9.10 from PyPI")
    infinity = solver.infinity()
    all_served = [solver.Constraint(1.0, 1.0) for _ in range(instance.load.shape[1])]
    rented = []
    for g, most in enumerate(_most_rented(instance)):
        n, y = solver.IntVar(0, most, f"n{g}"), solver.IntVar(0, 1, f"y{g}")
        rented.append(n)
        solver.Objective().SetCoefficient(n, float(instance.price[g]))
        room, linked = solver.Constraint(0.0, infinity), solver.Constraint(0.0, infinity)
        room.SetCoefficient(n, float(instance.utilization[g]))
        room.SetCoefficient(y, -float(instance.utilization[g] * instance.spare))
        linked.SetCoefficient(y, float(most))
        linked.SetCoefficient(n, -1.0)
        for b in np.flatnonzero(instance.servable[g]).tolist():
            share = solver.NumVar(0.0, 1.0, f"x{g}_{b}")
            room.SetCoefficient(share, -float(instance.load[g, b]))
            all_served[b].SetCoefficient(share, 1.0)
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, 0.0)
    status = solver.Solve(parameters)
    if status == solver.INFEASIBLE:
        return None
    if status != solver.OPTIMAL:
        raise SolverError(f"SCIP stopped with status {status} before a proof")
    return tuple(round(n.solution_value()) for n in rented)


def _with_cbc(instance: Instance) -> tuple[int, ...] | None:
    import pulp

    program = pulp.LpProblem("gpu_allocation", pulp.LpMinimize)
    variable = getattr(program, "add_variable", pulp.LpVariable)  # the latter is deprecated from PuLP 3.3 on
    types, buckets = range(len(instance.price)), range(instance.load.shape[1])
    most = _most_rented(instance)
    n = [variable(f"n{g}", 0, most[g], cat="Integer") for g in types]
    y = [variable(f"y{g}", cat="Binary") for g in types]
    x = {(g, b): variable(f"x{g}_{b}", 0, 1) for g in types for b in buckets if instance.servable[g, b]}
    program += pulp.lpSum(float(instance.price[g]) * n[g] for g in types)
    for b in buckets:
        program += pulp.lpSum(x[g, b] for g in types if (g, b) in x) == 1
    for g in types:
        load = pulp.lpSum(float(instance.load[g, b]) * x[g, b] for b in buckets if (g, b) in x)
        program += load <= float(instance.utilization[g]) * (n[g] - instance.spare * y[g])
        program += n[g] <= most[g] * y[g]
    with warnings.catch_warnings():  # PuLP 3.3 announces that 4.0 will not bundle CBC; we ask for PuLP below 4
        warnings.simplefilter("ignore", DeprecationWarning)
        bundled = pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, gapAbs=0.0, threads=1)
    program.solve(bundled)
    if program.sol_status == pulp.LpSolutionInfeasible or program.status == pulp.LpStatusInfeasible:
        return None
    if program.sol_status != pulp.LpSolutionOptimal:  # `status` says Optimal for unproven incumbents too
        raise SolverError(f"CBC stopped with {pulp.LpSolution[program.sol_status]!r} before a proof")
    return tuple(round(count.value() or 0.0) for count in n)
