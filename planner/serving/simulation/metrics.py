"""What a run means: latencies and their percentiles, throughput, what was met, and how sure that is.

TTFT runs from the arrival to the first token, E2E to the last; TPOT = (E2E − TTFT)/(output − 1), of requests with at
least two tokens; ITL is a gap between tokens as a client sees it: one gap an iteration, whatever it yields. Percentiles
are those of served requests, by linear interpolation; a rejected request is in no latency and in ``num_rejected``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.problem.requests import LATENCIES, PERCENTILES, Objective
from meshplan.planner.serving.simulation.run import ServingRun, WorkerRun

QUANTILES = {name: int(name[1:]) / 100.0 for name in PERCENTILES if name != "mean"}
# Two-sided normal quantile of the confidence intervals: 95 %.
CONFIDENCE_Z = 1.959963984540054
# Batches for the interval of a mean: between 10 and 30 are usual (Law, Simulation Modeling and Analysis, §9.5.3).
NUM_BATCHES = 20
# A stretch of equal gaps is given this width, as a share of the gap: wide enough for its density to be summed.
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
        """By one of :data:`PERCENTILES`."""
        return float(getattr(self, percentile))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures of a run.

    Args:
        latencies: by name of :data:`LATENCIES`.
        num_served: requests that were answered.
        num_rejected: requests that fit no worker.
        num_preemptions: requests thrown out of a KV cache, each time counted.
        duration_s: from the start to the last token.
        output_tokens_per_s: of all devices.
        output_tokens_per_s_per_device: over the devices of the plan.
        output_tokens_per_s_per_user: 1/mean TPOT: what one client sees; 0 where TPOT is undefined.
        requests_per_s: served.
        mean_in_flight: requests between arrival and last token, over time.
        mean_decoding: decoding requests of a worker, over the time in which it works.
        mean_queued: requests that no worker runs, over time.
        kv_use: mean share of KV cache in use while a worker works.
        peak_kv_use: largest share at the start of a stretch.
        busy: share of the duration in which a worker works, mean of the workers.
        mean_wait_s: from arrival to admission.
    """

    latencies: Mapping[str, Latency]
    num_served: int
    num_rejected: int
    num_preemptions: int
    duration_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_device: float
    output_tokens_per_s_per_user: float
    requests_per_s: float
    mean_in_flight: float
    mean_decoding: float
    mean_queued: float
    kv_use: float
    peak_kv_use: float
    busy: float
    mean_wait_s: float

    def value(self, objective: Objective) -> float:
        """The latency that an objective is about, s."""
        return self.latencies[objective.metric].value(objective.percentile)

    def meets(self, objectives: Sequence[Objective]) -> bool:
        """Every objective is met and nobody was rejected. An undefined latency breaks no promise."""
        return not self.num_rejected and all(self.value(objective) <= objective.limit_s for objective in objectives)


def summarize(run: ServingRun, *, num_devices: int = 1) -> Metrics:
    """All figures of a run; finite, whatever the run."""
    samples = {name: samples_of(run, name) for name in LATENCIES if name != "itl"}
    latencies = {name: latency(values) for name, values in samples.items()} | {"itl": itl(run.workers)}
    served = run.is_served
    start = float(run.arrival_s[served].min(initial=math.inf))
    duration = run.end_s - start if served.any() else 0.0
    tokens = int(run.output_length[served].sum())
    per_s = tokens / duration if duration > 0.0 else 0.0
    tpot = latencies["tpot"].mean
    busy = np.array([(worker.segments.end_s - worker.segments.start_s).sum() for worker in run.workers])
    waits = run.admitted_s[served] - run.arrival_s[served]
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
        output_tokens_per_s_per_user=1.0 / tpot if tpot > 0.0 else 0.0,
        requests_per_s=_over(float(np.count_nonzero(served)), duration),
        mean_in_flight=in_flight,
        mean_decoding=_over(sum(_integral(w, w.segments.num_decoding) for w in run.workers), busy.sum()),
        mean_queued=max(in_flight - _over(running, duration), 0.0),
        kv_use=_over(
            sum(_integral(w, w.segments.kv_tokens) / max(w.kv_capacity_tokens, 1) for w in run.workers), busy.sum()
        ),
        peak_kv_use=max((_peak_kv_use(worker) for worker in run.workers), default=0.0),
        busy=_over(float(busy.mean()) if len(busy) else 0.0, duration),
        mean_wait_s=float(waits.mean()) if len(waits) else 0.0,
    )


