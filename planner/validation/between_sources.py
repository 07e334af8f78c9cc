"""How far off a prediction may be for a source that nobody has measured: an interval over sources, not over runs.

*Unit.* Runs of one source share its servers, scripts and clocks, so hundreds of them tell little more about the next
source than a few. With x the errors ln(predicted/measured) of a source, bias included, v is their mean square, its
(model, device) groups weighing the same. A source of g groups is worth

    w = g/(1 + (g − 1)·ρ)

independent ones, ρ being the correlation of two groups of one source: the mean product of their mean errors over the
mean square, taken over all sources that were held out.

*Levels.* From the widest, s² = Σ w·v/ν with ν = Σ w over all sources, to nearer ones, such as one engine, then that
engine on one generation. A nearer level moves the expectation by partial pooling, what is known of the wider one
counting as :data:`PARENT_WORTH`,

    s² ← (ν·s² + Σ_j w_j·v_j)/(ν + Σ_j w_j),  ν ← ν + Σ_j w_j,  with ν no more than PARENT_WORTH before,

which is the posterior mean of a variance under a scaled inverse χ² prior. The half-width is Student's

    t(0.95; ν)·s,

so that few sources mean a wide interval, one good source does not make it narrow, and many decide alone.

Sources: Gelman et al., Bayesian Data Analysis, 3rd edition, sections 2.6 and 5.4; Smyth, Linear models and empirical
Bayes methods, Stat. Appl. Genet. Mol. Biol. 3 (2004) 3, whose moderated t this is; Kish, Survey Sampling (1965),
section 5.4, for the worth of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.validation.held_out import HeldOut

# How many independent groups what is known of all sources counts for where a nearer level has sources of its own.
PARENT_WORTH = 2.0
# A source counts as no farther off than so many times the median source: like the tenth of the runs that an interval
# leaves out, a server that no model describes is not to widen the intervals of all others without bound.
MOST_OF_MEDIAN = 2.0
# Correlation of two groups of one source, where no source has two.
ASSUMED_CORRELATION = 0.5
# Student's quantile that holds 90 % on both sides, by degrees of freedom; between them it is nearly linear in 1/ν.
# National Institute of Standards and Technology, e-Handbook of Statistical Methods, section 1.3.6.7.2, column 0.95.
_T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 8: 1.860, 10: 1.812, 15: 1.753, 30: 1.697}
_T95_OF_MANY = 1.645
# Different own plans whose errors count as much as what published runs say of how well a cluster can be predicted.
PRIOR_PLANS = 5
# No error counts for more than so many times what was expected: one strange run does not undo the others.
MOST_SURPRISE = 3.0
# A hundredth of what was measured: what a prediction is worse than is not told apart.
LEAST_ERROR = -0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceError:
    """How far off the predictions of one source were.

    Args:
        square: mean square of its errors in the logarithm, v.
        product: mean product of the mean errors of two of its groups; None where it has one.
        num_groups: its (model, device) groups, g.
    """

    square: float
    product: float | None
    num_groups: int

    def worth(self, correlation: float) -> float:
        """Independent groups that it stands for."""
        return self.num_groups / (1.0 + (self.num_groups - 1) * correlation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is expected of one more source.

    Args:
        square: mean square of its errors in the logarithm, s².
        worth: degrees of freedom behind that, ν.
        level: which sources it rests on, in words.
        num_sources: how many of that level.
    """

    square: float
    worth: float
    level: str
    num_sources: int

    @property
    def half_width(self) -> float:
        """In the logarithm, of an interval that holds 90 % of its runs."""
        return student_95(self.worth) * float(np.sqrt(self.square))

    def beside(self, other: Expected) -> Expected:
        """What is expected where both are there, each by itself: s² = s₁² + s₂², ν = s⁴/(s₁⁴/ν₁ + s₂⁴/ν₂).

        Satterthwaite, An approximate distribution of estimates of variance components, Biometrics Bulletin 2 (1946).

        >>> one = Expected(square=0.01, worth=4.0, level="", num_sources=4)
        >>> both = one.beside(one)
        >>> round(both.square, 3), round(both.worth, 3)
        (0.02, 8.0)
        """
        parts = (self.square, self.worth), (other.square, other.worth)
        square = self.square + other.square
        spread = sum(part**2 / worth for part, worth in parts)
        return replace(self, square=square, worth=square**2 / spread if spread else self.worth + other.worth)


