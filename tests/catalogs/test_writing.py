"""One file, complete or absent, and never over what was not offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.errors import EmitError
from meshplan.catalogs.writing import remove_leftovers, write_file


def test_existing_files_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "a.svg", tmp_path / "link.svg"
    write_file(path, "one", force=False)
    with pytest.raises(EmitError, match="--force"):
        write_file(path, "two", force=False)
    assert path.read_text() == "one"
    link.symlink_to(path)
    for force in (False, True):
        with pytest.raises(EmitError, match="symbolic link"):
            write_file(link, "two", force=force)
    write_file(path, "two", force=True)
    assert path.read_text() == "two"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.svg", "link.svg"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "export.json"
    write_file(path, "good", force=False)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(EmitError, match="No space left"):
        write_file(path, "half", force=True)
    assert path.read_text() == "good"
    assert [entry.name for entry in tmp_path.iterdir()] == ["export.json"]


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    dead = tmp_path / ".out.meshplan-999999999-0123abcd"
    dead.mkdir()
    other = tmp_path / ".out.meshplan-notes"
    other.write_text("mine")
    remove_leftovers(tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == [other.name]
