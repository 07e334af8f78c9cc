"""A small question for the service, and how long an answer is waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from starlette.testclient import TestClient

from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.web.calls import Answer

PATIENCE_S = 120.0
HERE = "http://127.0.0.1"
# Small enough to be answered in about a second.
SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
    "fixed": {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1},
}


def own_pid(_: Catalog) -> Answer:
    """A call: the process that answers it."""
    return Answer(status=200, media_type="text/plain", body=str(os.getpid()).encode())


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    ends_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends_at, "waited in vain"
        time.sleep(0.05)


def ended(client: TestClient, job_id: str) -> dict[str, Any]:
    """The job when it has ended."""

    def job() -> dict[str, Any]:
        answer = client.get(f"/api/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    until(lambda: job()["state"] in ("done", "failed", "cancelled"))
    return job()
