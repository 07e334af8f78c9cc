"""Times of layers that are remembered are those that are priced: by the candidates, whatever chunks hold the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, MOE, configured, machine_with, problem_of
from training_constants import with_time

from meshplan.planner.training.estimator.layer_time import LayerModel, LayerTimes, known_times
from meshplan.planner.training.estimator.priced import candidates_of, training_model
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.problem.switches import TrainingPractice


def model_of(problem: TrainingProblem, **choices: Any) -> LayerModel:
    return training_model(problem, candidates_of(problem, configured(problem, **choices)))._layer_model


def assert_alike(found: LayerTimes, expected: LayerTimes) -> None:
    assert found.parts.keys() == expected.parts.keys()
    for name, seconds in found.parts.items():
        assert np.array_equal(seconds, expected.parts[name]), name
    assert np.array_equal(found.total_s, expected.total_s)


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "experts"])
def test_other_chunks_of_the_same_stages_have_the_same_layers(shape: Any) -> None:
    problem = problem_of(shape, num_devices=8, global_batch_size=8)
    plain = {"tensor_parallel": 2, "pipeline_parallel": 2}
    one, two = (model_of(problem, **plain, virtual_pipeline_stages=chunks) for chunks in (1, 2))
    for kind in one.candidates.split.kinds:
        found = known_times(one, kind)
        assert known_times(two, kind) is found
        assert_alike(two.times(kind), found)


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 2},
        {"tensor_parallel": 1},
        {"pipeline_parallel": 1},
        {"zero_stage": 0},
        {"activation_recompute": "full"},
        {"sequence_parallel": False},
    ],
    ids=str,
)
def test_another_choice_is_another_layer(change: dict[str, Any]) -> None:
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8)
    usual = {"tensor_parallel": 2, "pipeline_parallel": 2}
    for choices in (usual, {**usual, **change}, usual):
        model = model_of(problem, **choices)
        for kind in model.candidates.split.kinds:
            assert_alike(known_times(model, kind), model.times(kind))


def test_another_machine_or_other_constants_are_not_mistaken() -> None:
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8)
    slower = replace(problem, machine=machine_with(8, scale_up_bytes_per_s=1e9))
    costly = replace(problem, calibration=with_time(problem.calibration, host_s_per_layer=1.0))
    times = []
    for asked in (problem, slower, problem, costly):
        model = model_of(asked, tensor_parallel=2)
        (kind,) = model.candidates.split.kinds
        times.append(float(known_times(model, kind).total_s[0]))
        assert times[-1] == float(model.times(kind).total_s[0])
    assert times[0] == times[2] < min(times[1], times[3])


def test_many_constants_of_one_candidate_are_priced_each_time() -> None:
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8)
    many = with_time(problem.calibration, host_s_per_layer=np.linspace(1e-5, 1e-3, 1000))
    model = model_of(replace(problem, calibration=many), tensor_parallel=2)
    (kind,) = model.candidates.split.kinds
    assert known_times(model, kind) is not known_times(model, kind)


TOKENS_TRAVEL = "expert-parallel communication"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("width", [16, 1 << 20], ids=["a little", "all of the way"])
def test_a_shared_expert_hides_the_first_exchange_of_a_pass(recompute: str, width: int) -> None:
    """As long as it runs, and on what 20 of 132 processors leave it; the second exchange of each pass stays."""
    assert MOE.moe is not None
    shape = replace(MOE, moe=replace(MOE.moe, shared_intermediate_size=width))
    problem = problem_of(shape, num_devices=8, global_batch_size=8, machine=machine_with(8))
    choices = {"data_parallel": 8, "expert_parallel": 8, "activation_recompute": recompute}
    alone = model_of(problem, **choices)
    workload = replace(problem.workload, practice=TrainingPractice(overlaps_shared_experts=True))
    beside = model_of(replace(problem, workload=workload), **choices)
    kind = next(kind for kind in alone.candidates.split.kinds if kind.is_moe)
    exposed, left = (float(model.times(kind).parts[TOKENS_TRAVEL][0]) for model in (alone, beside))
    exchanges, passes = (4.0, 2.0) if recompute == "none" else (6.0, 3.0)
    if alone.calibration.recipe.recomputes_only_needed and recompute == "full":
        exchanges = 5.0
    if width > MOE.hidden_size:
        assert exposed - left == pytest.approx(passes * exposed / exchanges * 112.0 / 132.0)
    else:
        shared = alone.compute.mlp(width)
        runs = float((shared.forward_s * (passes - 1.0) + shared.backward_s)[0])
        assert exposed - left == pytest.approx(runs * 112.0 / 132.0)
