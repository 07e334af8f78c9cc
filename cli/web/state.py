"""What the application holds: settings, catalog, jobs, and the processes that answer calls."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.state import catalog_state
from meshplan.cli.web.calls import Answer, Calls
from meshplan.cli.web.metrics import Metrics
from meshplan.cli.web.settings import Settings

# Seconds for which a look at the catalog counts.
FRESH_S = 1.0


class CatalogState:
    """The state of the catalog, looked up at most once in :data:`FRESH_S`: it takes ten queries, more than an answer
    that is known.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog, self._lock = catalog, threading.Lock()
        self._state, self._looked_s = "", -math.inf

    def now(self) -> str:
        """The digest of what the catalog holds; a change by another process shows after :data:`FRESH_S`."""
        with self._lock:
            if time.monotonic() - self._looked_s > FRESH_S:
                self._state = catalog_state(self._catalog.engine)
                self._looked_s = time.monotonic()
            return self._state

    def fresh(self) -> str | None:
        """The same without looking, and without waiting for somebody who looks; None where it is time to look."""
        return self._state if time.monotonic() - self._looked_s <= FRESH_S else None

    def forget(self) -> None:
        """Look anew for the next question: this service has just changed the catalog."""
        with self._lock:
            self._looked_s = -math.inf


class Remembered:
    """The last answers by the digest of what was asked: a page that moves a slider back asks nothing anew.

    Args:
        most: answers to keep.
    """

    def __init__(self, most: int = 2048) -> None:
        self._most, self._lock = most, threading.Lock()
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    def get(self, digest: str) -> Answer | None:
        """The answer; None where it was not asked, or too long ago."""
        with self._lock:
            if digest in self._answers:
                self._answers.move_to_end(digest)
            return self._answers.get(digest)

    def put(self, digest: str, answer: Answer) -> None:
        """Keep an answer, for the one that was asked for longest ago."""
        with self._lock:
            self._answers[digest] = answer
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One running service.

    Args:
        settings: its limits.
        catalog: its database.
        jobs: the queue in it.
        calls: see :class:`~meshplan.cli.web.calls.Calls`.
        catalog_state: see :class:`CatalogState`.
        metrics: what monitors scrape.
        on_job: called when there is work for a worker.
        remembered: estimates.
    """

    settings: Settings
    catalog: Catalog
    jobs: Jobs
    calls: Calls
    catalog_state: CatalogState
    metrics: Metrics
    on_job: Callable[[], object]
    remembered: Remembered = field(default_factory=Remembered)
