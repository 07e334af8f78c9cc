"""What the devices of a training step draw: the curve of :mod:`meshplan.planner.cluster.power` over what the step does.

    matrix units    FLOPs of the step, recompute included, over those of all devices at their peak (HFU)
    memory          bytes of the memory-bound operators and of the optimizer over those at the peak bandwidth

The constants are those of serving devices: five shares of the board's limit, for all devices. No training was in their
fit; ten trainings on an H100 (``tests/benchmarks/on_a_gpu.py``) are met within 3 %, but one within 31 %.

Assumes: what matrix products move is part of their power; stages that wait draw what the slowest one does on average.
"""

from __future__ import annotations

import math

import numpy as np

from meshplan.catalogs.constants.power import PowerCalibration, power_calibration
from meshplan.planner.cluster.power import DeviceWork, average_power_w
from meshplan.planner.core.plan import Interval
from meshplan.planner.training.estimator.operators.products import peak_flops_per_s
from meshplan.planner.training.estimator.priced import Priced
from meshplan.planner.training.problem.problem import TrainingProblem


def utilisation(problem: TrainingProblem, priced: Priced) -> DeviceWork:
    """How busy a device is in a step: work at its peak rates over the step."""
    constants, config = problem.calibration.time, priced.config
    parts = priced.breakdown_s
    moving_s = parts.get("memory-bound operators", 0.0) * constants.memory_op_efficiency
    if not config.optimizer_offload:
        moving_s = moving_s + parts.get("optimizer step", 0.0) * constants.optimizer_efficiency
    flops = priced.model_flops * (1.0 + priced.recompute_flops_share) / config.world_size
    multiplying_s = flops / peak_flops_per_s(problem.machine.device, problem.workload.precision)
    return DeviceWork(
        wide_s=np.asarray(moving_s / priced.step_s),
        narrow_s=np.zeros(()),
        compute_s=np.asarray(multiplying_s / priced.step_s),
    )


def energy_j_per_step(
    problem: TrainingProblem, priced: Priced, step: Interval, calibration: PowerCalibration | None = None
) -> Interval | None:
    """Energy of all devices in a step, without their hosts, J; None where the board's limit is unknown.

    The relative errors of power and step are taken as independent. No board draws more than its limit.

    Args:
        problem: the question.
        priced: the plan.
        step: its time, s.
        calibration: of the power curve; None for the one that ships.
    """
    device, known = problem.machine.device, calibration or power_calibration()
    watts = average_power_w(device, known.constants, utilisation(problem, priced))
    if device.tdp_w is None or watts is None:
        return None
    devices = priced.config.world_size
    value = devices * watts * step.value
    low, high = (
        math.exp(math.hypot(math.log(side), known.error_p90["power"]))
        for side in (step.value / step.low, step.high / step.value)
    )
    return Interval(value=value, low=value / low, high=min(value * high, devices * device.tdp_w * step.high))
