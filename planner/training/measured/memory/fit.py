"""Fitting the constants of the memory estimate to measured peaks, framework by framework.

*Model.* Bytes of the fullest rank are linear in the constants (:mod:`.peaks`).

*Objective.* Σ_i ((model_i − measured_i)/measured_i/σ)² + Σ_j ((θ_j − θ⁰_j)/s_j)², with the fullest rank's stage and
moment taken anew after each solution until they no longer change.

*Runs without a measured peak* still fitted their devices: where all choices are stated and the model predicts more than
the device's usable memory, such a run counts as a peak of that size. So a framework without any measured peak gets
constants too, bounded from above only.

*Safe bound.* One factor for the states, one for activations and logits (:mod:`.peaks`). Of a framework with
measured peaks they are the least under which no more than 2 % exceed the bound (none of fewer than 50), neither fitted
to nor with their group held out, plus :data:`SAFE_MARGIN`. A framework without peaks takes what frameworks of the same
memory layout (``bounded_by`` of its recipe; where that names none, all) would have needed if *they* had not been
measured: at the constants of the literature, each of them weighing the same, no more than 1 % above, with a margin that
is found in the same way.

*Errors* are those of a group held out, with the factors too chosen without it, and those of a whole source
(:func:`without_source`): nothing that is judged was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import MemoryConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.text import counted
from meshplan.planner.training.measured.memory.peaks import (
    ALLOCATED,
    NONE_ABOVE,
    ONE_PERCENT_ABOVE,
    PRIOR,
    SAFE_FIXED_BYTES,
    TWO_PERCENT_ABOVE,
    Peak,
    PeakParts,
    SafeFactors,
    safe_factors,
)
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.validation.fitting import Linear, Prior, most_probable_non_negative
from meshplan.planner.validation.held_out import leave_one_out

NOISE = 0.03  # relative: peaks printed in whole GB, fragmentation
LIMIT_NOISE = 0.10  # relative, where usable memory stands in for a peak: an upper limit, not a reading
ITERATIONS = 8
CONVERGED = 1e-6  # in the constants' own units: the same fullest stages give the same solution
# Choices that decide memory: where a row leaves one out, that the run fitted is no evidence.
DECISIVE = frozenset({"activation_recompute", "micro_batch_size", "zero_stage"})
SAFE_MARGIN = 0.02  # the least
# Share of a framework's own peaks that its bound may leave above it. Of fewer than this leaves one of, none may be.
ABOVE = 0.02
# The same of other frameworks' peaks, where a framework has none: half of it, because those are few and the next one is
# not among them.
UNSEEN_ABOVE = 0.01
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


def _prior(framework: str, start: MemoryConstants | None = None) -> Prior:
    """Where the constants are expected: of the literature, or of the catalog's set where a user's peaks adapt it."""
    allocated = start is None and recipe_named(framework).unstated.peak_is_allocated
    known = {**PRIOR, **ALLOCATED} if allocated else PRIOR
    means = [mean for mean, _ in known.values()] if start is None else [getattr(start, name) for name in known]
    return Prior(
        mean=np.array(means, dtype=np.float64), spread=np.array([deviation for _, deviation in known.values()])
    )


def _solve(peaks: Sequence[Peak], prior: Prior) -> FloatArray:
    """Most probable constants, none below zero: the best of the solutions of one fullest rank after the other."""

    def told(theta: FloatArray) -> list[Peak]:
        return [peak for peak in peaks if peak.counts(theta)]

    def error(theta: FloatArray) -> float:
        off = []
        for peak in told(theta):
            slope, base = peak.linear(theta)
            off.append((float(slope @ theta) + base - peak.measured) / _noise(peak))
        return float(np.square(off).sum() + np.square((theta - prior.mean) / prior.spread).sum())

    theta = best = prior.mean
    for _ in range(ITERATIONS):
        known = told(theta)
        if not known:
            break
        worst = [peak.linear(theta) for peak in known]
        linear = Linear(
            at=np.zeros_like(theta),
            residual=np.array([peak.measured for peak in known]) - np.array([base for _, base in worst]),
            slope=np.array([slope for slope, _ in worst]),
            noise=np.array([_noise(peak) for peak in known]),
            weight=np.ones(len(known)),
        )
        before, theta = theta, most_probable_non_negative(linear, prior)
        if error(theta) < error(best):
            best = theta
        if np.max(np.abs(theta - before)) < CONVERGED:
            break
    return best


def _noise(peak: Peak) -> float:
    """Standard deviation of what is read of a peak, bytes."""
    return peak.measured * (LIMIT_NOISE if peak.is_limit else NOISE)


def _constants(theta: FloatArray, factors: SafeFactors) -> MemoryConstants:
    values = {name: float(f"{value:.4g}") for name, value in zip(PRIOR, theta, strict=True)}
    return MemoryConstants(
        **values,
        safe_factor=round(factors.states, 3),
        activation_safe_factor=round(factors.work, 3),
        safe_fixed_bytes=SAFE_FIXED_BYTES,
    )


def needed_factor(peak: Peak, theta: FloatArray, bound: float) -> float:
    """The safe factor of all that is not fixed under which the bound of a peak's run is ``bound`` bytes."""
    parts = peak.parts(theta)
    return (bound - parts.fixed) / (parts.states + parts.reported_work)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenBounds:
    """What the estimate misses on frameworks that it has not measured: the measured ones, taken as if they were not.

    Args:
        peaks: measured framework → the expected parts of each of its peaks at the constants of the literature.
    """

    peaks: Mapping[str, tuple[PeakParts, ...]]

    def of(self, framework: str) -> tuple[SafeFactors, str]:
        """The safe factors of a framework without peaks of its own, and what they rest on.

        The margin is what the other measured frameworks would have needed, each bounded by the rest in the same way:
        frameworks of one layout are few, and the next one is not among them.
        """
        used = self._alike(framework, self.peaks)
        if not used:
            factor = MemoryConstants().safe_factor
            return SafeFactors(states=factor, work=factor), "no measured peak of any framework"
        count = sum(len(values) for values in used.values())
        return (
            _pooled(used).widened(self._margin(framework)),
            f"{count} measured peaks of {', '.join(used)}, none of {framework} itself",
        )

    def _alike(self, framework: str, among: Mapping[str, tuple[PeakParts, ...]]) -> Mapping[str, tuple[PeakParts, ...]]:
        """The measured frameworks of one's layout; where there is none, all others."""
        others = {name: values for name, values in among.items() if name != framework}
        return {name: others[name] for name in recipe_named(framework).bounded_by if name in others} or others

    def _margin(self, framework: str) -> float:
        """Added to both factors: all but :data:`UNSEEN_ABOVE` of the peaks of other frameworks that have relatives,
        held out, stay below, each framework weighing the same.
        """
        others = {name: values for name, values in self.peaks.items() if name != framework}
        short, weights = [], []
        for name, values in others.items():
            if recipe_named(name).bounded_by and (used := self._alike(name, others)):
                factors = _pooled(used)
                short += [(one.measured - one.bound(factors)) / (one.states + one.reported_work) for one in values]
                weights += [1.0 / len(values)] * len(values)
        if not short:
            return SAFE_MARGIN
        order = np.argsort(short)
        reached = np.cumsum(np.array(weights)[order]) >= (1.0 - UNSEEN_ABOVE) * sum(weights)
        return max(float(np.array(short)[order][int(np.argmax(reached))]), SAFE_MARGIN)

    def constants(self, framework: str) -> tuple[MemoryConstants, str]:
        """Constants of the literature with the bound of :meth:`of`, and what it rests on."""
        factors, basis = self.of(framework)
        return _constants(np.array([mean for mean, _ in PRIOR.values()]), factors), basis


