"""``meshplan batch``: the batch that trains soonest, as a user asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from meshplan.cli.commands.batch import app
from meshplan.planner import load_catalog, make_plan

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.2-1b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64, "num_training_tokens": "100B"},
    "fixed": {"tensor_parallel": 1, "pipeline_parallel": 1},
}


def call(folder: Path, *words: str, spec: dict[str, Any] = SPEC) -> Result:
    (folder / "spec.json").write_text(json.dumps(spec))
    return CliRunner().invoke(app, [str(folder / "spec.json"), "--db", str(folder / "c.sqlite"), *words])


def test_a_table_of_batches(tmp_path: Path) -> None:
    shown = call(tmp_path, "--noise", "1M", "--batches", "256k,1M")
    assert shown.exit_code == 0, shown.output
    assert "The same loss at every batch" in shown.output
    assert "262,144" in shown.output
    assert "1,048,576" in shown.output


def test_its_numbers_are_those_of_the_plans(tmp_path: Path) -> None:
    answer = json.loads(call(tmp_path, "--noise", "1M", "--batches", "256k,1M", "--format", "json").output)
    small, large = answer["rows"]
    assert answer["reference_batch_tokens"] == 64 * 4096
    assert small["tokens"] == pytest.approx(100e9)
    assert large["tokens"] == pytest.approx(100e9 * 2 / 1.25)
    assert large["run_s"] == pytest.approx(large["tokens"] / large["tokens_per_s"])
    assert answer["schedule_s"] <= answer["best_fixed_s"] * (1.0 + 1e-12)  # sums of the same numbers


def test_a_run_with_interruptions_is_done_when_its_plan_says(tmp_path: Path) -> None:
    """Days were those of a run that nothing interrupts: 2.5 beside 42.6 in the plan of the same batch."""
    spec = {**SPEC, "run": {"failures_per_node_day": 20, "restart_time": "1 min"}}
    answer = json.loads(call(tmp_path, "--noise", "1M", "--batches", "256k", "--format", "json", spec=spec).output)
    (row,) = answer["rows"]
    catalog = load_catalog(str(tmp_path / "c.sqlite"))
    plan = make_plan(spec, catalog)
    assert answer["best_fixed_s"] == pytest.approx(row["run_s"])
    assert row["run_s"] == pytest.approx(plan.predicted["run_time_s"].value)
    assert row["tokens_per_s"] == pytest.approx(plan.predicted["tokens_per_s"].value)
    assert row["run_s"] > 2.0 * row["tokens"] / row["tokens_per_s"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--noise", "lots"), "--noise"),
        (("--noise", "1M", "--batches", "1000"), "no multiple of 4096"),
        (("--noise", "1M", "--batches", "much"), "--batches"),
    ],
)
def test_wrong_words_are_refused(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    shown = call(tmp_path, *words)
    assert shown.exit_code != 0
    assert problem in str(shown.exception)


def test_tokens_are_needed(tmp_path: Path) -> None:
    workload = {name: value for name, value in SPEC["workload"].items() if name != "num_training_tokens"}
    shown = call(tmp_path, "--noise", "1M", spec={**SPEC, "workload": workload})
    assert "num_training_tokens" in str(shown.exception)


def test_batches_of_nobodys_choice_that_the_pins_do_not_divide_are_left_out(tmp_path: Path) -> None:
    """A quarter of the question's own batch was refused by its pins, and with it the question."""
    spec = {**SPEC, "fixed": {"data_parallel": 8, "micro_batch_size": 4}}
    answer = json.loads(call(tmp_path, "--noise", "1M", "--format", "json", spec=spec).output)
    assert [row["batch_tokens"] // 4096 for row in answer["rows"]] == [32, 64, 128, 256, 512, 1024]
    named = call(tmp_path, "--noise", "1M", "--batches", "64k,128k", spec=spec)
    assert "does not divide" in str(named.exception)


def test_a_question_with_an_open_batch_is_compared_at_the_batches_of_its_plan(tmp_path: Path) -> None:
    """Its batch was taken for one sequence: batches above 16 and their tokens were others than the plan's."""
    workload = {**SPEC["workload"], "global_batch_size": "auto", "gradient_noise_scale": {"tokens": "1M"}}
    spec = {**SPEC, "workload": workload}
    answer = json.loads(call(tmp_path, "--noise", "1M", "--format", "json", spec=spec).output)
    plan = make_plan(spec, load_catalog(str(tmp_path / "c.sqlite")))
    assert plan.answer is not None
    assert answer == plan.answer["batches"]
    named = json.loads(call(tmp_path, "--noise", "1M", "--batches", "256k", "--format", "json", spec=spec).output)
    assert [row["batch_tokens"] for row in named["rows"]] == [2**18]
