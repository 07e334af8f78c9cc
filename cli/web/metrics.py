"""What a monitor scrapes: requests and their latencies, questions by what became of them, jobs by state.

Text of Prometheus, at ``/metrics``; names follow its conventions (a total of events, seconds, a gauge). Routes are the
patterns of the application, not the addresses asked for, so that nobody can make the text grow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshplan.catalogs.database.jobs import Jobs

# Upper ends of the buckets of latencies, in seconds: what pages and estimates aim at lies between them.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
NO_ROUTE = "none"
SEARCHED, KNOWN, REFUSED = "searched", "known", "refused"


class _JobStates(Collector):
    """The queue as it stands when it is asked for; it is shared by all services and workers of a database."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One value for every state."""
        found = GaugeMetricFamily("meshplan_jobs", "Searches of the database by state.", labels=["state"])
        for state, count in self._jobs.counts().items():
            found.add_metric([state.value], count)
        yield found


class Metrics:
    """The counters of one application.

    Args:
        jobs: the queue.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_JobStates(jobs))
        self._requests = Counter(
            "meshplan_http_requests", "Requests.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "meshplan_http_request_seconds",
            "Time until an answer begins.",
            ["route"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._questions = Counter(
            "meshplan_questions", "Questions by what became of them.", ["outcome"], registry=self._registry
        )
        for outcome in (SEARCHED, KNOWN, REFUSED):
            self._questions.labels(outcome)

    def asked(self, outcome: str) -> None:
        """Count a question: it is searched, its answer was known, or it is refused."""
        self._questions.labels(outcome).inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Everything, as a monitor reads it."""
        return generate_latest(self._registry)


class Measured:
    """ASGI middleware that counts every request and the time until its answer begins.

    Args:
        app: what it watches; a stream of events counts up to its first.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on, and count when the answer begins."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", NO_ROUTE)
                method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE") else "other"
                metrics: Metrics = scope["app"].state.service.metrics
                metrics.answered(method, route, message["status"], time.perf_counter() - began)
            await send(message)

        await self.app(scope, receive, counted)


MEDIA_TYPE = CONTENT_TYPE_LATEST
