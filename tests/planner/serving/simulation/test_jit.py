"""Machine code on disk is no older than what it was compiled from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("numba")
from meshplan.planner.serving.simulation.compiled.jit import drop_outdated


def test_code_older_than_any_source_is_deleted(tmp_path: Path) -> None:
    stored = {}
    for folder, age in (("one", 3), ("two", 1)):
        (tmp_path / folder / "__pycache__").mkdir(parents=True)
        stored[folder] = tmp_path / folder / "__pycache__" / "f-1.py312.1.nbc"
        stored[folder].touch()
        os.utime(stored[folder], (1000 - age, 1000 - age))
    source = tmp_path / "one" / "called.py"
    source.touch()
    os.utime(source, (998, 998))
    drop_outdated(tmp_path)
    assert not stored["one"].exists()  # a function in another file may have called it
    assert stored["two"].exists()
