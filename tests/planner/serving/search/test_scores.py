"""Objectives as people state them."""

from __future__ import annotations

import pytest

from meshplan.planner.serving.problem.problem import ServingObjective
from meshplan.planner.serving.search.scores import objective_change


@pytest.mark.parametrize(
    ("objective", "change"),
    [
        (ServingObjective.THROUGHPUT_PER_DEVICE, -0.25),  # a third more device-seconds a token
        (ServingObjective.MAX_REQUEST_RATE, -0.25),
        (ServingObjective.NUM_DEVICES, 1 / 3),
        (ServingObjective.USD_PER_MILLION_TOKENS, 1 / 3),
        (ServingObjective.ENERGY, 1 / 3),
    ],
)
def test_objectives_change_as_their_figures_in_the_tables_do(objective: ServingObjective, change: float) -> None:
    assert objective_change(objective, 6.0, 8.0) == pytest.approx(change)
    assert objective_change(objective, 6.0, 6.0) == 0.0
