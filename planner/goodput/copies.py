"""Copies of the states that restart apart (replica groups): the share of the run's batches that trains.

A job that keeps R whole copies of its states on nodes of their own need not stop where a node does: its copy leaves,
the others stand still for a moment and go on with (R − k)/R of the batch while k copies are away. Nothing is loaded
from a checkpoint, since a copy that comes back takes the states of another.

Notation
    λ    interruptions per second of the whole job       R    copies, each interrupted λ/R times a second
    D    seconds that a copy is away: the restart, and the repair where a node is broken and no spare stands by
    S    seconds that all others stand still when one leaves; it begins anew where another leaves meanwhile
    L    copies that must be there for the others to go on

Model. A copy is present with probability p = 1 / (1 + λ D / R), each for itself (alternating renewal; whatever the law
of D). Copies present are then binomial, and one leaves λ p times a second, so that the others work where none has left
for S seconds:

    share of the batches that trains = Σ_{k ≥ L} (k/R) C(R, k) p^k (1 − p)^(R − k) · exp(−λ p S).

Source       the ways of recovery of FT-HSDP (arXiv:2602.00277) and torchft; S: FT-HSDP's 3 minutes at O(100,000) GPUs,
             the only published one, so that smaller jobs stand still for less.
Assumptions  interruptions are Poisson; copies fail apart; whoever comes back makes nobody wait; a batch that is smaller
             by a share trains less by that share (what the smaller batch does to the loss is not priced); copies go
             on failing while too few are there.
"""

from __future__ import annotations

import math

from meshplan.planner.goodput.conditions import Interruptions
from meshplan.planner.goodput.spares import erlang_b

# FT-HSDP (arXiv:2602.00277, abstract): stall of a recovery at O(100,000) GPUs.
STALL_S = 180.0
# Below this share of the copies the others wait: nobody tuned a learning rate for less of a batch (assumed).
LEAST_SHARE = 0.5


def least_copies(copies: int) -> int:
    """L, the copies that must be there."""
    return math.ceil(LEAST_SHARE * copies)


def away_s(stops: Interruptions) -> float:
    """D, mean seconds that a copy is away after an interruption."""
    load = stops.per_s * stops.broken_share * stops.repair_s
    none_by = erlang_b(stops.spares, load)
    return stops.restart_s + stops.broken_share * stops.repair_s * none_by


def batch_share(stops: Interruptions, copies: int, *, stall_s: float = STALL_S) -> float:
    """Share of the run's batches that trains, between 0 and 1.

    Args:
        stops: interruptions of the whole job.
        copies: R, at least 2.
        stall_s: S.
    """
    present = 1.0 / (1.0 + stops.per_s / copies * away_s(stops))
    there = sum(
        count / copies * math.comb(copies, count) * present**count * (1.0 - present) ** (copies - count)
        for count in range(least_copies(copies), copies + 1)
    )
    return there * math.exp(-stops.per_s * present * stall_s)
