"""A run held against SLOs: which are violated, by how much, and how many requests stay within every limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from meshplan.planner.core.arrays import BoolArray
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.metrics import (
    CONFIDENCE_Z,
    Latency,
    Metrics,
    confidence_interval,
    itl,
    itl_interval,
    latency,
    samples_of,
)
from meshplan.planner.serving.simulation.run import ServingRun


def violations(metrics: Metrics, slos: Iterable[Slo]) -> tuple[tuple[Slo, float], ...]:
    """The violated SLOs with their latencies, s. A rejected request violates all; an undefined latency (0) none."""
    found = ((slo, metrics.value(slo)) for slo in slos)
    return tuple((slo, value) for slo, value in found if metrics.num_rejected or not slo.is_met(value))


def worst_ratio(run: ServingRun, slos: Sequence[Slo]) -> float:
    """The largest latency/limit over the SLOs: above 1 where one is violated, ∞ if a request was rejected."""
    if run.num_rejected:
        return math.inf
    seen: dict[str, Latency] = {}
    for metric in {slo.metric for slo in slos}:
        seen[metric] = itl(run.workers) if metric == "itl" else latency(samples_of(run, metric))
    return max((seen[slo.metric].value(slo.percentile) / slo.limit_s for slo in slos), default=0.0)


def latency_interval(run: ServingRun, slo: Slo, t: float) -> tuple[float, float]:
    """Interval of the latency that an SLO limits, s; (∞, ∞) if a request was rejected, (0, 0) where it is undefined.

    Args:
        run: the part of a run that is measured.
        slo: whose metric and percentile.
        t: Student's quantile, see :func:`~meshplan.planner.serving.simulation.metrics.confidence_interval`.
    """
    if run.num_rejected:
        return math.inf, math.inf
    if slo.metric == "itl":
        return itl_interval(run, slo.percentile, t)
    return confidence_interval(samples_of(run, slo.metric), slo.percentile, t)


def goodput(run: ServingRun, slos: Sequence[Slo]) -> float:
    """Requests/s that stay within every limit, whatever the percentile of the SLO (arXiv:2401.09670).

    Gaps between tokens are not recorded per request: an SLO on ``itl`` is judged by the request's mean gap, its TPOT.
    """
    served = run.is_served
    if not served.any():
        return 0.0
    duration = run.end_s - float(run.arrival_s[served].min())
    return float(np.count_nonzero(attained(run, slos))) / duration if duration > 0.0 else 0.0


def attained(run: ServingRun, slos: Sequence[Slo]) -> BoolArray:
    """[n] whether a request was served within every limit; a request of one token has no TPOT to violate."""
    within = run.is_served.copy()
    for slo in slos:
        metric = "tpot" if slo.metric == "itl" else slo.metric
        chosen = run.is_served & (run.output_length > 1) if metric == "tpot" else run.is_served
        within[chosen] &= samples_of(run, metric) <= slo.limit_s
    return within


def attainment(run: ServingRun, slos: Sequence[Slo]) -> tuple[float, float]:
    """Share of all requests within every limit, and its lower confidence bound; rejected requests are outside."""
    within = int(np.count_nonzero(attained(run, slos)))
    return within / len(run), wilson_lower(within, len(run))


def wilson_lower(successes: int, trials: int, z: float = CONFIDENCE_Z) -> float:
    """Lower end of Wilson's score interval of a share (J. Am. Stat. Assoc. 22 (1927), p. 209); 0 without trials.

    >>> round(wilson_lower(99, 100), 4)
    0.9455
    """
    if not trials:
        return 0.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max((centre - spread) / (1 + z * z / trials), 0.0)
