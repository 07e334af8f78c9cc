"""The simulated step of whole configurations against the estimated one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, MOE, configured, problem_of

from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.simulated import simulated_pipeline, simulated_step_s


@pytest.mark.parametrize(
    ("schedule", "chunks", "within"),
    [("1f1b", 1, 1e-9), ("gpipe", 1, 1e-9), ("interleaved", 3, 0.01), ("zb-1p", 1, 0.03), ("zb-h1", 1, 0.03)],
)
def test_the_closed_form_and_the_simulation_agree_on_a_step(schedule: str, chunks: int, within: float) -> None:
    for shape in (DENSE, replace(DENSE, vocab_size=8 * DENSE.vocab_size)):
        problem = problem_of(shape, num_devices=8, global_batch_size=16)
        config = configured(problem, pipeline_parallel=2, virtual_pipeline_stages=chunks)
        config = replace(config, pipeline_schedule=schedule)
        assert simulated_step_s(problem, config) == pytest.approx(price(problem, config).step_s, rel=within)


def test_uneven_layers_and_full_recompute_stay_exact() -> None:
    problem = problem_of(replace(DENSE, num_hidden_layers=8), num_devices=8, global_batch_size=8)
    config = configured(problem, pipeline_parallel=4, activation_recompute="full")
    for layers in ((2, 2, 2, 2), (4, 2, 1, 1), (1, 5, 1, 1), (1, 1, 2, 4)):
        config = replace(config, layers_per_chunk=layers)
        assert simulated_step_s(problem, config) == pytest.approx(price(problem, config).step_s, rel=1e-9)


def test_the_head_makes_the_last_stage_of_1f1b_the_busy_one() -> None:
    problem = problem_of(replace(DENSE, vocab_size=50 * DENSE.vocab_size), num_devices=8, global_batch_size=16)
    run = simulated_pipeline(problem, configured(problem, pipeline_parallel=3))
    assert min(run.idle_s) == run.idle_s[-1]


def test_experts_in_some_layers_are_timed_where_they_lie() -> None:
    problem = problem_of(MOE, num_devices=8, global_batch_size=8)
    config = configured(problem, pipeline_parallel=2)
    assert simulated_step_s(problem, config) == pytest.approx(price(problem, config).step_s, rel=1e-9)
