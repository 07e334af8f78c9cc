"""Programs stated once: every back end proves the same optimum, and says in the same words how sure it is."""

from __future__ import annotations

import ast
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshplan import planner
from meshplan.catalogs.errors import SolverError
from meshplan.planner.cluster.rings import packing_program
from meshplan.planner.core.milp import BACKENDS, NO_SOLUTION, Program, Solved, solve_program, solve_relaxed
from meshplan.planner.core.solution import Status
from meshplan.planner.expert_placement.certify import layer_program
from meshplan.planner.gpu_allocation.nodes.packing import pattern_program
from meshplan.planner.gpu_allocation.nodes.problem import FleetProblem, ScenarioPolicy, lifted
from meshplan.planner.gpu_allocation.nodes.program import fleet_program, routing_program
from meshplan.planner.gpu_allocation.replicas.cuts import cut_program
from meshplan.planner.gpu_allocation.replicas.instance import instance_of
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem

PLANNER = Path(str(planner.__file__)).parent
DATA = Path(__file__).parents[2] / "data" / "gpu_allocation"


def instance(name: str) -> GpuAllocationProblem:
    return GpuAllocationProblem.from_document(json.loads((DATA / f"{name}.json").read_text()), DATA)


def fleets() -> Iterator[FleetProblem]:
    """Small ones that between them use every row of the program."""
    toy, spare = lifted(instance("toy")), lifted(instance("feature-spare-1"))
    yield from (toy, spare, lifted(instance("feature-infeasible-caps")))
    peak = toy.scenarios[0]
    night = replace(peak, name="night", weight=0.5, request_rate_per_s=tuple(r / 2 for r in peak.request_rate_per_s))
    pair = (replace(peak, weight=0.5), night)
    yield replace(toy, scenarios=pair)
    yield replace(toy, scenarios=pair, policy=ScenarioPolicy.EXPECTED, start_usd=1.0, stop_usd=0.5, max_usd_per_hour=99)
    yield replace(toy, routing_steps=4)


def cuts_of(problem: GpuAllocationProblem) -> Program:
    """The inequalities that the buckets one by one give, and that of the prices."""
    arrays = instance_of(problem)
    each = (arrays.utilization[:, None] / arrays.load).T
    least = (arrays.price[:, None] * arrays.load / arrays.utilization[:, None]).min(axis=0).sum()
    return cut_program(arrays, np.vstack([each, arrays.price / least]))


# The three rings of four members: links between 0 and 1, 0 and 2, 0 and 3, 1 and 2, 1 and 3, 2 and 3.
RINGS_OF_FOUR = np.array([[1.0, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0]])

STATED: dict[str, Callable[[], Iterator[Program]]] = {
    "fleet_program": lambda: (fleet_program(problem).program for problem in fleets()),
    "routing_program": lambda: (
        routing_program(problem, 0, [3 + g for g in range(len(problem.kinds))])[0] for problem in fleets()
    ),
    "layer_program": lambda: iter([layer_program(np.array([0.5, 1.5, 0.7, 0.9]), np.array([1.0, 1.5]), 2)]),
    "packing_program": lambda: iter([packing_program(RINGS_OF_FOUR, np.array([2.0, 1.0, 1.0, 1.0, 1.0, 2.0]))]),
    "pattern_program": lambda: (
        pattern_program(sizes, 8)[0] for sizes in ([5, 3, 3, 2, 2, 1], [8, 4, 4, 4, 6, 2], [7, 5, 5, 3, 3, 3, 1, 1])
    ),
    "cut_program": lambda: (cuts_of(instance(name)) for name in ("toy", "feature-spare-1", "mixed-slo40-r2")),
}


def test_every_program_of_the_planner_is_held_against_two_more_solvers() -> None:
    found = set()
    for path in PLANNER.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(isinstance(call, ast.Name) and call.id == "Program" for call in calls):
                    found.add(function.name)
    assert found == set(STATED)


def test_solvers_of_programs_are_met_in_one_file_only() -> None:
    """CP-SAT, which takes no programs but circuits, is met where mappings are certified."""
    users = set()
    for path in PLANNER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in ("ortools", "pulp", "highspy") for name in names):
                users.add(path.relative_to(PLANNER).as_posix())
    assert users == {"core/milp.py", "rank_mapping/certify.py"}


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "scip"])
def test_two_solvers_agree_on_every_program(name: str, backend: str) -> None:
    for program in STATED[name]():
        first, second = solve_program(program), solve_program(program, backend)
        assert first.status is second.status
        assert second.objective == pytest.approx(first.objective, rel=1e-6)
        assert second.bound == pytest.approx(first.bound, rel=1e-6)
        relaxed = solve_relaxed(program)
        assert relaxed.objective <= first.objective + 1e-6 * abs(first.objective)
        linear = replace_whole(program)
        assert solve_program(linear, backend).objective == pytest.approx(relaxed.objective, rel=1e-6)


def replace_whole(program: Program) -> Program:
    return replace(program, whole=[False] * len(program.whole))


