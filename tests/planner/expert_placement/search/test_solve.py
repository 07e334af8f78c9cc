"""Every answer is judged by a referee written from the format's definition (tests/support/expert_referee.py)."""

from __future__ import annotations

import json
from itertools import chain, combinations, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_referee import eplb_balance, judge, referee_balance, run
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Status
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.solve import answer, solve

HERE = Path(__file__).parent


# ------------------------------------------------------------------------------------------------- balance
def best_by_enumeration(load: list[list[float]], num_redundant: int, num_devices: int) -> list[float]:
    """Balancedness of the best placement of each layer, all of them tried."""
    experts = range(len(load[0]))
    per_device = (len(experts) + num_redundant) // num_devices
    rows = ([*chain(*each)] for each in product(combinations(experts, per_device), repeat=num_devices))
    legal = [row for row in rows if len(set(row)) == len(experts)]
    return [max(referee_balance([layer], [row], num_devices, [1.0] * num_devices) for row in legal) for layer in load]


@pytest.mark.parametrize(
    ("experts", "redundant", "devices"),
    [(4, 2, 2), (4, 2, 3), (5, 1, 3), (6, 0, 3), (6, 0, 2), (9, 0, 3), (3, 5, 4), (6, 2, 2)],
)
def test_small_layers_are_proven_optimal(experts: int, redundant: int, devices: int) -> None:
    rng = np.random.default_rng(experts * 100 + redundant * 10 + devices)
    load = rng.integers(0, 60, size=(6, experts))
    found = run(
        {
            "num_layers": 6,
            "num_experts": experts,
            "num_devices": devices,
            "num_redundant_experts": redundant,
            "load": load.tolist(),
        }
    )
    assert found["status"] == "optimal"
    expected = best_by_enumeration(load.tolist(), redundant, devices)
    assert found["balancedness"] == pytest.approx(float(np.mean(expected)), abs=1e-9)


