"""Figures of a run: latencies and their percentiles, throughput, and confidence intervals.

TTFT (time to first token) runs from the arrival to the first token, E2E (end-to-end latency) to the last;
TPOT (time per output token) = (E2E − TTFT)/(output − 1), for requests with at least two tokens; ITL (inter-token
latency) is a gap between tokens as a client sees it: one gap per iteration, however many tokens the iteration yields.
Percentiles are taken over served requests by linear interpolation; rejected requests have no latency and are counted in
``num_rejected``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import STUDENT_95
from meshplan.planner.serving.problem.slo import LATENCIES, PERCENTILES, Slo
from meshplan.planner.serving.simulation.run import ServingRun, WorkerRun

QUANTILES = {name: int(name[1:]) / 100.0 for name in PERCENTILES if name != "mean"}
# Two-sided normal quantile of the confidence intervals: 95 %.
CONFIDENCE_Z = 1.959963984540054
# Batches for the interval of a mean: between 10 and 30 are usual (Law, Simulation Modeling and Analysis, §9.5.3).
NUM_BATCHES = 20
# Student's quantiles with NUM_BATCHES − 1 degrees of freedom, two-sided: of intervals that are shown (95 %), and of
# those by which an SLO is decided (99 %).
CONFIDENCE_T, DECISION_T = STUDENT_95[NUM_BATCHES - 2], 2.861
# A segment of equal gaps is given this width, as a share of the gap: wide enough for its density to be summed.
LEAST_WIDTH = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One latency over the requests (or gaps) of a run; all 0 where ``count`` is 0: it is undefined there.

    Args:
        count: samples.
        mean: s.
        p50: s.
        p90: s.
        p95: s.
        p99: s.
    """

    count: float
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    def value(self, percentile: str) -> float:
        """The value at one of :data:`PERCENTILES`, s."""
        return float(getattr(self, percentile))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures of a run.

    Args:
        latencies: by name of :data:`LATENCIES`.
        num_served: requests that were answered.
        num_rejected: requests that fit no worker.
        num_preemptions: preemptions for want of KV cache; a request may be preempted several times.
        duration_s: from the start to the last token.
        output_tokens_per_s: rate of all devices.
        output_tokens_per_s_per_device: over the devices of the plan.
        requests_per_s: served.
        mean_in_flight: requests between arrival and last token, over time.
        mean_decoding: decoding requests of a worker, over the time in which it works.
        mean_queued: requests that no worker runs, over time.
        found_share: of prompt tokens, that workers held; None where nothing says which requests share what.
    """

    latencies: Mapping[str, Latency]
    num_served: int
    num_rejected: int
    num_preemptions: int
    duration_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_device: float
    requests_per_s: float
    mean_in_flight: float
    mean_decoding: float
    mean_queued: float
    found_share: float | None = None

    def value(self, slo: Slo) -> float:
        """The latency that an SLO limits, s."""
        return self.latencies[slo.metric].value(slo.percentile)


def summarize(run: ServingRun, *, num_devices: int = 1) -> Metrics:
    """All figures of a run; finite, whatever the run."""
    samples = {name: samples_of(run, name) for name in LATENCIES if name != "itl"}
    latencies = {name: latency(values) for name, values in samples.items()} | {"itl": itl(run.workers)}
    served = run.is_served
    start = float(run.arrival_s[served].min(initial=math.inf))
    duration = run.end_s - start if served.any() else 0.0
    tokens = int(run.output_length[served].sum())
    per_s = tokens / duration if duration > 0.0 else 0.0
    busy_s = np.array([(worker.segments.end_s - worker.segments.start_s).sum() for worker in run.workers]).sum()
    in_flight = float(samples["e2e"].sum()) / duration if duration > 0.0 else 0.0
    running = sum(
        _integral(worker, worker.segments.num_decoding + worker.segments.num_prefilling) for worker in run.workers
    )
    return Metrics(
        latencies=latencies,
        num_served=int(np.count_nonzero(served)),
        num_rejected=run.num_rejected,
        num_preemptions=run.num_preemptions,
        duration_s=duration,
        output_tokens_per_s=per_s,
        output_tokens_per_s_per_device=per_s / num_devices,
        requests_per_s=_over(float(np.count_nonzero(served)), duration),
        mean_in_flight=in_flight,
        mean_decoding=_over(sum(_integral(w, w.segments.num_decoding) for w in run.workers), busy_s),
        mean_queued=max(in_flight - _over(running, duration), 0.0),
        found_share=_found_share(run),
    )


def _found_share(run: ServingRun) -> float | None:
    if run.found_tokens is None:
        return None
    prompts = int(run.input_length[run.is_served].sum())
    return _over(float(run.found_tokens[run.is_served].sum()), float(prompts))


def steady_window_s(run: ServingRun, num_running: int) -> tuple[float, float] | None:
    """The time in which ``num_running`` requests run: without the ramp at the start and the tail at the end.

    From the first token of the ``num_running``-th request to the time when one more than so many are left (as ML.ENERGY
    measures: github.com/ml-energy/benchmark, llm/benchmark.py, RequestTracker); None where there is no such time.
    """
    served = run.is_served & (run.output_length > 1)
    first, finish = run.first_token_s[served], run.finish_s[served]
    if len(first) <= num_running + 1:
        return None
    start, end = float(np.sort(first)[num_running - 1]), float(np.sort(finish)[-num_running - 2])
    return (start, end) if start < end else None


def steady_tokens_per_s(run: ServingRun, num_running: int) -> float:
    """Rate of output tokens in the window of :func:`steady_window_s`; 0 where there is none.

    An answer's tokens come evenly between its first, which counts like any other, and its last.
    """
    window = steady_window_s(run, num_running)
    if window is None:
        return 0.0
    start, end = window
    served = run.is_served & (run.output_length > 1)
    first, finish = run.first_token_s[served], run.finish_s[served]
    inside = np.clip(np.minimum(finish, end) - np.maximum(first, start), 0.0, None)
    tokens = (run.output_length[served] - 1) * inside / np.maximum(finish - first, LEAST_WIDTH)
    return (float(tokens.sum()) + np.count_nonzero((first > start) & (first <= end))) / (end - start)


def samples_of(run: ServingRun, metric: str) -> FloatArray:
    """One value per served request, s, in order of the requests: ``ttft``, ``tpot`` or ``e2e``."""
    chosen = run.is_served & (run.output_length > 1) if metric == "tpot" else run.is_served
    arrival, first, finish = run.arrival_s[chosen], run.first_token_s[chosen], run.finish_s[chosen]
    if metric == "ttft":
        return first - arrival
    if metric == "e2e":
        return finish - arrival
    return (finish - first) / (run.output_length[chosen] - 1)


def latency(samples: FloatArray) -> Latency:
    """Mean and percentiles of samples."""
    if not len(samples):
        return Latency(count=0)
    p50, p90, p95, p99 = (float(value) for value in np.quantile(samples, list(QUANTILES.values())))
    return Latency(count=len(samples), mean=float(samples.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def itl(workers: Sequence[WorkerRun]) -> Latency:
    """Inter-token latency from the segments: num_gaps × steps gaps each, spread evenly from the first to the last.

    The density of the gaps is thus Σ weight/width over the segments that contain a gap: piecewise constant, so the
    distribution function is piecewise linear.
    """
    lows, highs, weights = _gaps(workers)
    total = float(weights.sum())
    if total <= 0.0:
        return Latency(count=0)
    mean = float((weights * (lows + highs)).sum()) / 2.0 / total
    highs = np.maximum(highs, lows * (1.0 + LEAST_WIDTH))
    density = weights / (highs - lows)
    places = np.concatenate((lows, highs))
    order = np.argsort(places, kind="stable")
    places = places[order]
    densities = np.cumsum(np.concatenate((density, -density))[order])
    below = np.concatenate(([0.0], np.cumsum(densities[:-1] * np.diff(places))))
    shares = np.maximum.accumulate(below) / below[-1]
    p50, p90, p95, p99 = (float(gap) for gap in np.interp(list(QUANTILES.values()), shares, places))
    return Latency(count=total, mean=mean, p50=p50, p90=p90, p95=p95, p99=p99)


def confidence_interval(samples: FloatArray, percentile: str, t: float = CONFIDENCE_T) -> tuple[float, float]:
    """Interval of a mean or a percentile of one run's samples, in order of arrival, which depend on each other.

    The samples are cut into NUM_BATCHES batches. A mean has Student's interval of the batches' means. For a percentile
    q, n·p samples are expected beyond its true value, p = 1 − q, with the relative standard deviation e = √(v·q/(n·p)),
    v ≥ 1 being the variance of the batches' numbers over that of independent samples. The interval is that of the
    percentiles at 1 − p·(1 ± t·e/2)², the square root of a count having an even spread; where few samples decide
    (t·e > 1) its upper end goes on as an exponential. Beyond the largest sample the tail is taken as exponential, with
    the mean excess of the samples beyond the percentile, so that a short run has a wide interval.

    Args:
        samples: [n], in order of arrival.
        percentile: one of :data:`PERCENTILES`.
        t: Student's quantile for NUM_BATCHES − 1 degrees of freedom.
    """
    num = len(samples)
    if not num:
        return 0.0, 0.0
    batches = np.array_split(samples, min(NUM_BATCHES, num))
    if percentile == "mean":
        return _interval_of_mean([float(batch.mean()) for batch in batches], float(samples.mean()), t)
    beyond = 1.0 - QUANTILES[percentile]
    cut = float(np.quantile(samples, 1.0 - beyond))
    counts = np.array([np.count_nonzero(batch > cut) for batch in batches], dtype=float)
    independent = num * beyond * (1.0 - beyond)
    spread = max(len(counts) * float(counts.var(ddof=1)) / independent, 1.0) if len(counts) > 1 else 1.0
    error = t * math.sqrt(spread * (1.0 - beyond) / (num * beyond))
    fewer = beyond * ((1.0 - error / 2.0) ** 2 if error < 1.0 else 0.25 * math.exp(2.0 * (1.0 - error)))
    more = min(beyond * (1.0 + error / 2.0) ** 2, 1.0)
    high = float(np.quantile(samples, 1.0 - fewer))
    if num * fewer < 1.0:
        excess = samples[samples > cut] - cut
        high = float(samples.max()) - math.log(num * fewer) * (float(excess.mean()) if len(excess) else 0.0)
    return float(np.quantile(samples, 1.0 - more)), high


def itl_interval(run: ServingRun, percentile: str, t: float = CONFIDENCE_T) -> tuple[float, float]:
    """Interval of an inter-token latency: gaps are not kept per request, so its batches are NUM_BATCHES spans of time.

    Student's interval of the batches' values, about the value of the whole run.
    """
    first = float(run.arrival_s.min(initial=math.inf))
    edges = np.linspace(min(first, run.end_s), run.end_s, NUM_BATCHES + 1)[1:-1]
    batches = [itl([worker.within(edges, i) for worker in run.workers]) for i in range(NUM_BATCHES)]
    values = [batch.value(percentile) for batch in batches if batch.count]
    return _interval_of_mean(values, itl(run.workers).value(percentile), t)


def _interval_of_mean(values: Sequence[float], middle: float, t: float) -> tuple[float, float]:
    if len(values) < 2:  # noqa: PLR2004 - one batch has no spread
        return 0.0, math.inf
    half = t * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return middle - half, middle + half


def _gaps(workers: Sequence[WorkerRun]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Shortest and longest gap and number of gaps of every segment; single gaps are segments of one."""
    lows, highs, weights = [], [], []
    for worker in workers:
        segments = worker.segments
        lows += [segments.first_step_s, worker.gap_s]
        highs += [segments.last_step_s, worker.gap_s]
        weights += [segments.num_gaps * segments.steps, worker.gap_count]
    if not lows:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    low, high, weight = np.concatenate(lows), np.concatenate(highs), np.concatenate(weights)
    chosen = weight > 0.0
    return low[chosen], np.maximum(high[chosen], low[chosen]), weight[chosen]


