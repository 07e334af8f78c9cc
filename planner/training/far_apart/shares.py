"""How many sequences of a step each site takes, so that they finish together.

Equal sites take equal shares where the batch divides. Else shares are whole multiples of a quantum that every site can
deal to the replicas of its best plan: a prime number of sequences has few ways to be split over devices. They start in
proportion to the sites' rates with the whole batch. A site's steps at the whole batch and at this share give a line
a + b·s each; where the lines take equally long is tried next. Then a quantum moves from the slowest site to the
fastest as long as that makes the slowest faster (of several, one of them).

*Bound.* A step of k·b sequences takes at most k steps of b: a site's rate at a part of the batch is at most its rate at
the whole. So no shares make a step shorter than 1/Σ(1/bound_i), with bound_i that of site i with the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Quanta of a site on average, at least: shares are within 1/16 of what would be even. Assumed.
LEAST_QUANTA = 16
# Moves of a quantum that are tried; each plans two sites anew. Assumed: the lines are close.
MOST_MOVES = 4

# (site, sequences) → time of the site's best step, s; infinite where nothing fits.
StepOf = Callable[[int, int], float]


def quantum(batch: int, replicas: Sequence[int]) -> int:
    """The largest divisor of the batch that all replicas divide and that leaves a site :data:`LEAST_QUANTA` on average.

    Where there is none the fewest sequences that all replicas divide, else the largest divisor with so many quanta.

    Args:
        batch: sequences of a step.
        replicas: data parallelism of each site's best plan.
    """
    most, count = batch // (LEAST_QUANTA * len(replicas)), len(replicas)
    together = math.lcm(*replicas)
    sizes = [size for size in range(1, batch // count + 1) if batch % size == 0]
    shared = [size for size in sizes if size % together == 0]
    if shared:
        return max((size for size in shared if size <= most), default=shared[0])
    return max((size for size in sizes if size <= most), default=1)


def proportional(total: int, rates: Sequence[float]) -> list[int]:
    """Whole parts of a total in proportion to rates, at least 1 each (largest remainders)."""
    whole = sum(rates)
    exact = [total * rate / whole for rate in rates]
    parts = [max(1, int(one)) for one in exact]
    by_remainder = sorted(range(len(rates)), key=lambda site: (parts[site] - exact[site], site))
    while sum(parts) != total:
        short = sum(parts) < total
        order = by_remainder if short else [site for site in reversed(by_remainder) if parts[site] > 1]
        for site in order[: abs(total - sum(parts))]:
            parts[site] += 1 if short else -1
    return parts


def share_batch(
    batch: int, steps_s: Sequence[float], replicas: Sequence[int], step_of: StepOf, *, alike: bool
) -> tuple[int, ...]:
    """Sequences of each site.

    Args:
        batch: of a step, over all sites.
        steps_s: each site's step with the whole batch.
        replicas: data parallelism of those plans.
        step_of: a site's best step with some sequences.
        alike: whether all sites are equal.
    """
    count = len(steps_s)
    if alike and batch % count == 0:
        return (batch // count,) * count
    size = quantum(batch, replicas)
    total = batch // size
    shares = [size * one for one in proportional(total, [1.0 / step for step in steps_s])]
    if alike:
        return tuple(shares)
    found = _Shared.of(shares, step_of)
    found = min(found, _Shared.of([size * one for one in proportional(total, _level(batch, steps_s, found))], step_of))
    for _ in range(MOST_MOVES):
        slow = max(range(count), key=lambda site: found.times[site])
        fast = min(range(count), key=lambda site: found.times[site])
        if found.shares[slow] <= size or slow == fast:
            break
        moved = list(found.shares)
        moved[slow], moved[fast] = moved[slow] - size, moved[fast] + size
        better = min(found, _Shared.of(moved, step_of))
        if better is found:
            break
        found = better
    return found.shares


@dataclass(frozen=True, slots=True)
class _Shared:
    """Shares and the step of each site, in the order of the slowest."""

    shares: tuple[int, ...]
    times: tuple[float, ...]

    @classmethod
    def of(cls, shares: Sequence[int], step_of: StepOf) -> _Shared:
        """Every site planned for its share."""
        return cls(tuple(shares), tuple(step_of(site, share) for site, share in enumerate(shares)))

    def __lt__(self, other: _Shared) -> bool:
        return sorted(self.times, reverse=True) < sorted(other.times, reverse=True)


def _level(batch: int, steps_s: Sequence[float], found: _Shared) -> list[float]:
    """Shares at which lines through both known steps of every site take equally long.

    τ = (B + Σ a/b)/Σ 1/b and s = (τ − a)/b; where a step does not grow with the share, the share is kept.
    """
    lines = []
    for whole_s, share, step_s in zip(steps_s, found.shares, found.times, strict=True):
        slope = (whole_s - step_s) / (batch - share)
        if not (math.isfinite(slope) and slope > 0.0):
            return [float(one) for one in found.shares]
        lines.append((step_s - slope * share, slope))
    level = (batch + sum(a / b for a, b in lines)) / sum(1.0 / b for _, b in lines)
    return [max((level - a) / b, 1.0) for a, b in lines]
