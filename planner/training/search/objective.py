"""The objective of a training plan, f(T, n) of step time and devices, and its bound from the least work of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.work_bound import work_device_s


@dataclass(frozen=True)
class Objective:
    """f(T, n), smaller is better: T for throughput; n·T for money and energy; n, then T, for fewest devices.

    Args:
        problem: the question.
    """

    problem: TrainingProblem

    def of(self, step_s: FloatArray, devices: FloatArray) -> FloatArray:
        """f(T, n), [n]."""
        kind = self.problem.objective
        if kind is TrainingObjective.THROUGHPUT:
            return step_s
        if kind is TrainingObjective.NUM_DEVICES:
            # Devices are whole: a fraction below one orders equals by time, T/(1 + T).
            return devices + step_s / (1.0 + step_s)
        return step_s * devices * self._per_device_s

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
    def _per_device_s(self) -> float:
        """Dollars or joules of one device-second, times the steps of the run where they are known."""
        machine, steps = self.problem.machine, self.problem.num_steps or 1.0
        if self.problem.objective is TrainingObjective.ENERGY:
            return machine.device.tdp_w or 1.0
        return (machine.usd_per_hour_per_device or 1.0) / SECONDS_PER_HOUR * steps
