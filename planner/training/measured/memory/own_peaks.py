"""What a user's own peaks make of a framework's memory constants and of their safe bound.

*Constants.* The catalog's are the prior. A peak is off for its model and its plan too, which the constants of a cluster
are not there to explain, so a single one moves them part of the way (:meth:`~.spread.PeakSpread.noise`).

*Bound.* The factors of the catalog's bound hold a share of the peaks of a source that nobody has measured. After own
peaks they hold the same share of other plans of the cluster (:mod:`.spread`): what the peaks say of the cluster narrows
them, the bias of the constants of the literature that they have taken away widens them, and own peaks that are left out
in turn scale them by how far off they are (:func:`~meshplan.planner.validation.between_sources.surprise`). No own peak,
fitted to or left out, lies above.

Until 2026-11-27 one factor on everything held what the own plans had needed, as far as that was below the catalog's
bound of them. Where own peaks lifted the estimate, the bound of all other plans sank towards it, and a run with few
activations set their factor: with whole sources held out, 2 to 3 % of the peaks lay above after one own run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from meshplan.catalogs.constants.training import MemoryConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.text import counted
from meshplan.planner.training.measured.memory.fit import (
    SAFE_MARGIN,
    Learned,
    MemoryFit,
    constants_of,
    literature,
    made_of,
    needed_factor,
    reading_noise,
    samples_of,
    solve,
)
from meshplan.planner.training.measured.memory.peaks import LITERATURE, PRIOR, Peak, SafeFactors
from meshplan.planner.training.measured.memory.spread import Deviation, PeakSpread, moved_factor
from meshplan.planner.training.measured.observations import ObservedRun, repeated
from meshplan.planner.validation.between_sources import surprise
from meshplan.planner.validation.fitting import Prior
from meshplan.planner.validation.held_out import leave_one_out

What = TypeVar("What")  # that is learned beside the constants


def adapt_memory(
    runs: Iterable[ObservedRun], start: Callable[[str, str], MemoryConstants], spread: PeakSpread
) -> dict[str, MemoryFit]:
    """Adapt the constants of every framework that own runs are of.

    Args:
        runs: a user's own runs.
        start: (framework, hardware generation) → the constants to start from.
        spread: how far off peaks of sources are that nobody has measured.
    """
    return {
        framework: _adapted(framework, samples, start(framework, samples[0].run.architecture), spread)
        for framework, samples in samples_of(runs).items()
    }


def _adapted(framework: str, samples: Sequence[Peak], start: MemoryConstants, spread: PeakSpread) -> MemoryFit:
    own = _OwnPeaks(framework, start, spread)
    theta, factors = own.learned(samples)
    count = sum(not sample.is_limit for sample in samples)
    constants = replace(constants_of(theta, factors), safe_fixed_bytes=start.safe_fixed_bytes)
    return made_of(framework, constants, counted(count, "own peak") if count else "", _left_out(samples, own.learned))


class _OwnPeaks:
    """What own peaks make of the constants and factors of a framework.

    Args:
        framework: its name.
        start: the constants to start from.
        spread: how far off peaks of sources are that nobody has measured.
    """

    def __init__(self, framework: str, start: MemoryConstants, spread: PeakSpread) -> None:
        mean = np.array([getattr(start, name) for name in PRIOR], dtype=np.float64)
        self._prior = Prior(mean=mean, spread=np.array([deviation for _, deviation in PRIOR.values()]))
        self._factors = SafeFactors(states=start.safe_factor, work=start.safe_activation_factor)
        is_unmeasured = any(np.allclose(mean, known) for known in (literature(framework).mean, LITERATURE))
        self._spread = spread if is_unmeasured else replace(spread, bias=0.0)

    def learned(self, known: Sequence[Peak]) -> Learned:
        """Constants and factors from some own runs."""
        theta = self._solved(known)
        peaks = [peak for peak in known if not peak.is_limit]
        if not peaks:
            return theta, self._factors
        errors, beyond = [(peak, theta) for peak in peaks], dict[Hashable, list[float]]()
        if len({repeated(peak.run) for peak in peaks}) > 1:
            for peak, used, expected in _left_out(known, lambda others: (self._solved(others), self._after(others))):
                errors.append((peak, used))
                beyond.setdefault(repeated(peak.run), []).append(expected.standard(peak.log_excess(used)))
        before, after, scale = self._spread.unknown(), self._after(known), surprise(beyond.values())
        least = max(1.0, *(needed_factor(peak, used, peak.measured) + SAFE_MARGIN for peak, used in errors))
        states, work = (
            max(moved_factor(factor, before, after, scale), least)
            for factor in (self._factors.states, self._factors.work)
        )
        return theta, SafeFactors(states=states, work=work)

    def _solved(self, known: Sequence[Peak]) -> FloatArray:
        """Most probable constants."""
        models = Counter((peak.is_limit, _model(peak)) for peak in known)
        plans = Counter((peak.is_limit, repeated(peak.run)) for peak in known)

        def noise(peak: Peak) -> float:
            alike = models[peak.is_limit, _model(peak)], plans[peak.is_limit, repeated(peak.run)]
            return self._spread.noise(reading_noise(peak), *alike)

        return solve(known, self._prior, noise)

    def _after(self, known: Sequence[Peak]) -> Deviation:
        """What is expected of one more plan."""
        plans = {repeated(peak.run): _model(peak) for peak in known if not peak.is_limit}
        return self._spread.after(Counter(plans.values()))


def _left_out(
    samples: Sequence[Peak], learned: Callable[[Sequence[Peak]], tuple[FloatArray, What]]
) -> list[tuple[Peak, FloatArray, What]]:
    """Every measured peak with what was learned without its plan."""
    return leave_one_out(
        [sample for sample in samples if not sample.is_limit],
        lambda peak: repeated(peak.run),
        lambda left: learned([sample for sample in samples if repeated(sample.run) != left]),
        lambda peak, known: [(peak, *known)],
    )


def _model(peak: Peak) -> str:
    return peak.run.problem.shape.slug
