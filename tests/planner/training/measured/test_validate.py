"""Training runs against their estimates: every metric of the observation format, from one price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, MOE, configured, problem_of

from meshplan.planner.training.admission import WITH_RECOMPUTE, peak_interval
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.measured.validate import METRICS, validate_run
from meshplan.planner.training.plan import UNMEASURED_SCHEDULE_ERROR, half_width, time_interval
from meshplan.planner.training.problem.problem import TrainingProblem


def run_of(problem: TrainingProblem, measured: Mapping[str, Any], **choices: Any) -> ObservedRun:
    config = configured(problem, **choices)
    return ObservedRun(
        id="run",
        group="g",
        problem=problem,
        config=config,
        framework="megatron",
        measured=measured,
        derived={},
        filled=(),
        expects_oom=False,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_run_is_judged_by_the_interval_that_a_plan_would_show(schedule: str) -> None:
    """A schedule that nobody measured widens both; a judge that was narrower called good plans misses."""
    problem = problem_of(DENSE, num_devices=8)
    choices = {"pipeline_parallel": 4, "data_parallel": 2, "pipeline_schedule": schedule, "num_microbatches": 8}
    config = configured(problem, **choices)
    step_s = price(problem, config).step_s
    judged = validate_run(run_of(problem, {"iteration_s": step_s}, **choices)).predicted["iteration_s"]
    assert judged == time_interval(problem, step_s, config=config)
    widened = judged.high / judged.value - 1.0 - half_width(problem, config)
    assert widened == pytest.approx(0.0 if schedule == "1f1b" else UNMEASURED_SCHEDULE_ERROR)


def test_a_run_measured_as_predicted_has_no_error() -> None:
    problem = problem_of(MOE, num_devices=8)
    config = configured(problem, data_parallel=8)
    priced = price(problem, config)
    measured = {"iteration_s": priced.step_s, "peak_memory_bytes": priced.typical_bytes}
    row = validate_run(run_of(problem, measured, data_parallel=8))
    assert row.error == {"iteration_s": 0.0, "peak_memory_bytes": 0.0}
    assert row.predicted["peak_memory_bytes"] == peak_interval(priced.typical_bytes, priced.safe_bytes)  # as a plan's
    assert row.labels["strategy"] == "MoE"
    assert not row.oom


def test_every_metric_agrees_with_the_step_time() -> None:
    problem = problem_of(DENSE, num_devices=8)
    measured = dict.fromkeys(METRICS, 1.0)
    row = validate_run(run_of(problem, measured, data_parallel=8, activation_recompute="full"))
    value = {name: interval.value for name, interval in row.predicted.items()}
    assert set(value) == set(METRICS)
    assert value["tokens_per_s_per_device"] * value["iteration_s"] * 8 == pytest.approx(16 * 1024)
    assert value["samples_per_s"] * value["iteration_s"] == pytest.approx(16)
    assert value["hfu"] / value["mfu"] == pytest.approx(4 / 3)
    assert value["hardware_flops_per_s_per_device"] / value["model_flops_per_s_per_device"] == pytest.approx(4 / 3)
    assert value["params_and_optimizer_bytes"] == pytest.approx(
        value["weights_and_gradients_bytes"] + value["optimizer_bytes"]
    )


def test_what_is_no_number_is_no_measurement() -> None:
    row = validate_run(run_of(problem_of(DENSE), {"oom": True, "note": "x", "iteration_s": 1.0}))
    assert row.measured == {"iteration_s": 1.0}


def test_a_run_that_worked_says_by_which_figure_it_would_have_been_admitted() -> None:
    problem = problem_of(DENSE, num_devices=8)
    run = run_of(problem, {"iteration_s": 1.0}, data_parallel=8)
    priced = price(problem, run.config)
    full = price(problem, replace(run.config, activation_recompute="full"))

    def admitted(limit: float, **changes: Any) -> str:
        limits = replace(problem.limits, memory_bytes=limit)
        return validate_run(replace(run, problem=replace(problem, limits=limits), **changes)).admitted

    unsaid = ("activation_recompute",)
    assert admitted(priced.safe_bytes) == "safe bound"
    assert admitted(priced.typical_bytes) == "typical figure"
    assert admitted(full.typical_bytes) == "neither"
    assert admitted(full.typical_bytes, filled=unsaid) == WITH_RECOMPUTE
    assert admitted(full.typical_bytes - 1, filled=unsaid) == "neither"
    assert admitted(priced.safe_bytes, expects_oom=True) == ""
    # Bytes that a publisher may have worked out are no run; a peak that is not compared is one.
    counted = {"activation_bytes": 1e9, "params_and_optimizer_bytes": 1e9}
    assert admitted(priced.safe_bytes, measured=counted) == ""
    assert admitted(priced.safe_bytes, measured=counted, peak_left_out="cpu offload") == "safe bound"
