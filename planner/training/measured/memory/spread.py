"""How far measured peaks lie from predicted ones, told apart by source, model and plan, and what own peaks leave of it.

*Model.* The logarithm of measured over predicted, at constants that have not seen the source, is taken as

    ln(M/T) = β + u_source + m_model + v_plan,

normal parts with standard deviations τ, b and σ about a bias β that all sources share. A source's runs are those of one
cluster and framework, so that n_j different plans of model j leave of its own part the variance

    τ²·s,  s = 1/(1 + τ²·Σ_j 1/(b² + σ²/n_j)),

and of the bias the same share, because an estimate that follows the peaks takes the rest of it away. One more plan, of
whatever model, has the mean β·s and the variance τ²·s + b² + σ² (:meth:`PeakSpread.after`).

*Bound.* A factor f on the estimate that holds a given share of the peaks lies z = (ln f − mean)/√variance standard
deviations above the mean. The factor that holds the same share after own peaks lies as many above the new one
(:func:`moved_factor`).

*Estimate.* Sources weigh the same. σ² is the mean over them of the mean square within models, b² of the variance
between models less what plans make of it, τ² the variance of the sources' means. No source counts as farther off than
:data:`~meshplan.planner.validation.between_sources.MOST_OF_MEDIAN` times the median source, and no plan as nearer than
peaks are read.

Sources: Gelman et al., Bayesian Data Analysis, 3rd edition, section 5.4 (the hierarchical normal model); Searle,
Casella and McCulloch, Variance Components (1992), section 3.6 (unbalanced data, by analysis of variance).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.memory.fit import NOISE
from meshplan.planner.training.measured.memory.peaks import LITERATURE, Peak
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.validation.between_sources import MOST_OF_MEDIAN

# Fewer sources say nothing of how sources differ.
FEWEST_SOURCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """What is expected of ln(M/T) of one more plan.

    Args:
        mean: of it.
        variance: of it.
    """

    mean: float
    variance: float

    def standard(self, log_excess: float) -> float:
        """An excess in standard deviations from what is expected."""
        return (log_excess - self.mean) / float(np.sqrt(self.variance))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakSpread:
    """The parts of ln(M/T).

    Args:
        bias: β.
        source: τ.
        model: b.
        plan: σ.
    """

    bias: float
    source: float
    model: float
    plan: float

    def unknown(self) -> Deviation:
        """A plan of a source that nobody has measured."""
        return self.after({})

    def after(self, plans: Mapping[str, int]) -> Deviation:
        """One more plan of a source of which plans were measured, of another model.

        Args:
            plans: model → different plans of it, n_j.

        >>> one = PeakSpread(bias=-0.1, source=0.1, model=0.0, plan=0.1).after({"a": 1})
        >>> round(one.mean, 3), round(one.variance, 3)
        (-0.05, 0.015)
        """
        information = sum(1.0 / (self.model**2 + self.plan**2 / count) for count in plans.values())
        share = 1.0 / (1.0 + self.source**2 * information)
        return Deviation(mean=self.bias * share, variance=self.source**2 * share + self.model**2 + self.plan**2)

    def noise(self, reading: float, same_model: int, same_plan: int) -> float:
        """By how much a peak is off for what the constants of its source are not there to explain, over the peak.

        What a model is off by is shared by all its peaks, so that their mean must not tell more than one of them; of
        a plan and its repeats likewise.

        Args:
            reading: by how much the reading is.
            same_model: own peaks of its model.
            same_plan: of its plan.
        """
        return float(np.sqrt(reading**2 + same_model * self.model**2 + same_plan * self.plan**2))


# 360 peaks of ten sources, 2026-11-27 (``tests/benchmarks/training_memory.py`` prints it). Without any one of the
# sources β is −0.09 to −0.05, τ 0.07 to 0.10, b 0.05 to 0.07 and σ 0.09 to 0.10.
PUBLISHED_SPREAD = PeakSpread(bias=-0.074, source=0.089, model=0.059, plan=0.094)


def moved_factor(factor: float, before: Deviation, after: Deviation, scale: float = 1.0) -> float:
    """The factor on the estimate that holds the share of the peaks which ``factor`` held before.

    Args:
        factor: f.
        before: what was expected where it was chosen.
        after: what is expected now.
        scale: of the standard deviation now, as own errors are larger or smaller than expected.

    >>> before, after = Deviation(mean=0.0, variance=0.04), Deviation(mean=0.0, variance=0.01)
    >>> round(moved_factor(1.21, before, after), 3)
    1.1
    """
    above = before.standard(float(np.log(factor)))
    return float(np.exp(after.mean + scale * above * np.sqrt(after.variance)))


def peak_spread(runs: Iterable[ObservedRun]) -> PeakSpread:
    """The parts of ln(M/T) of published peaks, at what plans on frameworks without peaks start from.

    Where fewer than :data:`FEWEST_SOURCES` have peaks, it is :data:`PUBLISHED_SPREAD`.
    """
    sources: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if run.measured.get("peak_memory_bytes"):
            models = sources.setdefault(run.source, {})
            models.setdefault(run.problem.shape.slug, []).append(Peak(run).log_excess(LITERATURE))
    if len(sources) < FEWEST_SOURCES:
        return PUBLISHED_SPREAD
    samples = [[np.array(errors) for errors in models.values()] for models in sources.values()]
    means = np.array([np.mean([errors.mean() for errors in models]) for models in samples])
    unlike = np.square(means - means.mean()) * len(means) / (len(means) - 1)
    plan = _mean_square([_within(models) for models in samples])
    several = [models for models in samples if len(models) > 1]
    between = _mean_square([float(np.var([errors.mean() for errors in models], ddof=1)) for models in several])
    of_plans = plan * np.mean([1.0 / len(errors) for models in several for errors in models]) if several else 0.0
    return PeakSpread(
        bias=float(means.mean()),
        source=float(np.sqrt(_mean_square(unlike))),
        model=float(np.sqrt(max(between - of_plans, 0.0))),
        plan=max(float(np.sqrt(plan)), NOISE),
    )


def _within(models: Sequence[FloatArray]) -> float:
    """Mean square within the models of a source."""
    freedom = sum(len(errors) - 1 for errors in models)
    return sum(float(np.square(errors - errors.mean()).sum()) for errors in models) / max(freedom, 1)


def _mean_square(squares: Sequence[float] | FloatArray) -> float:
    """What sources are off by in the mean, each no more than :data:`MOST_OF_MEDIAN` times the median source."""
    if not len(squares):
        return 0.0
    return float(np.minimum(squares, MOST_OF_MEDIAN**2 * np.median(squares)).mean())
