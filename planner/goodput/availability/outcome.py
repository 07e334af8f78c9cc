"""What a policy makes of a trace, in expectation over which nodes go.

The state of a job is the number of nodes that it uses, the time from which it runs, and whether it owes work: what a
hit has destroyed since the last checkpoint is done again before a job makes progress, however long it stood still in
between. A policy sees the state, the nodes available and how long they have been, and nothing of the future. Every
state is carried on with its probability, so that the expectation is exact: a job that was hit and one that was not go
on side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from meshplan.planner.goodput.availability.capacity import Capacity, hit_probability
from meshplan.planner.goodput.availability.trace import AvailabilityTrace

# States less likely than this are left out, and the rest scaled up: sums change by less than their rounding.
_UNLIKELY = 1e-9
# A job: nodes used, running from (seconds), owes lost work.
_Job = tuple[int, float, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a policy knows when it decides.

    Args:
        time_s: now.
        nodes: available.
        used: by the job; 0 where it does not run, or was hit just now.
        ready_s: from when the job runs, or would have run.
        is_settled: nothing has changed for the policy's waiting time.
        was_hit: the job has to start again whatever is decided.
        owes: work lost in an earlier hit is still to be done again: a start from no node takes as long as after a hit.
    """

    time_s: float
    nodes: int
    used: int
    ready_s: float
    is_settled: bool
    was_hit: bool
    owes: bool


class Policy(Protocol):
    """Decides how many nodes a job uses."""

    wait_s: float

    def saw(self, time_s: float, nodes: int) -> None:
        """The nodes available change now; called before any decision about it."""

    def choose(self, seen: Seen) -> int:
        """Nodes to use, at most those available; the number used now means no change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a trace.

    Args:
        progress: tokens.
        interruptions: times that the job was hit.
        changes: times that it chose another number of nodes.
        seconds_by_nodes: nodes used → seconds, those that the job stands still included.
    """

    progress: float
    interruptions: float
    changes: float
    seconds_by_nodes: Mapping[int, float]


def spells(trace: AvailabilityTrace, wait_s: float) -> Iterator[tuple[float, float, int, int, bool]]:
    """(from, to, nodes, nodes that just went, settled): spells of the trace, each cut where it has settled.

    A line of the trace that repeats the number of nodes, such as one with another price, begins no spell.
    """
    changes = trace.changes()
    before = int(changes.nodes[0])
    for start, end, nodes in zip(changes.times_s[:-1], changes.times_s[1:], changes.nodes, strict=True):
        cut = float(start) + wait_s
        yield float(start), min(float(end), cut), int(nodes), max(0, before - int(nodes)), False
        if cut < end:
            yield cut, float(end), int(nodes), 0, True
        before = int(nodes)


def play(trace: AvailabilityTrace, capacity: Capacity, policy: Policy) -> Outcome:
    """What a policy makes of a trace; the job starts with the first spell."""
    states: dict[_Job, float] = {(0, float(trace.times_s[0]), False): 1.0}
    progress = interruptions = changes = 0.0
    seconds: dict[int, float] = {}
    before = 0
    for start, end, nodes, gone, is_settled in spells(trace, policy.wait_s):
        if not is_settled:
            policy.saw(start, nodes)
        after: dict[_Job, float] = {}
        for (used, ready, owes), chance in states.items():
            hit = hit_probability(before, used, gone)
            for share, was_hit in ((hit, True), (1.0 - hit, False)):
                if share * chance <= _UNLIKELY:
                    continue
                seen = Seen(
                    time_s=start,
                    nodes=nodes,
                    used=0 if was_hit else used,
                    ready_s=start if was_hit else ready,
                    is_settled=is_settled,
                    was_hit=was_hit,
                    owes=owes and (used == 0 or ready > start),
                )
                chosen = policy.choose(seen)
                interruptions += share * chance * was_hit
                changes += share * chance * (chosen != seen.used and not was_hit)
                key = _next(seen, chosen, capacity)
                after[key] = after.get(key, 0.0) + share * chance
        total = sum(after.values())
        states = {key: chance / total for key, chance in after.items()}
        for (used, ready, _), chance in states.items():
            runs_s = max(0.0, end - max(start, ready)) if used else 0.0
            progress += chance * capacity.rates[used] * runs_s
            seconds[used] = seconds.get(used, 0.0) + chance * (end - start)
        before = nodes
    return Outcome(progress=progress, interruptions=interruptions, changes=changes, seconds_by_nodes=seconds)


def _next(seen: Seen, chosen: int, capacity: Capacity) -> _Job:
    """The job after a decision."""
    owes = seen.was_hit or seen.owes
    if chosen == 0:
        return 0, seen.time_s, owes
    if seen.used == 0:
        return chosen, seen.time_s + (capacity.forced_s if owes else capacity.change_s), owes
    if chosen == seen.used:
        return chosen, max(seen.ready_s, seen.time_s), owes
    # Work to be done again after a hit stays to be done: a change never makes a job ready earlier.
    return chosen, max(seen.ready_s, seen.time_s + capacity.change_s), owes
