"""Answers jobs: claims one, searches in a process of its own, tells how far it is, stores the plan.

Any number of workers, on any machines, take jobs from one database. A worker that dies leaves its job without a
heartbeat, and another one takes it up again. A search that takes too long, or is no longer wanted, gets what Ctrl-C
sends: it keeps the best plan found.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.database.job_rows import Beat, Job
from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CatalogUnavailableError, MeshplanError
from meshplan.cli.web.problems import problem, problem_of
from meshplan.cli.web.sandbox import closed_catalog
from meshplan.cli.web.settings import Settings
from meshplan.planner.core.solution import Status

if TYPE_CHECKING:
    from meshplan.planner.core.solution import Progress

# Seconds between two heartbeats, and after which a job without any is taken from its worker.
BEAT_S = 1.0
DEAD_S = 30.0
MOST_ATTEMPTS = 3
# Seconds that a worker waits for a job before it looks whether it should end.
IDLE_S = 2.0
# Seconds that a search has to hand over what it has found, after it was asked to stop.
GRACE_S = 15.0
# Seconds between two reports of a search.
REPORT_S = 0.5
# In what a job tells: the answer that is not stored.
ANSWER = "answer"
Message = tuple[str, dict[str, Any]]
PLAN, PROGRESS, PROBLEM, NOTHING, LOST = "plan", "progress", "problem", "nothing", "lost"


class Worker:
    """One worker.

    Args:
        settings: limits of a search.
        catalog: database of questions and answers.
        pause: how it waits for work, in seconds; it may return sooner where there is some.
    """

    def __init__(self, settings: Settings, catalog: Catalog, *, pause: Callable[[float], object] = time.sleep) -> None:
        self.settings, self.catalog, self.pause = settings, catalog, pause
        self.jobs, self.rows = Jobs(catalog.engine), PlanRows(catalog.engine)
        self.name = f"{socket.gethostname()}:{os.getpid()}:{threading.get_ident()}"

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set; the job in hand then keeps its best plan."""
        while not stop.is_set():
            try:
                self.jobs.requeue(older_than_s=DEAD_S, most_attempts=MOST_ATTEMPTS)
                job = self.jobs.claim(self.name, wait_s=IDLE_S, pause=self.pause)
                if job is not None:
                    self.answer(job, stop)
            except CatalogUnavailableError:  # locked, or its server is away: it may come back
                stop.wait(IDLE_S)

    def answer(self, job: Job, stop: threading.Event) -> None:
        """Search in a process of its own, and store what it finds."""
        context = get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        limits = (self.settings.job_s, self.settings.job_bytes)
        process = context.Process(target=_search, args=(theirs, self.settings.db, job.document, *limits), daemon=True)
        process.start()
        theirs.close()
        try:
            name, found = self._followed(job, process, ours, stop)
        finally:
            if process.is_alive():
                process.kill()
            process.join()
        if name == PLAN:
            self._keep(job, found, is_ending=stop.is_set())
        elif name == NOTHING:  # ended before it had found anything: cancelled, or for another worker
            self.jobs.release(job)
        elif name == PROBLEM:
            self.jobs.fail(job, found)

    def _followed(self, job: Job, process: Any, ours: Connection, stop: threading.Event) -> Message:
        """The last message of a search; heartbeats until then."""
        ends_at = time.monotonic() + self.settings.job_s + GRACE_S
        is_asked = False
        while time.monotonic() < ends_at:
            latest = None
            try:
                if ours.poll(BEAT_S):
                    name, latest = ours.recv()
                    if name != PROGRESS:
                        return name, latest
            except (EOFError, OSError):
                process.join(GRACE_S)
                if is_asked:  # while it still loaded what it needs: it has found nothing
                    return NOTHING, {}
                detail = f"its process ended with {process.exitcode}: too little memory, or it was killed"
                return PROBLEM, problem(503, "The search has ended", detail)
            beat = self.jobs.beat(job, latest)
            if beat is Beat.LOST:  # somebody else has the job now
                return LOST, {}
            if not is_asked and (stop.is_set() or beat is Beat.STOP):
                is_asked, ends_at = True, time.monotonic() + GRACE_S
                os.kill(process.pid, signal.SIGINT)
        if is_asked:
            return NOTHING, {}
        return PROBLEM, problem(503, "The search takes too long", f"no answer within {self.settings.job_s:g} s")

    def _keep(self, job: Job, document: Mapping[str, Any], *, is_ending: bool) -> None:
        """Store a plan; the same one is stored once, however often its job was begun.

        That no plan exists stays with the job: ``latest`` is a plan that can be launched. What a worker that ends has
        found so far is kept and shown, but whoever asks again has it searched to the end.

        Args:
            job: the claim.
            document: the plan.
            is_ending: whether the worker was told to end while it searched.
        """
        if document["solution"]["status"] == Status.INFEASIBLE.value:
            self.jobs.beat(job, {ANSWER: document})
            self.jobs.finish(job, plan_id=None)
            return
        try:
            self.rows.insert(document)
        except MeshplanError as error:
            self.jobs.fail(job, problem_of(error))
        else:
            is_short = is_ending and document["solution"]["status"] != Status.OPTIMAL.value
            end = self.jobs.stop if is_short or self.jobs.beat(job) is Beat.STOP else self.jobs.finish
            end(job, plan_id=str(document["plan_id"]))


def _search(theirs: Connection, db: str | None, document: Mapping[str, Any], most_s: float, most_bytes: int) -> None:
    """One search, in its own process; sends progress, then a plan or a problem."""
    from meshplan.planner.service import make_plan

    os.setsid()  # Ctrl-C in the terminal is not meant for it: what it has found would pass for its answer
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the worker, which it comes from, ignores it
    options = dict(document["options"])
    limit_s = min(options.pop("time_limit_s", most_s), most_s)
    try:
        catalog = closed_catalog(db, 2 * most_bytes)
        made = make_plan(
            document["spec"],
            catalog,
            time_limit_s=limit_s,
            memory_limit_bytes=most_bytes,
            on_progress=_Reporter(theirs).report,
            **options,
        )
        theirs.send((PLAN, made.to_document()))
    except KeyboardInterrupt:
        theirs.send((NOTHING, {}))
    except Exception as error:  # noqa: BLE001 - whatever it is, the job must say so
        theirs.send((PROBLEM, problem_of(error)))


class _Reporter:
    """Sends how far a search is, now and then."""

    def __init__(self, theirs: Connection) -> None:
        self._theirs, self._started, self._last = theirs, time.monotonic(), 0.0

    def report(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last >= REPORT_S:
            self._last = now
            self._theirs.send((PROGRESS, {**asdict(progress), "seconds": now - self._started}))
