"""The objective of a training plan, f(T, n) of step time and devices, and its bound from the least work of a step.

Energy depends on more: on what a plan recomputes and moves. With w its work, f is E(w, T, n) of
:mod:`meshplan.planner.training.estimator.energy` there, the figure that the plan predicts; f(T, n) is that of the least
work, which no plan with that step is below. E grows with n·T and with w, so that every bound of a step bounds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.catalogs.constants.power import power_calibration
from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.power import DeviceWork, longest_s, peak_bytes_per_j
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.assembly import TrainingEstimate
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.energy import board_limit_w, energy_j, least_work, step_work
from meshplan.planner.training.estimator.flops import forward_flops_per_token
from meshplan.planner.training.estimator.operators.attention import kernel_of
from meshplan.planner.training.estimator.operators.products import LOW_PRECISION, attention_peak_flops_per_s, gemm_curve
from meshplan.planner.training.estimator.priced import price, training_model
from meshplan.planner.training.problem.expert_load import leaving_load
from meshplan.planner.training.problem.problem import (
    TrainingConfig,
    TrainingObjective,
    TrainingProblem,
    TrainingWorkload,
)


@dataclass(frozen=True)
class Objective:
    """f, smaller is better: T for throughput; n·T for money; n, then T, for fewest devices; the joules of a step.

    Where a whole run is asked about, T counts with what interruptions add on n devices, and n with the spares; not for
    energy, which is that of a step.

    Args:
        problem: the question.
    """

    problem: TrainingProblem

    def of(self, step_s: FloatArray, devices: FloatArray) -> FloatArray:
        """The least f of any plan with that step on that many devices, [n]; but for energy, f of each of them."""
        kind = self.problem.objective
        if kind is TrainingObjective.THROUGHPUT:
            return step_s if self.problem.run is None else step_s * self.problem.stretch(devices)
        if kind is TrainingObjective.NUM_DEVICES:
            # Devices are whole: a fraction below one orders equals by time, T/(1 + T). What never ends is no plan.
            return np.where(np.isinf(step_s), np.inf, devices + 1.0 - 1.0 / (1.0 + step_s))
        if kind is TrainingObjective.ENERGY:
            return energy_j(self.problem.machine, self._least_work, step_s * devices, 1.0)
        return step_s * self._weight(devices)

    def of_config(self, config: TrainingConfig, step_s: float) -> float:
        """F of one configuration whose step is known; its work is the same under all links."""
        if self.problem.objective is TrainingObjective.ENERGY:
            work = price(self.problem, config).work
            return float(energy_j(self.problem.machine, work, step_s, config.world_size))
        return float(self.of(np.asarray(step_s), np.asarray(float(config.world_size))))

    def estimated(self, batch: Candidates) -> tuple[TrainingEstimate, FloatArray]:
        """What candidates take, without their memory, and f of each, [n]."""
        problem = self.problem
        model = training_model(problem, batch)
        estimate = model.estimate(with_memory=False)
        if problem.objective is TrainingObjective.ENERGY:
            work = step_work(problem, model)
            return estimate, energy_j(problem.machine, work, estimate.step_s, batch.world_size)
        return estimate, self.of(estimate.step_s, batch.world_size)

    def step_s(self, objective: float, devices: FloatArray) -> FloatArray:
        """The longest step with that objective, [n], the inverse of :meth:`of`; 0 where there are too many devices for
        it.
        """
        kind = self.problem.objective
        if kind is TrainingObjective.THROUGHPUT:
            return objective / self.problem.stretch(devices)
        if kind is TrainingObjective.NUM_DEVICES:
            share = np.clip(objective - devices, 0.0, 1.0)
            return np.where(share < 1.0, share / np.maximum(1.0 - share, 1e-300), np.inf)
        if kind is TrainingObjective.ENERGY:
            over_limit = objective / board_limit_w(self.problem.machine)
            bytes_per_j = peak_bytes_per_j(self.problem.machine.device)
            return longest_s(power_calibration().constants, self._least_work, over_limit, bytes_per_j) / devices
        return objective / self._weight(devices)

    def bound(self, devices: FloatArray) -> FloatArray:
        """The least f with that many devices, [n]: the least work W over all of them at their full rate."""
        return self.of(self.work_s / devices, devices)

    @property
    def unit(self) -> str:
        """Unit of f."""
        return {
            TrainingObjective.THROUGHPUT: "s a step",
            TrainingObjective.NUM_DEVICES: "devices",
            TrainingObjective.ENERGY: "J",
        }.get(self.problem.objective, "USD")

    @cached_property
    def work_s(self) -> float:
        """W: device-seconds that no plan can avoid."""
        return self._least_work_s(recompute_full=False)

    @cached_property
    def work_with_recompute_s(self) -> float:
        """The same where every layer's forward pass runs twice."""
        return self._least_work_s(recompute_full=True)

    def _least_work_s(self, *, recompute_full: bool) -> float:
        problem = self.problem
        return work_device_s(
            problem.shape, problem.machine, problem.workload, problem.calibration, recompute_full=recompute_full
        )

    @cached_property
    def _least_work(self) -> DeviceWork:
        return least_work(self.problem)

    def _weight(self, devices: FloatArray) -> FloatArray:
        """Dollars of one second of a step, [n]."""
        return self.problem.paid_devices(devices) * self.problem.stretch(devices) * self._per_device_s

    @cached_property
    def _per_device_s(self) -> float:
        """Dollars of one device-second, times the steps of the run where they are known."""
        machine, steps = self.problem.machine, self.problem.num_steps or 1.0
        return (machine.usd_per_hour_per_device or 1.0) / SECONDS_PER_HOUR * steps


