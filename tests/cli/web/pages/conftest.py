"""The pages with something to show: plans of several kinds, a recorded run, and a browser."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import uvicorn
from page_cases import ARGUMENTS, ROOT, SERVING
from starlette.testclient import TestClient
from web_cases import ended, until

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.web.app import create_app
from meshplan.cli.web.settings import Settings
from meshplan.planner.service import make_plan


@pytest.fixture(scope="session")
def plans(client: TestClient, plan: dict[str, Any], settings: Settings) -> dict[str, str]:
    """Ids of stored plans by what they are; something was recorded for the large one."""
    large = json.loads((ROOT / "tests" / "golden" / "cli" / "plan-70b.json").read_text())
    catalog = Catalog.open(settings.db)
    PlanRows(catalog.engine).insert(large)
    told = client.post(f"/api/v1/plans/{large['plan_id']}/record", json={"iteration_s": 60.0})
    assert told.status_code == 201, told.text
    asked = client.post("/api/v1/plans", json=SERVING).json()
    job = ended(client, asked["job_id"])
    assert job["state"] == "done", job
    islands = json.loads((ROOT / "tests/data/rank_mapping/rank-mapping-islands-8n-pp2-dp4.json").read_text())
    mapped = make_plan(islands, catalog).to_document()
    PlanRows(catalog.engine).insert(mapped)
    return {
        "small": plan["plan_id"],
        "large": large["plan_id"],
        "serving": job["plan_id"],
        "mapping": str(mapped["plan_id"]),
    }


@pytest.fixture(scope="session")
def address(settings: Settings, working: None, plans: dict[str, str]) -> Iterator[str]:
    """The service on a port of this machine."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser; tests with it are skipped where there is none."""
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: install the package chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=[*ARGUMENTS])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def accessibility() -> str:
    """The script that lists what keeps people from using a page."""
    return (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")