def _pooled(used: Mapping[str, tuple[PeakParts, ...]]) -> SafeFactors:
    """Factors of several frameworks, each weighing the same."""
    weighed = [replace(one, weight=1.0 / len(values)) for values in used.values() for one in values]
    return safe_factors(weighed, ONE_PERCENT_ABOVE)


def unseen_bounds(runs: Iterable[ObservedRun]) -> UnseenBounds:
    """What every measured framework would have needed unmeasured."""
    found: dict[str, list[PeakParts]] = {}
    for run in runs:
        if run.measured.get("peak_memory_bytes"):
            framework = recipe_named(run.framework).calibrated_as
            found.setdefault(framework, []).append(Peak(run).parts(_prior(framework).mean))
    return UnseenBounds(peaks={name: tuple(values) for name, values in found.items()})


def without_source(runs: Iterable[ObservedRun]) -> dict[str, tuple[float, float]]:
    """Run → typical / measured − 1 and safe / measured − 1 of its peak, as for a framework that nobody has measured.

    Constants are those of the literature, factors those of the other frameworks: of every source with peaks that is
    what is left without it, because no two of them measured the same framework.
    """
    observed = [run for run in runs if run.measured.get("peak_memory_bytes")]
    bounds, found = unseen_bounds(observed), {}
    for run in observed:
        framework = recipe_named(run.framework).calibrated_as
        peak, theta = Peak(run), _prior(framework).mean
        safe = peak.parts(theta).bound(bounds.of(framework)[0])
        found[run.id] = (peak.typical_bytes(theta) / peak.measured - 1.0, safe / peak.measured - 1.0)
    return found


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
    by_framework: dict[str, list[Peak]] = {}
    for run in observed:
        if run.measured.get("peak_memory_bytes") or not (DECISIVE & set(run.filled) or run.expects_oom):
            by_framework.setdefault(recipe_named(run.framework).calibrated_as, []).append(Peak(run))
    return {
        framework: _fit(framework, peaks, unseen)
        if start is None
        else _adapted(framework, peaks, start(framework, peaks[0].run.architecture))
        for framework, peaks in by_framework.items()
    }


