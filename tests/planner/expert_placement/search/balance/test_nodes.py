"""Nodes: devices that talk share one, groups of experts stay whole; both against enumeration."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_referee import referee_balance, run

from meshplan.catalogs.errors import SpecError
from meshplan.planner.expert_placement.problem.objectives import cross_node_fraction
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.balance.nodes import group_devices, inside_nodes


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("devices_per_node", [2, 3])
def test_grouping_of_six_devices_is_the_best_of_all(seed: int, devices_per_node: int) -> None:
    traffic = np.random.default_rng(seed).random((6, 6)) ** 3
    weight = traffic + traffic.T
    np.fill_diagonal(weight, 0.0)
    order = group_devices(traffic, devices_per_node)
    assert sorted(order.tolist()) == list(range(6))
    best = max(inside_nodes(weight, np.array(each), devices_per_node) for each in permutations(range(6)))
    # A local search: near the best is the demand, and never worse than leaving the devices as they are.
    assert inside_nodes(weight, order, devices_per_node) >= 0.97 * best
    assert inside_nodes(weight, order, devices_per_node) >= inside_nodes(weight, np.arange(6), devices_per_node)


def test_a_node_that_is_partly_used_is_grouped_too() -> None:
    assert sorted(group_devices(np.ones((5, 5)), 2).tolist()) == [0, 1, 2, 3, 4]
    assert group_devices(np.zeros((1, 1)), 8).tolist() == [0]


def test_traffic_between_nodes_falls_and_nothing_else_changes() -> None:
    """Device pairs (0, 3) and (1, 2) exchange tokens; they come to share nodes."""
    rng = np.random.default_rng(0)
    group = np.arange(16) % 4
    partner = np.array([3, 2, 1, 0])
    near = (group[:, None] == group[None, :]) * 5.0 + (group[:, None] == partner[group][None, :]) * 2.0
    transitions = np.stack([near + rng.random((16, 16)) * 0.01 for _ in range(3)])
    load = np.concatenate([transitions.sum(axis=2), transitions[-1:].sum(axis=1)])
    shape: dict[str, Any] = {"num_layers": 4, "num_experts": 16, "num_devices": 4, "devices_per_node": 2}
    document = shape | {"objective": "balance+affinity", "load": load.tolist(), "transitions": transitions.tolist()}
    found = run(document | {"min_balancedness": 0.9})
    assert found["cross_node_fraction"] < 0.02
    assert found["cross_device_fraction"] == pytest.approx(2 / 7, abs=0.02)
    rows = np.array(found["physical_to_logical_map"])
    everywhere = [
        cross_node_fraction(transitions, rows.reshape(4, 4, 4)[:, list(order)].reshape(4, -1), 4, 2)
        for order in permutations(range(4))
    ]
    assert found["cross_node_fraction"] == pytest.approx(min(everywhere))


def grouped(**other: Any) -> dict[str, Any]:
    load = np.random.default_rng(3).lognormal(0, 1, (2, 32)) * 100
    shape = {"num_layers": 2, "num_experts": 32, "num_devices": 8, "devices_per_node": 4, "num_redundant_experts": 8}
    return {**shape, "num_expert_groups": 8, "load": load.tolist(), **other}


def test_groups_stay_on_one_node() -> None:
    document = grouped(num_layers=1)
    document["load"] = document["load"][:1]
    found = run(document)
    free = run({**document, "num_expert_groups": 1})
    assert found["balancedness"] <= free["bound"] + 1e-12
    for row in np.array(found["physical_to_logical_map"]):
        node = np.arange(40) // 20
        for group in range(8):
            assert len({int(home) for home in node[row // 4 == group]}) == 1
    contiguous = [[*range(16), *range(4), *range(16, 32), *range(16, 20)]]
    assert found["balancedness"] > referee_balance(document["load"], contiguous, 8, [1.0] * 8) + 0.1


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"num_expert_groups": 3}, "num_expert_groups"),
        ({"num_expert_groups": 32, "devices_per_node": 3}, "num_expert_groups"),
        ({"num_redundant_experts": 0, "devices_per_node": 1, "num_expert_groups": 4}, "num_expert_groups"),
        ({"device_speed": [1, 1, 1, 1, 2, 2, 2, 2]}, "num_expert_groups"),
        ({"objective": "robust", "scenarios": [[[1] * 32] * 2]}, "num_expert_groups"),
    ],
)
def test_groups_that_cannot_be_are_named(change: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        ExpertPlacementProblem.from_document(grouped(**change), Path())
    assert path in {problem.path for problem in caught.value.problems}
