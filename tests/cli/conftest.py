"""Run a command line in this process, on a catalog of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database import open_database
from meshplan.cli.main import run


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]


@pytest.fixture(scope="session")
def seeded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeded") / "catalog.sqlite"
    open_database(str(path))
    return path


@pytest.fixture
def meshplan(
    seeded_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """``meshplan("catalog", "list")`` → exit code, stdout, stderr."""
    own = tmp_path / "catalog.sqlite"
    own.write_bytes(seeded_file.read_bytes())
    monkeypatch.setenv("MESHPLAN_DB", str(own))

    def command(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            run(arguments)
        captured = capsys.readouterr()
        code = caught.value.code
        return Outcome(code=code if isinstance(code, int) else 0, out=captured.out, err=captured.err)

    return command
