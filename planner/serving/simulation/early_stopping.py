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

from meshplan.planner.serving.problem.requests import Objective
from meshplan.planner.serving.simulation.metrics import QUANTILES
from meshplan.planner.serving.simulation.request_state import Ledger

# Looks at a run while its requests arrive: each costs about a hundredth of a run of a thousand requests.
NUM_LOOKS = 12


class LostPromiseError(Exception):
    """A run that goes on can no longer keep ``objective``, nor a limit as many times as high as the watch was told."""

    def __init__(self, objective: Objective) -> None:
        super().__init__(f"{objective.key} is beyond its limit whatever the rest of the run brings")
        self.objective = objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a run is watched for.

    Args:
        objectives: the promises.
        margin: a run is given up when a latency is certain to be above so many times its limit.
        seen_later_s: clients see every token so much later than the engine gives it.
    """

    objectives: Sequence[Objective]
    margin: float = 1.0
    seen_later_s: float = 0.0

    def later(self, seconds: float) -> Watch:
        """The same, for clients who see every token ``seconds`` later."""
        return replace(self, seen_later_s=self.seen_later_s + seconds)

    def moments(self, arrival_s: NDArray[np.float64]) -> list[int]:
        """Numbers of the requests at whose arrival it looks."""
        num = len(arrival_s)
        return sorted({num * i // NUM_LOOKS for i in range(1, NUM_LOOKS)} - {0})

    def look(self, ledger: Ledger, now_s: float) -> None:
        """Look at the requests of a run that has been simulated up to ``now_s``.

        Raises:
            LostPromiseError: whatever comes, a promise is broken by more than the margin.
        """
        arrival, first, finish = (
            np.array(column) for column in (ledger.arrival_s, ledger.first_token_s, ledger.finish_s)
        )
        has_come = arrival <= now_s
        for objective in self.objectives:
            limit = objective.limit_s * self.margin
            if objective.metric == "tpot":
                gaps = np.array(ledger.output_length) - 1
                known = np.isfinite(first) & np.isfinite(finish) & (gaps > 0)
                values = (finish[known] - first[known]) / gaps[known]
                num = int(np.count_nonzero(gaps > 0))
            elif objective.metric in ("ttft", "e2e"):
                seen = first if objective.metric == "ttft" else finish
                values = np.minimum(seen, now_s)[has_come] - arrival[has_come]
                limit -= self.seen_later_s
                num = len(ledger)
            else:
                continue
            if _is_above(values, limit, objective.percentile, num):
                raise LostPromiseError(objective)


def _is_above(values: NDArray[np.float64], limit_s: float, percentile: str, num: int) -> bool:
    """Whether the percentile of ``num`` values, of which these are known from below, is above the limit for certain."""
    if percentile == "mean":
        return float(values.sum()) > num * limit_s
    needed = num - math.floor(QUANTILES[percentile] * (num - 1))
    return int(np.count_nonzero(values > limit_s)) >= needed
