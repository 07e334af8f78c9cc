"""The second opinion on a placement agrees with what is true and speaks against what is not."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.certificate import AGREES, DISAGREES
from meshplan.planner.core.kinds import Question
from meshplan.planner.expert_placement.service import certify, plan


def asked(**changes: Any) -> Question:
    rng = np.random.default_rng(4)
    document: dict[str, Any] = {
        "kind": "expert-placement",
        "num_layers": 3,
        "num_experts": 8,
        "num_devices": 4,
        "load": rng.integers(1, 100, (3, 8)).tolist(),
    }
    nothing: Catalog = None  # type: ignore[assignment]  # a stand-alone question looks nothing up
    return Question(document={**document, **changes}, catalog=nothing, base=Path())


MAP = [[0, 1, 2, 3, 4, 5, 6, 7]] * 3
MOVES: dict[str, Any] = {"objective": "migrate", "current": MAP, "max_moved_experts": 6}
TRAFFIC: dict[str, Any] = {
    "objective": "balance+affinity",
    "min_balancedness": 0.5,
    "transitions": np.random.default_rng(5).integers(0, 9, (2, 8, 8)).tolist(),
}


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, True),
        ({"device_speed": [1.0, 1.0, 2.0, 2.0]}, True),
        ({"num_redundant_experts": 4}, False),
        (MOVES, False),
        (TRAFFIC, False),
    ],
)
def test_what_is_claimed_is_true(changes: dict[str, Any], whole: bool) -> None:
    question = asked(**changes)
    certificate = certify(question, plan(question))
    assert (certificate.covers == "the whole question") == whole
    assert certificate.outcome == AGREES


@pytest.mark.parametrize("changes", [{}, MOVES, TRAFFIC])
def test_another_placement_than_the_one_that_was_claimed_is_found(changes: dict[str, Any]) -> None:
    question = asked(**changes)
    made = plan(question)
    other = copy.deepcopy(made.answer)
    row = other["physical_to_logical_map"][1]
    row[0], row[7] = row[7], row[0]
    assert certify(question, replace(made, answer=other)).outcome == DISAGREES
    row[0] = row[1]
    assert certify(question, replace(made, answer=other)).outcome == DISAGREES


def test_a_bound_below_the_best_balance_is_found() -> None:
    question = asked()
    made = plan(question)
    low = replace(made, solution={**made.solution, "bound": 0.99 * made.solution["objective"], "status": "feasible"})
    assert certify(question, low).outcome == DISAGREES
