"""Processes of this machine: each answers one point after the other, and is replaced when it dies or has grown old.

A process that lives on keeps what costs time to load: the planner, the catalog, the last trace. One that ends – out of
memory, killed – takes the point in its hand with it and no other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from meshplan.planner.core.budget import interrupts_held, leave_interrupts
from meshplan.planner.sweep.answer import Outcome, Setting, answer
from meshplan.planner.sweep.points import Question
from meshplan.planner.sweep.runners.runner import POINTS_OF_A_PROCESS, out_of_time

# Seconds that an idle process has to end by itself.
_GOODBYE_S = 2.0


@dataclass(slots=True)
class _Process:
    process: SpawnProcess
    pipe: Connection
    question: Question | None = None
    began_s: float = 0.0
    answered: int = 0

    @property
    def left_s(self) -> float | None:
        """Seconds until the point in hand is given up; None where it has all the time."""
        limit = None if self.question is None else self.question.limit_s
        return None if limit is None else max(self.began_s + limit - time.monotonic(), 0.0)

    def end(self) -> int | None:
        """End it at once, and say how it ended."""
        self.pipe.close()
        if self.question is None:
            self.process.join(_GOODBYE_S)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        return self.process.exitcode


class LocalRunner:
    """A crew of processes.

    Args:
        setting: what they answer with.
        processes: how many.
    """

    def __init__(self, setting: Setting, processes: int) -> None:
        self._setting, self._most = setting, processes
        self._context = get_context("spawn")
        self._idle: list[_Process] = []
        self._busy: dict[Connection, _Process] = {}
        # Inherited: a process a core, and none that wants them all.
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    @property
    def where(self) -> str:
        """In words."""
        return f"{self._most} local process{'' if self._most == 1 else 'es'}"

    @property
    def room(self) -> int:
        """How many more questions can be taken now."""
        return self._most - len(self._busy)

    def start(self, question: Question) -> None:
        """Begin to answer a question."""
        one = self._idle.pop() if self._idle else self._new()
        one.question, one.began_s = question, time.monotonic()
        self._busy[one.pipe] = one
        with contextlib.suppress(OSError):  # it has ended meanwhile: `ended` finds that out
            one.pipe.send(question)

    def ended(self, wait_s: float) -> Sequence[tuple[str, Outcome]]:
        """Digest and outcome of the points that have ended, waiting for one at most so long."""
        limits = [one.left_s for one in self._busy.values()]
        ready = wait(list(self._busy), min([wait_s, *(left for left in limits if left is not None)]))
        found = [self._received(self._busy.pop(pipe)) for pipe in ready if isinstance(pipe, Connection)]
        for one in [one for one in self._busy.values() if one.left_s == 0.0]:
            question = self._busy.pop(one.pipe).question
            one.end()
            assert question is not None  # noqa: S101  (the busy ones have one)
            found.append((question.digest, out_of_time(question)))
        return found

    def close(self) -> None:
        """End the processes, whatever they do."""
        for one in (*self._idle, *self._busy.values()):
            one.end()
        self._idle, self._busy = [], {}

    def _new(self) -> _Process:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._setting), daemon=True)
        with interrupts_held():
            process.start()
        theirs.close()
        return _Process(process=process, pipe=ours)

    def _received(self, one: _Process) -> tuple[str, Outcome]:
        question = one.question
        assert question is not None  # noqa: S101  (the busy ones have one)
        try:
            outcome = one.pipe.recv()
        except (EOFError, OSError):
            code = one.end()
            return question.digest, Outcome(died=f"its process ended with {code}: too little memory, or it was killed")
        one.question, one.answered = None, one.answered + 1
        if one.answered < POINTS_OF_A_PROCESS:
            self._idle.append(one)
        else:
            one.end()
        return question.digest, outcome


def _work(pipe: Connection, setting: Setting) -> None:
    """The main function of a process; Ctrl-C in the terminal is left to the parent."""
    leave_interrupts()
    threading.Thread(target=_follow_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(answer(pipe.recv(), setting))


def _follow_parent() -> None:
    """End with the sweep, also where that was killed: nobody would hear the answer."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