# Keeps the bound below the model: FLOPs count biases and routers, whose products the layer times leave out.
BOUND_SLACK = 0.99


def work_device_s(
    shape: ModelShape,
    machine: Machine,
    workload: TrainingWorkload,
    calibration: Calibration,
    *,
    recompute_full: bool = False,
) -> float:
    """Device-seconds that no plan can avoid: every step takes at least this over its number of devices.

    The matrix products and fused attention of one step at the full rates that the estimator knows, without tile
    padding, memory traffic, communication or bubble.

    Args:
        shape: the model.
        machine: the device's rates.
        workload: tokens, precision, phase.
        calibration: efficiencies.
        recompute_full: with the forward pass of the layers a second time.
    """
    constants = calibration.time
    low = workload.precision in LOW_PRECISION
    wide = "bf16" if low else workload.precision
    factor = constants.low_precision_efficiency if low else 1.0
    rate = gemm_curve(machine.device, workload.precision).rate_flops_per_s * constants.gemm_efficiency * factor
    head_rate = gemm_curve(machine.device, wide).rate_flops_per_s * constants.gemm_efficiency
    flops = forward_flops_per_token(
        shape, workload.sequence_length, workload.documents, decoder_length=workload.decoder_sequence_length
    )
    experts_rate = rate * max(1.0, float(np.max(constants.expert_gemm_efficiency)))  # a single one is an MLP
    experts = flops.experts * leaving_load(workload)
    layers = (flops.matrix - flops.experts) / rate + experts / experts_rate
    attention = 0.0
    if calibration.recipe.flash_attention:
        kernel = kernel_of(shape, machine.device, calibration)
        best = max(kernel.forward_share, kernel.backward_share) * float(np.max(constants.attention_kernel_efficiency))
        attention = flops.attention / (attention_peak_flops_per_s(machine.device, workload) * best)
    passes = 2.0 if workload.phase.has_adapters else 3.0
    again = 1.0 if recompute_full else 0.0
    per_token = (passes + again) * layers + passes * flops.head / max(rate, head_rate) + (3.0 + again) * attention
    return float(BOUND_SLACK * workload.tokens_per_step * per_token)
