"""A mixed-integer program as plain data, and the two unrelated solvers that read it.

SCIP through OR-tools, CBC through PuLP. Both allow 1e-6 of infeasibility. HiGHS is left out: through ``pywraplp`` it
keeps a relative gap of 1e-4 whatever is asked, and it writes a banner to standard output.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshplan.catalogs.errors import SolverError

BACKENDS = ("scip", "cbc")
# Relative distance at which a solver's own bound counts as met: its tolerance on integers and rows.
_MET = 1e-6


@dataclass(slots=True)
class Program:
    """min cost · x subject to low ≤ A x ≤ high, with bounds on x, some of it whole. Built row by row.

    Args:
        costs: [columns].
        lows: [columns] least value.
        highs: [columns] most.
        whole: [columns] whether the value must be whole.
        rows: (low, high, column → coefficient).
    """

    costs: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, Mapping[int, float]]] = field(default_factory=list)

    def column(self, low: float, high: float, *, cost: float = 0.0, whole: bool = False) -> int:
        """Add a variable; its number."""
        self.costs.append(cost)
        self.lows.append(low)
        self.highs.append(high)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, coefficients: Mapping[int, float], *, low: float = -math.inf, high: float = math.inf) -> int:
        """Add a constraint; its number."""
        self.rows.append((low, high, coefficients))
        return len(self.rows) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What a solver says of a program.

    Args:
        values: [columns]; empty where there is no solution.
        objective: of the values; infinite where there is no solution.
        bound: no solution is cheaper; infinite where it is proven that there is none.
        duals: [rows] of a program without whole columns; empty otherwise.
        num_iterations: of the simplex method, all boxes together: the work, the same on every run. Of SCIP only.
    """

    values: tuple[float, ...]
    objective: float
    bound: float
    duals: tuple[float, ...] = ()
    num_iterations: int = 0


def solve_program(program: Program, backend: str = "scip", *, max_nodes: int | None = None) -> Solved:
    """Solve a program to proven optimality, or until ``max_nodes`` boxes are searched.

    Args:
        program: the program.
        backend: one of :data:`BACKENDS`.
        max_nodes: of SCIP's tree: a count, so that every run stops at the same place; None for no limit.

    Raises:
        SolverError: unknown backend, or the solver stopped without a proof and without the limit reached.
    """
    if backend not in BACKENDS:
        raise SolverError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    return _with_scip(program, max_nodes) if backend == "scip" else _with_cbc(program)


def solve_relaxed(program: Program) -> Solved:
    """Solve the program with no column whole, duals included (GLOP)."""
    solver, columns, rows = _ortools(program, "GLOP", relaxed=True)
    status = solver.Solve()
    if status == solver.INFEASIBLE:
        return Solved(values=(), objective=math.inf, bound=math.inf)
    if status != solver.OPTIMAL:
        raise SolverError(f"GLOP stopped with status {status} on a linear program; check the rates for extreme values")
    objective = float(solver.Objective().Value())
    return Solved(
        values=tuple(column.solution_value() for column in columns),
        objective=objective,
        bound=objective,
        duals=tuple(row.dual_value() for row in rows),
    )


def _ortools(program: Program, name: str, *, relaxed: bool) -> tuple[Any, list[Any], list[Any]]:
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver.CreateSolver(name)
    if solver is None:
        raise SolverError(f"OR-tools was built without {name}; install ortools >= 9.10 from PyPI")
    infinity = solver.infinity()
    columns = []
    for cost, low, high, whole in zip(program.costs, program.lows, program.highs, program.whole, strict=True):
        make = solver.IntVar if whole and not relaxed else solver.NumVar
        column = make(low, min(high, infinity), "")
        if cost:
            solver.Objective().SetCoefficient(column, cost)
        columns.append(column)
    rows = []
    for low, high, coefficients in program.rows:
        row = solver.Constraint(max(low, -infinity), min(high, infinity))
        for number, coefficient in coefficients.items():
            row.SetCoefficient(columns[number], coefficient)
        rows.append(row)
    solver.Objective().SetMinimization()
    return solver, columns, rows


def _with_scip(program: Program, max_nodes: int | None) -> Solved:
    from ortools.linear_solver import pywraplp

    solver, columns, _ = _ortools(program, "SCIP", relaxed=False)
    if max_nodes is not None:
        solver.SetSolverSpecificParametersAsString(f"limits/nodes = {max_nodes}\n")
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, 0.0)
    status = solver.Solve(parameters)
    if status == solver.INFEASIBLE:
        return Solved(values=(), objective=math.inf, bound=math.inf)
    if status not in (solver.OPTIMAL, solver.FEASIBLE):
        if max_nodes is not None and status == solver.NOT_SOLVED:
            bound = float(solver.Objective().BestBound())
            return Solved(values=(), objective=math.inf, bound=bound, num_iterations=solver.iterations())
        raise SolverError(f"SCIP stopped with status {status} before a proof")
    objective, bound = float(solver.Objective().Value()), float(solver.Objective().BestBound())
    if status == solver.FEASIBLE and max_nodes is None:
        raise SolverError(f"SCIP stopped at {objective:g} with the bound {bound:g} before a proof")
    if objective - bound <= _MET * max(abs(objective), 1.0):
        bound = objective
    return Solved(
        values=tuple(column.solution_value() for column in columns),
        objective=objective,
        bound=bound,
        num_iterations=solver.iterations(),
    )


def _with_cbc(program: Program) -> Solved:
    import pulp

    model = pulp.LpProblem("program", pulp.LpMinimize)
    variable = getattr(model, "add_variable", pulp.LpVariable)  # the latter is deprecated from PuLP 3.3 on
    columns = [
        variable(
            f"x{i}",
            None if math.isinf(low) else low,
            None if math.isinf(high) else high,
            cat="Integer" if whole else "Continuous",
        )
        for i, (low, high, whole) in enumerate(zip(program.lows, program.highs, program.whole, strict=True))
    ]
    model += pulp.lpSum(cost * column for cost, column in zip(program.costs, columns, strict=True) if cost)
    for low, high, coefficients in program.rows:
        total = pulp.lpSum(coefficient * columns[number] for number, coefficient in coefficients.items())
        if low == high:
            model += total == low
            continue
        if not math.isinf(low):
            model += total >= low
        if not math.isinf(high):
            model += total <= high
    with warnings.catch_warnings():  # PuLP 3.3 announces that 4.0 will not bundle CBC; we ask for PuLP below 4
        warnings.simplefilter("ignore", DeprecationWarning)
        bundled = pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, gapAbs=0.0, threads=1)
    model.solve(bundled)
    if pulp.LpStatusInfeasible in (model.sol_status, model.status):
        return Solved(values=(), objective=math.inf, bound=math.inf)
    if model.sol_status != pulp.LpSolutionOptimal:  # `status` says Optimal for unproven incumbents too
        raise SolverError(f"CBC stopped with {pulp.LpSolution[model.sol_status]!r} before a proof")
    values = tuple(float(column.value() or 0.0) for column in columns)
    objective = math.fsum(cost * value for cost, value in zip(program.costs, values, strict=True))
    return Solved(values=values, objective=objective, bound=objective)
