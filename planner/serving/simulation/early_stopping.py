"""Early stopping of a run that is certain to violate an SLO, so that it need not be simulated to its end.

At any time t a latency is known or bounded from below: a request without its first token has waited t − arrival for it.
A percentile q of n values lies above its limit as soon as n − ⌊q(n − 1)⌋ of them do, a mean as soon as the sum of the
bounds exceeds n·limit. Inter-token latencies are not checked, because gaps are not recorded per request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.metrics import QUANTILES

# Checks of a run while its requests arrive: each costs about a hundredth of a run of a thousand requests.
NUM_LOOKS = 12


class SloViolatedError(Exception):
    """An unfinished run is certain to violate ``slo`` by more than the margin."""

    def __init__(self, slo: Slo) -> None:
        super().__init__(f"{slo.key} is beyond its limit whatever the rest of the run brings")
        self.slo = slo


class Seen(Protocol):
    """What a look needs of a running simulation: one value per request, infinite times where they are not known yet."""

    @property
    def arrival_s(self) -> ArrayLike:
        """When it arrived."""

    @property
    def first_token_s(self) -> ArrayLike:
        """When its first token came."""

    @property
    def finish_s(self) -> ArrayLike:
        """When its last token came."""

    @property
    def output_length(self) -> ArrayLike:
        """Tokens of its answer."""

    def __len__(self) -> int:
        """Requests of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """The rule by which a run is stopped.

    Args:
        slos: what must be met.
        margin: a run is stopped when a latency is certain to exceed this multiple of its limit.
        seen_later_s: delay from the engine to the client, of every token.
        check: called at every look; it raises where the time for the run is over.
    """

    slos: Sequence[Slo]
    margin: float = 1.0
    seen_later_s: float = 0.0
    check: Callable[[], None] | None = None

    def later(self, seconds: float) -> EarlyStopping:
        """The same rule for clients who see every token ``seconds`` later."""
        return replace(self, seen_later_s=self.seen_later_s + seconds)

    def moments(self, arrival_s: NDArray[np.float64]) -> list[int]:
        """The requests at whose arrivals the run is checked."""
        num = len(arrival_s)
        return sorted({num * i // NUM_LOOKS for i in range(1, NUM_LOOKS)} - {0})

    def look(self, state: Seen, now_s: float) -> None:
        """Check a run that has been simulated up to ``now_s``.

        Raises:
            SloViolatedError: whatever comes, an SLO is violated by more than the margin.
        """
        if self.check is not None:
            self.check()
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
    """Whether the percentile of ``num`` values is certain to exceed the limit, given lower bounds on some of them."""
    if percentile == "mean":
        return float(values.sum()) > num * limit_s
    return int(np.count_nonzero(values > limit_s)) >= needed_beyond(percentile, num)


def needed_beyond(percentile: str, num: int) -> int:
    """How many of ``num`` values have to lie above a limit for their percentile to do so; not for a mean.

    >>> needed_beyond("p99", 1000)
    11
    """
    return num - math.floor(QUANTILES[percentile] * (num - 1))
