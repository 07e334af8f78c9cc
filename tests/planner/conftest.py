"""What the tests of the planner share: one freshly seeded catalog, which nobody changes."""

from __future__ import annotations

import pytest
from machine_code import load

from meshplan.catalogs.database.repository import Catalog


@pytest.fixture(scope="session")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite"))


@pytest.fixture(scope="session")
def machine_code() -> None:
    """Runs are simulated in machine code, where Numba is installed."""
    load()
