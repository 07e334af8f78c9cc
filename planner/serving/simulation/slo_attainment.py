"""A run held against what is asked of it: how far off its SLOs are, requests within every limit, and whether it keeps
pace with the rate at which requests arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.metrics import (
    CONFIDENCE_Z,
    NUM_BATCHES,
    QUANTILES,
    Latency,
    confidence_interval,
    itl,
    itl_interval,
    latency,
    samples_of,
)
from meshplan.planner.serving.simulation.run import ServingRun

# Parts of a run by which a longer one is predicted, and Student's quantile with one degree of freedom less, two-sided,
# 99 %. Few and long parts, because the slowest requests come in clusters: at rates found on 65,536 requests of a queue
# with one server (fixed and exponential service, limits of 10 to 100 services at p95 and p99), 0 to 3 % of other runs
# of 20,000 break the SLO with ten parts, up to 6 % with sixteen; with five 0 to 2 %, at rates 1 to 3 % lower. By the
# interval of the true percentile from 8,192 requests it was 8 to 33 %.
NUM_PARTS, PARTS_T = 10, 3.250
# Clusters of slow requests that a run should have seen, two in each part.
CLUSTERS = 2 * NUM_PARTS
# Student's quantile for the increments between NUM_PARTS parts, which are one fewer: two-sided, 99 %.
INCREMENTS_T = 3.355
# Seconds by which waits may grow in a second of arrivals at most: a hundredth of the rate is less than a bracket of
# rates is wide. Runs of one server with fixed, uniform or exponential service, and with gaps twice as uneven as random
# ones (200 of 1,024 and of 8,192 requests, 60 of 65,536): at most 1 in 100 with 3 % to spare was said to fall behind, 2
# in 100 with none; none that has 2 % too little was said to keep pace. Of the longest all with a twentieth to spare are
# shown to keep it (93 % under uneven gaps), and all with a twentieth too little not to.
LEAST_GROWTH = 0.01


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


def longer_run_interval(run: ServingRun, slo: Slo, num_requests: int) -> tuple[float, float]:
    """99 % interval of the latency that an SLO limits in another, longer run of the same load, s.

    The run is cut into k = :data:`NUM_PARTS` parts of m requests, of which each has a latency y. Logarithms of
    latencies near saturation are spread evenly. With s the standard deviation of ln y over the parts, the run's own
    latency Y, and n requests in the other run, the interval is Y·exp(± t·s·√(m/n + 1/k)): Student's prediction
    interval, in which m/n is the other run's own chance and 1/k what this run does not know. (∞, ∞) if a request was
    rejected, (0, 0) where the latency is undefined.

    Args:
        run: the part of a run that is measured.
        slo: whose metric and percentile.
        num_requests: of the other run, n.
    """
    if run.num_rejected:
        return math.inf, math.inf
    whole, parts = _in_parts(run, slo)
    if whole <= 0.0 or len(parts) < 2 or min(parts) <= 0.0:  # noqa: PLR2004 - one part has no spread
        return whole, whole
    each = len(run) / NUM_PARTS
    spread = float(np.std(np.log(parts), ddof=1)) * math.sqrt(each / num_requests + 1.0 / len(parts))
    return whole * math.exp(-PARTS_T * spread), whole * math.exp(PARTS_T * spread)


def _in_parts(run: ServingRun, slo: Slo) -> tuple[float, list[float]]:
    """The latency that an SLO limits, s: of the run, and of each of its parts."""
    if slo.metric == "itl":  # gaps are not kept per request: parts of equal time
        edges = np.linspace(min(float(run.arrival_s.min(initial=math.inf)), run.end_s), run.end_s, NUM_PARTS + 1)[1:-1]
        spans = [itl([worker.within(edges, i) for worker in run.workers]) for i in range(NUM_PARTS)]
        return itl(run.workers).value(slo.percentile), [span.value(slo.percentile) for span in spans if span.count]
    samples = samples_of(run, slo.metric)
    parts = np.array_split(samples, min(NUM_PARTS, max(len(samples), 1)))
    return latency(samples).value(slo.percentile), [latency(part).value(slo.percentile) for part in parts]


def requests_to_see(run: ServingRun, slo: Slo) -> int:
    """Requests of a run from which a longer one can be told: it has :data:`CLUSTERS` clusters of slow requests.

    Requests beyond a percentile q follow each other: one slow moment delays all that are there. With τ requests between
    independent ones, n·(1 − q)/τ clusters lie beyond it in n requests. τ is the variance of the means of batches of b
    requests times b over that of single requests (integrated autocorrelation time; Law, Simulation Modeling and
    Analysis, §9.5.3).
    """
    samples = samples_of(run, "tpot" if slo.metric == "itl" else slo.metric)
    beyond = 1.0 - QUANTILES.get(slo.percentile, 0.5)  # a mean depends on all requests, as the median does
    return math.ceil(CLUSTERS * _correlated_requests(samples) / beyond)


def _correlated_requests(samples: FloatArray) -> float:
    """τ, at least 1: see :func:`requests_to_see`."""
    each = len(samples) // NUM_BATCHES
    variance = float(samples.var()) if each else 0.0
    if variance <= 0.0:
        return 1.0
    means = samples[: each * NUM_BATCHES].reshape(NUM_BATCHES, each).mean(axis=1)
    return max(each * float(means.var(ddof=1)) / variance, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Whether a deployment finishes requests as fast as they arrive by themselves.

    Where less is finished (μ) than arrives (λ), the wait of a request that arrives a second later is g = λ/μ − 1
    seconds longer, for ever; where as much is, g is 0 once the run has forgotten its start.

    Args:
        wait_growth: 99 % interval of g in the waits for first tokens.
        stay_growth: the same in whole stays of requests of the mean length, which also grow while batches fill.
    """

    wait_growth: tuple[float, float]
    stay_growth: tuple[float, float]

    @property
    def is_lost(self) -> bool:
        """The queue is shown to grow, and grows by more than :data:`LEAST_GROWTH` as far as the run tells."""
        return self.wait_growth[0] > 0.0 and sum(self.wait_growth) / 2.0 > LEAST_GROWTH

    @property
    def is_kept(self) -> bool:
        """Nothing is shown to grow, and what the run leaves open is less than :data:`LEAST_GROWTH`."""
        return self.wait_growth[0] <= 0.0 and max(self.wait_growth[1], self.stay_growth[1]) <= LEAST_GROWTH

    def finished_per_s(self, offered_per_s: float) -> float:
        """Requests/s that are begun, and in the end finished, where so many arrive: μ = λ/(1 + g)."""
        return offered_per_s / (1.0 + max(sum(self.wait_growth) / 2.0, 0.0))


