"""Robust placements of small layers against every placement, tried by a brute force that shares no code."""

from __future__ import annotations

from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_referee import referee_balance, run

from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Status
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.balance.every_layout import (
    MOST_LAYOUTS,
    _undominated,
    best_sums,
    layouts,
    num_layouts,
)
from meshplan.planner.expert_placement.search.solve import solve

# Experts, redundant copies, speeds of the devices.
SHAPES = [
    (6, 0, [1.0, 1.0, 1.0]),
    (4, 2, [1.0, 1.0, 1.0]),
    (4, 2, [1.0, 3.0]),
    (5, 1, [2.0, 1.0, 1.0]),
    (3, 1, [1.0, 1.0]),
]


def rows_of(experts: int, redundant: int, devices: int) -> list[tuple[int, ...]]:
    """Every legal row of a map, devices told apart."""
    per_device = (experts + redundant) // devices
    rows = (sum(sets, ()) for sets in product(combinations(range(experts), per_device), repeat=devices))
    return [row for row in rows if len(set(row)) == experts]


def robust(experts: int, redundant: int, speed: list[float], layers: int, cases: int, seed: int) -> dict[str, Any]:
    """A question with loads that differ much from case to case."""
    rng = np.random.default_rng(seed)
    return {
        "kind": "expert-placement",
        "num_layers": layers,
        "num_experts": experts,
        "num_devices": len(speed),
        "num_redundant_experts": redundant,
        "device_speed": speed,
        "objective": "robust",
        "scenarios": (rng.lognormal(3, 1.2, (cases, layers, experts)).round() + 1).tolist(),
    }


def best_by_brute_force(document: dict[str, Any]) -> float:
    """The best objective of all combinations of rows, one for each layer."""
    speed = document["device_speed"]
    rows = rows_of(document["num_experts"], document["num_redundant_experts"], len(speed))
    measure = np.mean if document.get("robust_measure") == "average" else np.min
    each = [
        [
            [referee_balance([case[layer]], [list(row)], len(speed), speed) for case in document["scenarios"]]
            for row in rows
        ]
        for layer in range(document["num_layers"])
    ]
    return max(float(measure(np.mean(chosen, axis=0))) for chosen in product(*each))


@pytest.mark.parametrize(("experts", "redundant", "speed"), SHAPES)
def test_a_small_layer_is_proven_optimal(experts: int, redundant: int, speed: list[float]) -> None:
    for seed in range(4):
        document = robust(experts, redundant, speed, 1, 3, seed)
        found = run(document)
        assert found["status"] == "optimal"
        assert found["balancedness"] == pytest.approx(best_by_brute_force(document), abs=1e-9)


@pytest.mark.parametrize(("experts", "redundant", "speed"), SHAPES)
def test_the_average_over_the_cases_is_proven_optimal(experts: int, redundant: int, speed: list[float]) -> None:
    document = robust(experts, redundant, speed, 1, 3, 7) | {"name": "average", "robust_measure": "average"}
    found = solve(ExpertPlacementProblem.from_document(document, Path()))
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(best_by_brute_force(document), abs=1e-9)


def test_small_layers_together_are_proven_optimal() -> None:
    """The smallest mean over layers is no matter of one layer: all pairs of rows are tried."""
    for seed in range(6):
        document = robust(4, 0, [1.0, 1.0], 3, 3, seed)
        found = run(document)
        assert found["status"] == "optimal"
        assert found["balancedness"] == pytest.approx(best_by_brute_force(document), abs=1e-9)


def test_balance_on_unequal_devices_is_proven_optimal() -> None:
    load = np.random.default_rng(3).lognormal(3, 1, (1, 6)).round().tolist()
    speed = [1.0, 2.0, 1.5]
    document = {"num_layers": 1, "num_experts": 6, "num_devices": 3, "device_speed": speed, "load": load}
    found = run(document)
    expected = max(referee_balance(load, [list(row)], 3, speed) for row in rows_of(6, 0, 3))
    assert found["status"] == "optimal"
    assert found["balancedness"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("experts", "redundant", "devices"), [(6, 0, 3), (4, 2, 3), (5, 1, 3), (3, 3, 2), (4, 0, 4)])
def test_layouts_are_complete_and_distinct(experts: int, redundant: int, devices: int) -> None:
    expected = {
        tuple(tuple(part) for part in np.reshape(row, (devices, -1))) for row in rows_of(experts, redundant, devices)
    }
    per_device = (experts + redundant) // devices
    told_apart = layouts(experts, per_device, devices, alike=False)
    assert told_apart is not None
    listed = [tuple(map(tuple, layout)) for layout in told_apart.tolist()]
    assert len(listed) == len(set(listed)) == num_layouts(experts, per_device, devices)
    assert set(listed) == expected
    alike = layouts(experts, per_device, devices, alike=True)
    assert alike is not None
    reordered = {order for layout in alike.tolist() for order in permutations(map(tuple, layout))}
    assert reordered == expected
    assert len(alike) == len({tuple(sorted(layout)) for layout in expected})


def test_more_layouts_than_are_looked_at_are_left_to_the_portfolio() -> None:
    assert num_layouts(12, 2, 6) > MOST_LAYOUTS
    assert layouts(12, 2, 6, alike=False) is None
    assert layouts(256, 9, 32, alike=True) is None


def test_best_sums_agree_with_every_combination() -> None:
    rng = np.random.default_rng(11)
    for _ in range(30):
        values = rng.random((4, 5, 3))
        best = max(float(sum(chosen).min()) for chosen in product(*values))
        options, bound = best_sums(values, 0.0, Budget())
        assert options is not None
        assert float(values[np.arange(4), options].sum(axis=0).min()) == pytest.approx(best)
        assert bound == pytest.approx(best)
        none_better, still = best_sums(values, best, Budget())
        assert none_better is None
        assert still == pytest.approx(best)


def test_a_bound_that_was_cut_short_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "meshplan.planner.expert_placement.search.balance.every_layout"
    monkeypatch.setattr(f"{module}.MOST_SUMS", 2)
    rng = np.random.default_rng(12)
    for _ in range(30):
        values = rng.random((4, 6, 4))
        best = max(float(sum(chosen).min()) for chosen in product(*values))
        options, bound = best_sums(values, 0.0, Budget())
        assert bound >= best - 1e-9
        assert options is None or float(values[np.arange(4), options].sum(axis=0).min()) <= bound + 1e-9


def test_a_spent_time_limit_leaves_the_layouts_alone() -> None:
    problem = ExpertPlacementProblem.from_document(robust(6, 0, [1.0] * 3, 1, 3, 0) | {"name": "late"}, Path())
    assert solve(problem, budget=Budget(1e-9)).solver == "portfolio"


def test_ctrl_c_ends_a_pass_and_an_answer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over many layers takes seconds: what comes after the fourth row is not begun."""
    module = "meshplan.planner.expert_placement.search.balance.every_layout"
    problem = ExpertPlacementProblem.from_document(robust(6, 0, [1.0] * 3, 20, 3, 5) | {"name": "long"}, Path())
    budget, rows = Budget(), iter(range(1000))

    def interrupted(vectors: np.ndarray) -> np.ndarray:
        if next(rows) == 3:
            budget.interrupt()
        return _undominated(vectors)

    monkeypatch.setattr(f"{module}._undominated", interrupted)
    found = solve(problem, budget=budget)
    assert next(rows) == 4
    assert found.stopped == "Ctrl-C"
    assert found.assignment is not None
    assert found.objective is not None
    assert found.bound is not None
    assert found.objective <= found.bound