def _integral(worker: WorkerRun, values: FloatArray) -> float:
    return float(((worker.segments.end_s - worker.segments.start_s) * values).sum())


def _over(value: float, by: float) -> float:
    return float(value / by) if by > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Averages over equal intervals of time; arrays of one length.

    Args:
        end_s: end of each interval.
        decoding: requests that decode, all workers together.
        prefilling: requests in prefill.
        queued: requests that no worker runs: waiting, preempted, or in transfer between pools.
        kv_use: share of all KV cache in use.
    """

    end_s: FloatArray
    decoding: FloatArray
    prefilling: FloatArray
    queued: FloatArray
    kv_use: FloatArray


def series(run: ServingRun, *, num_bins: int) -> Series:
    """Averages over ``num_bins`` equal intervals from the first arrival to the last token."""
    served = run.is_served
    start = float(run.arrival_s[served].min(initial=np.inf)) if served.any() else 0.0
    edges = np.linspace(start, max(run.end_s, start), num_bins + 1)
    width = max(float(edges[1] - edges[0]), np.finfo(float).tiny)
    decoding = prefilling = kv_tokens = np.zeros(num_bins)
    for worker in run.workers:
        segments = worker.segments
        spans = (segments.start_s, segments.end_s)
        decoding = decoding + over_bins(edges, *spans, segments.num_decoding)
        prefilling = prefilling + over_bins(edges, *spans, segments.num_prefilling)
        kv_tokens = kv_tokens + over_bins(edges, *spans, segments.kv_tokens)
    present = over_bins(edges, run.arrival_s[served], run.finish_s[served], np.ones(np.count_nonzero(served)))
    capacity = sum(worker.kv_capacity_tokens for worker in run.workers)
    return Series(
        end_s=edges[1:],
        decoding=decoding / width,
        prefilling=prefilling / width,
        queued=np.maximum(present - decoding - prefilling, 0.0) / width,
        kv_use=kv_tokens / width / max(capacity, 1),
    )


def over_bins(edges: FloatArray, start: FloatArray, end: FloatArray, values: FloatArray) -> FloatArray:
    """Integral over each bin of Σ values, each value counting from its start to its end."""
    times = np.concatenate((start, end))
    order = np.argsort(times, kind="stable")
    times = times[order]
    if not len(times):
        return np.zeros(len(edges) - 1)
    heights = np.cumsum(np.concatenate((values, -values))[order])
    area = np.concatenate(([0.0], np.cumsum(heights[:-1] * np.diff(times))))
    return np.diff(np.interp(edges, times, area))
