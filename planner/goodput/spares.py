"""Nodes that break and come back: how long a run waits for one, and what spare nodes are worth.

Notation
    a = λ q M   nodes in repair on average, were there spares without end: λ interruptions per second of a job that
                runs, q of them break a node, M seconds of repair
    S           spares                 k     nodes in repair                  B(s, a)   Erlang's loss formula

Model. Repairs go on side by side. With k ≤ S the job runs (or starts); with k = S + 1 it waits for the first node, and
nothing breaks meanwhile. k is then the number of busy lines of a telephone exchange with S + 1 lines, so that

    share of the time that the job waits = B(S + 1, a),      B(s, a) = (a^s/s!) / Σ_{k≤s} a^k/k!

The formula holds for any distribution of repair times with mean M (insensitivity of Erlang's formula) as long as
several nodes are never waited for together, which the model excludes.

Source       A. K. Erlang (1917); any textbook of queueing theory, "M/G/c/c".
Assumptions  interruptions of a running job are Poisson; a repaired node is as good as any.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.goodput.conditions import Interruptions

# Spares of which a table tells the worth.
MOST_TABLED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareWorth:
    """What a number of spares comes to.

    Args:
        spares: nodes that stand by.
        waiting_share: share of the time that the job waits for a node.
        hours_saved: hours of the run that the last of these spares saves; None for no spare.
    """

    spares: int
    waiting_share: float
    hours_saved: float | None = None


def erlang_b(servers: int, load: float) -> float:
    """B(s, a), the share of the time that all of ``servers`` lines are busy; by the stable recursion."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked


def waiting_share(stops: Interruptions, spares: int | None = None) -> float:
    """Share of the time that a job waits for a node.

    Args:
        stops: λ, q, M, S.
        spares: S where another number is asked about.
    """
    load = stops.per_s * stops.broken_share * stops.repair_s
    return 0.0 if load <= 0.0 else erlang_b((stops.spares if spares is None else spares) + 1, load)
