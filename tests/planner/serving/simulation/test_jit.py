"""Machine code on disk is no older than what it was compiled from, and is loaded once it is worth it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulation_cases import random_requests

from meshplan.planner.serving.simulation.compiled import choice
from meshplan.planner.serving.simulation.compiled.stored import ENTRIES, drop_outdated, is_stored


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


def test_code_of_every_entry_no_older_than_a_source_is_stored(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    source = tmp_path / "events.py"
    source.touch()
    os.utime(source, (1000, 1000))
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    indices = [tmp_path / "__pycache__" / f"events.{entry}-30.{python}.nbi" for entry in ENTRIES]
    for index in indices:
        assert not is_stored(tmp_path)
        index.touch()
        os.utime(index, (1001, 1001))
    assert is_stored(tmp_path)
    os.utime(source, (1002, 1002))
    assert not is_stored(tmp_path)
    os.utime(source, (1000, 1000))
    indices[0].rename(indices[0].with_name(f"events.{ENTRIES[0]}-30.py27.nbi"))  # another Python's
    assert not is_stored(tmp_path)


@pytest.mark.parametrize(("stored", "least"), [(True, choice.LEAST_STORED), (False, choice.LEAST_TOGETHER)])
def test_machine_code_is_loaded_once_runs_together_are_long_enough(
    monkeypatch: pytest.MonkeyPatch, stored: bool, least: int
) -> None:
    monkeypatch.setattr(choice, "_ENTRY", "a module that is not loaded")
    monkeypatch.setattr(choice, "_RUNS", choice._Runs())
    monkeypatch.setattr(choice, "_is_here", lambda: True)
    monkeypatch.setattr(choice, "_is_stored", lambda: stored)
    run = random_requests(0, 4000)
    prefixes = replace(run, prefix=np.zeros(4000, dtype=np.int64))
    paid = [choice.pays(run, 2) for _ in range(least // 4000) if not choice.pays(prefixes, 2)]
    assert paid == [*[False] * (least // 4000 - 1), True]
    assert choice.pays(random_requests(0, choice.LEAST_TO_LOAD), 1)
