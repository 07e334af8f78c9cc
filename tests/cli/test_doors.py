"""A file given to the wrong command: the answer says what it is and which command takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import SPEC, Command

RUN = {
    "id": "a",
    "task": "training",
    "model": {"name": "m"},
    "hardware": {"device": "d"},
    "measured": {"iteration_s": 1},
}
TEXTS = {
    "spec.yaml": SPEC,
    "study.yaml": "kind: sweep\nbase: spec.yaml\nover: {workload.global_batch_size: [64, 128]}\n",
    "entries.yaml": "format: meshplan-catalog/1\ndevices: []\n",
    "one_run.json": json.dumps(RUN) + "\n",
    "runs.jsonl": (json.dumps(RUN) + "\n") * 2,
    "many_runs.jsonl": (json.dumps(RUN) + "\n") * 8000,  # more than a spec may have
    "launch.sh": "#!/usr/bin/env bash\nset -euo pipefail\necho 'a: b: c'\ntorchrun --nproc-per-node 8 train.py\n",
}
IS = {
    "spec.yaml": "a spec, not {wanted}: meshplan plan {path}",
    "study.yaml": "a study, not {wanted}: meshplan sweep {path}",
    "entries.yaml": "catalog entries, not {wanted}: meshplan catalog import {path}",
    "one_run.json": "a measured run, not {wanted}: meshplan validate {path}",
    "plan.json": "a plan, not {wanted}: meshplan explain {path}",
}
DOORS = {
    ("plan",): "a spec",
    ("estimate",): "a spec",
    ("sweep",): "a study",
    ("validate",): "measured runs",
    ("calibrate", "--dry-run"): "measured runs",
    ("import",): "what a framework reads",
    ("explain",): "a plan",
    ("catalog", "import"): "catalog entries",
}


@pytest.fixture
def files(stored_plan: Path, tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def stored_plan(meshplan: Command, tmp_path: Path) -> Path:
    (tmp_path / "asked.yaml").write_text(SPEC)
    (tmp_path / "plan.json").write_text(meshplan("plan", tmp_path / "asked.yaml", "--format", "json").out)
    return tmp_path / "plan.json"


def test_every_door_knows_every_other(meshplan: Command, files: Path) -> None:
    own = {"a spec": "spec.yaml", "a study": "study.yaml", "measured runs": "one_run.json", "a plan": "plan.json"}
    own |= {"catalog entries": "entries.yaml"}
    for words, wanted in DOORS.items():
        for name, text in IS.items():
            if own.get(wanted) == name:
                continue
            path = files / name
            done = meshplan(*words, path)
            assert done.code in (2, 4), (words, name, done.err)
            assert text.format(wanted=wanted, path=path) in done.err.replace("\n", " "), (words, name, done.err)


@pytest.mark.parametrize(
    ("command", "name"),
    [("plan", "runs.jsonl"), ("plan", "many_runs.jsonl"), ("explain", "runs.jsonl"), ("import", "runs.jsonl")],
)
def test_rows_of_measured_runs_are_no_spec(meshplan: Command, files: Path, command: str, name: str) -> None:
    done = meshplan(command, files / name)
    assert done.code == 2
    assert f"its lines are measured runs: meshplan validate {files / name}" in done.err


def test_a_script_is_imported(meshplan: Command, files: Path) -> None:
    done = meshplan("plan", files / "launch.sh")
    assert done.code == 2
    assert f"it is a script: meshplan import {files / 'launch.sh'}" in done.err


def test_a_folder_of_a_plan_names_its_file(meshplan: Command, files: Path) -> None:
    done = meshplan("explain", files)
    assert done.code == 4
    assert f"{files} is a folder; its plan: {files / 'plan.json'}" in done.err
    done = meshplan("import", files)
    assert done.code == 2
    assert "is a folder; give a file of it" in done.err
    for command in ("validate", "calibrate"):
        done = meshplan(command, files)
        assert done.code == 2
        assert f"{files}: is a folder; give its files of measured runs, such as {files / '*.jsonl'}" in done.err
