"""The workers of one machine: processes that answer jobs until they are told to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.synchronize import Semaphore

from meshplan.cli.web.jobs.worker import GRACE_S
from meshplan.cli.web.settings import Settings
from meshplan.planner.core.budget import interrupts_held, leave_interrupts

# Seconds that a worker has to hand over its job beyond what the search has.
LONGER_S = 10.0


def bell() -> Semaphore:
    """What a service rings (``release``) when there is work, for the workers beside it.

    Those on other machines look into the database now and then. A semaphore and no event: whoever rings an event waits
    for all that listen, also for a worker that was killed while it listened.
    """
    return get_context("spawn").Semaphore(0)


@contextmanager
def crew(settings: Settings, ringing: Semaphore | None = None) -> Iterator[None]:
    """Run ``settings.workers`` workers; at the end each stores the best plan of the job in its hand.

    Args:
        settings: how many, and their limits.
        ringing: the :func:`bell` that they listen to; None: they look into the database.
    """
    context = get_context("spawn")
    processes = [context.Process(target=_work, args=(settings, ringing)) for _ in range(settings.workers)]
    with interrupts_held():
        for process in processes:
            process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(GRACE_S + LONGER_S)
            if process.is_alive():
                process.kill()


def _work(settings: Settings, ringing: Semaphore | None) -> None:
    """The main function of a worker's process: SIGTERM ends it, and Ctrl-C in the terminal is left to the parent."""
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.cli.web.jobs.worker import Worker

    stop = threading.Event()
    threading.Thread(target=_follow_parent, args=(stop,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    leave_interrupts()
    pause = time.sleep if ringing is None else partial(ringing.acquire, True)
    Worker(settings, Catalog.open(settings.db), pause=pause).run(stop)


def _follow_parent(stop: threading.Event) -> None:
    """End with the process that began this one, also where that was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        stop.set()
