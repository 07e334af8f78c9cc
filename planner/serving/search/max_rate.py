"""The highest rate of open arrivals at which every SLO is still met.

All rates use the same requests with their arrivals stretched (common random numbers), so that two runs differ in the
rate alone. The rate is halved until the SLOs are met; then the bracket between a rate that meets them and one that does
not is closed. With y = limit/latency, which falls to 0 at saturation much as the spare capacity does, the crossing y =
1 is estimated by the secant through both ends. The next rate is half a tolerance beyond it, on the side of the end that
did not move last, so that two good estimates end the search; while the same end keeps moving, the distance doubles.
Whether a rate meets the SLOs is decided with confidence (:mod:`meshplan.planner.serving.search.trials`): one that is
not shown to meet them ends the bracket, and the lowest that is shown to violate them ends the interval of the answer.

The answer is the highest rate at which the SLOs are shown to hold, not a promise for every lower one: latencies are not
strictly monotone in the rate, because which requests share a batch changes with it. So a rate that does not meet them
ends nothing by itself: :meth:`RateSearch.look_above` tries some between it and the lowest that is shown to violate
them, by short runs. One that meets them opens the bracket again, one that violates them narrows the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

from meshplan.planner.serving.search.trials import Effort, Trial, Verdict

Try = Callable[[float, bool, Effort], Trial]
# Factor of each step down from the upper limit until the SLOs are met, and the most steps.
DOWN, MAX_DOWN = 0.5, 12
# Rates tried above a closed bracket, and the relative distance to the lowest that fails which is not worth a try.
LOOKS_ABOVE, LEAST_ABOVE = 3, 0.03
# Rates tried to settle an answer, the largest step down in brackets, and the largest latency/limit of a settled rate
# that is worth another try: near saturation one per cent of the rate is five to ten of the latency.
MOST_SETTLED, LARGEST_STEPS, NEAR = 8, 3.0, 0.9
# Smallest latency/limit that is divided by, which is 0 where no request waits; largest limit/latency of a violation.
LEAST_RATIO, BELOW_ONE = 1e-3, 1.0 - 1e-6


class RateSearch:
    """The search, one rate at a time.

    Args:
        attempt: (rate, may stop early, effort) → whether the SLOs hold at a rate.
        high_per_s: upper limit of the search.
        tolerance: relative width of the closed bracket.

    Attributes:
        low: the highest rate tried at which the SLOs hold; 0 if there is none.
        high: the lowest rate tried above it at which they do not, or not for certain; infinite if there is none.
        refuted: the lowest rate at which an SLO is violated for certain; infinite if there is none.
        low_trial: the trial at ``low``.
        high_trial: the trial at ``high``.
    """

    def __init__(self, attempt: Try, *, high_per_s: float, tolerance: float) -> None:
        self.attempt, self.most = attempt, high_per_s
        self.num_runs = 0
        self.effort = Effort.SEARCH
        # In logarithms; slightly less, so that a bracket of one step counts as closed.
        self.step = math.log1p(tolerance) * (1.0 - 1e-6)
        self.low, self.high, self.refuted, self.refuted_ratio = 0.0, math.inf, math.inf, 0.0
        self.low_trial: Trial | None = None
        self.high_trial: Trial | None = None
        # limit/latency at both ends, and how often the same end has moved in a row: negative for the upper end.
        self.low_ratio, self.high_ratio, self.in_a_row = math.inf, 0.0, 0

    def start_from(self, rate: float, ratio: float) -> None:
        """Begin at a rate that is known to meet the SLOs, with its largest latency/limit."""
        self.low, self.low_ratio = rate, max(1.0 / max(ratio, LEAST_RATIO), 1.0)

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
        """Whether the SLOs hold at a rate; it becomes one end of the bracket."""
        self.num_runs += 1
        trial = self.attempt(rate, may_stop_early, self.effort)
        is_met = trial.verdict is Verdict.MET
        ratio = max(trial.ratio, LEAST_RATIO)
        is_first = not self.low or self.high == math.inf
        if is_met:
            self.low, self.low_trial, self.low_ratio = rate, trial, max(1.0 / ratio, 1.0)
            self.in_a_row = 0 if is_first else max(self.in_a_row, 0) + 1
        else:
            self.high, self.high_trial, self.high_ratio = rate, trial, min(1.0 / ratio, BELOW_ONE)
            self.in_a_row = 0 if is_first else min(self.in_a_row, 0) - 1
        if trial.verdict is Verdict.VIOLATED:
            self.refuted, self.refuted_ratio = min((self.refuted, self.refuted_ratio), (rate, self.high_ratio))
        return is_met

    def look_above(self) -> bool:
        """Whether a rate above the bracket is shown to meet the SLOs; it is then the lower end of a new bracket.

        Each try halves, in logarithms, what is left between rates that are undecided and the lowest shown to fail.
        """
        if self.high == math.inf:
            return False
        below = self.high
        for _ in range(LOOKS_ABOVE):
            above = min(self.refuted, self.most)
            if above <= below * (1.0 + LEAST_ABOVE):
                break
            rate = math.sqrt(below * above)
            self.num_runs += 1
            trial = self.attempt(rate, True, Effort.FIRST)
            if trial.verdict is Verdict.VIOLATED:
                self.refuted, self.refuted_ratio = rate, min(1.0 / max(trial.ratio, LEAST_RATIO), BELOW_ONE)
            elif trial.verdict is Verdict.MET:
                self.low, self.low_trial, self.low_ratio = rate, trial, max(1.0 / max(trial.ratio, LEAST_RATIO), 1.0)
                self.high, self.high_trial, self.high_ratio = self.refuted, None, 0.0
                self.in_a_row = 0
                return True
            else:
                below = rate
        return False

    def close(self) -> Self:
        """Try rates until the bracket is closed."""
        while not self.is_closed or self.look_above():
            self.try_rate(self.next_rate())
        return self

    def settle(self) -> Self:
        """Close the bracket again by rates of which longer runs tell, beginning at the rate that was found.

        After a rate that fails the next is the one at which y would be 1; after one that holds, the search goes on
        between both. It ends at a bracket of two tolerances, or at a rate whose latency is :data:`NEAR` its limit.
        """
        rate = self.low
        self.effort, self.low, self.low_trial, self.high_trial = Effort.SETTLE, 0.0, None, None
        self.high, self.high_ratio, self.in_a_row = self.refuted, self.refuted_ratio, 0
        for _ in range(MOST_SETTLED if rate else 0):
            if self.try_rate(rate):
                if self.low_ratio <= 1.0 / NEAR:
                    break
            elif not self.low:
                rate = self._below(rate, self.high_ratio)
                continue
            if self.low >= self.most or math.log(self.high / self.low) <= 2.0 * self.step:
                break
            rate = self.next_rate()
        return self

    def _below(self, rate: float, ratio: float) -> float:
        """The rate at which y = 1, from one at which it is ``ratio`` < 1; by one to :data:`LARGEST_STEPS` brackets."""
        wide = 2.0 * self.step
        guess = self.most - max(self.most - rate, 0.0) / ratio
        return min(max(guess, rate * math.exp(-LARGEST_STEPS * wide)), rate * math.exp(-wide))
