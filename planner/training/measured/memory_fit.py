"""Fitting the constants of the memory estimate to measured peaks, framework by framework.

*Model.* Bytes of the worst rank are linear in the constants: states + activation_factor · activations +
logits_bytes_per_entry · logits + extra_bytes_per_parameter · optimizer-sharded parameters + fixed_bytes.

*Objective.* Σ_i ((model_i − measured_i)/measured_i/σ)² + Σ_j ((θ_j − θ⁰_j)/s_j)², with the worst rank's stage taken
anew after each solution until it no longer changes.

*Runs without a measured peak* still fitted their devices: where all choices are stated and the model predicts more than
the device's usable memory, such a run counts as a peak of that size. So a framework without any measured peak gets
constants too, bounded from above only, and the safe factor :data:`UNMEASURED_SAFE_FACTOR`.

*Safe bound.* The safe factor multiplies all bytes but ``fixed_bytes``. It is the smallest under which no measured peak
exceeds the bound, neither fitted to nor with its group held out, plus :data:`SAFE_MARGIN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, MemoryConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.validation.fitting import LEAST_SQUARES, Linear, Prior, gauss_newton, most_probable
from meshplan.planner.validation.held_out import leave_one_out

# constant → (prior mean, prior standard deviation).
PRIOR: Mapping[str, tuple[float, float]] = {
    "fixed_bytes": (4.0e9, 1.5e9),
    "activation_factor": (1.0, 0.15),
    "logits_bytes_per_entry": (12.0, 3.0),
    "extra_bytes_per_parameter": (0.0, 5.0),
}
# fixed_bytes where the peak is that of allocated tensors: no device context, no communication buffers, no cache.
ALLOCATED_FIXED = (0.5e9, 0.5e9)
NOISE = 0.03  # relative: peaks printed in whole GB, fragmentation
LIMIT_NOISE = 0.10  # relative, where usable memory stands in for a peak: an upper limit, not a reading
ITERATIONS = 8
CONVERGED = 1e-6  # in the constants' own units: the same worst stages give the same solution
# Choices that decide memory: where a row leaves one out, that the run fitted is no evidence.
DECISIVE = frozenset({"activation_recompute", "micro_batch_size", "zero_stage"})
SAFE_MARGIN = 0.02
SAFE_FIXED_BYTES = 0.3e9
# For a framework without a measured peak: the largest held-out under-estimate of those with one, rounded up.
UNMEASURED_SAFE_FACTOR = 1.20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """The memory constants of one framework.

    Args:
        framework: our name.
        constants: fitted, with the safe factor.
        typical_error: held-out typical / measured − 1 of each run, by id.
        safe_error: held-out safe / measured − 1 of each run, by id.
    """

    framework: str
    constants: MemoryConstants
    typical_error: Mapping[str, float]
    safe_error: Mapping[str, float]


class _Peak:
    """One measured peak, or usable memory as its upper limit, with the model's coefficients for every stage."""

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        peak = run.measured.get("peak_memory_bytes")
        self.is_limit = not peak
        self.measured = float(peak or run.problem.limits.memory_bytes)
        self.stages = [_stage_bytes(run, calibration) for calibration in _probes(run.framework)]

    def worst_stage(self, theta: FloatArray) -> tuple[FloatArray, float]:
        """Coefficients and constant part of the stage with the most bytes under ``theta``."""
        return max(self._rows(), key=lambda row: float(row[0] @ theta + row[1]))

    def counts(self, theta: FloatArray) -> bool:
        """A limit counts only where the model is beyond it."""
        if not self.is_limit:
            return True
        return self.predicted(theta)[0] > self.measured

    def predicted(self, theta: FloatArray) -> tuple[float, float]:
        """Bytes of the worst stage, and those of them that are fixed."""
        slope, base = self.worst_stage(theta)
        return float(slope @ theta + base), float(theta[0])

    def _rows(self) -> list[tuple[FloatArray, float]]:
        base, per_constant = self.stages[0], self.stages[1:]
        return [
            (np.array([probe[stage] - base[stage] for probe in per_constant]), base[stage])
            for stage in range(len(base))
        ]


