"""What a step's devices draw: between waiting and the board's limit, as measured on a GPU that no fit has seen, and one
figure for what is minimised, bounded and predicted.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from core_cases import DENSE, configured, machine_with, problem_of
from gpu_runs import measured_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from training_constants import with_time

from meshplan.catalogs.constants.power import PowerConstants, power_calibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.power import DeviceWork, energy_over_limit_s, longest_s
from meshplan.planner.core.plan import Interval
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.plan import energy_j_per_step, time_interval
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.joint import search_plans
from meshplan.planner.training.search.mapping.placement import placed_problem
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
    for overhead in (0.0, 0.1, 1.0, 1e12):
        slower = replace(problem, calibration=with_time(problem.calibration, step_overhead_s=overhead))
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
    assert energy_j_per_step(unknown, priced, time_interval(unknown, priced.step_s, config=priced.config)) is None


def test_trainings_on_a_gpu_draw_what_serving_constants_say(catalog: Catalog) -> None:
    """Twelve runs, none of which any constant has seen."""
    errors = []
    for run in measured_runs():
        if "power_w" in run.measured:
            problem, priced = resolve(run.spec, catalog).problem, run.priced(catalog)
            errors.append(abs(watts(problem, priced) / run.measured["power_w"] - 1.0))
    assert len(errors) == 12
    assert median(errors) < 0.03


# --- what a bound needs of the curve ----------------------------------------------------------------------------------

SHARES, BYTES_PER_J = st.floats(0.0, 1.5), 5e9
WORK = st.builds(
    lambda *parts: DeviceWork(**dict(zip(DeviceWork.__dataclass_fields__, map(np.asarray, parts), strict=True))),
    *[st.floats(0.0, 10.0)] * 4,
)
CURVES = st.builds(
    PowerConstants,
    waiting_share=st.floats(0.05, 0.9),
    memory_pj_per_bit=st.floats(0.0, 40.0),
    narrow_share=SHARES,
    compute_share=SHARES,
    compute_exponent=st.floats(0.0, 1.0),
    bulk_share=SHARES,
)


@settings(max_examples=60, deadline=None)
@given(curve=CURVES, work=WORK, more=WORK, seconds=st.floats(0.01, 30.0), longer=st.floats(1.0, 5.0))
def test_energy_never_falls_as_time_or_work_grows(
    curve: PowerConstants, work: DeviceWork, more: DeviceWork, seconds: float, longer: float
) -> None:
    energy = float(energy_over_limit_s(curve, work, seconds, BYTES_PER_J))
    names = DeviceWork.__dataclass_fields__
    busier = DeviceWork(**{name: getattr(work, name) + getattr(more, name) for name in names})
    assert energy <= float(energy_over_limit_s(curve, work, longer * seconds, BYTES_PER_J)) * (1.0 + 1e-12)
    assert energy <= float(energy_over_limit_s(curve, busier, seconds, BYTES_PER_J)) * (1.0 + 1e-12)
    assert longest_s(curve, work, energy, BYTES_PER_J) == pytest.approx(seconds, rel=1e-6)


def test_the_curve_that_ships_is_one_that_the_bound_holds_for() -> None:
    assert 0.0 <= power_calibration().constants.compute_exponent <= 1.0


# --- one kind of joule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [{}, {"activation_recompute": "full"}, {"micro_batch_size": 2}])
def test_neither_links_nor_the_split_of_the_layers_change_the_work(choices: dict[str, object]) -> None:
    problem = problem_of(DENSE)
    slow = replace(problem, machine=machine_with(8, scale_up_bytes_per_s=1e9, scale_out_bytes_per_s=1e8))
    work = [
        price(asked, configured(asked, data_parallel=4, pipeline_parallel=2, layers_per_chunk=split, **choices)).work
        for asked in (problem, slow)
        for split in ((3, 3), (1, 5), (6, 0))
    ]
    for one in work[1:]:
        assert float(one.wide_s) == pytest.approx(float(work[0].wide_s), rel=1e-12)
        assert float(one.compute_s) == pytest.approx(float(work[0].compute_s), rel=1e-12)


@pytest.mark.parametrize("is_mapped", [False, True], ids=["equal links", "a slow node"])
def test_what_is_minimised_is_what_is_predicted(is_mapped: bool) -> None:
    machine = machine_with(6, domain_size=2, devices_per_host=2)
    rates = np.array([[np.inf, 1e9, 50e9], [1e9, np.inf, 1e9], [50e9, 1e9, np.inf]])
    network = Network(
        names=("a", "b", "c"), bytes_per_s=rates, latency_s=np.zeros((3, 3)), usable=(0, 1, 2), source="test"
    )
    machine = replace(machine, network=network) if is_mapped else machine
    problem = problem_of(
        DENSE,
        num_devices=6,
        machine=machine,
        objective=TrainingObjective.ENERGY,
        fixed={"micro_batch_size": 1, "activation_recompute": "none"},
        limits={"min_devices": 4},
    )
    found = search_plans(problem, mapped=4)
    best, bound = found.solution.assignment, found.solution.bound
    assert best is not None
    assert bound is not None
    own = placed_problem(problem, found.placement.order) if is_mapped and found.placement else problem
    priced = price(own, best.config)
    predicted = energy_j_per_step(own, priced, time_interval(own, priced.step_s, config=best.config))
    assert predicted is not None
    assert found.solution.objective == pytest.approx(predicted.value, rel=1e-12)
    assert bound <= predicted.value
