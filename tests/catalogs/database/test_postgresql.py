"""What only PostgreSQL has: a server that may not be there, users and rights, passwords, another order of texts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from command_line import SPEC
from postgresql_server import PASSWORD, READER, USER, PostgresqlServer
from store_cases import Store

from meshplan.catalogs.database.connection import connect, parse_url, shown, without_password, writing
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.transfer import export_document
from meshplan.catalogs.errors import CatalogError, CatalogUnavailableError

on_server = pytest.mark.xdist_group("postgresql")


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_the_driver_is_filled_in(scheme: str) -> None:
    assert parse_url(f"{scheme}://user@host:5433/meshplan").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql+psycopg2://user:secret@host/meshplan", "through postgresql\\+psycopg, not postgresql\\+psycopg2"),
        ("mysql://user:secret@host/meshplan", "kept in sqlite or postgresql, not in 'mysql'"),
        ("postgresql://user:secret@host", "names no database"),
        ("postgresql://user:x@secret@host/meshplan", "%40"),
        ("postgresql://user:secret@host:port/meshplan", "cannot read the database URL"),
        ("postgres//x://user:secret@host", "cannot read the database URL"),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(CatalogError, match=words) as caught:
        connect(parse_url(url))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("place", ["user:secret@host/meshplan", "host/meshplan?user=me&password=secret"])
def test_a_password_is_never_shown(place: str) -> None:
    for text in (shown(parse_url(f"postgresql://{place}")), without_password(f"postgresql://{place}")):
        assert "secret" not in text
        assert "meshplan" in text
    assert without_password("./my catalog.sqlite") == "./my catalog.sqlite"


def test_a_missing_driver_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(CatalogError, match=r"pip install 'meshplan\[postgresql\]'"):
        open_database("postgresql://user@host/meshplan")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("/meshplan?host=/nowhere", "no server answers there; start it"),
        ("127.0.0.1:1/meshplan", "no server answers there; start it"),
        ("no-such-host.invalid/meshplan", "no such host"),
    ],
)
def test_a_server_that_is_not_there(place: str, words: str, server: PostgresqlServer) -> None:
    # The fixture stands for the driver alone, which is there where the server is.
    with pytest.raises(CatalogUnavailableError, match=words) as caught:
        open_database(f"postgresql://user:secret@{place}")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@on_server
def test_what_the_server_refuses_comes_with_the_fix(server: PostgresqlServer, postgresql_store: Store) -> None:
    url = postgresql_store.empty()
    database = url.partition("?")[0].rpartition("/")[2]
    with pytest.raises(CatalogUnavailableError, match="does not take this user and password"):
        open_database(server.url(database, password=PASSWORD[1:]))
    with pytest.raises(CatalogUnavailableError, match="createdb"):
        open_database(server.url("nowhere"))
    with pytest.raises(CatalogUnavailableError, match="GRANT CREATE ON SCHEMA public"):
        open_database(server.url(database, user=READER))


@on_server
def test_a_user_who_may_only_read(server: PostgresqlServer, postgresql_store: Store) -> None:
    url = postgresql_store.seeded()
    owner = open_database(url)
    with writing(owner) as connection:
        connection.execute(sa.text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {READER}"))
    owner.dispose()
    catalog = Catalog.open(url.replace(f"{USER}:", f"{READER}:", 1))
    assert catalog.device("t4").architecture == "turing"
    with pytest.raises(CatalogUnavailableError, match="GRANT SELECT, INSERT, UPDATE, DELETE"):
        PlanRows(catalog.engine).insert({"plan_id": "p", "kind": "k", "spec_digest": "s", "catalog_digest": "c"})
    catalog.engine.dispose()


@on_server
def test_a_restarted_server_is_connected_anew(server: PostgresqlServer, postgresql_store: Store) -> None:
    catalog = Catalog.open(postgresql_store.seeded())
    assert catalog.device("t4").architecture == "turing"
    server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname <> 'postgres'")
    assert catalog.device("t4").architecture == "turing"
    catalog.engine.dispose()


@on_server
def test_both_stores_answer_in_the_same_order(sqlite_store: Store, postgresql_store: Store) -> None:
    first, second = Catalog.open(sqlite_store.seeded()), Catalog.open(postgresql_store.seeded())
    assert first.devices() == second.devices()
    assert first.node_types() == second.node_types()
    assert first.models() == second.models()
    one, other = export_document(first.engine), export_document(second.engine)
    assert one == other
    assert [list(one[section]) for section in ("devices", "links", "node_types", "models")] == [
        list(other[section]) for section in ("devices", "links", "node_types", "models")
    ]
    assert one["calibrations"] == other["calibrations"]
    for device in first.devices():
        assert [fact.field for fact in first.facts("device", device.slug)] == [
            fact.field for fact in second.facts("device", device.slug)
        ]
    second.engine.dispose()


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


@on_server
def test_no_command_prints_the_password(server: PostgresqlServer, postgresql_store: Store, spec_file: Path) -> None:
    url = postgresql_store.empty()
    outputs = []
    for arguments in (
        ["plan", str(spec_file), "--tag", "mine", "--db", url],
        ["plans", "list", "--db", url, "--format", "json"],
        ["plans", "show", "mine", "--db", url],
        ["catalog", "upgrade", "--db", url],
        ["catalog", "upgrade", "--db", url, "--format", "json"],
        ["catalog", "list", "--db", server.url("nowhere")],
        ["plan", str(spec_file), "--db", server.url("nowhere")],
    ):
        command = [sys.executable, "-m", "meshplan.cli.main", *arguments]
        outputs.append(subprocess.run(command, capture_output=True, text=True, check=False, timeout=120))
    assert [done.returncode for done in outputs] == [0, 0, 0, 0, 0, 0, 0], [done.stderr for done in outputs]
    printed = "".join(done.stdout + done.stderr for done in outputs)
    assert "is stored; next, with MESHPLAN_DB set to that URL:" in printed  # its commands can be typed as they stand
    assert "***" not in outputs[0].stdout
    assert "numbers that ship with meshplan" in printed
    assert PASSWORD not in printed