def knapsack(values: list[int], weights: list[int], room: float) -> Program:
    program = Program()
    columns = [program.column(f"take {i}", 0, 1, cost=-value, whole=True) for i, value in enumerate(values)]
    program.row("room", {column: float(w) for column, w in zip(columns, weights, strict=True)}, high=room)
    return program


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_optimum_is_that_of_plain_enumeration(backend: str) -> None:
    rng = np.random.default_rng(3)
    for room in (0, 7, 20):
        values, weights = (rng.integers(1, 12, 8).tolist() for _ in range(2))
        best = max(
            sum(v for v, taken in zip(values, choice, strict=True) if taken)
            for choice in itertools.product((0, 1), repeat=8)
            if sum(w for w, taken in zip(weights, choice, strict=True) if taken) <= room
        )
        solved = solve_program(knapsack(values, weights, room), backend)
        assert solved.objective == pytest.approx(-best)
        assert (solved.status, solved.gap) == (Status.OPTIMAL, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_solution_is_infeasible_and_what_has_no_bottom_is_an_error(backend: str) -> None:
    program = knapsack([1, 2], [3, 3], 7)
    program.row("at least three", {0: 1.0, 1: 1.0}, low=3.0)
    solved = solve_program(program, backend)
    assert solved == NO_SOLUTION
    assert (solved.status, solved.gap) == (Status.INFEASIBLE, None)
    endless = Program()
    endless.column("down", -math.inf, math.inf, cost=1.0)
    with pytest.raises(SolverError, match="before a proof"):
        solve_program(endless, backend)


def test_a_search_cut_short_claims_no_more_than_its_bound_proves() -> None:
    rng = np.random.default_rng(0)
    program = Program()
    columns = [program.column(f"x{i}", 0, 1, cost=-rng.uniform(90, 110), whole=True) for i in range(60)]
    for r in range(5):
        weights = {column: rng.uniform(90, 110) for column in columns}
        program.row(f"r{r}", weights, high=sum(weights.values()) / 2 + 0.5)
    solved = solve_program(program, max_nodes=1)
    assert solved.status is Status.FEASIBLE
    assert solved.gap is not None
    assert 0.0 < solved.gap < 0.1
    assert solved.bound < solved.objective
    assert Solved(values=(), objective=math.inf, bound=3.0).status is None


def test_a_back_end_that_breaks_a_row_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Solved(values=(1.0, 1.0), objective=-3.0, bound=-3.0)
    monkeypatch.setitem(BACKENDS, "cbc", BACKENDS["cbc"]._replace(solve=lambda program, max_nodes, parameters: wrong))
    with pytest.raises(SolverError, match="CBC calls a solution optimal that breaks 'room'"):
        solve_program(knapsack([1, 2], [3, 3], 4), "cbc")
    program = knapsack([1, 2], [3, 3], 4)
    assert program.broken((0.5, 0.0), tolerance=1e-6) == "take 0"
    assert program.broken((0.0, 2.0), tolerance=1e-6) == "take 1"
    assert program.broken((0.0, 1.0), tolerance=1e-6) is None


def test_an_unknown_back_end_is_named_with_the_known_ones() -> None:
    with pytest.raises(SolverError, match="unknown backend 'gurobi'; there are scip, cbc, highs"):
        solve_program(Program(), "gurobi")


def printed(code: str, environment: dict[str, str]) -> list[str]:
    """Words that a program prints in a process of its own, with this environment alone."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_pulp_does_not_bring_highspy_into_the_process(tmp_path: Path) -> None:
    """ortools and highspy cannot live in one process, and PuLP imports highspy where it finds it."""
    (tmp_path / "highspy.py").write_text("raise SystemExit('highspy was imported')\n")
    code = (
        "import sys\n"
        "from meshplan.planner.core.milp import Program, solve_program\n"
        "program = Program()\n"
        "program.column('x', 1.5, 9, cost=1.0, whole=True)\n"
        "print(solve_program(program, 'cbc').objective, solve_program(program, 'highs').objective)\n"
        "assert 'highspy' not in sys.modules\n"
    )
    assert printed(code, {"PYTHONPATH": str(tmp_path)}) == ["2.0", "2.0"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_solvers_leave_nothing_in_the_temporary_folder(backend: str, tmp_path: Path) -> None:
    """A program that breaks off, too: CBC is a process of its own, which then leaves its two files."""
    code = (
        "import math\n"
        "from meshplan.catalogs.errors import SolverError\n"
        "from meshplan.planner.core.milp import Program, solve_program\n"
        "program = Program()\n"
        "program.column('x', 1.5, 9, cost=1.0, whole=True)\n"
        f"print(solve_program(program, {backend!r}).objective)\n"
        "endless = Program()\n"
        "endless.column('down', -math.inf, math.inf, cost=1.0)\n"
        "try:\n"
        f"    solve_program(endless, {backend!r})\n"
        "except SolverError:\n"
        "    print('broke off')\n"
    )
    assert printed(code, {"TMPDIR": str(tmp_path)}) == ["2.0", "broke", "off"]
    assert list(tmp_path.iterdir()) == []
