"""Ctrl-C and processes that work for another one: a terminal sends it to all of them, and one of them answers it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
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
