"""The highest rate of open arrivals at which every objective is still met.

All rates meet the same requests, whose arrivals are stretched (common random numbers), so that what differs between two
runs is the rate alone. The rate is stepped down until the objectives are met, and then closed in between a rate that is
met and one that is not. With y = limit/latency, which falls to 0 at saturation much as the spare capacity does, the
crossing y = 1 is looked for on the line through both ends; the next rate is tried half a tolerance beyond it, on the
side that did not move last, so that two good guesses end the search; where guesses fall on the same side again, the
distance doubles. A run that is certain to miss an objective by far is given up (:mod:`meshplan.planner.serving.simulation.early_stopping`).

Latencies are not strictly monotone in the rate: who meets whom in a batch changes. Where there are several crossings,
one of them is found.

A short run at too high a rate may be over before its queue is long. So no rate is tried above the one at which
requests leave while the queue never runs dry: all of them at once, counted over the middle half of the departures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.serving.problem.requests import Objective, Requests
from meshplan.planner.serving.simulation.arrivals import scaled
from meshplan.planner.serving.simulation.early_stopping import LostPromiseError, Watch
from meshplan.planner.serving.simulation.metrics import Latency, itl, latency, samples_of
from meshplan.planner.serving.simulation.run import ServingRun

Serve = Callable[[Requests, Watch | None], ServingRun]
# Relative distance between the rate that is met and the one that is not: below the noise of a thousand requests.
TOLERANCE = 0.01
# A run whose latency is certain to be above so many times its limit is given up: nearer ones tell where to look next.
FAR = 1.3
# Each step down from the saturated rate, until the objectives are met; and how often before none is.
DOWN, MAX_DOWN = 0.5, 12
# Latencies below this share of their limits count as that share: there is none to divide by where nobody waits.
LEAST_RATIO = 1e-3


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
        serve: simulates requests; given a watch, it may give up.
        objectives: what must be met. A rejected request meets none.
        high_per_s: no rate is above it; None for the saturated rate, which takes a run.
        tolerance: of the rate, relative.

    Raises:
        SpecError: all requests arrive at once.
    """
    search = RateSearch(requests, serve, objectives, high_per_s=high_per_s, tolerance=tolerance)
    while not search.is_closed:
        search.try_rate(search.next_rate())
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


class RateSearch:
    """The search, one rate at a time; arguments as of :func:`max_rate`.

    Attributes:
        low: the highest rate tried that meets the objectives; 0 before one does.
        high: the lowest rate tried that does not, infinite before one does not.
        low_run: the run at ``low``.
        high_run: the run at ``high``; None where it was given up.
    """

    def __init__(
        self,
        requests: Requests,
        serve: Serve,
        objectives: Sequence[Objective],
        *,
        high_per_s: float | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.requests, self.serve, self.objectives = requests, serve, objectives
        self.watch = Watch(objectives=objectives, margin=FAR)
        self.num_runs = 0
        self.most = self._saturated_rate() if high_per_s is None else high_per_s
        # In logarithms; a hair less, so that a bracket of one step counts as closed.
        self.step = math.log1p(tolerance) * (1.0 - 1e-6)
        self.low, self.high = 0.0, math.inf
        self.low_run: ServingRun | None = None
        self.high_run: ServingRun | None = None
        self.binding: Objective | None = None
        # limit/latency at both ends, and how often the same end has moved in a row: downwards if negative.
        self.low_ratio, self.high_ratio, self.in_a_row = math.inf, 0.0, 0

    @property
    def is_closed(self) -> bool:
        """Nothing is left to try: the bracket is within the tolerance, the limit is met, or no rate is."""
        if not self.low:
            return self.most <= 0.0 or self.high <= self.most * DOWN ** (MAX_DOWN - 1)
        return self.low >= self.most or math.log(self.high / self.low) <= self.step * (1.0 + 1e-5)

    def next_rate(self) -> float:
        """What to try next."""
        if self.high == math.inf:
            return self.most
        if not self.low:
            return self.high * DOWN
        low, high, step = math.log(self.low), math.log(self.high), self.step
        if high - low <= 2.0 * step:
            return math.exp((low + high) / 2.0)
        share = (self.low_ratio - 1.0) / (self.low_ratio - self.high_ratio)
        guess = math.log(self.low + share * (self.high - self.low))
        guess += math.copysign(step / 2.0 * 2.0 ** (abs(self.in_a_row) - 1), self.in_a_row) if self.in_a_row else 0.0
        return math.exp(min(max(guess, low + step), high - step))

    def try_rate(self, rate: float, *, gives_up: bool = True) -> bool:
        """Whether a rate meets the objectives; it becomes one end of the bracket."""
        self.num_runs += 1
        run = None
        try:
            run = self.serve(scaled(self.requests, rate), self.watch if gives_up else None)
            ratio, whose = worst_ratio(run, self.objectives)
        except LostPromiseError as lost:
            ratio, whose = FAR, lost.objective
        is_first = not self.low or self.high == math.inf
        if ratio <= 1.0:
            self.low, self.low_run, self.low_ratio = rate, run, 1.0 / max(ratio, LEAST_RATIO)
            self.in_a_row = 0 if is_first else max(self.in_a_row, 0) + 1
        else:
            self.high, self.high_run, self.binding, self.high_ratio = rate, run, whose, 1.0 / ratio
            self.in_a_row = 0 if is_first else min(self.in_a_row, 0) - 1
        return ratio <= 1.0

    def found(self) -> MaxRate:
        """What is known now."""
        return MaxRate(
            rate_per_s=self.low,
            broken_per_s=self.high,
            binding=self.binding,
            run=self.low_run,
            num_runs=self.num_runs,
            growth=1.0 if self.low_run is None else in_flight_growth(self.low_run),
        )

    def _saturated_rate(self) -> float:
        self.num_runs += 1
        at_once = replace(self.requests, arrival_s=np.zeros(len(self.requests)))
        return saturated_rate(self.serve(at_once, None))
