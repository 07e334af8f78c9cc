"""What a search may spend: time, memory, and the patience of the person who waits.

One :class:`Budget` is made when a question is asked and handed down to everything that answers it, alternatives and
second opinions included, so that the limits hold for the whole and not for each part. Ctrl-C in a terminal reaches all
processes: those that work for another one leave it to that (:func:`interrupts_held`). Loops call :meth:`Budget.check`
between pieces of work that take a fraction of a second; whoever holds an incumbent wraps the loop in
:meth:`Budget.keeping` and goes on with what it has.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

from meshplan.catalogs.errors import SolverError
from meshplan.catalogs.units import format_bytes

DEFAULT_MEMORY_BYTES = 2 * 1024**3
INTERRUPTED = "Ctrl-C"
# Seconds between Ctrl-C and the end of work that does not look at its budget.
PATIENCE_S = 1.5
# Seconds between two looks at the memory, which read a file: searches ask many times as often.
MEMORY_PERIOD_S = 0.01
_STATM = Path("/proc/self/statm")
_STAT = Path("/proc/self/stat")
_START_FIELD = 19  # starttime, counted after the command's name (proc_pid_stat(5), field 22)
_KIB = 1024
_LOADED = time.monotonic()


class OutOfBudgetError(Exception):
    """Raised by :meth:`Budget.check`, caught by :meth:`Budget.keeping`; leaves the planner nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What this process has spent since it began.

    Args:
        wall_s: elapsed seconds.
        cpu_s: processor seconds, those of ended child processes included.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0


def spent() -> Spent:
    """What this process has spent so far; elapsed since this module was loaded where the system does not say."""
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    try:
        ticks = int(_STAT.read_text().rpartition(")")[2].split()[_START_FIELD])
        wall_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        wall_s = time.monotonic() - _LOADED
    return Spent(wall_s=wall_s, cpu_s=cpu_s)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; its peak where the system does not tell the present value."""
    try:
        with _STATM.open("rb", buffering=0) as file:  # asked with every step of a search
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * _KIB
    return pages * resource.getpagesize()


class Budget:
    """Limits of one question.

    Args:
        time_limit_s: elapsed seconds from now on; None for as long as it takes.
        memory_limit_bytes: memory of the process beyond ``held_bytes``; None for no limit.
        held_bytes: of the process that are no part of this question, such as a notebook's data.
        elapsed_s: seconds of the time limit that are over already.
        clock: seconds that only grow.
        resident: memory of the process now, bytes.
    """

    def __init__(
        self,
        time_limit_s: float | None = None,
        memory_limit_bytes: float | None = DEFAULT_MEMORY_BYTES,
        *,
        held_bytes: float = 0.0,
        elapsed_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self.time_limit_s, self.memory_limit_bytes = time_limit_s, memory_limit_bytes
        self._clock, self._resident, self._held_bytes = clock, resident, held_bytes
        self._started = clock() - elapsed_s
        self._look_again = -math.inf  # the clock from which on the memory is read again
        self._stopped = ""

    @property
    def stopped(self) -> str:
        """Why the work ended before it was done, in words; empty while it may go on."""
        if not self._stopped:
            self._stopped = self._exceeded()
        return self._stopped

    def _exceeded(self) -> str:
        left_s = self.left_s()
        if left_s is not None and left_s <= 0.0:
            return f"time limit of {self.time_limit_s:g} s"
        if self.memory_limit_bytes is None or (now := self._clock()) < self._look_again:
            return ""
        self._look_again = now + MEMORY_PERIOD_S
        if self._resident() - self._held_bytes > self.memory_limit_bytes:
            return f"memory limit of {format_bytes(self.memory_limit_bytes)}"
        return ""

    def left_s(self) -> float | None:
        """Seconds left, 0 after Ctrl-C; None where no limit is set and nobody interrupted."""
        if self._stopped:
            return 0.0
        if self.time_limit_s is None:
            return None
        return max(self.time_limit_s - (self._clock() - self._started), 0.0)

    def interrupt(self) -> None:
        """Ctrl-C was pressed: what has not begun does not begin."""
        self._stopped = self._stopped or INTERRUPTED

    def check(self) -> None:
        """Go on, or not.

        Raises:
            OutOfBudgetError: a limit is exceeded.
        """
        if self.stopped:
            raise OutOfBudgetError(self.stopped)

    def nothing_found(self, what: str) -> NoReturn:
        """End without an answer, because the budget was spent before there was one; nothing is proven then.

        Args:
            what: what was looked for.

        Raises:
            SolverError: a limit was exceeded.
            KeyboardInterrupt: Ctrl-C.
        """
        if self.stopped == INTERRUPTED:
            raise KeyboardInterrupt(f"no {what} was found yet")
        raise SolverError(f"no {what} found within the {self.stopped}: allow more")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let Ctrl-C end the work at its next :meth:`check`; a second one, or no check within :data:`PATIENCE_S`,
        raises KeyboardInterrupt as usual.

        Only the main thread of a process hears Ctrl-C; elsewhere this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def hear(_number: int, _frame: object) -> None:
            if self._stopped == INTERRUPTED:
                raise KeyboardInterrupt
            self._stopped = INTERRUPTED
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)

        def lose_patience(_number: int, _frame: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, hear), signal.signal(signal.SIGALRM, lose_patience)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGALRM, before[1])

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Run until done, out of budget or interrupted; what was found so far stays."""
        try:
            yield
        except OutOfBudgetError:
            pass
        except KeyboardInterrupt:
            self.interrupt()
        except MemoryError:
            self._stopped = self._stopped or "memory of this machine"


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while processes are started, which inherit that it is held: one would be interrupted while it
    imports, before it can say :func:`leave_interrupts`, print its traceback and be gone.
    """
    resource_tracker.ensure_running()  # as `start` does, and in starting lets what is held go
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_interrupts() -> None:
    """Leave Ctrl-C to the process that started this one; what this one starts may hear it again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
