"""The highest rate of open arrivals at which every SLO is still met.

All rates use the same requests with their arrivals stretched (common random numbers), so that two runs differ in the
rate alone. The rate is halved until the SLOs are met; then the bracket between a rate that meets them and one that does
not is closed. With y = limit/latency, which falls to 0 at saturation much as the spare capacity does, the crossing y =
1 is estimated by the secant through both ends. The next rate is half a tolerance beyond it, on the side of the end that
did not move last, so that two good estimates end the search; while the same end keeps moving, the distance doubles. A
run that is certain to violate an SLO by far is stopped (:mod:`meshplan.planner.serving.simulation.early_stopping`).

Latencies are not strictly monotone in the rate, because which requests share a batch changes with it. Where there are
several crossings, one of them is found.

A short run at too high a rate may end before its queue is long. The search is therefore bounded by the saturated rate:
the rate at which requests leave while the queue never empties (all of them arrive at once, measured over the middle
half of the departures).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.arrivals import scaled
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping, SloViolatedError
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import worst_ratio

Serve = Callable[[Requests, EarlyStopping | None], ServingRun]
# Relative width of the closed bracket: below the sampling noise of a thousand requests.
TOLERANCE = 0.01
# A run whose latency is certain to exceed this multiple of its limit is stopped: nearer ones tell where to look next.
FAR = 1.3
# Factor of each step down from the saturated rate until the SLOs are met, and the most steps.
DOWN, MAX_DOWN = 0.5, 12
# Smallest latency/limit that is divided by; it is 0 where no request waits.
LEAST_RATIO = 1e-3


class RateSearch:
    """The search, one rate at a time.

    Args:
        requests: open arrivals, at any rate.
        serve: simulates requests; given an early-stopping rule, it may stop.
        slos: what must be met. A rejected request violates all.
        high_per_s: upper limit of the search; None for the saturated rate, which takes a run.
        tolerance: relative tolerance of the rate.

    Attributes:
        low: the highest rate tried that meets the SLOs; 0 if none has.
        high: the lowest rate tried that does not; infinite if all have.
        low_run: the run at ``low``.
        high_run: the run at ``high``; None where it was stopped early.

    Raises:
        SpecError: all requests arrive at once.
    """

    def __init__(
        self,
        requests: Requests,
        serve: Serve,
        slos: Sequence[Slo],
        *,
        high_per_s: float | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.requests, self.serve, self.slos = requests, serve, slos
        self.stopping = EarlyStopping(slos=slos, margin=FAR)
        self.num_runs = 0
        self.most = self._saturated_rate() if high_per_s is None else high_per_s
        # In logarithms; slightly less, so that a bracket of one step counts as closed.
        self.step = math.log1p(tolerance) * (1.0 - 1e-6)
        self.low, self.high = 0.0, math.inf
        self.low_run: ServingRun | None = None
        self.high_run: ServingRun | None = None
        # limit/latency at both ends, and how often the same end has moved in a row: negative for the upper end.
        self.low_ratio, self.high_ratio, self.in_a_row = math.inf, 0.0, 0

    @property
    def is_closed(self) -> bool:
        """Nothing is left to try: the bracket is within the tolerance, the upper limit is met, or no rate is."""
        if not self.low:
            return self.most <= 0.0 or self.high <= self.most * DOWN ** (MAX_DOWN - 1)
        return self.low >= self.most or math.log(self.high / self.low) <= self.step * (1.0 + 1e-5)

    def next_rate(self) -> float:
        """The rate to try next."""
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

    def try_rate(self, rate: float, *, may_stop_early: bool = True) -> bool:
        """Whether a rate meets the SLOs; it becomes one end of the bracket."""
        self.num_runs += 1
        run = None
        try:
            run = self.serve(scaled(self.requests, rate), self.stopping if may_stop_early else None)
            ratio = worst_ratio(run, self.slos)
        except SloViolatedError:
            ratio = FAR
        is_first = not self.low or self.high == math.inf
        if ratio <= 1.0:
            self.low, self.low_run, self.low_ratio = rate, run, 1.0 / max(ratio, LEAST_RATIO)
            self.in_a_row = 0 if is_first else max(self.in_a_row, 0) + 1
        else:
            self.high, self.high_run, self.high_ratio = rate, run, 1.0 / ratio
            self.in_a_row = 0 if is_first else min(self.in_a_row, 0) - 1
        return ratio <= 1.0

    def close(self) -> Self:
        """Try rates until the bracket is closed."""
        while not self.is_closed:
            self.try_rate(self.next_rate())
        return self

    def _saturated_rate(self) -> float:
        self.num_runs += 1
        at_once = replace(self.requests, arrival_s=np.zeros(len(self.requests)))
        return saturated_rate(self.serve(at_once, None))


def saturated_rate(run: ServingRun) -> float:
    """Requests/s that leave a run whose requests all arrive at once: over the middle half of them, or over all.

    The middle half excludes the first fill and the drain; where all requests fit in one batch it overestimates, never
    underestimates.
    """
    finish = np.sort(run.finish_s[run.is_served])
    num = len(finish)
    if not num:
        return 0.0
    first, last = finish[num // 4], finish[(3 * num) // 4]
    middle = ((3 * num) // 4 - num // 4) / (last - first) if last > first else 0.0
    return float(max(middle, num / finish[-1]))