def _probes(framework: str) -> list[Calibration]:
    """Calibrations with all constants 0, then with one constant 1 in turn: their bytes give the linear model."""
    empty = Calibration(framework=framework, architecture="any", recipe=recipe_named(framework).recipe)
    zeros = dict.fromkeys(PRIOR, 0.0)
    units = [zeros, *({**zeros, name: 1.0} for name in PRIOR)]
    return [replace(empty, memory=MemoryConstants(**unit)) for unit in units]


def _stage_bytes(run: ObservedRun, calibration: Calibration) -> list[float]:
    priced = price(replace(run.problem, calibration=calibration), run.config)
    return [stage.typical_bytes for stage in priced.stages]


def _allocated(peaks: Sequence[_Peak]) -> bool:
    return any(recipe_named(peak.run.framework).unstated.peak_is_allocated for peak in peaks)


def _solve(peaks: Sequence[_Peak]) -> FloatArray:
    """Most probable constants, none below zero."""
    known = {**PRIOR, "fixed_bytes": ALLOCATED_FIXED} if _allocated(peaks) else PRIOR
    prior = Prior(
        mean=np.array([mean for mean, _ in known.values()]),
        spread=np.array([deviation for _, deviation in known.values()]),
    )

    def step(theta: FloatArray) -> FloatArray:
        counted = [peak for peak in peaks if peak.counts(theta)]
        if not counted:
            return theta
        worst = [peak.worst_stage(theta) for peak in counted]
        measured = np.array([peak.measured for peak in counted])
        linear = Linear(
            at=np.zeros_like(theta),
            residual=measured - np.array([base for _, base in worst]),
            slope=np.array([slope for slope, _ in worst]),
            noise=measured * np.array([LIMIT_NOISE if peak.is_limit else NOISE for peak in counted]),
            weight=np.ones(len(counted)),
        )
        return np.maximum(most_probable(linear, prior, LEAST_SQUARES, rounds=1), 0.0)

    return gauss_newton(step, prior.mean, iterations=ITERATIONS, converged=CONVERGED)


def _constants(theta: FloatArray, safe_factor: float) -> MemoryConstants:
    values = {name: float(f"{value:.4g}") for name, value in zip(PRIOR, theta, strict=True)}
    return MemoryConstants(**values, safe_factor=round(safe_factor, 3), safe_fixed_bytes=SAFE_FIXED_BYTES)


def calibrate_memory(runs: Iterable[ObservedRun]) -> dict[str, MemoryFit]:
    """Fit every framework that has measured peaks, or runs that fitted.

    Args:
        runs: measured runs.
    """
    by_framework: dict[str, list[_Peak]] = {}
    for run in runs:
        if run.measured.get("peak_memory_bytes") or not (DECISIVE & set(run.filled) or run.expects_oom):
            by_framework.setdefault(recipe_named(run.framework).calibrated_as, []).append(_Peak(run))
    return {framework: _fit(framework, peaks) for framework, peaks in by_framework.items()}


def _fit(framework: str, samples: Sequence[_Peak]) -> MemoryFit:
    theta = _solve(samples)
    peaks = [sample for sample in samples if not sample.is_limit]
    if not peaks:
        constants = _constants(theta, UNMEASURED_SAFE_FACTOR)
        return MemoryFit(framework=framework, constants=constants, typical_error={}, safe_error={})

    def without(group: str) -> FloatArray:
        others = [sample for sample in samples if sample.run.group != group]
        return _solve(others) if any(not other.is_limit for other in others) else theta

    held_out = leave_one_out(
        sorted(peaks, key=lambda peak: peak.run.group),
        lambda peak: peak.run.group,
        without,
        lambda peak, used: [(peak, *peak.predicted(used))],
    )
    everything = [*((peak, *peak.predicted(theta)) for peak in peaks), *held_out]
    needed = [(peak.measured - fixed - SAFE_FIXED_BYTES) / (total - fixed) for peak, total, fixed in everything]
    factor = max(1.0, *needed) + SAFE_MARGIN
    return MemoryFit(
        framework=framework,
        constants=_constants(theta, factor),
        typical_error={peak.run.id: total / peak.measured - 1.0 for peak, total, _ in held_out},
        safe_error={
            peak.run.id: ((total - fixed) * factor + fixed + SAFE_FIXED_BYTES) / peak.measured - 1.0
            for peak, total, fixed in held_out
        },
    )
