"""What a place where points are answered can do; what all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshplan.planner.sweep.answer import Outcome
from meshplan.planner.sweep.points import Question

# A process is replaced after so many points: what searches keep in memory for the next one adds up.
POINTS_OF_A_PROCESS = 100


class Runner(Protocol):
    """Answers questions side by side."""

    @property
    def where(self) -> str:
        """In words."""

    @property
    def room(self) -> int:
        """How many more questions can be taken now."""

    def start(self, question: Question) -> None:
        """Begin to answer a question; there is room for it."""

    def ended(self, wait_s: float) -> Sequence[tuple[str, Outcome]]:
        """Digest and outcome of the points that have ended, waiting for one at most so long."""

    def close(self) -> None:
        """End whatever is being done."""


def out_of_time(question: Question) -> Outcome:
    """A point that took longer than the sweep allows."""
    detail = f"no answer within {question.limit_s:g} s (limit_s of the sweep)"
    return Outcome(problem={"title": "it takes too long", "detail": detail})
