"""Fitting the constants of the memory estimate to measured peaks, framework by framework.

*Model.* Bytes of the worst rank are linear in the constants: states + activation_factor · activations +
logits_bytes_per_entry · logits + extra_bytes_per_parameter · optimizer-sharded parameters + fixed_bytes.

*Objective.* Σ_i ((model_i − measured_i)/measured_i/σ)² + Σ_j ((θ_j − θ⁰_j)/s_j)², with the worst rank's stage taken
anew after each solution until it no longer changes.

*Runs without a measured peak* still fitted their devices: where all choices are stated and the model predicts more than
the device's usable memory, such a run counts as a peak of that size. So a framework without any measured peak gets
constants too, bounded from above only.

*Safe bound.* The safe factor multiplies all bytes but ``fixed_bytes``. Of a framework with measured peaks it is the
smallest under which none exceeds the bound, neither fitted to nor with its group held out, plus :data:`SAFE_MARGIN`.
A framework without peaks takes what frameworks of the same memory layout (``bounded_by`` of its recipe; where that
names none, all) would have needed if *they* had not been measured: at the constants of the literature.

*Errors* are those of a group held out, with the factor too chosen without it: nothing that is judged was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, MemoryConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.text import counted
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
# The same for a framework without peaks: of three with one layout (Zero Bubble, Megatron-DeepSpeed, TorchTitan) one
# needs 3 % more than the other two would have told.
UNSEEN_MARGIN = 0.05
SAFE_FIXED_BYTES = 0.3e9
# Of a user's own peaks, number known → what other plans of the cluster need over the most that any of these needed,
# fitted to or left out in turn: 99 % of the peaks of sources held out whole stay below (358 peaks of ten sources,
# 2026-11-23, each drawn six times; the larger of the percentiles with runs and with sources weighing the same).
OWN_PEAK_FACTORS: Mapping[int, float] = {1: 2.15, 2: 1.65, 5: 1.6, 10: 1.5, 20: 1.45}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """The memory constants of one framework.

    Args:
        framework: our name.
        constants: fitted, with the safe factor.
        basis: what the safe bound rests on, for reports.
        typical_error: held-out typical / measured − 1 of each run, by id.
        safe_error: held-out safe / measured − 1 of each run, by id.
    """

    framework: str
    constants: MemoryConstants
    basis: str
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


def _prior(peaks: Sequence[_Peak], start: MemoryConstants | None) -> Prior:
    """Where the constants are expected: of the literature, or of the catalog's set where a user's peaks adapt it."""
    allocated = any(recipe_named(peak.run.framework).unstated.peak_is_allocated for peak in peaks)
    known = {**PRIOR, "fixed_bytes": ALLOCATED_FIXED} if allocated else PRIOR
    means = [mean for mean, _ in known.values()] if start is None else [getattr(start, name) for name in known]
    return Prior(
        mean=np.array(means, dtype=np.float64), spread=np.array([deviation for _, deviation in known.values()])
    )


def _solve(peaks: Sequence[_Peak], prior: Prior) -> FloatArray:
    """Most probable constants, none below zero."""

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


def needed_factor(measured: float, total: float, fixed: float) -> float:
    """The safe factor that a measured peak needs where ``total`` bytes are predicted, ``fixed`` of them not scaled."""
    return (measured - fixed - SAFE_FIXED_BYTES) / (total - fixed)


def _largest(needed: Iterable[float], margin: float = SAFE_MARGIN) -> float:
    return max([1.0, *needed]) + margin


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenBounds:
    """What the estimate misses on frameworks that it has not measured: the measured ones, taken as if they were not.

    Args:
        needed: measured framework → safe factor that each of its peaks needs at the constants of the literature.
    """

    needed: Mapping[str, tuple[float, ...]]

    def of(self, framework: str) -> tuple[float, str]:
        """The safe factor of a framework without peaks of its own, and what it rests on."""
        others = {name: values for name, values in self.needed.items() if name != framework}
        alike = {name: others[name] for name in recipe_named(framework).bounded_by if name in others}
        used = alike or others
        if not used:
            return MemoryConstants().safe_factor, "no measured peak of any framework"
        count = sum(len(values) for values in used.values())
        return (
            _largest((value for values in used.values() for value in values), UNSEEN_MARGIN),
            f"{count} measured peaks of {', '.join(used)}, none of {framework} itself",
        )

    def constants(self, framework: str) -> tuple[MemoryConstants, str]:
        """Constants of the literature with the bound of :meth:`of`, and what it rests on."""
        factor, basis = self.of(framework)
        return _constants(np.array([mean for mean, _ in PRIOR.values()]), factor), basis


def unseen_bounds(runs: Iterable[ObservedRun]) -> UnseenBounds:
    """What every measured framework would have needed unmeasured."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.measured.get("peak_memory_bytes"):
            peak = _Peak(run)
            needed = needed_factor(peak.measured, *peak.predicted(_prior([peak], None).mean))
            found.setdefault(recipe_named(run.framework).calibrated_as, []).append(needed)
    return UnseenBounds(needed={name: tuple(values) for name, values in found.items()})


