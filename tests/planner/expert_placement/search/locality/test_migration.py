"""Few moves from the present placement: within the budget, and the more the better."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_referee import referee_balance, referee_moves, run

from meshplan.planner.core.solution import Status
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.solve import solve

HERE = Path(__file__).parent


def drifted(budget: int) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    load = rng.lognormal(0, 0.7, (4, 64))
    shape = {"num_layers": 4, "num_experts": 64, "num_devices": 8, "num_redundant_experts": 8}
    current = run(shape | {"load": load.tolist()})["physical_to_logical_map"]
    after = load * rng.lognormal(0, 0.3, load.shape)
    return shape | {
        "objective": "migrate",
        "load": after.tolist(),
        "current": current,
        "max_moved_experts": budget,
    }


def test_migration_keeps_within_its_budget_and_gains_with_it() -> None:
    reached = [run(drifted(budget))["balancedness"] for budget in (0, 4, 16, 48, 500)]
    assert reached == sorted(reached)
    assert reached[0] < 0.96
    assert reached[-2] > 0.98
    assert reached[-1] > 0.995


def test_a_quarter_of_a_full_rebalance_is_enough() -> None:
    document = drifted(500)
    full = run({**document, "objective": "balance"})
    moves = full["moved_experts"]
    assert run({**document, "max_moved_experts": moves // 4})["balancedness"] >= full["balancedness"] - 0.02


def test_a_budget_below_what_a_legal_placement_needs_is_infeasible() -> None:
    """The present placement holds a duplicate and lacks an expert, so it cannot be kept."""
    document = {
        "num_layers": 1,
        "num_experts": 4,
        "num_devices": 2,
        "objective": "migrate",
        "load": [[1, 1, 1, 1]],
        "current": [[0, 0, 1, 2]],
        "max_moved_experts": 0,
    }
    problem = ExpertPlacementProblem.from_document(document, HERE)
    assert solve(problem).status is Status.INFEASIBLE
    assert run({**document, "max_moved_experts": 1})["moved_experts"] == 1


@pytest.mark.parametrize("moves", [0, 1, 3, 6])
def test_few_moves_of_small_layers_are_proven(moves: int) -> None:
    """Every placement of two layers within the budget; nothing that may move was answered with a gap of 23 %."""
    rng = np.random.default_rng(moves)
    load, current = rng.integers(1, 90, (2, 4)), [[0, 1, 2, 3], [0, 1, 2, 3]]
    options = [tuple(map(list, chosen)) for chosen in product(combinations(range(4), 2), repeat=2)]
    rows = [one + other for one, other in options if set(one + other) == set(range(4))]
    best = max(
        referee_balance(load.tolist(), [one, other], 2, [1.0, 1.0])
        for one in rows
        for other in rows
        if referee_moves([one, other], current, 2) <= moves
    )
    document = {
        "num_layers": 2,
        "num_experts": 4,
        "num_devices": 2,
        "objective": "migrate",
        "load": load.tolist(),
        "current": current,
        "max_moved_experts": moves,
    }
    found = run(document)
    assert (found["status"], found["balancedness"]) == ("optimal", pytest.approx(best))
