"""In which order all pairs are measured: rounds of disjoint pairs, so that n endpoints need n − 1 rounds, not n²/2.

Every endpoint talks to at most one other in a round, hence no two measurements share a network interface. The rounds
are those of a round-robin tournament by the circle method: one endpoint stands still, the others move by one seat.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

Pair = tuple[int, int]
Round = tuple[Pair, ...]
# Above this, all pairs take longer than most people wait: n − 1 rounds of a second or two each.
MAX_COMPLETE = 64
SAMPLED_ROUNDS = 16


def rounds(num_endpoints: int) -> list[Round]:
    """Perfect matchings that together hold every pair once; with an odd number one endpoint rests in each round.

    >>> rounds(4)
    [((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3))]
    """
    if num_endpoints <= 1:
        return []
    seats: list[int | None] = list(range(num_endpoints)) + ([None] if num_endpoints % 2 else [])
    schedule = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        schedule.append(tuple(sorted(pairs)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return schedule


def sampled_rounds(num_endpoints: int, *, count: int = SAMPLED_ROUNDS, seed: int = 0) -> list[Round]:
    """A random choice of the rounds: every endpoint appears in (almost) each, so that a slow one is always seen."""
    everything = rounds(num_endpoints)
    if len(everything) <= count:
        return everything
    chosen = np.random.default_rng(seed).permutation(len(everything))[:count]
    return [everything[index] for index in sorted(chosen)]


def unmeasured(num_endpoints: int, schedule: Sequence[Round]) -> list[Pair]:
    """The pairs that a schedule leaves out."""
    measured = {pair for matching in schedule for pair in matching}
    return [pair for pair in combinations(range(num_endpoints), 2) if pair not in measured]
