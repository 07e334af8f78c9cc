"""``meshplan calibrate``: what is stored, exported and refused; the fits have tests of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Command

from meshplan.planner.validation.machines import read_rows

FOLDER = Path(__file__).parents[2] / "validation"


def some_rows(task: str, framework: str, count: int) -> list[dict[str, Any]]:
    name = "observations.jsonl" if task == "training" else "serving-observations.jsonl"
    rows = [dict(row) for row in read_rows(FOLDER / name) if row["framework"]["name"] == framework]
    return rows[:count]


def file_of(folder: Path, rows: list[Mapping[str, Any]]) -> Path:
    path = folder / "runs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_own_training_runs_are_stored_and_exported(meshplan: Command, tmp_path: Path) -> None:
    path = file_of(tmp_path, some_rows("training", "torchtitan", 3))
    exported = tmp_path / "own.yaml"
    done = meshplan("calibrate", path, "--export", exported, "--format", "json")
    assert done.code == 0
    (stored,) = done.json["calibrations"]
    assert (stored["framework"], stored["architecture"], stored["num_runs"]) == ("torchtitan", "hopper", 3)
    assert "recipe" not in stored
    content = yaml.safe_load(exported.read_text())
    assert content["calibrations"][0]["time"] == stored["time"]
    again = meshplan("calibrate", path, "--dry-run", "--format", "json").json["calibrations"][0]
    assert again["source"].endswith(stored["source"])  # the next fit starts from the stored set


def test_a_dry_run_stores_nothing(meshplan: Command, tmp_path: Path) -> None:
    path = file_of(tmp_path, some_rows("training", "torchtitan", 2))
    first, second = (meshplan("calibrate", path, "--dry-run", "--format", "json").json for _ in range(2))
    assert first == second


def test_training_and_serving_runs_of_one_file_are_both_fitted(meshplan: Command, tmp_path: Path) -> None:
    served = [row for row in some_rows("serving", "vLLM", 9) if not row["workload"].get("disaggregated")][:1]
    path = file_of(tmp_path, [*some_rows("training", "torchtitan", 2), *served])
    done = meshplan("calibrate", path, "--export", tmp_path / "own.yaml")
    assert done.code == 0
    assert "on serving runs, each run held out" in done.out
    assert "step time on held-out runs" in done.out
    assert "stored 1 sets of serving constants" in done.err
    assert "stored 1 sets of constants" in done.err
    assert (tmp_path / "own.yaml").exists()
    assert (tmp_path / "serving_own.yaml").exists()


def test_an_unknown_serving_constant_is_named_with_the_known_ones(meshplan: Command, tmp_path: Path) -> None:
    path = file_of(tmp_path, some_rows("serving", "vLLM", 1))
    refused = meshplan("calibrate", path, "--constants", "decode_factor,speed")
    assert refused.code == 2
    assert "'speed'" in refused.err
    assert "decode_factor" in refused.err


@pytest.mark.parametrize("source", ["a blog", 3, ["x"]])
def test_a_source_that_is_no_object_is_refused_not_a_crash(meshplan: Command, tmp_path: Path, source: object) -> None:
    rows = some_rows("training", "torchtitan", 2)
    done = meshplan("calibrate", file_of(tmp_path, [rows[0], {**rows[1], "source": source}]), "--dry-run")
    assert done.code == 0
    assert "1 runs cannot be priced" in done.err


def test_files_without_a_run_that_can_be_priced(meshplan: Command, tmp_path: Path) -> None:
    refused = meshplan("calibrate", file_of(tmp_path, [{"id": "a", "task": "diffusion"}]))
    assert refused.code == 2
    assert "no run in these files that can be priced" in refused.err


def test_the_power_curve_is_fitted_and_exported(meshplan: Command, tmp_path: Path) -> None:
    exported = tmp_path / "own.yaml"
    done = meshplan("calibrate", FOLDER / "serving-power.jsonl", "--power", "--export", exported, "--format", "json")
    assert done.code == 0
    (made,) = done.json["calibrations"]
    assert made["num_runs"] == 6
    assert (
        yaml.safe_load((tmp_path / "power_own.yaml").read_text())["calibrations"][0]["constants"] == made["constants"]
    )
    assert {row["metric"] for row in done.json["group"]} >= {"power_w", "energy_per_output_token_j"}


def test_a_fit_of_power_needs_watts_and_takes_no_other_choice(meshplan: Command, tmp_path: Path) -> None:
    without = meshplan("calibrate", file_of(tmp_path, some_rows("serving", "vLLM", 2)), "--power")
    assert "no serving run in these files has a measured power" in without.err
    both = meshplan("calibrate", FOLDER / "serving-power.jsonl", "--power", "--from-scratch")
    assert "goes with none of --from-scratch" in both.err