def samples_of(run: ServingRun, metric: str) -> FloatArray:
    """One value a served request, s, in order of the requests: ``ttft``, ``tpot`` or ``e2e``."""
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
    """Gaps between tokens, from the stretches: each is num_gaps × steps gaps, spread evenly from its first to its last.

    So their density is Σ weight/width over the stretches that reach over a gap: it changes where a stretch begins and
    ends, and between those places the distribution is a straight line.
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


def goodput(run: ServingRun, objectives: Sequence[Objective]) -> float:
    """Requests/s that keep every limit themselves, whatever the percentile of the objective (arXiv:2401.09670).

    Gaps are not kept by request: an objective on ``itl`` is judged by the request's mean gap, its TPOT.
    """
    kept = attained(run, objectives)
    served = run.is_served
    if not served.any():
        return 0.0
    duration = run.end_s - float(run.arrival_s[served].min())
    return _over(float(np.count_nonzero(kept)), duration)


def attained(run: ServingRun, objectives: Sequence[Objective]) -> NDArray[np.bool_]:
    """[n] whether a request was served within every limit; without a second token it has no TPOT to break."""
    kept = run.is_served.copy()
    for objective in objectives:
        metric = "tpot" if objective.metric == "itl" else objective.metric
        chosen = run.is_served & (run.output_length > 1) if metric == "tpot" else run.is_served
        kept[chosen] &= samples_of(run, metric) <= objective.limit_s
    return kept


def attainment(run: ServingRun, objectives: Sequence[Objective]) -> tuple[float, float]:
    """Share of all requests that keep every limit, and its lower confidence bound; who is rejected keeps none."""
    kept = int(np.count_nonzero(attained(run, objectives)))
    return kept / len(run), wilson_lower(kept, len(run))


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


def confidence_interval(samples: FloatArray, percentile: str, z: float = CONFIDENCE_Z) -> tuple[float, float]:
    """Interval of a mean or a percentile of one run's samples, in order of arrival, which depend on each other.

    The samples are cut into NUM_BATCHES batches. A mean has the normal interval of the batches' means. A percentile
    has the order statistics around n·q whose distance is the spread of the number of samples below it: that of the
    batches, or that of independent samples, √(n·q·(1 − q)), where it is larger.
    """
    num = len(samples)
    if not num:
        return 0.0, 0.0
    num_batches = min(NUM_BATCHES, num)
    batches = np.array_split(samples, num_batches)
    if percentile == "mean":
        means = np.array([batch.mean() for batch in batches])
        half = z * float(means.std(ddof=1)) / math.sqrt(num_batches) if num_batches > 1 else math.inf
        mean = float(samples.mean())
        return max(mean - half, float(samples.min())), min(mean + half, float(samples.max()))
    share = QUANTILES[percentile]
    cut = float(np.quantile(samples, share))
    below = np.array([np.count_nonzero(batch <= cut) for batch in batches], dtype=float)
    spread = math.sqrt(num * share * (1.0 - share))
    if num_batches > 1:
        spread = max(spread, float(below.std(ddof=1)) * math.sqrt(num_batches))
    ordered = np.sort(samples)
    low = min(max(math.floor(num * share - z * spread), 0), num - 1)
    high = min(math.ceil(num * share + z * spread), num - 1)
    return float(ordered[low]), float(ordered[high])


def _gaps(workers: Sequence[WorkerRun]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Shortest and longest gap and number of gaps of every stretch; single gaps are stretches of one."""
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


def _peak_kv_use(worker: WorkerRun) -> float:
    return float(worker.segments.kv_tokens.max(initial=0.0)) / max(worker.kv_capacity_tokens, 1)


def _over(value: float, by: float) -> float:
    return float(value / by) if by > 0.0 else 0.0
