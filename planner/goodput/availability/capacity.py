"""What a job makes of a number of nodes, and what it costs to change the number.

Notation
    n   nodes available        m ≤ n  nodes that the job uses; the others stand by
    f   progress per second with m nodes: tokens per second of the best plan for at most m
    C   seconds that the job stands still for a change that it chooses (restart, states moved to the new layout)
    L   seconds for a change that is forced on it: C, and the work since the last checkpoint done again

Of k nodes that go, any of the n are equally likely to be among them. The job is hit unless all of them stood by:

    P(hit) = 1 − C(n − m, k) / C(n, k)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb

import numpy as np

from meshplan.planner.core.arrays import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A job by its number of nodes.

    Args:
        rates: f, [most nodes + 1], tokens per second, from no node on; does not fall (fewer nodes can be used).
        change_s: C.
        forced_s: L, at least C.
    """

    rates: tuple[float, ...]
    change_s: float
    forced_s: float

    @property
    def most(self) -> int:
        """Largest number of nodes."""
        return len(self.rates) - 1

    @property
    def useful(self) -> tuple[int, ...]:
        """Numbers of nodes that are faster than one node less, and none."""
        return (0, *(m for m in range(1, self.most + 1) if self.rates[m] > self.rates[m - 1]))


def rates_of(known: dict[int, float], most: int) -> tuple[float, ...]:
    """Rates f for every number of nodes, from plans for some: the best plan that needs no more nodes.

    Args:
        known: nodes → tokens per second.
        most: largest number.
    """
    at = np.zeros(most + 1)
    for nodes, rate in known.items():
        if nodes <= most:
            at[nodes] = max(at[nodes], rate)
    best: FloatArray = np.maximum.accumulate(at)
    return tuple(float(rate) for rate in best)


@cache
def hit_probability(available: int, used: int, gone: int) -> float:
    """P(hit), see the module's text."""
    gone = min(gone, available)
    if gone <= 0 or used <= 0:
        return 0.0
    return 1.0 - comb(available - used, gone) / comb(available, gone)