def calibrate_memory(
    runs: Iterable[ObservedRun], start: Callable[[str, str], MemoryConstants] | None = None
) -> dict[str, MemoryFit]:
    """Fit every framework that has measured peaks, or runs that fitted.

    Args:
        runs: measured runs.
        start: (framework, hardware generation) → the catalog's constants, where the runs are a user's own; None: those
            of the literature.
    """
    observed = list(runs)
    unseen = unseen_bounds(observed)
    by_framework: dict[str, list[_Peak]] = {}
    for run in observed:
        if run.measured.get("peak_memory_bytes") or not (DECISIVE & set(run.filled) or run.expects_oom):
            by_framework.setdefault(recipe_named(run.framework).calibrated_as, []).append(_Peak(run))
    return {
        framework: _fit(framework, peaks, unseen)
        if start is None
        else _adapted(framework, peaks, start(framework, peaks[0].run.architecture))
        for framework, peaks in by_framework.items()
    }


def _adapted(framework: str, samples: Sequence[_Peak], start: MemoryConstants) -> MemoryFit:
    """The catalog's constants, moved by a user's own peaks.

    On the plans that were measured the new bound is at least the lesser of the catalog's, which a moved estimate must
    not lower by itself, and the peak times its :data:`OWN_PEAK_FACTORS` – and never less than the peak.
    """
    prior = _prior([], start)

    def wanted(peak: _Peak, used: FloatArray, most: float) -> float:
        """The safe factor for such a bound of one peak under the constants ``used``."""
        total, fixed = peak.predicted(prior.mean)
        catalogs = (total - fixed) * start.safe_factor + fixed + start.safe_fixed_bytes
        return needed_factor(min(catalogs, most * peak.measured), *peak.predicted(used))

    def learned(known: Sequence[_Peak]) -> tuple[FloatArray, float]:
        fitted = _solve(known, prior)
        peaks = [peak for peak in known if not peak.is_limit]
        if not peaks:
            return fitted, start.safe_factor
        errors = [(peak, fitted) for peak in peaks]
        if len(peaks) > 1:
            left_out = _held_out(known, lambda others: (_solve(others, prior), 1.0), _run)
            errors += [(peak, used) for peak, used, _ in left_out]
        most = own_peak_factor(len(peaks))
        needed = _largest(needed_factor(peak.measured, *peak.predicted(used)) for peak, used in errors)
        return fitted, max(needed, *(wanted(peak, used, most) for peak, used in errors))

    theta, factor = learned(samples)
    count = sum(not sample.is_limit for sample in samples)
    basis = counted(count, "own peak") if count else ""
    return _made(framework, _constants(theta, factor), basis, _held_out(samples, learned, _run))


def own_peak_factor(count: int) -> float:
    """The factor of :data:`OWN_PEAK_FACTORS` for a number of own peaks, at least 1.

    >>> own_peak_factor(1), own_peak_factor(4), own_peak_factor(100)
    (2.15, 1.65, 1.45)
    """
    return OWN_PEAK_FACTORS[max(known for known in OWN_PEAK_FACTORS if known <= count)]


def _fit(framework: str, samples: Sequence[_Peak], unseen: UnseenBounds) -> MemoryFit:
    prior = _prior(samples, None)
    theta = _solve(samples, prior)
    without_peaks, basis = unseen.of(framework)
    peaks = [sample for sample in samples if not sample.is_limit]
    if not peaks:
        return MemoryFit(
            framework=framework,
            constants=_constants(theta, without_peaks),
            basis=basis,
            typical_error={},
            safe_error={},
        )

    def learned(known: Sequence[_Peak]) -> tuple[FloatArray, float]:
        """Constants and safe factor from some peaks; from none, as a framework that nobody has measured."""
        measured = [peak for peak in known if not peak.is_limit]
        if not measured:
            return prior.mean, without_peaks
        fitted = _solve(known, prior)
        label = _group if len({peak.run.group for peak in measured}) > 1 else _run
        errors = [(peak, fitted) for peak in measured]
        errors += [
            (peak, used) for peak, used, _ in _held_out(known, lambda others: (_solve(others, prior), 1.0), label)
        ]
        return fitted, _largest(needed_factor(peak.measured, *peak.predicted(used)) for peak, used in errors)

    _, factor = learned(samples)
    return _made(framework, _constants(theta, factor), f"{len(peaks)} measured peaks", _held_out(samples, learned))


def _group(peak: _Peak) -> str:
    return peak.run.group


def _run(peak: _Peak) -> str:
    return peak.run.id


def _held_out(
    samples: Sequence[_Peak],
    learned: Callable[[Sequence[_Peak]], tuple[FloatArray, float]],
    label: Callable[[_Peak], str] = _group,
) -> list[tuple[_Peak, FloatArray, float]]:
    """Every measured peak with the constants and the safe factor that were learned without all of its label."""
    return leave_one_out(
        sorted((sample for sample in samples if not sample.is_limit), key=label),
        label,
        lambda left: learned([sample for sample in samples if label(sample) != left]),
        lambda peak, known: [(peak, *known)],
    )


def _made(
    framework: str, constants: MemoryConstants, basis: str, held_out: Sequence[tuple[_Peak, FloatArray, float]]
) -> MemoryFit:
    typical, safe = {}, {}
    for peak, used, factor in held_out:
        total, fixed = peak.predicted(used)
        typical[peak.run.id] = total / peak.measured - 1.0
        safe[peak.run.id] = ((total - fixed) * factor + fixed + SAFE_FIXED_BYTES) / peak.measured - 1.0
    return MemoryFit(framework=framework, constants=constants, basis=basis, typical_error=typical, safe_error=safe)
