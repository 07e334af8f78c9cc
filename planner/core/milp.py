"""A (mixed-)integer linear program as plain arrays, and the unrelated solvers that prove its optimum.

    min c · x   with   low_r ≤ Σ_j a_rj · x_j ≤ high_r  for each row r,   low_j ≤ x_j ≤ high_j,   some x_j whole

A model is stated once, as a function that returns a :class:`Program`; whatever solves it reads the same arrays:

=========  ==================================  =========================================================================
``scip``   SCIP through OR-tools               the default; can be stopped after a number of nodes of its tree
``cbc``    CBC through PuLP                    a child process, bundled with PuLP
``highs``  HiGHS through OR-tools' MathOpt     with its own tolerances
=========  ==================================  =========================================================================

All allow 1e-6 of infeasibility. What is known to go wrong, and why the code below is as it is (ortools 9.15, PuLP 3.3):

* highspy and ortools cannot live in one process, and ``import pulp`` loads highspy where it is installed. So HiGHS is
  the one that OR-tools carries, and PuLP is imported with highspy hidden.
* HiGHS through ``pywraplp`` keeps a relative gap of 1e-4 whatever is asked; through MathOpt it fails where ``threads``
  is set, and with feasibility tolerances of 1e-9 it has returned wrong optima: those stay at their defaults.
* PuLP's ``status`` says Optimal for the incumbent of a search that was cut short; ``sol_status`` does not.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from meshplan.catalogs.errors import SolverError
from meshplan.catalogs.scratch import scratch_folder
from meshplan.planner.core.solution import Status, relative_gap, status_of

# Relative distance at which a solver's own bound counts as met: its tolerance on integers and rows.
_MET = 1e-6
# What a solution may break a row by before it is not believed.
_TRUSTED = 1e-5
DEFAULT_BACKEND = "scip"
# A few dozen columns under hundreds of dense rows: cutting planes take SCIP longer than its tree.
LEAN = "separating/maxrounds = 0\nseparating/maxroundsroot = 0\n"


@dataclass(slots=True)
class Program:
    """The arrays of a program; :meth:`column` and :meth:`row` fill them.

    Args:
        costs: [columns] c.
        lows: [columns] least value.
        highs: [columns] most.
        whole: [columns] whether the value must be whole.
        names: [columns] for people; solvers do not see them.
        rows: (low, high, column → coefficient).
        row_names: [rows] for people.
    """

    costs: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rows: list[tuple[float, float, Mapping[int, float]]] = field(default_factory=list)
    row_names: list[str] = field(default_factory=list)

    def column(self, name: str, low: float, high: float, *, cost: float = 0.0, whole: bool = False) -> int:
        """Add a variable; its number."""
        self.names.append(name)
        self.costs.append(cost)
        self.lows.append(low)
        self.highs.append(high)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(
        self, name: str, coefficients: Mapping[int, float], *, low: float = -math.inf, high: float = math.inf
    ) -> int:
        """Add a constraint; its number."""
        self.row_names.append(name)
        self.rows.append((low, high, coefficients))
        return len(self.rows) - 1

    def broken(self, values: Sequence[float], *, tolerance: float) -> str | None:
        """Name of the first column or row that the values break by more than ``tolerance``; None where none is.

        The tolerance is relative to a row's largest term, absolute below 1.
        """
        for j, value in enumerate(values):
            distance = abs(value - round(value)) if self.whole[j] else 0.0
            if distance > tolerance or not self.lows[j] - tolerance <= value <= self.highs[j] + tolerance:
                return self.names[j]
        for name, (low, high, coefficients) in zip(self.row_names, self.rows, strict=True):
            terms = [coefficient * values[number] for number, coefficient in coefficients.items()]
            slack = tolerance * max([1.0, *map(abs, terms)])
            if not low - slack <= math.fsum(terms) <= high + slack:
                return name
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What a solver says of a program.

    Args:
        values: [columns]; empty where there is no solution.
        objective: objective value; infinite where there is no solution.
        bound: no solution is cheaper; infinite where it is proven that there is none.
        duals: [rows] of a program without whole columns; empty otherwise.
        num_iterations: simplex iterations over the whole tree, the same on every run; from SCIP only.
    """

    values: tuple[float, ...]
    objective: float
    bound: float
    duals: tuple[float, ...] = ()
    num_iterations: int = 0

    @property
    def status(self) -> Status | None:
        """What the bound proves; None where the search was cut short before it had any solution."""
        if self.values:
            return status_of(self.objective, self.bound)
        return Status.INFEASIBLE if math.isinf(self.bound) else None

    @property
    def gap(self) -> float | None:
        """:func:`~meshplan.planner.core.solution.relative_gap`; None without a solution."""
        return relative_gap(self.objective, self.bound) if self.values else None


