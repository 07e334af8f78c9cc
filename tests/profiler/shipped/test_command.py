"""Fits are run by hand: paths of what is fitted, then the folder for the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.seed import SEED_FOLDER
from meshplan.profiler.shipped.command import write_files
from meshplan.profiler.shipped.fit_efficiency import HEADER


def made(first_table: Path, second_table: Path) -> dict[str, str]:
    """Two names."""
    return {"names.txt": f"{first_table.name} {second_table.name}"}


def test_files_are_written_to_the_folder_named_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fit", "a.csv", "b.csv", str(tmp_path)])
    write_files(made)
    assert (tmp_path / "names.txt").read_text() == "a.csv b.csv"


def test_a_missing_table_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fit", "a.csv"])
    with pytest.raises(SystemExit):
        write_files(made)
    assert "second_table, folder" in capsys.readouterr().err


def test_the_shipped_efficiencies_begin_as_the_fit_writes_them() -> None:
    shipped = (SEED_FOLDER / "efficiency.yaml").read_text(encoding="utf-8")
    assert shipped.startswith(HEADER)
