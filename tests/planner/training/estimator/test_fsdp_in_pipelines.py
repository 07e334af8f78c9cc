"""FSDP under a pipeline: what PyTorch keeps unsharded over micro-batches, and what it moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, configured, machine_with, problem_of
from training_constants import with_time

from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.problem.switches import GATHERS, TrainingPractice

DATA, STAGES, MICRO_BATCHES = 8, 4, 16
TRANSFERS = "data-parallel communication"
FP32, HALF = 4.0, 2.0


def question(*, is_fsdp: bool = True) -> TrainingProblem:
    devices = DATA * STAGES
    problem = problem_of(
        DENSE, num_devices=devices, global_batch_size=DATA * MICRO_BATCHES, machine=machine_with(devices)
    )
    calibration = with_time(problem.calibration, fully_sharded_overlap=0.0, data_parallel_window=0.0)
    recipe = replace(
        calibration.recipe,
        weight_bytes=FP32,
        gradient_bytes=FP32,
        gradient_reduce_bytes=FP32,
        parameter_gather_bytes=HALF,
        is_fsdp=is_fsdp,
    )
    return replace(problem, calibration=replace(calibration, recipe=recipe))


def priced(zero_stage: int, *, stages: int = STAGES, is_fsdp: bool = True) -> Priced:
    problem = question(is_fsdp=is_fsdp)
    data = DATA * STAGES // stages
    config = configured(problem, zero_stage=zero_stage, data_parallel=data, pipeline_parallel=stages)
    return price(problem, config)


def parameters() -> float:
    """Parameters of the fullest stage, from what ZeRO 0 keeps of them."""
    return priced(0).worst_stage.components["weights"] / FP32


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_stage_keeps_whole_parameters_and_gradients(zero_stage: int) -> None:
    """Six bytes a parameter more than the shards: a 16-bit copy and a sum of fp32 gradients."""
    found = priced(zero_stage).worst_stage.components
    each = parameters()
    assert found["weights"] == pytest.approx(each * (FP32 / DATA + HALF), rel=1e-6)
    assert found["gradients"] == pytest.approx(each * FP32, rel=1e-6)


def test_without_a_pipeline_gradients_are_scattered_at_once() -> None:
    alone = priced(2, stages=1).worst_stage.components
    whole = priced(0, stages=1).worst_stage.components
    assert alone["gradients"] == pytest.approx(whole["gradients"] / (DATA * STAGES), rel=1e-6)
    assert alone["weights"] == pytest.approx(whole["weights"] / FP32 * (FP32 / (DATA * STAGES) + HALF), rel=1e-6)


def test_a_pipeline_scatters_once_a_step() -> None:
    """ZeRO-3 gathers once per micro-batch; gradients cross the links once, as with ZeRO-2."""
    problem = question()
    other = question(is_fsdp=False)
    config = configured(problem, zero_stage=3, data_parallel=DATA, pipeline_parallel=STAGES)
    three, elsewhere = price(problem, config), price(other, config)
    two = priced(2)
    assert two.breakdown_s[TRANSFERS] < three.breakdown_s[TRANSFERS] < elsewhere.breakdown_s[TRANSFERS]


# --- gathers less often, and flushes more often, than plans do --------------------------------------------------------


def practised(problem: TrainingProblem, **switches: Any) -> TrainingProblem:
    return replace(problem, workload=replace(problem.workload, practice=TrainingPractice(**switches)))


def test_parameters_are_gathered_as_often_as_the_run_says() -> None:
    """ZeRO-3 alone: two gathers and a scatter in each of m micro-batches; one and one; one of each in a step."""
    problem = question()
    config = configured(problem, zero_stage=3, data_parallel=DATA * STAGES)
    count = config.num_microbatches

    def moved(gathers: str) -> float:
        switched = practised(problem, gathers=gathers)
        switched = replace(switched, calibration=with_time(switched.calibration, data_parallel_s_per_rank=0.0))
        return price(switched, config).breakdown_s[TRANSFERS]

    each, kept, once = (moved(gathers) for gathers in GATHERS)
    gather = (each - kept) / count
    scatter = kept / count - gather  # fp32, twice the bytes of the gather; both wait for the rings of the layers
    assert 1.7 * gather < scatter < 2.0 * gather
    assert once == pytest.approx(gather + scatter, rel=0.1)  # one scatter a step waits for no layer


def test_what_stays_gathered_is_held() -> None:
    problem = question()
    config = configured(problem, zero_stage=3, data_parallel=DATA * STAGES)
    held = (price(practised(problem, gathers=gathers), config).worst_stage.components for gathers in GATHERS)
    each, kept, once = held
    whole = priced(0, stages=1).worst_stage.components["weights"] / FP32
    assert kept["weights"] == pytest.approx(whole * (FP32 / (DATA * STAGES) + HALF), rel=1e-6)
    assert once["weights"] == kept["weights"] > each["weights"]
    assert kept["gradients"] == each["gradients"] == pytest.approx(once["gradients"] / (DATA * STAGES), rel=1e-6)


def test_a_pipeline_that_is_flushed_twice_fills_twice() -> None:
    """Two flushes of half of the micro-batches are two steps of half the batch, but for what a step has once."""
    problem = question()
    config = configured(problem, data_parallel=DATA, pipeline_parallel=STAGES, zero_stage=1)
    whole = price(problem, config).breakdown_s["pipeline bubble"]
    halves = practised(problem, local_microbatches=MICRO_BATCHES // 2)
    assert price(halves, config).breakdown_s["pipeline bubble"] == pytest.approx(2.0 * whole)
    all_at_once = practised(problem, local_microbatches=MICRO_BATCHES)
    assert price(all_at_once, config).step_s == price(problem, config).step_s


def test_a_flush_bounds_what_is_in_flight() -> None:
    problem = question()
    config = configured(problem, data_parallel=DATA, pipeline_parallel=STAGES, zero_stage=1)
    full, two = (price(practised(problem, local_microbatches=count), config) for count in (0, 2))
    held = [priced.stages[0].components["activations"] for priced in (full, two)]
    assert held[1] == pytest.approx(held[0] * 2 / STAGES, rel=0.2)
