"""The target ``torchrun``: a script of the user's own, with the plan's rank table and choices."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from emit_cases import LLAMA_70B, LLAMA_70B_ON_64, config_for, plan_for, request_for

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.emit.training.own_script import CONFIG_FILE
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit

REQUEST = replace(request_for(LLAMA_70B, LLAMA_70B_ON_64), script="train.py")
TORCHRUN = (
    '#!/usr/bin/env bash\nprintf \'%s\\n\' "$@" > "$NOTES/argv"\nprintf %s "$MESHPLAN_CONFIG" > "$NOTES/config"\n'
)


def start(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``launch.sh 0`` of a plan whose script is ``script``, with a torchrun that only takes notes."""
    write_artifacts(emit("torchrun", replace(REQUEST, script=script)).artifacts, folder / "out", force=True)
    (folder / "torchrun").write_text(TORCHRUN)
    (folder / "torchrun").chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"],
        "TORCHRUN": str(folder / "torchrun"),
        "NOTES": str(folder),
        "MESHPLAN_SKIP_CHECKS": "1",
        **variables,
    }
    command = [str(folder / "out" / "launch.sh"), "0", "--lr", "1"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_golden(golden) -> None:
    for artifact in emit("torchrun", REQUEST).artifacts:
        if artifact.path.suffix in {".json", ".md"} or artifact.path.name == "launch.sh":
            golden(f"emit/torchrun/{artifact.path}", artifact.content)


@pytest.mark.parametrize("name", ["train.py", "a b.py", "-c", "$(touch pwned).py", "it's.py", "--nnodes", "*.py"])
def test_any_name_stays_one_argument(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    done = start(tmp_path, name)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "argv").read_text().splitlines()[-3:] == [f"{tmp_path}/{name}", "--lr", "1"]
    assert not (tmp_path / "pwned").exists()


def test_choices_are_handed_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert start(tmp_path, "train.py").returncode == 0
    handed = json.loads(Path((tmp_path / "config").read_text()).read_text())["config"]
    assert handed["world_size"] == 64
    expected = LLAMA_70B_ON_64.choices
    assert {name: handed[name] for name in expected} == {**expected, "layers_per_chunk": [20, 20, 20, 20]}


def test_missing_script_is_named(tmp_path: Path) -> None:
    done = start(tmp_path, "elsewhere.py")
    assert done.returncode == 1
    assert "no training script elsewhere.py" in done.stderr
    (tmp_path / "other.py").write_text("")
    assert start(tmp_path, "elsewhere.py", SCRIPT="other.py").returncode == 0


@pytest.mark.parametrize("script", ["a\nb.py", "`id`.py", "a|b.py", "\x1b[31m.py"])
def test_names_that_no_path_needs_are_refused(script: str) -> None:
    with pytest.raises(EmitError, match="rename the script"):
        emit("torchrun", replace(REQUEST, script=script))


def test_script_belongs_to_frameworks_without_one() -> None:
    with pytest.raises(EmitError, match=r"name it with --script train\.py"):
        emit("torchrun", replace(REQUEST, script=""))
    with pytest.raises(EmitError, match="leave --script out"):
        emit("megatron", REQUEST)


def test_scattered_ranks_are_refused() -> None:
    config = config_for(LLAMA_70B, data_parallel=4)
    table = ((0, 0), (1, 0), (0, 1), (1, 1))
    request = request_for(LLAMA_70B, config, plan=plan_for(LLAMA_70B, config, rank_table=table))
    with pytest.raises(CannotExpressError, match="returns to a host"):
        emit("torchrun", replace(request, script="train.py"))


def test_choices_and_table_files_are_named_in_the_readme() -> None:
    readme = emit("torchrun", REQUEST).artifacts[0].content
    assert str(CONFIG_FILE) in readme
    assert "`SCRIPT` | `train.py`" in readme
