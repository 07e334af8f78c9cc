"""Interruptible replicas: how many of a pool serve, and what share of the time.

Notation
    λ        interruptions of one unit per second      r       seconds until a replacement serves
    n        units in use                              q       share of the time that a unit is away, λ·r / (1 + λ·r)

Equation     units fail independently, so the number away is Binomial(n, q) in the long run. An interrupted unit takes
             all its replicas with it; a replica over several units fails with any of them. Spares take over.
Assumption   a state outlasts the requests in it: r is minutes, a request seconds. A request that stays w seconds is
             lost to an interruption of its replica with probability 1 − exp(−λ·w).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.gpu_allocation.nodes.problem import Offer, ReplicaKind

# States rarer than this are not simulated; their requests count as lost.
LEAST_SHARE = 5e-4
# Share of the time that the states of one pool may leave out.
_LEFT_OUT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """One state of a system's pools.

    Args:
        usable: [pools] replicas that serve.
        share: share of the time.
    """

    usable: tuple[int, ...]
    share: float


def interruptions_per_s(offer: Offer, kind: ReplicaKind) -> float:
    """How often one replica of a kind is interrupted, 1/s."""
    return max(-(-kind.num_devices // offer.num_devices), 1) * offer.interruptions_per_hour / SECONDS_PER_HOUR


def states_of(offer: Offer, kind: ReplicaKind, *, count: int, usable: int) -> list[PoolState]:
    """How many replicas of one pool serve, and how often.

    Args:
        offer: offer of the pool's units.
        kind: kind of the pool's replicas.
        count: replicas rented, spares included.
        usable: replicas that carry load when none is away.

    Returns:
        Different numbers of serving replicas, the full pool first; shares sum to 1 but for one in a billion.
    """
    together = max(offer.num_devices // kind.num_devices, 1)
    rate = interruptions_per_s(offer, kind)
    away = rate * offer.interruption_s / (1.0 + rate * offer.interruption_s)
    groups = -(-count // together)
    shares: dict[int, float] = {}
    for gone in range(groups + 1):
        if sum(shares.values()) > 1.0 - _LEFT_OUT:
            break
        left = min(usable, max(count - gone * together, 0))
        chance = math.comb(groups, gone) * away**gone * (1.0 - away) ** (groups - gone)
        shares[left] = shares.get(left, 0.0) + chance
    return [PoolState(usable=(left,), share=share) for left, share in shares.items()]


def states_together(pools: Sequence[Sequence[PoolState]]) -> list[PoolState]:
    """Joint states of pools that serve together and fail independently; those too rare to simulate are left out."""
    found = []
    for parts in product(*pools):
        share = math.prod(part.share for part in parts)
        if share >= LEAST_SHARE:
            found.append(PoolState(usable=tuple(n for part in parts for n in part.usable), share=share))
    return found
