"""Every test here may simulate requests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _simulates(machine_code: None) -> None: ...
