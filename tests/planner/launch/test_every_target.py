"""Random plans to every target: files that use exactly the plan's devices, or a refusal whose reason is true."""

from __future__ import annotations

import random

from emitted import random_serving, random_training, serving_outcomes, training_outcomes

from meshplan.planner.launch.registry import TARGETS

PLANS = 25


def test_serving_plans() -> None:
    draw = random.Random(7)
    outcomes = [outcome for _ in range(PLANS) for outcome in serving_outcomes(random_serving(draw))]
    assert [(one.target, one.wrong) for one in outcomes if one.wrong] == []
    assert {one.target for one in outcomes if one.is_emitted} == {one.name for one in TARGETS if one.serves}


def test_training_plans() -> None:
    draw = random.Random(8)
    outcomes = [outcome for _ in range(PLANS) for outcome in training_outcomes(random_training(draw))]
    assert [(one.target, one.wrong) for one in outcomes if one.wrong] == []
    orchestrators = {one.name for one in TARGETS if one.wraps and not one.serves}
    assert {one.target.partition("/")[0] for one in outcomes if one.is_emitted} == orchestrators
