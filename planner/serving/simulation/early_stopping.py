"""Whether a run that goes on can still keep its promises: one that cannot need not be simulated to its end.

At any moment t a latency is known or bounded from below: who has no first token has waited t − arrival for it. A
percentile q of n values lies above its limit as soon as n − ⌊q(n − 1)⌋ of them do, a mean as soon as the sum of the
bounds is above n·limit. Gaps between tokens are not watched: they are kept by stretch, not by request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.metrics import QUANTILES
from meshplan.planner.serving.simulation.request_state import RequestState

# Looks at a run while its requests arrive: each costs about a hundredth of a run of a thousand requests.
NUM_LOOKS = 12


class SloViolatedError(Exception):
    """A run that goes on can no longer keep ``slo``, nor a limit as many times as high as the watch was told."""

    def __init__(self, slo: Slo) -> None:
        super().__init__(f"{slo.key} is beyond its limit whatever the rest of the run brings")
        self.slo = slo


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """What a run is watched for.

    Args:
        slos: the promises.
        margin: a run is given up when a latency is certain to be above so many times its limit.
        seen_later_s: clients see every token so much later than the engine gives it.
    """

    slos: Sequence[Slo]
    margin: float = 1.0
    seen_later_s: float = 0.0

    def later(self, seconds: float) -> EarlyStopping:
        """The same, for clients who see every token ``seconds`` later."""
        return replace(self, seen_later_s=self.seen_later_s + seconds)

    def moments(self, arrival_s: NDArray[np.float64]) -> list[int]:
        """Numbers of the requests at whose arrival it looks."""
        num = len(arrival_s)
        return sorted({num * i // NUM_LOOKS for i in range(1, NUM_LOOKS)} - {0})

    def look(self, state: RequestState, now_s: float) -> None:
        """Look at the requests of a run that has been simulated up to ``now_s``.

        Raises:
            LostPromiseError: whatever comes, a promise is broken by more than the margin.
        """
        arrival, first, finish = (np.array(column) for column in (state.arrival_s, state.first_token_s, state.finish_s))
        has_come = arrival <= now_s
        for slo in self.slos:
            limit = slo.limit_s * self.margin
            if slo.metric == "tpot":
                gaps = np.array(state.output_length) - 1
                known = np.isfinite(first) & np.isfinite(finish) & (gaps > 0)
                values = (finish[known] - first[known]) / gaps[known]
                num = int(np.count_nonzero(gaps > 0))
            elif slo.metric in ("ttft", "e2e"):
                seen = first if slo.metric == "ttft" else finish
                values = np.minimum(seen, now_s)[has_come] - arrival[has_come]
                limit -= self.seen_later_s
                num = len(state)
            else:
                continue
            if _is_above(values, limit, slo.percentile, num):
                raise SloViolatedError(slo)


def _is_above(values: NDArray[np.float64], limit_s: float, percentile: str, num: int) -> bool:
    """Whether the percentile of ``num`` values, of which these are known from below, is above the limit for certain."""
    if percentile == "mean":
        return float(values.sum()) > num * limit_s
    needed = num - math.floor(QUANTILES[percentile] * (num - 1))
    return int(np.count_nonzero(values > limit_s)) >= needed
