"""A job on nodes that come and go, node by node: the judge of meshplan.planner.goodput.availability.

Nodes have names here. When the trace takes some, they are drawn from those present; the job is interrupted if it used
one of them. Time goes in small steps, and nothing is shared with the planner but the policy's decisions.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from meshplan.planner.goodput.availability.capacity import Capacity
from meshplan.planner.goodput.availability.outcome import Policy, Seen
from meshplan.planner.goodput.availability.trace import AvailabilityTrace


def simulated_progress(
    trace: AvailabilityTrace, capacity: Capacity, made: Callable[[], Policy], *, draws: int, seed: int = 0
) -> float:
    """Mean progress over draws of which nodes go."""
    return sum(_one(trace, capacity, made(), random.Random(seed + draw)) for draw in range(draws)) / draws


def _one(trace: AvailabilityTrace, capacity: Capacity, policy: Policy, draw: random.Random) -> float:
    events = [(float(time), "nodes", int(nodes)) for time, nodes in zip(trace.times_s, trace.nodes, strict=False)]
    events += [(time + policy.wait_s, "settled", 0) for time, _, _ in events]
    events = sorted(event for event in events if event[0] < float(trace.times_s[-1]))
    present: set[int] = set()
    job: set[int] = set()
    named = 0
    clock, runs_from, last_change, progress, owes = float(trace.times_s[0]), 0.0, -1.0, 0.0, False
    for time, kind, count in [*events, (float(trace.times_s[-1]), "end", 0)]:
        if job:
            progress += capacity.rates[len(job)] * max(0.0, time - max(clock, runs_from))
            owes = owes and runs_from > time
        clock = time
        if kind == "end" or (kind == "settled" and last_change + policy.wait_s > time + 1e-6):
            continue
        was_hit = False
        if kind == "nodes":
            last_change = time
            policy.saw(time, count)
            while len(present) < count:
                named += 1
                present.add(named)
            gone = set(draw.sample(sorted(present), len(present) - count))
            present -= gone
            was_hit = bool(gone & job)
            if was_hit:
                job, owes = set(), True
        wants = policy.choose(
            Seen(
                time_s=time,
                nodes=len(present),
                used=len(job),
                ready_s=max(runs_from, time) if job and not was_hit else time,
                is_settled=kind == "settled",
                was_hit=was_hit,
                owes=owes,
            )
        )
        if was_hit or wants != len(job):
            pays = capacity.forced_s if owes and not job else capacity.change_s
            still = runs_from if job else time
            job = set(sorted(present)[:wants])
            runs_from = max(still, time + pays)
    return progress
