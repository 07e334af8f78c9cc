"""Times of all numbers of layers at once are those of each number by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, MOE, problem_of

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.candidates import layer_kinds
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import Phase
from meshplan.planner.training.search.layers.counted_stages import stage_of
from meshplan.planner.training.search.layers.stage_costs import SplitCosts
from meshplan.planner.training.search.templates import make_templates, pipeline_splits, template_candidates

assert MOE.moe is not None
ALL_EXPERTS = replace(MOE, slug="all-experts", moe=replace(MOE.moe, moe_layers=(True,) * MOE.num_hidden_layers))


@pytest.mark.parametrize(
    ("shape", "phase"),
    [(DENSE, Phase.PRETRAINING), (DENSE, Phase.LORA), (ALL_EXPERTS, Phase.PRETRAINING)],
    ids=["dense", "adapters", "experts"],
)
def test_a_column_of_counts_is_every_count(shape: ModelShape, phase: Phase) -> None:
    problem = problem_of(shape, num_devices=16, phase=phase)
    assert len(layer_kinds(shape)[0]) == 1
    templates = make_templates(problem)
    for split in pipeline_splits(problem):
        if split.pipeline_parallel != 2:
            continue
        batch = template_candidates(problem, templates, np.arange(0, len(templates), 7), split)
        costs = SplitCosts(problem, batch)
        most = shape.num_hidden_layers
        for (first, head), table in costs.tables(0, most, np.zeros(1)).items():
            for count in range(most + 1):
                stage = stage_of([count], first=first, head=head)
                seconds = costs.model.stages_s([stage])[0]
                exposed_s, optimizer_s = costs.model.ending_s(stage, seconds)
                np.testing.assert_allclose(table.seconds[count], seconds, rtol=1e-13)
                np.testing.assert_allclose(table.exposed_s[count], exposed_s, rtol=1e-13)
                np.testing.assert_allclose(table.optimizer_s[count], optimizer_s, rtol=1e-13)
        return
    raise AssertionError("no split of two stages")


def test_recompute_saves_no_more_than_is_said() -> None:
    """Also where activations have a safe factor of their own."""
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8)
    memory = replace(problem.calibration.memory, safe_factor=1.05, activation_safe_factor=1.6)
    problem = replace(problem, calibration=replace(problem.calibration, memory=memory))
    split = next(split for split in pipeline_splits(problem) if split.pipeline_parallel == 2)
    batch = template_candidates(problem, make_templates(problem), slice(0, None), split)
    plain = batch.take((batch.recompute == Recompute.NONE) & (batch.zero_stage < ZERO_PARAMETERS))
    whole = replace(plain, recompute=np.full(len(plain), int(Recompute.FULL)))
    costs, again = SplitCosts(problem, plain), SplitCosts(problem, whole)
    most = costs.memory().saved_bytes[0, 0]
    for count in (1, 3):
        stage = stage_of([count])
        saved = costs.model.memory.stage(stage).safe_bytes - again.model.memory.stage(stage).safe_bytes
        assert (saved <= count * most * (1.0 + 1e-12)).all()
    assert (saved > 0.0).any()
