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
(:func:`without_source`): nothing that is judged was seen. What a user's own peaks make of these constants:
:mod:`.own_peaks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import MemoryConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.memory.peaks import (
    ALLOCATED,
    LITERATURE,
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
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
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


Learned = tuple[FloatArray, SafeFactors]  # constants, and the factors of their bound
Judged = tuple[Peak, FloatArray, SafeFactors]  # a peak with what was learned without it


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


def literature(framework: str) -> Prior:
    """Where the constants of a framework are expected before anybody has measured it."""
    known = {**PRIOR, **ALLOCATED} if recipe_named(framework).unstated.peak_is_allocated else PRIOR
    mean, spread = np.array(list(known.values()), dtype=np.float64).T
    return Prior(mean=mean, spread=spread)


def reading_noise(peak: Peak) -> float:
    """Standard deviation of what is read of a peak, over the peak."""
    return LIMIT_NOISE if peak.is_limit else NOISE


def solve(peaks: Sequence[Peak], prior: Prior, noise: Callable[[Peak], float] = reading_noise) -> FloatArray:
    """Most probable constants, none below zero: the best of the solutions of one fullest rank after the other.

    Args:
        peaks: measured peaks and limits.
        prior: of the constants.
        noise: standard deviation of a peak about what the constants explain, over the peak.
    """

    def counting(theta: FloatArray) -> list[Peak]:
        return [peak for peak in peaks if peak.counts(theta)]

    def error(theta: FloatArray) -> float:
        off = []
        for peak in counting(theta):
            slope, base = peak.linear(theta)
            off.append((float(slope @ theta) + base - peak.measured) / (noise(peak) * peak.measured))
        return float(np.square(off).sum() + np.square((theta - prior.mean) / prior.spread).sum())

    theta = best = prior.mean
    for _ in range(ITERATIONS):
        known = counting(theta)
        if not known:
            break
        worst = [peak.linear(theta) for peak in known]
        linear = Linear(
            at=np.zeros_like(theta),
            residual=np.array([peak.measured for peak in known]) - np.array([base for _, base in worst]),
            slope=np.array([slope for slope, _ in worst]),
            noise=np.array([noise(peak) * peak.measured for peak in known]),
            weight=np.ones(len(known)),
        )
        before, theta = theta, most_probable_non_negative(linear, prior)
        if error(theta) < error(best):
            best = theta
        if np.max(np.abs(theta - before)) < CONVERGED:
            break
    return best


def constants_of(theta: FloatArray, factors: SafeFactors) -> MemoryConstants:
    """Constants as the catalog takes them."""
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
            f"{count} measured peaks of {', '.join(used)}, none of "
            f"{'the framework' if framework == ANY_FRAMEWORK.name else framework} itself",
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
        return constants_of(LITERATURE, factors), basis


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
            found.setdefault(framework, []).append(Peak(run).parts(literature(framework).mean))
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
        peak, theta = Peak(run), literature(framework).mean
        safe = peak.parts(theta).bound(bounds.of(framework)[0])
        found[run.id] = (peak.typical_bytes(theta) / peak.measured - 1.0, safe / peak.measured - 1.0)
    return found


def samples_of(runs: Iterable[ObservedRun]) -> dict[str, list[Peak]]:
    """Framework → its measured peaks, and usable memory where all choices of a run that fitted are known."""
    found: dict[str, list[Peak]] = {}
    for run in runs:
        if run.measured.get("peak_memory_bytes") or not (DECISIVE & set(run.filled) or run.expects_oom):
            found.setdefault(recipe_named(run.framework).calibrated_as, []).append(Peak(run))
    return found


def calibrate_memory(runs: Iterable[ObservedRun]) -> dict[str, MemoryFit]:
    """Fit every framework that has measured peaks, or runs that fitted, from the literature."""
    observed = list(runs)
    unseen = unseen_bounds(observed)
    return {framework: _fit(framework, peaks, unseen) for framework, peaks in samples_of(observed).items()}


def _fit(framework: str, samples: Sequence[Peak], unseen: UnseenBounds) -> MemoryFit:
    prior = literature(framework)
    theta = solve(samples, prior)
    without_peaks, basis = unseen.of(framework)
    peaks = [sample for sample in samples if not sample.is_limit]
    if not peaks:
        return MemoryFit(
            framework=framework,
            constants=constants_of(theta, without_peaks),
            basis=basis,
            typical_error={},
            safe_error={},
        )

    def learned(known: Sequence[Peak]) -> Learned:
        """Constants and safe factors from some peaks; from none, as a framework that nobody has measured."""
        measured = [peak for peak in known if not peak.is_limit]
        if not measured:
            return prior.mean, without_peaks
        fitted = solve(known, prior)
        label = _group if len({peak.run.group for peak in measured}) > 1 else _run
        errors = [(peak, fitted) for peak in measured]
        errors += [
            (peak, used)
            for peak, used, _ in _held_out(known, lambda others: (solve(others, prior), without_peaks), label)
        ]
        above_cost = TWO_PERCENT_ABOVE if ABOVE * len(measured) >= 1.0 else NONE_ABOVE
        return fitted, safe_factors([peak.parts(used) for peak, used in errors], above_cost).widened(SAFE_MARGIN)

    _, factors = learned(samples)
    return made_of(framework, constants_of(theta, factors), f"{len(peaks)} measured peaks", _held_out(samples, learned))


def _group(peak: Peak) -> str:
    return peak.run.group


def _run(peak: Peak) -> str:
    return peak.run.id


def _held_out(
    samples: Sequence[Peak],
    learned: Callable[[Sequence[Peak]], Learned],
    label: Callable[[Peak], str] = _group,
) -> list[Judged]:
    """Every measured peak with the constants and the safe factors that were learned without all of its label."""
    return leave_one_out(
        sorted((sample for sample in samples if not sample.is_limit), key=label),
        label,
        lambda left: learned([sample for sample in samples if label(sample) != left]),
        lambda peak, known: [(peak, *known)],
    )


def made_of(framework: str, constants: MemoryConstants, basis: str, judged: Sequence[Judged]) -> MemoryFit:
    """The fit of a framework, with its errors where peaks were held out."""
    typical, safe = {}, {}
    for peak, used, factors in judged:
        typical[peak.run.id] = peak.typical_bytes(used) / peak.measured - 1.0
        safe[peak.run.id] = peak.parts(used).bound(factors) / peak.measured - 1.0
    return MemoryFit(framework=framework, constants=constants, basis=basis, typical_error=typical, safe_error=safe)
