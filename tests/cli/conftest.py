"""Runs command lines in this process, each test with its own copy of one seeded database."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import SPEC, Command, Outcome

from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.main import run


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeded") / "catalog.sqlite"
    Catalog.open(str(path)).engine.dispose()
    return path


@pytest.fixture
def database(seeded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "catalog.sqlite"
    shutil.copy(seeded, path)
    monkeypatch.setenv("MESHPLAN_DB", str(path))
    return path


@pytest.fixture
def meshplan(database: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """``meshplan("plan", spec)``: run a command line."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run([*map(str, arguments)])
        out, err = capsys.readouterr()
        code = exit_.value.code
        assert code is None or isinstance(code, int)
        assert "Traceback" not in err
        return Outcome(code=code or 0, out=out, err=err)

    return call


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path
