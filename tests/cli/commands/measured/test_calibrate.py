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

FOLDER = Path(__file__).parents[3] / "validation"


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


def test_a_time_in_milliseconds_moves_no_constant(meshplan: Command, tmp_path: Path) -> None:
    """After a fit to two such runs a plan of another model took eight times as long."""
    rows = some_rows("training", "torchtitan", 3)
    seconds = rows[0]["measured"]["iteration_s"]
    wrong = {**rows[0], "measured": {**rows[0]["measured"], "iteration_s": 1000.0 * seconds}}
    done = meshplan("calibrate", file_of(tmp_path, [wrong, *rows[1:]]), "--dry-run", "--format", "json")
    assert rows[0]["id"] in done.err
    assert "another unit" in done.err
    alone = meshplan("calibrate", file_of(tmp_path, rows[1:]), "--dry-run", "--format", "json")
    assert done.json == alone.json


def test_a_file_that_is_named_twice_counts_once(meshplan: Command, tmp_path: Path) -> None:
    """A run that is held out was among those that constants were fitted to, in its copy."""
    path = file_of(tmp_path, some_rows("training", "torchtitan", 2))
    once, twice = (meshplan("calibrate", *[path] * n, "--dry-run", "--format", "json") for n in (1, 2))
    assert once.json == twice.json
    assert "2 rows are equal to another one and count once" in twice.err


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


# --- recorded runs --------------------------------------------------------------------------------------------------

PINNED = """\
kind: training
model: llama-3.1-8b
cluster: {name: lab, nodes: [{type: dgx-h100, count: 1}]}
workload: {sequence_length: 4096, global_batch_size: 64}
fixed: {tensor_parallel: 2, data_parallel: 4, zero_stage: 1, activation_recompute: full}
"""
OWN_SET = "megatron/hopper@lab:dgx-h100"


def recorded_plan(meshplan: Command, folder: Path, factor: float) -> dict[str, Any]:
    """A stored plan of the cluster ``lab`` and its measured step, so many times the predicted one."""
    spec, measured = folder / "spec.yaml", folder / "measured.json"
    spec.write_text(PINNED)
    made = meshplan("plan", spec, "--format", "json").json
    measured.write_text(json.dumps({"iteration_s": made["predicted"]["iteration_s"]["value"] * factor}))
    assert meshplan("plans", "record", made["plan_id"], measured).code == 0
    return {**made, "recorded": meshplan("plans", "record", made["plan_id"], measured).err}


def test_recorded_runs_teach_the_next_plan_of_their_cluster_until_undone(meshplan: Command, tmp_path: Path) -> None:
    made = recorded_plan(meshplan, tmp_path, 1.15)
    assert "meshplan calibrate --recorded" in made["recorded"]
    assert OWN_SET in meshplan("calibrate", "--recorded", "--dry-run").out
    assert meshplan("plan", tmp_path / "spec.yaml", "--format", "json").json["plan_id"] == made["plan_id"]
    done = meshplan("calibrate", "--recorded")
    assert done.code == 0
    assert "llama-3.1-8b" in done.out
    again = meshplan("plan", tmp_path / "spec.yaml")
    assert "2 own runs" in " ".join(again.out.split())
    assert meshplan("plan", tmp_path / "spec.yaml", "--format", "json").json["plan_id"] != made["plan_id"]
    assert OWN_SET in meshplan("calibrate", "--recorded", "--undo").out
    assert meshplan("plan", tmp_path / "spec.yaml", "--format", "json").json["plan_id"] == made["plan_id"]


def test_a_recording_that_will_not_count_says_so_at_once_and_again(meshplan: Command, tmp_path: Path) -> None:
    made = recorded_plan(meshplan, tmp_path, 10.0)
    assert "no constant will be adapted to it: outlier" in made["recorded"]
    done = meshplan("calibrate", "--recorded")
    assert "--accept" in done.out
    assert OWN_SET not in done.out
    document = meshplan("calibrate", "--recorded", "--accept", made["plan_id"][:6], "--format", "json").json
    assert document["left_out"] == []
    assert document["calibrations"][0]["architecture"] == "hopper@lab:dgx-h100"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give either OBSERVATIONS or --recorded"),
        (("runs.jsonl", "--recorded"), "give either OBSERVATIONS or --recorded"),
        (("runs.jsonl", "--undo"), "go with --recorded"),
        (("--recorded", "--undo", "--accept", "base"), "no use with --undo"),
        (("--recorded", "--hold-out", "run"), "not with --recorded"),
        (("--recorded", "--accept", "nobody"), "nobody"),
    ],
)
def test_options_that_do_not_go_together_are_refused(meshplan: Command, arguments: tuple[str, ...], words: str) -> None:
    refused = meshplan("calibrate", *arguments)
    assert refused.code in (2, 4)
    assert words in refused.err


def test_without_recordings_there_is_nothing_to_adapt_to(meshplan: Command) -> None:
    done = meshplan("calibrate", "--recorded")
    assert done.code == 0
    assert "no run is recorded" in done.err
    assert "no constants of a cluster are stored" in meshplan("calibrate", "--recorded", "--undo").err