def pace(run: ServingRun) -> Pace | None:
    """How waits grow over the measured part of a run of open arrivals; None where its requests are too few to tell.

    The run is cut into k = :data:`NUM_PARTS` parts of as many requests. With a the time from the middle of a part to
    that of the next, and y their mean waits, the k − 1 increments (y' − y)/a are samples of g, of whose mean Student's
    interval is taken. A queue that grows, or is just about to, has independent increments; those of a queue that does
    not cancel each other, so that its interval is wider than need be and no run is too short to be honest.
    """
    served = run.is_served
    if np.count_nonzero(served) < 2 * NUM_PARTS:
        return None
    arrival, first, finish = run.arrival_s[served], run.first_token_s[served], run.finish_s[served]
    if arrival[-1] <= arrival[0]:
        return None
    gaps = run.output_length[served] - 1
    step_s = np.divide(finish - first, gaps, out=np.zeros(len(gaps)), where=gaps > 0)
    waits = first - arrival
    return Pace(wait_growth=_growth(arrival, waits), stay_growth=_growth(arrival, waits + float(gaps.mean()) * step_s))


def _growth(arrival_s: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """99 % interval of the growth of a time per second of arrivals: see :func:`pace`."""
    middles, values = (
        np.array([part.mean() for part in np.array_split(column, NUM_PARTS)]) for column in (arrival_s, seconds)
    )
    increments = np.diff(values) / float(np.diff(middles).mean())
    half = INCREMENTS_T * float(increments.std(ddof=1)) / math.sqrt(len(increments))
    return float(increments.mean()) - half, float(increments.mean()) + half


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