NO_SOLUTION = Solved(values=(), objective=math.inf, bound=math.inf)


def solve_program(
    program: Program, backend: str = DEFAULT_BACKEND, *, max_nodes: int | None = None, parameters: str = ""
) -> Solved:
    """Solve a program to proven optimality, or until ``max_nodes`` nodes of the tree are searched.

    Args:
        program: the program.
        backend: one of :data:`BACKENDS`.
        max_nodes: limit on the nodes of SCIP's tree, a count so that every run stops at the same place; None for no
            limit. The other back ends go on to the end.
        parameters: SCIP's own, a line each, such as :data:`LEAN`; the other back ends have none.

    Raises:
        SolverError: unknown backend, or the solver stopped without a proof and without the limit reached.
    """
    if backend not in BACKENDS:
        raise SolverError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    solved = BACKENDS[backend].solve(program, max_nodes, parameters)
    if backend != DEFAULT_BACKEND and solved.values:  # the others are there to check: what they say is checked, too
        broken = program.broken(solved.values, tolerance=_TRUSTED)
        if broken is not None:
            raise SolverError(f"{BACKENDS[backend].label} calls a solution optimal that breaks {broken!r}")
    return solved


def solve_relaxed(program: Program) -> Solved:
    """Solve the program with no column whole, duals included (GLOP through OR-tools)."""
    solver, columns, rows = _loaded(program, "GLOP", relaxed=True)
    status = solver.Solve()
    if status == solver.INFEASIBLE:
        return NO_SOLUTION
    if status != solver.OPTIMAL:
        raise SolverError(f"GLOP stopped with status {status} on a linear program; check the rates for extreme values")
    objective = float(solver.Objective().Value())
    return Solved(
        values=tuple(column.solution_value() for column in columns),
        objective=objective,
        bound=objective,
        duals=tuple(row.dual_value() for row in rows),
    )


def new_solver(name: str) -> Any:
    """An empty ``pywraplp`` solver of OR-tools: SCIP, or GLOP for a linear program that grows while it is solved.

    Raises:
        SolverError: OR-tools was built without it.
    """
    from ortools.linear_solver import pywraplp  # start-up: about 1 s

    solver = pywraplp.Solver.CreateSolver(name)
    if solver is None:
        raise SolverError(f"OR-tools was built without {name}; install ortools >= 9.10 from PyPI")
    return solver


def _loaded(program: Program, name: str, *, relaxed: bool) -> tuple[Any, list[Any], list[Any]]:
    """The program in a ``pywraplp`` solver, with its columns and rows there."""
    solver = new_solver(name)
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


def _with_scip(program: Program, max_nodes: int | None, parameters: str) -> Solved:
    from ortools.linear_solver import pywraplp  # start-up: see new_solver

    solver, columns, _ = _loaded(program, "SCIP", relaxed=False)
    limit = "" if max_nodes is None else f"limits/nodes = {max_nodes}\n"
    solver.SetSolverSpecificParametersAsString(limit + parameters)
    gaps = pywraplp.MPSolverParameters()
    gaps.SetDoubleParam(gaps.RELATIVE_MIP_GAP, 0.0)
    status = solver.Solve(gaps)
    if status == solver.INFEASIBLE:
        return NO_SOLUTION
    if status not in (solver.OPTIMAL, solver.FEASIBLE):
        if max_nodes is not None and status == solver.NOT_SOLVED:
            bound = float(solver.Objective().BestBound())
            return Solved(values=(), objective=math.inf, bound=bound, num_iterations=solver.iterations())
        raise SolverError(f"SCIP stopped with status {status} before a proof")
    objective, bound = float(solver.Objective().Value()), float(solver.Objective().BestBound())
    if status == solver.FEASIBLE and max_nodes is None:
        raise SolverError(f"SCIP stopped at {objective:g} with the bound {bound:g} before a proof")
    return Solved(
        values=tuple(column.solution_value() for column in columns),
        objective=objective,
        bound=_met(objective, bound),
        num_iterations=solver.iterations(),
    )


