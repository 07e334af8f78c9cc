"""Two ways to the same schema, and old databases that still open."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import ReflectedIndex
from store_cases import Store

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import connect, parse_url, stored_revision, writing
from meshplan.catalogs.database.migrations import known_revisions, upgrade
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.tables import SCHEMA_REVISION, metadata
from meshplan.catalogs.database.upgrade import upgrade_database

NAMES = {"framework": "megatron", "architecture": "mine"}
DUMPS = sorted((Path(__file__).parent / "fixtures").glob("revision_*.sql"))


def predicate(index: ReflectedIndex) -> list[str]:
    """Which rows the index holds; SQLAlchemy's text of it equals no other."""
    return [str(value) for name, value in index.get("dialect_options", {}).items() if name.endswith("_where")]


def schema(engine: Engine) -> dict[str, object]:
    inspector = sa.inspect(engine)
    return {
        table: (
            [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in inspector.get_columns(table)],
            inspector.get_pk_constraint(table)["constrained_columns"],
            inspector.get_foreign_keys(table),
            [(i["name"], i["column_names"], i["unique"], predicate(i)) for i in inspector.get_indexes(table)],
            inspector.get_unique_constraints(table),
            inspector.get_check_constraints(table),
        )
        for table in inspector.get_table_names()
    }


def test_first_use_and_alembic_give_the_same_schema(store: Store) -> None:
    migrated = connect(parse_url(store.empty()))
    upgrade(migrated)
    created = open_database(store.empty())
    assert schema(migrated) == schema(created)
    assert stored_revision(migrated) == stored_revision(created) == SCHEMA_REVISION
    migrated.dispose()
    created.dispose()


def test_alembic_sees_no_difference_to_the_tables(store: Store) -> None:
    engine = connect(parse_url(store.empty()))
    upgrade(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_the_revision_in_the_code_is_the_newest() -> None:
    assert known_revisions()[-1] == SCHEMA_REVISION


def test_first_use_on_sqlite_imports_neither_alembic_nor_postgresql(tmp_path: Path) -> None:
    code = (
        "import sys; from meshplan.catalogs.database.repository import Catalog\n"
        "Catalog.open(sys.argv[1]); sys.exit(bool({'alembic', 'sqlalchemy.dialects.postgresql'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "new.sqlite")], check=False, timeout=60)
    assert done.returncode == 0


def test_a_folder_with_a_percent_sign_can_be_upgraded(tmp_path: Path) -> None:
    folder = tmp_path / "100%"
    folder.mkdir()
    upgrade(connect(parse_url(str(folder / "catalog.sqlite"))))


def test_there_is_a_dump_of_every_revision() -> None:
    assert [dump.stem.removeprefix("revision_") for dump in DUMPS] == list(known_revisions())


@pytest.mark.parametrize("dump", DUMPS, ids=lambda dump: dump.stem)
def test_an_old_database_is_upgraded_with_the_users_rows(dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(dump.read_text(encoding="utf-8"))
    connection.close()
    done = upgrade_database(str(path))
    assert done.from_revision == dump.stem.removeprefix("revision_")
    assert done.seeds_refreshed

    catalog = Catalog.open(str(path))
    assert catalog.device("my-device").memory_bandwidth_bytes_per_s == 9.1e11
    assert catalog.node_type("my-node").prices[0].usd_per_hour == 1.5
    assert catalog.model("my-model")["hidden_size"] == 64
    assert catalog.calibration("megatron", "mine") == {"gemm": 0.7}
    assert catalog.device("h100-sxm-80gb").vendor == "nvidia"
    rows = PlanRows(catalog.engine)
    assert rows.get("best").plan_id == "abcdef012345"
    assert [run.document for run in rows.runs("best")] == [{"tokens_per_s": 1.0}]


def test_constants_of_an_earlier_revision_keep_their_errors(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript((DUMPS[0].parent / "revision_0002.sql").read_text(encoding="utf-8"))
        document = '{"time_error_p90": 0.2, "moe_time_error_p90": 0.4, "num_runs": 3}'
        connection.execute("UPDATE calibrations SET document = ?", (document,))
    connection.close()
    upgrade_database(str(path))
    found = Calibration.from_document({**NAMES, **(Catalog.open(str(path)).calibration(*NAMES.values()) or {})})
    assert found.num_runs == 3
    assert found.error_p90 == found.cluster_error_p90 == {"dense": 0.2, "adapters": 0.2, "experts": 0.4}


def test_a_second_upgrade_does_nothing(store: Store) -> None:
    done = upgrade_database(store.seeded())
    assert (done.from_revision, done.seeds_refreshed) == (SCHEMA_REVISION, False)


@pytest.mark.parametrize("revision", known_revisions()[:-1])
def test_every_revision_is_upgraded_on_every_store(revision: str, store: Store) -> None:
    url = store.empty()
    engine = connect(parse_url(url))
    upgrade(engine, revision)
    with writing(engine) as connection:
        plan = {"plan_id": "p", "kind": "training", "name": "", "spec_digest": "s", "catalog_digest": "c"}
        connection.execute(
            sa.insert(tables.plans).values(**plan, document={"plan_id": "p"}, created_at="2026-01-01", sequence=1)
        )
    engine.dispose()
    assert upgrade_database(url).from_revision == revision
    catalog = Catalog.open(url)
    assert [row.plan_id for row in PlanRows(catalog.engine).list()] == ["p"]
    assert catalog.device("h100-sxm-80gb").vendor == "nvidia"
    catalog.engine.dispose()


def test_a_failing_upgrade_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = connect(parse_url(store.empty()))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("power cut")

    # The first index comes after the first table, which must be undone.
    monkeypatch.setattr("alembic.op.create_index", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        upgrade(engine)
    assert stored_revision(engine) is None
    engine.dispose()