def expected(levels: Sequence[tuple[str, Sequence[SourceError]]]) -> Expected | None:
    """What is expected of one more source at the last of the levels; None where no level has a source.

    Args:
        levels: words and sources, from the widest level to the nearest; a nearer level's sources are among those of
            the wider.

    >>> every = [SourceError(square=0.04, product=None, num_groups=1)] * 9
    >>> one = [SourceError(square=0.01, product=None, num_groups=1)]
    >>> levels = [("all engines", every), ("vllm", one)]
    >>> [round(found.half_width, 2) for found in (expected(levels[:1]), expected(levels)) if found]
    [0.37, 0.41]
    """
    widest = [source for _, sources in levels[:1] for source in sources]
    correlation = _correlation(widest)
    most = MOST_OF_MEDIAN**2 * float(np.median([source.square for source in widest])) if widest else np.inf
    found: Expected | None = None
    for words, sources in levels:
        if not sources:
            continue
        prior, held = (0.0, 0.0) if found is None else (found.square, min(found.worth, PARENT_WORTH))
        worths = [source.worth(correlation) for source in sources]
        total = held + sum(worths)
        moved = held * prior + sum(
            worth * min(source.square, most) for worth, source in zip(worths, sources, strict=True)
        )
        found = Expected(square=moved / total, worth=total, level=words, num_sources=len(sources))
    return found


def surprise(plans: Iterable[Sequence[float]]) -> float:
    """By how much own errors are larger than expected, in the square mean, as a factor on what is expected of others.

    √((ν + Σ z²)/(ν + n)) for n plans, ν = :data:`PRIOR_PLANS`: the posterior mean of a variance, as for nearer levels.

    Args:
        plans: of each own plan the errors z of its runs, over the standard deviation that was expected.

    >>> surprise([]), surprise([[1.0], [-1.0, 1.0]]), round(surprise([[9.0]]), 2)
    (1.0, 1.0, 1.53)
    """
    squares = [float(np.mean(np.minimum(np.abs(errors), MOST_SURPRISE) ** 2)) for errors in plans]
    return float(np.sqrt((PRIOR_PLANS + sum(squares)) / (PRIOR_PLANS + len(squares))))


def _correlation(sources: Sequence[SourceError]) -> float:
    """Correlation of two groups of one source about no error, each source with several weighing the same."""
    several = [source for source in sources if source.product is not None]
    squares = sum(source.square for source in several)
    if not squares:
        return ASSUMED_CORRELATION
    return min(max(sum(source.product or 0.0 for source in several) / squares, 0.0), 1.0)


def source_errors(items: Iterable[HeldOut], unit: Callable[[HeldOut], Hashable]) -> list[SourceError]:
    """The errors of each source.

    Args:
        items: runs that were held out.
        unit: what counts as one source.
    """
    units: dict[Hashable, dict[str, list[float]]] = {}
    for item in items:
        units.setdefault(unit(item), {}).setdefault(item.group, []).append(log_error(item))
    return [_source_error([np.array(errors) for errors in groups.values()]) for groups in units.values()]


def _source_error(groups: Sequence[FloatArray]) -> SourceError:
    means = np.array([errors.mean() for errors in groups])
    count = len(groups)
    pairs = count * (count - 1)
    return SourceError(
        square=float(np.mean([np.mean(errors**2) for errors in groups])),
        product=float((means.sum() ** 2 - (means**2).sum()) / pairs) if pairs else None,
        num_groups=count,
    )


def log_error(item: HeldOut) -> float:
    """ln(predicted/measured)."""
    return float(np.log1p(max(item.error, LEAST_ERROR)))


def log_size(item: HeldOut) -> float:
    """|ln(predicted/measured)|."""
    return abs(log_error(item))


def student_95(degrees: float) -> float:
    """Student's quantile within which 90 % lie on both sides.

    >>> round(student_95(4), 3), round(student_95(7), 2), round(student_95(1e9), 3)
    (2.132, 1.9, 1.645)
    """
    inverse = [0.0, *(1.0 / known for known in reversed(_T95))]
    return float(np.interp(1.0 / degrees, inverse, [_T95_OF_MANY, *reversed(_T95.values())]))