def test_constraint_programming_agrees_with_the_exact_search() -> None:
    """The same small layers as an integer program with fixed counts for each vector of copies, by CP-SAT."""
    from ortools.sat.python import cp_model

    rng = np.random.default_rng(5)
    experts, redundant, devices = 6, 3, 3
    load = rng.integers(1, 50, size=(3, experts))
    found = run(
        {
            "num_layers": 3,
            "num_experts": experts,
            "num_devices": devices,
            "num_redundant_experts": redundant,
            "load": load.tolist(),
        }
    )
    scale = 6  # a multiple of every possible number of copies, so that pieces are whole numbers
    ideal = load.sum(axis=1) / devices
    values = []
    for layer in load:
        model = cp_model.CpModel()
        lies = [[model.new_bool_var(f"x{e}{d}") for d in range(devices)] for e in range(experts)]
        copies = [[model.new_bool_var(f"c{e}{c}") for c in range(1, devices + 1)] for e in range(experts)]
        top = model.new_int_var(0, int(layer.sum()) * scale, "top")
        time: list[list[Any]] = [[] for _ in range(devices)]
        for e in range(experts):
            model.add_exactly_one(copies[e])
            model.add(sum(lies[e]) == sum((c + 1) * copies[e][c] for c in range(devices)))
            for d in range(devices):
                for c in range(devices):
                    piece = model.new_bool_var(f"p{e}{d}{c}")
                    model.add_bool_and([lies[e][d], copies[e][c]]).only_enforce_if(piece)
                    model.add_bool_or([lies[e][d].Not(), copies[e][c].Not(), piece])
                    time[d].append(int(layer[e]) * scale // (c + 1) * piece)
        for d in range(devices):
            model.add(sum(lies[e][d] for e in range(experts)) == (experts + redundant) // devices)
            model.add(sum(time[d]) <= top)
        model.minimize(top)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model) == cp_model.OPTIMAL
        values.append(solver.objective_value / scale)
    assert found["balancedness"] == pytest.approx(float(np.mean(ideal / np.array(values))), abs=1e-9)


@st.composite
def instances(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 3))
    experts = draw(st.integers(1, 24))
    devices = draw(st.integers(1, 8))
    most = experts * devices - experts
    legal = [extra for extra in range(min(most, 24) + 1) if (experts + extra) % devices == 0]
    document: dict[str, Any] = {
        "num_layers": layers,
        "num_experts": experts,
        "num_devices": devices,
        "num_redundant_experts": draw(st.sampled_from(legal)) if legal else 0,
        "objective": draw(st.sampled_from(["balance", "robust", "balance+affinity", "migrate"])),
    }
    if not legal:
        document |= {"num_devices": 1}
    slots = experts + document["num_redundant_experts"]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sparse = draw(st.sampled_from([0.0, 0.3, 1.0]))
    document["load"] = (rng.integers(0, 1000, (layers, experts)) * (rng.random((layers, experts)) >= sparse)).tolist()
    if draw(st.booleans()):
        document["device_speed"] = rng.uniform(0.5, 2.0, document["num_devices"]).tolist()
    if document["objective"] == "robust":
        document["scenarios"] = rng.integers(0, 1000, (2, layers, experts)).tolist()
    if document["objective"] == "balance+affinity":
        document["transitions"] = rng.integers(0, 50, (layers - 1, experts, experts)).tolist()
        document["min_balancedness"] = draw(st.sampled_from([0.0, 0.2]))
    if document["objective"] == "migrate":
        document["current"] = rng.integers(0, experts, (layers, slots)).tolist()
        document["max_moved_experts"] = draw(st.sampled_from([layers * slots, slots // 2]))
    return document


@settings(max_examples=12, deadline=None)
@given(instances())
def test_any_instance_gets_a_legal_placement_and_a_true_bound(document: dict[str, Any]) -> None:
    problem = ExpertPlacementProblem.from_document(document, HERE)
    try:
        solution = solve(problem)
    except SolverError:
        assert document["min_balancedness"] > 0  # the floor was not met
        return
    if solution.status is Status.INFEASIBLE:
        assert document["objective"] in ("migrate", "balance+affinity")
        return
    judge(document, answer(problem, solution))


@pytest.mark.parametrize("seed", range(4))
def test_never_below_eplb(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts, devices = 32, 8
    for redundant in (0, 8, 24):
        load = np.floor(rng.lognormal(0, (0.3, 1.0, 2.0)[seed % 3], (3, experts)) * 500)
        found = run(
            {
                "num_layers": 3,
                "num_experts": experts,
                "num_devices": devices,
                "num_redundant_experts": redundant,
                "load": load.tolist(),
            }
        )
        assert found["balancedness"] >= eplb_balance(load.tolist(), redundant, devices) - 1e-12


def test_same_seed_same_placement() -> None:
    rng = np.random.default_rng(3)
    document = {
        "num_layers": 4,
        "num_experts": 32,
        "num_devices": 16,
        "num_redundant_experts": 16,
        "load": rng.pareto(1.2, (4, 32)).tolist(),
    }
    assert run(document, seed=7)["physical_to_logical_map"] == run(document, seed=7)["physical_to_logical_map"]


def test_slow_devices_get_less() -> None:
    rng = np.random.default_rng(0)
    speed = [1.0] * 6 + [0.85] * 2
    found = run(
        {
            "num_layers": 4,
            "num_experts": 64,
            "num_devices": 8,
            "num_redundant_experts": 8,
            "load": rng.integers(1, 1000, (4, 64)).tolist(),
            "device_speed": speed,
        }
    )
    assert found["balancedness"] >= 1 / 1.01


@pytest.mark.parametrize("speed", [0.5, 2.0])
@pytest.mark.parametrize(("experts", "redundant", "devices"), [(3, 1, 2), (4, 0, 2), (4, 2, 2), (5, 3, 2)])
def test_equal_devices_are_proven_optimal_at_any_speed(
    experts: int, redundant: int, devices: int, speed: float
) -> None:
    """Speeds are relative: what all devices have alike says nothing, and the bound stays one."""
    load = np.random.default_rng(experts + redundant).exponential(size=(3, experts)).tolist()
    found = run(
        {
            "num_layers": 3,
            "num_experts": experts,
            "num_devices": devices,
            "num_redundant_experts": redundant,
            "load": load,
            "device_speed": [speed] * devices,
        }
    )
    best = float(np.mean(best_by_enumeration(load, redundant, devices)))
    assert found["status"] == "optimal"
    assert found["balancedness"] == pytest.approx(best, abs=1e-9)
    assert found["bound"] == pytest.approx(best, abs=1e-9)


def test_layers_without_load_are_placed() -> None:
    found = run({"num_layers": 2, "num_experts": 8, "num_devices": 4, "load": [[0] * 8, [1, 2, 3, 4, 5, 6, 7, 8]]})
    assert found["balancedness"] == pytest.approx(1.0)
    assert found["status"] == "optimal"


def test_one_slot_a_device_is_decided_by_the_copies_alone() -> None:
    """With one slot a device the largest piece is the time: 9 / 3 against 4 / 2 and 2."""
    found = run({"num_layers": 1, "num_experts": 3, "num_devices": 6, "num_redundant_experts": 3, "load": [[9, 4, 2]]})
    assert found["status"] == "optimal"
    assert found["balancedness"] == pytest.approx(15 / 6 / 3)


# ------------------------------------------------------------------------------------------------- real counts
def olmoe(domain: str) -> list[list[int]]:
    """Expert counts of OLMoE-1B-7B, layers 0, 7 and 15 (see the file's own source line)."""
    counts: list[list[int]] = json.loads((HERE.parents[2] / "data" / "olmoe_expert_counts.json").read_text())[domain]
    return counts


def test_olmoe_placement_serves_both_domains() -> None:
    """A placement for one domain loses a quarter on the other; the robust one keeps nearly all, without spare slots."""
    shape = {"num_layers": 3, "num_experts": 64, "top_k": 8, "num_devices": 8}
    c4, github = olmoe("c4"), olmoe("github")
    own = run(shape | {"load": c4})
    assert own["balancedness"] > 0.999
    elsewhere = referee_balance(github, own["physical_to_logical_map"], 8, [1.0] * 8)
    assert elsewhere < 0.8
    robust = run(shape | {"objective": "robust", "scenarios": [c4, github]})
    assert robust["balancedness"] >= 0.99


def test_the_average_over_scenarios_may_be_asked_for() -> None:
    """All placements of a small layer tried: the best average comes near, and beats what the worst case asks for."""
    rng = np.random.default_rng(1)
    cases = rng.integers(1, 60, (3, 1, 6)).tolist()
    document = {"num_layers": 1, "num_experts": 6, "num_devices": 3, "objective": "robust", "scenarios": cases}

    def averages(row: list[int]) -> float:
        return float(np.mean([referee_balance(case, [row], 3, [1.0] * 3) for case in cases]))

    best = max(averages(list(row)) for row in permutations(range(6)))
    problem = ExpertPlacementProblem.from_document({**document, "robust_measure": "average"}, HERE)
    solution = solve(problem)
    found = answer(problem, solution)
    assert solution.objective == pytest.approx(found["mean_balancedness"])
    assert solution.objective == pytest.approx(averages(found["physical_to_logical_map"][0]))
    assert solution.bound is not None
    assert best * 0.97 <= solution.objective <= best + 1e-12 <= solution.bound + 1e-9
    assert solution.objective >= averages(run(document)["physical_to_logical_map"][0]) - 1e-12


# ------------------------------------------------------------------------------------------------- the call itself
def test_a_time_limit_that_strikes_at_once_still_gives_a_legal_placement() -> None:
    rng = np.random.default_rng(6)
    document = {
        "num_layers": 3,
        "num_experts": 32,
        "num_devices": 8,
        "num_redundant_experts": 8,
        "load": rng.integers(1, 999, (3, 32)).tolist(),
    }
    problem = ExpertPlacementProblem.from_document(document, HERE)
    judge(document, answer(problem, solve(problem, budget=Budget(0.0))))


def test_progress_is_told() -> None:
    told: list[float | None] = []
    problem = ExpertPlacementProblem.from_document(
        {"num_layers": 1, "num_experts": 4, "num_devices": 2, "load": [[4, 3, 2, 1]]}, HERE
    )
    solution = solve(problem, on_progress=lambda progress: told.append(progress.incumbent))
    assert told[-1] == solution.objective == 1.0
