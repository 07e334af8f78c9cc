"""The highest rate of open arrivals at which every objective is still met.

All rates meet the same requests, whose arrivals are stretched (common random numbers), so that what differs between two
runs is the rate alone. The rate is bracketed and bisected on logarithms: who meets whom in a batch makes the latencies
rough in the rate, and methods that trust a slope needed as many runs.

A short run at too high a rate may be over before its queue is long. So no rate is tried above the one at which
requests leave while the queue never runs dry: all of them at once, counted over the middle half of the departures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.problems.serving import Objective, Requests
from meshplan.planner.simulation.arrivals import scaled
from meshplan.planner.simulation.metrics import Latency, itl, latency, samples_of
from meshplan.planner.simulation.run import ServingRun

Serve = Callable[[Requests], ServingRun]
# Relative distance between the rate that is met and the one that is not: below the noise of a thousand requests.
TOLERANCE = 0.01
# Each step down from the saturated rate, until the objectives are met; and how often before none is.
DOWN, MAX_DOWN = 0.5, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRate:
    """Where the objectives stop being met.

    Args:
        rate_per_s: the highest rate tried that meets them; 0 if none does.
        broken_per_s: the lowest rate tried that does not; infinite if none was.
        binding: the objective that breaks first there; None if saturation is the limit, or a request fits nowhere.
        run: at ``rate_per_s``; None if there is none.
        num_runs: simulations made.
        growth: requests in flight in the last quarter of the arrivals over those in the second: about 1 in a steady
            state. Much above it the run was too short to know the rate that can be kept up: give more requests.
    """

    rate_per_s: float
    broken_per_s: float
    binding: Objective | None
    run: ServingRun | None
    num_runs: int
    growth: float


def max_rate(
    requests: Requests,
    serve: Serve,
    objectives: Sequence[Objective],
    *,
    high_per_s: float | None = None,
    tolerance: float = TOLERANCE,
) -> MaxRate:
    """Find the rate.

    Args:
        requests: open arrivals, at any rate.
        serve: simulates requests.
        objectives: what must be met. A rejected request meets none.
        high_per_s: no rate is above it; None for the saturated rate, which takes a run.
        tolerance: of the rate, relative.

    Raises:
        SpecError: all requests arrive at once.
    """
    search = _Search(requests, serve, objectives)
    if high_per_s is None:
        high_per_s = search.saturated_rate()
    rate = high_per_s
    for _ in range(MAX_DOWN):
        if rate <= 0.0 or search.try_rate(rate):
            break
        rate *= DOWN
    if search.low_run is not None:
        search.close_in(tolerance)
    return search.found()


def worst_ratio(run: ServingRun, objectives: Sequence[Objective]) -> tuple[float, Objective | None]:
    """The largest latency/limit of the objectives and whose it is; infinite and None if a request was rejected."""
    if run.num_rejected:
        return math.inf, None
    worst, whose = 0.0, None
    seen: dict[str, Latency] = {}
    for objective in objectives:
        metric = objective.metric
        if metric not in seen:
            seen[metric] = itl(run.workers) if metric == "itl" else latency(samples_of(run, metric))
        ratio = seen[metric].value(objective.percentile) / objective.limit_s
        if ratio > worst:
            worst, whose = ratio, objective
    return worst, whose


def saturated_rate(run: ServingRun) -> float:
    """Requests/s that leave a run whose requests all came at once: over the middle half of them, or over all.

    The middle half has neither the first fill nor the drain; where all requests fit in one batch it says too much,
    never too little.
    """
    finish = np.sort(run.finish_s[run.is_served])
    num = len(finish)
    if not num:
        return 0.0
    first, last = finish[num // 4], finish[(3 * num) // 4]
    middle = ((3 * num) // 4 - num // 4) / (last - first) if last > first else 0.0
    return float(max(middle, num / finish[-1]))


def in_flight_growth(run: ServingRun) -> float:
    """Mean requests in flight as seen by the last quarter of the arrivals, over those that the second quarter saw."""
    arrival, finish = run.arrival_s[run.is_served], np.sort(run.finish_s[run.is_served])
    num = len(arrival)
    seen = np.arange(1, num + 1) - np.searchsorted(finish, arrival, side="right")
    before, after = seen[num // 4 : num // 2], seen[(3 * num) // 4 :]
    return float(after.mean() / before.mean()) if len(before) and len(after) else 1.0


class _Search:
    def __init__(self, requests: Requests, serve: Serve, objectives: Sequence[Objective]) -> None:
        self.requests, self.serve, self.objectives = requests, serve, objectives
        self.num_runs = 0
        self.low, self.high = 0.0, math.inf
        self.binding: Objective | None = None
        self.low_run: ServingRun | None = None

    def saturated_rate(self) -> float:
        self.num_runs += 1
        at_once = replace(self.requests, arrival_s=np.zeros(len(self.requests)))
        return saturated_rate(self.serve(at_once))

    def try_rate(self, rate: float) -> bool:
        """Whether a rate meets the objectives; it becomes one end of the bracket."""
        self.num_runs += 1
        run = self.serve(scaled(self.requests, rate))
        ratio, whose = worst_ratio(run, self.objectives)
        if ratio <= 1.0:
            self.low, self.low_run = rate, run
        else:
            self.high, self.binding = rate, whose
        return ratio <= 1.0

    def close_in(self, tolerance: float) -> None:
        """Halve the bracket to the tolerance."""
        while self.low * (1.0 + tolerance) < self.high < math.inf:
            self.try_rate(math.sqrt(self.low * self.high))

    def found(self) -> MaxRate:
        return MaxRate(
            rate_per_s=self.low,
            broken_per_s=self.high,
            binding=self.binding,
            run=self.low_run,
            num_runs=self.num_runs,
            growth=1.0 if self.low_run is None else in_flight_growth(self.low_run),
        )
