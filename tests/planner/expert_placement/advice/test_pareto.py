"""Curves between objectives: no point beats another, the ends are the single objectives, values are the referee's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_referee import judge, referee_balance, referee_cross, referee_moves, run

from meshplan.catalogs.errors import SpecError
from meshplan.planner.expert_placement.advice.pareto import migration_curve, traffic_curve
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem


def mixed() -> dict[str, Any]:
    rng = np.random.default_rng(8)
    transitions = rng.gamma(0.3, 100.0, (2, 12, 12))
    load = np.concatenate([transitions.sum(axis=2), transitions[-1:].sum(axis=1)])
    shape = {"num_layers": 3, "num_experts": 12, "num_devices": 3}
    return {**shape, "load": load.tolist(), "transitions": transitions.tolist()}


def test_less_traffic_costs_balance() -> None:
    document = mixed()
    problem = ExpertPlacementProblem.from_document(document, Path())
    curve = traffic_curve(problem, num_points=5)
    assert len(curve) >= 3
    for before, after in pairwise(curve):
        assert before.cross_device_fraction < after.cross_device_fraction
        assert before.balancedness < after.balancedness
    for item in curve:
        rows = item.placement.tolist()
        assert item.balancedness == pytest.approx(referee_balance(document["load"], rows, 3, [1.0] * 3))
        assert item.cross_device_fraction == pytest.approx(referee_cross(document["transitions"], rows, 3))
    least = run({**document, "objective": "balance+affinity"})["cross_device_fraction"]
    assert curve[0].cross_device_fraction == pytest.approx(least)
    assert curve[-1].balancedness == pytest.approx(run({**document, "objective": "balance"})["balancedness"])


def test_more_moves_buy_balance_and_few_suffice() -> None:
    rng = np.random.default_rng(4)
    load = rng.lognormal(0, 0.7, (3, 48))
    shape = {"num_layers": 3, "num_experts": 48, "num_devices": 8}
    current = run(shape | {"load": load.tolist()})["physical_to_logical_map"]
    document = shape | {"load": (load * rng.lognormal(0, 0.2, load.shape)).tolist(), "current": current}
    curve = migration_curve(ExpertPlacementProblem.from_document(document, Path()))
    assert len(curve) >= 4
    for before, after in pairwise(curve):
        assert before.moved_experts < after.moved_experts
        assert before.balancedness < after.balancedness
    for item in curve:
        assert item.moved_experts == referee_moves(item.placement.tolist(), current, 8)
    few = next(item for item in curve if item.balancedness >= curve[-1].balancedness - 0.02)
    assert few.balancedness >= curve[-1].balancedness - 0.02
    assert few.moved_experts <= 0.25 * run(document)["moved_experts"]


def test_an_illegal_present_placement_has_no_point_without_moves() -> None:
    document = {"num_layers": 1, "num_experts": 4, "num_devices": 2, "load": [[4, 3, 2, 1]], "current": [[0, 0, 1, 2]]}
    curve = migration_curve(ExpertPlacementProblem.from_document(document, Path()))
    assert curve[0].moved_experts >= 1
    judge(
        {**document, "objective": "balance"},
        {
            "physical_to_logical_map": curve[0].placement.tolist(),
            "duplicates_on_device": 0,
            "balancedness": curve[0].balancedness,
            "moved_experts": curve[0].moved_experts,
            "bound": 1.0,
            "gap": (1.0 - curve[0].balancedness) / curve[0].balancedness,
            "status": "feasible",
        },
    )


def test_what_is_missing_is_named() -> None:
    problem = ExpertPlacementProblem.from_document(
        {"num_layers": 1, "num_experts": 4, "num_devices": 2, "load": [[4, 3, 2, 1]]}, Path()
    )
    with pytest.raises(SpecError, match="transitions"):
        traffic_curve(problem)
    with pytest.raises(SpecError, match="current"):
        migration_curve(problem)
