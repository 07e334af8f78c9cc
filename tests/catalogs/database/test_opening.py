"""Opening the catalog: first use, many processes, damaged files, other revisions."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from store_cases import Store

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import connect, parse_url, reading, shown, writing
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.upgrade import upgrade_database
from meshplan.catalogs.errors import CatalogError, CatalogVersionError


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def set_revision(path: Path, revision: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.close()


def test_the_default_is_made_on_first_use_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHPLAN_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "not" / "there"))
    monkeypatch.setenv("HOME", str(tmp_path))
    catalog = Catalog.open()
    assert len(catalog.devices()) >= 25
    assert Path(str(catalog.engine.url.database)).is_file()


def test_an_empty_file_becomes_a_catalog(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    path.touch()
    assert Catalog.open(str(path)).device("h100-sxm-80gb").vendor == "nvidia"


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import sys; from meshplan.catalogs.database.repository import Catalog\n"
        "c = Catalog.open(sys.argv[1]); print(len(c.devices()), len(c.node_types()))"
    )
    children = [python(code, str(tmp_path / "shared.sqlite")) for _ in range(4)]
    answers = {child.communicate(timeout=60) for child in children}
    assert [child.returncode for child in children] == [0] * 4
    assert len(answers) == 1


def test_a_process_killed_half_way_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "killed.sqlite"
    code = (
        "import os, sys; import meshplan.catalogs.database.seeds as seeds\n"
        "from meshplan.catalogs.database.opening import open_database\n"
        "write = seeds.write_seeds\n"
        "def die(connection):\n"
        "    write(connection); os._exit(9)\n"
        "seeds.write_seeds = die; open_database(sys.argv[1])"
    )
    child = python(code, str(path))
    child.communicate(timeout=60)
    assert child.returncode == 9
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()
    assert len(Catalog.open(str(path)).devices()) >= 25


def test_a_failing_write_is_rolled_back(catalog: Catalog) -> None:
    before = len(catalog.links())

    def add_twice() -> None:
        row = {"slug": "x", "name": "X", "technology": "none", "origin": "user"}
        with writing(catalog.engine) as connection:
            connection.execute(sa.insert(tables.links).values(row))
            connection.execute(sa.insert(tables.links).values(row))

    with pytest.raises(CatalogError, match=r"UNIQUE|unique constraint"):
        add_twice()
    assert len(catalog.links()) == before


def test_a_read_only_database_reads_and_says_so_on_a_write(database_file: Path) -> None:
    catalog = Catalog.open(f"sqlite:///file:{database_file}?mode=ro&uri=true")
    assert catalog.device("t4").architecture == "turing"
    with pytest.raises(CatalogError, match=r"read-only; make it writable \(chmod u\+w\)"):
        catalog.put_calibration(
            "megatron", "hopper", {"framework": "megatron", "architecture": "hopper"}, source="a test of the catalog"
        )


def test_a_missing_folder_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="mkdir -p"):
        open_database(str(tmp_path / "missing" / "catalog.sqlite"))


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="cannot be opened"):
        open_database(str(tmp_path))


@pytest.mark.parametrize("content", [b"once upon a time" * 100, b"\0" * 4096 + b"x"])
def test_another_file_is_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "story.txt"
    path.write_bytes(content)
    with pytest.raises(CatalogError, match="is not an SQLite database"):
        open_database(str(path))
    assert path.read_bytes() == content


def test_a_damaged_catalog_is_reported(database_file: Path) -> None:
    content = bytearray(database_file.read_bytes())
    content[4096:200_000] = b"\xff" * (200_000 - 4096)
    database_file.write_bytes(bytes(content))
    with pytest.raises(CatalogError, match=r"damaged|not an SQLite"):
        Catalog.open(str(database_file)).devices()


def test_an_older_revision_names_the_upgrade(database_file: Path) -> None:
    set_revision(database_file, "0001")
    with pytest.raises(CatalogVersionError, match=r"meshplan catalog upgrade --db .*catalog\.sqlite"):
        open_database(str(database_file))


def test_another_revision_is_refused_on_every_store(store: Store) -> None:
    url = store.seeded()
    engine = open_database(url)
    for revision, words in (("0001", "meshplan catalog upgrade --db"), ("9999", "a newer meshplan wrote it")):
        with writing(engine) as connection:
            connection.execute(
                sa.update(sa.table("alembic_version", sa.column("version_num"))), {"version_num": revision}
            )
        with pytest.raises(CatalogVersionError, match=words):
            open_database(url)
    engine.dispose()


def test_another_applications_tables_are_left_alone(store: Store) -> None:
    url = store.empty()
    engine = connect(parse_url(url))
    with writing(engine) as connection:
        connection.execute(sa.text("CREATE TABLE songs (title TEXT)"))
    with pytest.raises(CatalogError, match="not a meshplan catalog"):
        open_database(url)
    engine.dispose()


def test_a_reader_sees_one_state(catalog: Catalog) -> None:
    query = sa.select(sa.func.count()).select_from(tables.prices)
    with reading(catalog.engine) as reader:
        before = reader.execute(query).scalar_one()
        with writing(catalog.engine) as writer:
            writer.execute(sa.delete(tables.prices))
        assert reader.execute(query).scalar_one() == before > 0


def test_a_newer_revision_is_refused_by_open_and_by_upgrade(database_file: Path) -> None:
    set_revision(database_file, "9999")
    with pytest.raises(CatalogVersionError, match="a newer meshplan wrote it"):
        open_database(str(database_file))
    with pytest.raises(CatalogVersionError, match="a newer meshplan wrote it"):
        upgrade_database(str(database_file))


@pytest.mark.parametrize("message", ["disk I/O error", "database or disk is full"])
def test_a_full_disk_is_named_with_the_fix(database_file: Path, message: str) -> None:
    # Without room for WAL's shared memory SQLite speaks of an I/O error.
    engine = open_database(str(database_file))
    with (
        pytest.raises(CatalogError, match=r"disk is full.*make room and try again, nothing was half-written"),
        writing(engine),
    ):
        raise sa.exc.OperationalError("INSERT", {}, sqlite3.OperationalError(message))


def test_paths_and_urls_are_read_and_passwords_are_not_shown(tmp_path: Path) -> None:
    assert parse_url("/data/catalog.sqlite").database == "/data/catalog.sqlite"
    assert parse_url("postgresql+psycopg://user@host/meshplan").get_backend_name() == "postgresql"
    assert "secret" not in shown(parse_url("postgresql://user:secret@host/meshplan"))
    with pytest.raises(CatalogError, match="cannot read the database URL"):
        parse_url("postgres//x://y")
    with pytest.raises(CatalogError, match="kept in sqlite or postgresql, not in 'cassandra'"):
        open_database("cassandra://host/meshplan")


def test_readers_go_on_during_a_write(catalog: Catalog) -> None:
    engine = catalog.engine
    with writing(engine) as writer:
        writer.execute(sa.delete(tables.prices))
        with reading(engine) as reader:
            assert reader.execute(sa.select(sa.func.count()).select_from(tables.prices)).scalar_one() > 0