def _with_highs(program: Program, max_nodes: int | None, parameters: str) -> Solved:
    from ortools.math_opt.python import mathopt  # start-up: see new_solver

    del max_nodes, parameters
    model = mathopt.Model()
    columns = [
        model.add_variable(lb=low, ub=high, is_integer=whole)
        for low, high, whole in zip(program.lows, program.highs, program.whole, strict=True)
    ]
    for low, high, coefficients in program.rows:
        row = model.add_linear_constraint(lb=low, ub=high)
        for number, coefficient in coefficients.items():
            row.set_coefficient(columns[number], coefficient)
    for cost, column in zip(program.costs, columns, strict=True):
        model.objective.set_linear_coefficient(column, cost)
    gaps = mathopt.SolveParameters(relative_gap_tolerance=0.0, absolute_gap_tolerance=0.0)
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=gaps)
    reason = result.termination.reason
    if reason == mathopt.TerminationReason.INFEASIBLE:
        return NO_SOLUTION
    if reason != mathopt.TerminationReason.OPTIMAL:
        raise SolverError(f"HiGHS stopped with {reason.value!r} before a proof")
    objective = float(result.objective_value())
    return Solved(
        values=tuple(result.variable_values(columns)),
        objective=objective,
        bound=_met(objective, float(result.best_objective_bound())),
    )


def _with_cbc(program: Program, max_nodes: int | None, parameters: str) -> Solved:
    del max_nodes, parameters
    pulp = _pulp()
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
    bundled.tmpDir = _cbc_folder().name  # else its files stay in the temporary folder where it breaks off or is killed
    try:
        model.solve(bundled)
    except pulp.PulpSolverError as error:
        raise SolverError(f"CBC broke off before a proof: {error}") from error
    if pulp.LpStatusInfeasible in (model.sol_status, model.status):
        return NO_SOLUTION
    if model.sol_status != pulp.LpSolutionOptimal:  # `status` says Optimal for unproven incumbents too
        raise SolverError(f"CBC stopped with {pulp.LpSolution[model.sol_status]!r} before a proof")
    values = tuple(float(column.value() or 0.0) for column in columns)
    objective = math.fsum(cost * value for cost, value in zip(program.costs, values, strict=True))
    return Solved(values=values, objective=objective, bound=objective)


@cache
def _cbc_folder() -> TemporaryDirectory[str]:
    return scratch_folder()


def _pulp() -> Any:
    """PuLP, imported without highspy: see the module's text."""
    hidden = "highspy" not in sys.modules
    if hidden:
        sys.modules["highspy"] = None  # type: ignore[assignment]  # what makes an import of it fail
    try:
        import pulp  # start-up: about 0.5 s, and only where CBC is asked for
    finally:
        if hidden:
            del sys.modules["highspy"]
    return pulp


def _met(objective: float, bound: float) -> float:
    """The bound, or the objective where the two agree within the solver's tolerance."""
    return objective if objective - bound <= _MET * max(abs(objective), 1.0) else bound


class Backend(NamedTuple):
    """A solver: its name as people write it, and (program, most nodes, parameters) → what it found."""

    label: str
    solve: Callable[[Program, int | None, str], Solved]


BACKENDS = {
    DEFAULT_BACKEND: Backend("SCIP", _with_scip),
    "cbc": Backend("CBC", _with_cbc),
    "highs": Backend("HiGHS", _with_highs),
}
