"""``meshplan plans record --run``: the forecast beside what happened, and the next plan that learns from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshplan.cli.commands.plan import app as plan_app
from meshplan.cli.commands.plans import app as plans_app

SPEC = {
    "kind": "training",
    "model": "llama-3.2-1b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 4}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 256, "num_training_tokens": "300B"},
    "run": {"failures": "llama3-h100"},
}
LOG = "time_s,event,tokens\n0,train,0\n40000,stop,6e10\n41200,train,59e9\n90000,now,130e9\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    (made / "spec.json").write_text(json.dumps(SPEC))
    (made / "run.csv").write_text(LOG)
    asked = CliRunner().invoke(plan_app, [str(made / "spec.json"), "--db", str(made / "c.sqlite"), "--tag", "runs"])
    assert asked.exit_code == 0, asked.output
    return made


def test_forecast_and_actual_stand_side_by_side(folder: Path) -> None:
    words = ["record", "runs", "--run", str(folder / "run.csv"), "--db", str(folder / "c.sqlite")]
    shown = CliRunner().invoke(plans_app, words)
    assert shown.exit_code == 0, shown.output
    assert "interruptions" in shown.stderr
    assert "20.0 min" in shown.stderr
    assert "--set run.counted.interruptions=1" in " ".join(shown.stderr.split())
    assert max(map(len, shown.stderr.splitlines())) <= 80


def test_the_next_plan_learns_from_it(folder: Path) -> None:
    learned = ["--set", "run.counted.interruptions=30", "--set", "run.counted.node_days=400"]
    words = [str(folder / "spec.json"), "--db", str(folder / "c.sqlite"), "--format", "json"]
    before, after = (
        json.loads(CliRunner().invoke(plan_app, [*words, *more]).stdout)["run"]["failures_per_node_day"]
        for more in ([], learned)
    )
    assert before["value"] < after["value"] < 30 / 400
    assert after["high"] / after["low"] < before["high"] / before["low"]


def test_a_plan_without_a_run_has_no_forecast(folder: Path) -> None:
    steps = {name: value for name, value in SPEC.items() if name != "run"}
    (folder / "steps.json").write_text(json.dumps(steps))
    db = str(folder / "c.sqlite")
    CliRunner().invoke(plan_app, [str(folder / "steps.json"), "--db", db, "--tag", "steps"])
    shown = CliRunner().invoke(plans_app, ["record", "steps", "--run", str(folder / "run.csv"), "--db", db])
    assert shown.exit_code != 0
    assert "says nothing of its run" in str(shown.exception)
