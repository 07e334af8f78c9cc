"""Every test of the store runs twice: on SQLite, and on a PostgreSQL server that the tests start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgresql_server import PASSWORD, READER, PostgresqlServer, postgresql_server, reason_without_server
from sqlalchemy.engine import Engine
from store_cases import Store

from meshplan.catalogs.database.connection import connect, parse_url, writing
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.tables import metadata

SEEDED = "seeded"


# In one process: each of pytest-xdist's would start a server of its own.
@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.xdist_group("postgresql"))])
def store(request: pytest.FixtureRequest) -> Store:
    fixture: Store = request.getfixturevalue(f"{request.param}_store")
    return fixture


@pytest.fixture
def sqlite_store(seeded_file: Path, tmp_path: Path) -> Store:
    numbers = iter(range(1000))

    def copied() -> str:
        return str(shutil.copy(seeded_file, tmp_path / f"catalog-{next(numbers)}.sqlite"))

    return Store("sqlite", lambda: str(tmp_path / f"empty-{next(numbers)}.sqlite"), copied)


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresqlServer]:
    reason = reason_without_server()
    if reason:
        pytest.skip(reason)
    with postgresql_server() as running:
        running.run(f"CREATE DATABASE {SEEDED}", f"CREATE ROLE {READER} LOGIN PASSWORD '{PASSWORD}'")
        open_database(running.url(SEEDED)).dispose()
        yield running


@pytest.fixture
def postgresql_store(server: PostgresqlServer) -> Iterator[Store]:
    made: list[str] = []

    def database(template: str = "template1") -> str:
        made.append(server.new_database(template))
        return made[-1]

    yield Store("postgresql", database, lambda: database(SEEDED))
    for url in made:
        server.drop(url)


@pytest.fixture
def catalog(store: Store) -> Iterator[Catalog]:
    opened = Catalog.open(store.seeded())
    yield opened
    opened.engine.dispose()


@pytest.fixture
def empty_engine(store: Store) -> Iterator[Engine]:
    """A database with the tables of a catalog and nothing in them."""
    engine = connect(parse_url(store.empty()))
    with writing(engine) as connection:
        metadata.create_all(connection)
    yield engine
    engine.dispose()
