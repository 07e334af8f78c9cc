"""Odd environments: stores that cannot be written, streams that are closed or full, no home, damaged rows."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command

from meshplan.catalogs.database import sqlite

MESHPLAN = [sys.executable, "-m", "meshplan.cli.main"]


def changed(database: Path, statement: str) -> None:
    with sqlite3.connect(database) as opened:
        opened.execute(statement)


def test_a_store_that_is_newer_costs_a_warning(meshplan: Command, spec: Path, database: Path, tmp_path: Path) -> None:
    assert meshplan("catalog", "list").code == 0
    changed(database, "UPDATE alembic_version SET version_num = '9999'")
    outcome = meshplan("plan", spec, "--out", tmp_path / "out")
    assert outcome.code == 0
    assert "✔" in outcome.out
    assert "(not stored)" in outcome.out
    assert "warning" in outcome.err
    assert "a newer meshplan wrote it" in outcome.err
    assert (tmp_path / "out" / "plan.json").is_file()
    assert meshplan("catalog", "list", "nodes").code == 0
    assert meshplan("plans", "list").code == 4


REFUSALS = ("database or disk is full", "database is locked", "attempt to write a readonly database")


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_plan_that_cannot_be_stored_is_shown_and_written(
    refusal: str, meshplan: Command, spec: Path, database: Path, tmp_path: Path
) -> None:
    assert meshplan("catalog", "list").code == 0
    changed(database, f"CREATE TRIGGER no BEFORE INSERT ON plans BEGIN SELECT RAISE(ABORT, '{refusal}'); END")
    outcome = meshplan("plan", spec, "--out", tmp_path / "out", "--tag", "mine")
    assert outcome.code == 0
    assert "✔" in outcome.out
    assert "the plan is not stored" in outcome.err
    assert (tmp_path / "out" / "plan.json").is_file()
    assert meshplan("plans", "show", tmp_path / "out" / "plan.json").code == 0


def test_a_locked_store_is_waited_for_and_then_left(
    meshplan: Command, spec: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert meshplan("catalog", "list").code == 0
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 10)
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    outcome = meshplan("plan", spec)
    holder.close()
    assert outcome.code == 0
    assert "another process holds it" in outcome.err


def test_a_read_only_catalog_is_listed_and_used(
    meshplan: Command, spec: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert meshplan("plan", spec, "--tag", "mine").code == 0
    before = sorted(path.name for path in database.parent.iterdir())
    monkeypatch.setattr(sqlite, "_is_read_only", lambda file: file.is_file())
    for arguments in (
        ["catalog", "list"],
        ["catalog", "show", "dgx-h100"],
        ["plans", "list"],
        ["plans", "show", "mine"],
    ):
        assert meshplan(*arguments).code == 0
    outcome = meshplan("plan", spec, "--seed", "1")
    assert outcome.code == 0
    assert "warning" in outcome.err or "is stored" in outcome.out
    outcome = meshplan("plans", "delete", "mine")
    assert outcome.code == 4
    assert "read-only" in outcome.err
    assert sorted(path.name for path in database.parent.iterdir()) == before


def test_no_home_directory(meshplan: Command, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHPLAN_DB", raising=False)
    monkeypatch.setattr("platformdirs.user_data_dir", lambda *_, **__: "~/.local/share/meshplan")
    outcome = meshplan("plan", spec)
    assert outcome.code == 0
    assert "no home directory" in outcome.err
    assert not Path("~").exists()


@pytest.mark.parametrize("document", ["{", "[]", "null", '{"spec": 1}', '{"solution": []}'])
def test_a_damaged_row_costs_itself(document: str, meshplan: Command, spec: Path, database: Path) -> None:
    assert meshplan("plan", spec).code == 0
    (kept,) = meshplan("plans", "list", "--format", "json").json
    columns = "kind, name, 'bad', spec_digest, catalog_digest, document, created_at, sequence + 1"
    changed(database, f"INSERT INTO plans SELECT 'bad000000000', {columns} FROM plans")  # noqa: S608 - constants
    with sqlite3.connect(database) as opened:
        opened.execute("UPDATE plans SET document = ? WHERE plan_id = 'bad000000000'", (document,))
    rows = meshplan("plans", "list", "--format", "json").json
    assert [row["status"].split(":")[0] for row in rows] == ["damaged", kept["status"]]
    assert meshplan("plans", "list").code == 0
    assert meshplan("plans", "show", "bad").code == 4
    assert meshplan("plans", "show", kept["plan_id"]).code == 0
    assert meshplan("plans", "delete", "bad").code == 0
    assert len(meshplan("plans", "list", "--format", "json").json) == 1


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (">&-", 0),
        ("2>&-", 0),
        (">/dev/full", 6),
        (">/dev/full 2>&1", 6),
    ],
)
def test_streams_that_take_nothing(command: str, code: int, meshplan: Command, database: Path) -> None:
    assert meshplan("catalog", "list").code == 0
    line = f'"{sys.executable}" -m meshplan.cli.main catalog list links --db "{database}" {command}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"NO_COLOR": "1", "COLUMNS": "40"},
        {"COLUMNS": "200", "TERM": "dumb"},
    ],
)
def test_any_terminal_gets_the_whole_plan_without_escapes(
    variables: dict[str, str], meshplan: Command, spec: Path, database: Path
) -> None:
    assert meshplan("plan", spec).code == 0
    done = subprocess.run(
        [*MESHPLAN, "plans", "show", "latest", "--db", str(database)],
        capture_output=True,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert len(done.stdout) > 1000