def _adapted(framework: str, samples: Sequence[Peak], start: MemoryConstants) -> MemoryFit:
    """The catalog's constants, moved by a user's own peaks.

    On the plans that were measured the new bound is at least the lesser of the catalog's, which a moved estimate must
    not lower by itself, and the peak times its :data:`OWN_PEAK_FACTORS` – and never less than the peak.
    """
    prior = _prior(framework, start)
    catalogs = SafeFactors(states=start.safe_factor, work=start.safe_activation_factor)

    def wanted(peak: Peak, used: FloatArray, most: float) -> float:
        """The safe factor for such a bound of one peak under the constants ``used``."""
        before = peak.parts(prior.mean).bound(catalogs) + start.safe_fixed_bytes - SAFE_FIXED_BYTES
        return needed_factor(peak, used, min(before, most * peak.measured))

    def learned(known: Sequence[Peak]) -> tuple[FloatArray, SafeFactors]:
        fitted = _solve(known, prior)
        peaks = [peak for peak in known if not peak.is_limit]
        if not peaks:
            return fitted, catalogs
        errors = [(peak, fitted) for peak in peaks]
        if len(peaks) > 1:
            left_out = _held_out(known, lambda others: (_solve(others, prior), catalogs), _run)
            errors += [(peak, used) for peak, used, _ in left_out]
        most = own_peak_factor(len(peaks))
        needed = max(1.0, *(needed_factor(peak, used, peak.measured) for peak, used in errors)) + SAFE_MARGIN
        factor = max(needed, *(wanted(peak, used, most) for peak, used in errors))
        return fitted, SafeFactors(states=factor, work=factor)

    theta, factors = learned(samples)
    count = sum(not sample.is_limit for sample in samples)
    basis = counted(count, "own peak") if count else ""
    return _made(framework, _constants(theta, factors), basis, _held_out(samples, learned, _run))


def own_peak_factor(count: int) -> float:
    """The factor of :data:`OWN_PEAK_FACTORS` for a number of own peaks, at least 1.

    >>> own_peak_factor(1), own_peak_factor(4), own_peak_factor(100)
    (2.15, 1.65, 1.45)
    """
    return OWN_PEAK_FACTORS[max(known for known in OWN_PEAK_FACTORS if known <= count)]


def _fit(framework: str, samples: Sequence[Peak], unseen: UnseenBounds) -> MemoryFit:
    prior = _prior(framework)
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

    def learned(known: Sequence[Peak]) -> tuple[FloatArray, SafeFactors]:
        """Constants and safe factors from some peaks; from none, as a framework that nobody has measured."""
        measured = [peak for peak in known if not peak.is_limit]
        if not measured:
            return prior.mean, without_peaks
        fitted = _solve(known, prior)
        label = _group if len({peak.run.group for peak in measured}) > 1 else _run
        errors = [(peak, fitted) for peak in measured]
        errors += [
            (peak, used)
            for peak, used, _ in _held_out(known, lambda others: (_solve(others, prior), without_peaks), label)
        ]
        above_cost = TWO_PERCENT_ABOVE if ABOVE * len(measured) >= 1.0 else NONE_ABOVE
        return fitted, safe_factors([peak.parts(used) for peak, used in errors], above_cost).widened(SAFE_MARGIN)

    _, factors = learned(samples)
    return _made(framework, _constants(theta, factors), f"{len(peaks)} measured peaks", _held_out(samples, learned))


def _group(peak: Peak) -> str:
    return peak.run.group


def _run(peak: Peak) -> str:
    return peak.run.id


def _held_out(
    samples: Sequence[Peak],
    learned: Callable[[Sequence[Peak]], tuple[FloatArray, SafeFactors]],
    label: Callable[[Peak], str] = _group,
) -> list[tuple[Peak, FloatArray, SafeFactors]]:
    """Every measured peak with the constants and the safe factors that were learned without all of its label."""
    return leave_one_out(
        sorted((sample for sample in samples if not sample.is_limit), key=label),
        label,
        lambda left: learned([sample for sample in samples if label(sample) != left]),
        lambda peak, known: [(peak, *known)],
    )


def _made(
    framework: str, constants: MemoryConstants, basis: str, held_out: Sequence[tuple[Peak, FloatArray, SafeFactors]]
) -> MemoryFit:
    typical, safe = {}, {}
    for peak, used, factors in held_out:
        typical[peak.run.id] = peak.typical_bytes(used) / peak.measured - 1.0
        safe[peak.run.id] = peak.parts(used).bound(factors) / peak.measured - 1.0
    return MemoryFit(framework=framework, constants=constants, basis=basis, typical_error=typical, safe_error=safe)
