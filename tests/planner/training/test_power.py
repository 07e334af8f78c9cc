"""What a step's devices draw: between waiting and the board's limit, and as measured on a GPU that no fit has seen."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from core_cases import DENSE, configured, problem_of
from h100_runs import measured_runs

from meshplan.catalogs.constants.power import PowerConstants, power_calibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.plan import Interval
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.plan import energy_j_per_step, time_interval
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.service import resolve


def watts(problem: TrainingProblem, priced: Priced, constants: PowerConstants | None = None) -> float:
    """Of one device."""
    known = power_calibration()
    step = Interval(value=priced.step_s, low=priced.step_s, high=priced.step_s)
    energy = energy_j_per_step(problem, priced, step, replace(known, constants=constants or known.constants))
    assert energy is not None
    assert energy.low <= energy.value <= energy.high
    limit = problem.machine.device.tdp_w
    assert limit is not None
    assert energy.high <= limit * priced.step_s * priced.config.world_size * (1.0 + 1e-12)
    return energy.value / priced.step_s / priced.config.world_size


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_device_that_waits_more_draws_less(recompute: str) -> None:
    """The same work in a longer step; at the end what a waiting device draws."""
    problem = problem_of(DENSE)
    drawn = []
    for overhead in (0.0, 0.1, 1.0, 1e6):
        slower = replace(problem, calibration=problem.calibration.with_time(step_overhead_s=overhead))
        priced = price(slower, configured(slower, data_parallel=8, activation_recompute=recompute))
        drawn.append(watts(slower, priced))
    assert drawn == sorted(drawn, reverse=True)
    limit = problem.machine.device.tdp_w
    assert limit is not None
    assert drawn[-1] == pytest.approx(power_calibration().constants.waiting_share * limit, rel=0.01)


def test_without_a_known_limit_nothing_is_said() -> None:
    problem = problem_of(DENSE)
    unknown = replace(problem, machine=replace(problem.machine, device=replace(problem.machine.device, tdp_w=None)))
    priced = price(unknown, configured(unknown, data_parallel=8))
    assert energy_j_per_step(unknown, priced, time_interval(unknown, priced.step_s, schedule="none")) is None


def test_trainings_on_a_gpu_draw_what_serving_constants_say(catalog: Catalog) -> None:
    """Ten runs, none of which any constant has seen."""
    errors = []
    for run in measured_runs():
        if "power_w" in run.measured:
            problem, priced = resolve(run.spec, catalog).problem, run.priced(catalog)
            errors.append(abs(watts(problem, priced) / run.measured["power_w"] - 1.0))
    assert len(errors) == 10
    assert median(errors) < 0.03
