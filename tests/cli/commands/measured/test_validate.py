"""``meshplan validate``: rows of every kind in one file, the picture, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command
from measured_rows import TRAINING_ROW

from meshplan.planner.validation.machines import read_rows

FOLDER = Path(__file__).parents[3] / "validation"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """One training run, one serving run, and one of a task that no kind answers."""
    rows = [next(iter(read_rows(FOLDER / name))) for name in ("observations.jsonl", "serving-observations.jsonl")]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (*rows, {"id": "odd", "task": "rendering"})))
    return path


def test_each_row_is_predicted_by_its_kind(meshplan: Command, runs: Path) -> None:
    answer = meshplan("validate", runs, "--format", "json")
    assert answer.code == 0
    trained, served, odd = answer.json["rows"]
    assert (trained["status"], "iteration_s" in trained["predicted"]) == ("ok", True)
    assert (served["status"], "engine" in served["labels"]) == ("ok", True)
    assert (odd["status"], odd["reason"]) == ("unsupported", "task 'rendering' is not answered yet")
    assert answer.json["coverage"] == pytest.approx(2 / 3)


def test_the_table_names_what_is_not_answered(meshplan: Command, runs: Path) -> None:
    shown = meshplan("validate", runs).out
    assert "2 of 3 observations answered" in shown
    assert "task 'rendering' is not answered yet" in shown


def test_a_file_without_a_run_is_said_to_be_one(meshplan: Command, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    outcome = meshplan("validate", empty)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{empty}: no measured run is in it" in outcome.err


def test_the_plot_has_a_point_per_step_time(meshplan: Command, runs: Path, tmp_path: Path) -> None:
    assert meshplan("validate", runs, "--plot", tmp_path / "steps.svg").code == 0
    assert (tmp_path / "steps.svg").read_text().count("<title>") == 1


def test_a_plot_that_would_not_be_written_is_refused(meshplan: Command, runs: Path, tmp_path: Path) -> None:
    refused = meshplan("validate", runs, "--from-points", "1", "--jobs", "1", "--plot", tmp_path / "steps.svg")
    assert refused.code == 2
    assert "--plot: shows predictions with the constants of the catalog" in " ".join(refused.err.split())


def test_curves_need_more_runs_than_points(meshplan: Command, runs: Path) -> None:
    refused = meshplan("validate", runs, "--from-points", "2", "--jobs", "1")
    assert refused.code == 2
    assert "no curve of these files has more than 2 runs" in refused.err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "llama-3.2-1b"}, "1 of 1 observations answered"),
        ({"name": "meta-llama/Llama-3.2-1B"}, "1 of 1 observations answered"),
        ({"name": "of-nobody"}, "0 of 1 observations answered"),
    ],
)
def test_a_run_may_name_a_model_of_the_catalog(
    model: dict[str, str], said: str, meshplan: Command, tmp_path: Path
) -> None:
    """Published rows state sizes; who measured a known model needs not copy its configuration."""
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({**TRAINING_ROW, "model": model}))
    outcome = meshplan("validate", path)
    assert said in outcome.out
    assert ("Largest errors" in outcome.out) == said.startswith("1")  # tables without a row are not printed
