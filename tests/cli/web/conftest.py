"""A service with one worker of its own, asked through Starlette's client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient
from web_cases import HERE, PATIENCE_S, SPEC, ended, until

from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.web.app import create_app
from meshplan.cli.web.jobs.worker import Worker
from meshplan.cli.web.settings import Settings


@pytest.fixture(scope="session")
def settings(seeded: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    database = tmp_path_factory.mktemp("service") / "catalog.sqlite"
    database.write_bytes(seeded.read_bytes())
    return Settings(db=str(database), callers=1, call_s=60.0)


@pytest.fixture(scope="session")
def client(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), HERE, raise_server_exceptions=False) as asking:
        yield asking


@pytest.fixture(scope="session")
def working(settings: Settings, client: TestClient) -> Iterator[None]:
    """A worker in a thread of this process; its searches have processes of their own."""
    stop = threading.Event()
    thread = threading.Thread(target=Worker(settings, Catalog.open(settings.db)).run, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join(PATIENCE_S)


@pytest.fixture(scope="session")
def plan(client: TestClient, working: None) -> dict[str, Any]:
    """A stored plan."""
    asked = client.post("/api/v1/plans", json=SPEC)
    assert asked.status_code == 202, asked.text
    job = ended(client, asked.json()["job_id"])
    assert job["state"] == "done", job
    found: dict[str, Any] = client.get(job["plan"]).json()
    return found


@pytest.fixture(scope="session")
def address(settings: Settings, working: None) -> Iterator[str]:
    """The service on a port of this machine; what it logs can be seen by tests."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="warning", log_config=None))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()
