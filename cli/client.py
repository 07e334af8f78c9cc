"""A service asked from here: ``meshplan --server URL plan SPEC`` and three lines of Python.

::

    from meshplan.cli.client import Client

    plan = Client("http://127.0.0.1:8484").plan({"kind": "training", …})

Needs nothing but Python's own library. Errors of the service come out with its words and the exit codes of the command
line.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import time
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import (
    EXIT_BUG,
    EXIT_CATALOG,
    EXIT_EMIT,
    EXIT_SOLVER,
    EXIT_SPEC,
    CatalogError,
    CatalogUnavailableError,
    EmitError,
    MeshplanError,
    Problem,
    SolverError,
    SpecError,
    StoreError,
    UnitError,
)

if TYPE_CHECKING:
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.core.solution import OnProgress

API = "/api/v1"
TOKEN_VARIABLE = "MESHPLAN_TOKEN"  # noqa: S105 - the name of it
# Seconds that one request may take, and between two looks at a job.
PATIENCE_S, LOOK_S = 120.0, 0.5
MOST_BYTES = 64 * 2**20
_PORTS = {"http": 80, "https": 443}
# Of errors with one exit code, one stands for all: they differ in their words.
_OF_EXIT_CODE = {
    EXIT_BUG: MeshplanError,
    EXIT_SPEC: UnitError,
    EXIT_CATALOG: CatalogError,
    EXIT_SOLVER: SolverError,
    EXIT_EMIT: EmitError,
}
# What the problems are in, as the text of a SpecError begins.
_HEAD = re.compile(r"\d+ problems? in (?P<of>.+?):\n  - ", re.DOTALL)


class Client:
    """One service.

    Args:
        url: such as ``http://127.0.0.1:8484``.
        token: which it wants; None for that of ``$MESHPLAN_TOKEN``.

    Raises:
        SpecError: not the URL of a service.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in _PORTS or not parts.hostname or port == 0 or parts.path.strip("/") or parts.query:
            message = f"{url!r} is no service; write http://HOST:PORT"
            raise SpecError.at("--server", message, of="the command line")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._is_encrypted = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or _PORTS[parts.scheme]
        self._token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token

    def plan(self, spec: Mapping[str, Any], *, on_progress: OnProgress | None = None, **options: Any) -> Plan:
        """The best plan for a spec, stored at the service; Ctrl-C keeps the best that was found until then.

        Args:
            spec: the question; files that it names would be the service's, which opens none.
            on_progress: called with incumbent and bound now and then.
            options: ``top``, ``seed``, ``time_limit_s``, ``certify``.

        Raises:
            MeshplanError: what the service refuses, in its words.
        """
        given = {name: str(value).lower() for name, value in options.items() if value is not None}
        answer = self.ask("POST", f"{API}/plans?{urllib.parse.urlencode(given)}", spec)
        if "plan_id" in answer and "spec" in answer:
            return _plan(answer)
        path = f"{API}/jobs/{urllib.parse.quote(str(answer['job_id']), safe='')}"
        while answer["finished_at"] is None:
            try:
                time.sleep(LOOK_S)
                answer = self.ask("GET", path)
                _report(answer, on_progress)
            except KeyboardInterrupt:
                answer = self.ask("DELETE", path)
                if answer["finished_at"] is None and not answer["cancel_asked"]:
                    raise KeyboardInterrupt(f"others wait for it, it goes on: {self.url}{path}") from None
        if answer["answer"] is not None:
            return _plan(answer["answer"])
        if answer["plan_id"] is not None:
            return _plan(self.ask("GET", f"{API}/plans/{answer['plan_id']}"))
        if answer["problem"] is not None:
            raise error_of(answer["problem"])
        raise KeyboardInterrupt("no plan was found yet")

    def estimate(self, spec: Mapping[str, Any]) -> Plan:
        """The configuration that a spec pins, priced."""
        return _plan(self.ask("POST", f"{API}/estimate", spec))

    def ask(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request; its answer as a mapping.

        Raises:
            CatalogUnavailableError: nobody answers there, or it is no service of meshplan.
            MeshplanError: a problem document.
        """
        connect = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=PATIENCE_S)
        headers = {"content-type": "application/json", "accept": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        body = None if document is None else json.dumps(document, default=str)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = json.loads(response.read(MOST_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise CatalogUnavailableError(f"no service answers at {self.url}: {error}") from error
        except ValueError as error:
            raise CatalogUnavailableError(f"what answers at {self.url} is no service of meshplan") from error
        finally:
            connection.close()
        if not isinstance(content, dict):
            raise CatalogUnavailableError(f"what answers at {self.url} is no service of meshplan")
        if response.status >= http.client.BAD_REQUEST:
            raise error_of(content)
        return content


def error_of(problem: Mapping[str, Any]) -> MeshplanError:
    """The error that a problem document stands for: its words, and the exit code that it has without a service."""
    detail = str(problem.get("detail") or problem.get("title") or "refused without a word")
    title, status, errors = problem.get("title"), problem.get("status"), problem.get("errors")
    if isinstance(errors, list) and errors:
        problems = [Problem(path=str(one.get("path", "")), message=str(one.get("message"))) for one in errors]
        head = _HEAD.match(detail)
        return SpecError(problems) if head is None else SpecError(problems, of=head["of"])
    if status == http.client.INTERNAL_SERVER_ERROR:
        return MeshplanError(f"{title}: {detail}")
    code = problem.get("exit_code")
    if isinstance(code, int) and code in _OF_EXIT_CODE:
        return _OF_EXIT_CODE[code](detail)
    if status == http.client.NOT_FOUND:
        return StoreError(detail)
    if status in (http.client.UNAUTHORIZED, http.client.TOO_MANY_REQUESTS):
        return CatalogUnavailableError(f"{title}: {detail}")
    if status in (http.client.REQUEST_ENTITY_TOO_LARGE, http.client.UNPROCESSABLE_ENTITY):
        return SpecError.at("", detail, of="the request")
    return SolverError(detail)


def _plan(document: Mapping[str, Any]) -> Plan:
    """A plan from elsewhere, read as one of a file: its content must be what its id was made of."""
    from meshplan.planner.store import plan_from_document

    return plan_from_document(document, name="the service's plan")


def _report(job: Mapping[str, Any], on_progress: OnProgress | None) -> None:
    from meshplan.planner.core.solution import Progress

    reported = job["progress"]
    if on_progress is None:
        return
    numbers = {name: reported.get(name) for name in ("incumbent", "bound")}
    known = {
        name: value if isinstance(value, float) and math.isfinite(value) else None for name, value in numbers.items()
    }
    note, unit = str(reported.get("note") or job["state"]), str(reported.get("unit", ""))
    on_progress(Progress(incumbent=known["incumbent"], bound=known["bound"], note=note, unit=unit))
