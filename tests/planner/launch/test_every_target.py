"""Random plans to every target: files that use exactly the plan's devices, or a refusal whose reason is true."""

from __future__ import annotations

import random

from emitted import framework_outcomes, random_serving, random_training, serving_outcomes, training_outcomes
from emitted_others import image_outcomes, random_images, random_stages, stage_outcomes

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.launch.registry import TARGETS, framework_names

PLANS = 25


def test_every_serving_target_writes_what_it_accepts() -> None:
    draw = random.Random(7)
    outcomes = [outcome for _ in range(PLANS) for outcome in serving_outcomes(random_serving(draw))]
    assert [(one.target, one.wrong) for one in outcomes if one.wrong] == []
    assert {one.target for one in outcomes if one.is_emitted} == {one.name for one in TARGETS if one.serves}


def test_every_orchestrator_writes_what_it_accepts() -> None:
    draw = random.Random(8)
    outcomes = [outcome for _ in range(PLANS) for outcome in training_outcomes(random_training(draw))]
    assert [(one.target, one.wrong) for one in outcomes if one.wrong] == []
    orchestrators = {one.name for one in TARGETS if one.wraps and not one.serves}
    assert {one.target.partition("/")[0] for one in outcomes if one.is_emitted} == orchestrators


def test_a_framework_takes_what_its_rules_allow() -> None:
    draw = random.Random(9)
    outcomes = [outcome for name in framework_names() for outcome in framework_outcomes(name, draw, 6)]
    assert [(one.target, one.wrong) for one in outcomes if one.wrong] == []
    assert {one.target.rpartition("/")[2] for one in outcomes if one.is_emitted} == set(framework_names())


def test_images_and_several_node_types(catalog: Catalog) -> None:
    draw = random.Random(10)
    outcomes = [one for _ in range(6) for one in image_outcomes(random_images(draw, catalog), catalog)]
    outcomes += [one for _ in range(6) for one in stage_outcomes(random_stages(draw, catalog), catalog)]
    assert [(one.target, one.wrong) for one in outcomes if one.wrong] == []
    assert {one.target for one in outcomes if one.is_emitted} == {"xdit", "flagscale"}
