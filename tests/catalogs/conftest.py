"""A seeded catalog for every test that asks for one, and never the catalog of the person who runs the tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

from meshplan.catalogs.database.connection import connect, parse_url
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.tables import metadata


@pytest.fixture(autouse=True)
def _own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPLAN_DB", str(tmp_path / "default.sqlite"))


@pytest.fixture(scope="session")
def seeded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeded") / "catalog.sqlite"
    open_database(str(path))
    return path


@pytest.fixture
def database_file(seeded_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(seeded_file, tmp_path / "catalog.sqlite"))


@pytest.fixture
def catalog(database_file: Path) -> Catalog:
    return Catalog.open(str(database_file))


@pytest.fixture
def empty_engine(tmp_path: Path) -> Engine:
    """A database with the tables of a catalog and nothing in them."""
    engine = connect(parse_url(str(tmp_path / "empty.sqlite")))
    with engine.begin() as connection:
        metadata.create_all(connection)
    return engine
