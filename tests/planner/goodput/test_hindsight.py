"""Hindsight against decisions in every moment of small traces, and what must hold of any trace."""

from __future__ import annotations

import numpy as np

from meshplan.planner.goodput.availability.capacity import Capacity
from meshplan.planner.goodput.availability.hindsight import best_in_hindsight
from meshplan.planner.goodput.availability.outcome import Seen, play
from meshplan.planner.goodput.availability.trace import AvailabilityTrace


def trace_of(times_s: list[float], nodes: list[int]) -> AvailabilityTrace:
    return AvailabilityTrace(name="x", times_s=np.array(times_s, dtype=float), nodes=np.array(nodes))


class _LastMoment:
    """Two nodes, and just before the nodes have been the same for so long only one."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def saw(self, time_s: float, nodes: int) -> None:
        pass

    def choose(self, seen: Seen) -> int:
        return 1 if seen.is_settled else min(seen.nodes, 2)


def test_a_job_that_shrinks_at_the_last_moment_does_not_beat_hindsight() -> None:
    # Of two nodes one goes; the change after it costs little, starting again much.
    trace = trace_of([0.0, 100.0, 120.0], [2, 1])
    job = Capacity(rates=(0.0, 1.0, 2.0), change_s=10.0, forced_s=19.0)
    assert play(trace, job, _LastMoment(99.0)).progress <= best_in_hindsight(trace, job)
