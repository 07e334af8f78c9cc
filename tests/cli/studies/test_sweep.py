"""``meshplan sweep``: run, show and list; killed and run again."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import Command
from sweep_cases import BASE, TOO_LARGE, write_sweep

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.studies.points import Points, PointState
from meshplan.planner.sweep.study import find_study

PATIENCE_S = 120.0
NUM_POINTS = 12
# Tests that a shell runs in the background inherit that SIGINT is ignored; the sweep must heed it.
HEEDING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from meshplan.cli.main import run
run()
"""
SLOW = f"""\
kind: sweep
base: base.yaml
over:
  workload.global_batch_size: {[64 + 8 * point for point in range(NUM_POINTS)]}
"""


def test_a_sweep_is_run_shown_and_listed(meshplan: Command, tmp_path: Path) -> None:
    path = write_sweep(tmp_path)
    ran = meshplan("sweep", path, "--processes", 1)
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "✔ best tokens/s, for each workload.sequence_length" in ran.out
    shown = meshplan("sweep", "show", "batches")
    assert shown.out == ran.out
    listed = meshplan("sweep", "list", "--format", "json").json
    assert [(one["name"], one["points"], one["finished"], one["failed"]) for one in listed] == [("batches", 4, 4, 0)]
    study = meshplan("sweep", "show", "latest", "--format", "json").json
    assert study["study_id"] == listed[0]["study_id"]
    rows = list(csv.DictReader(io.StringIO(meshplan("sweep", "show", "batches", "--format", "csv").out)))
    assert [row["plan_id"] for row in rows] == [row["plan_id"] for row in study["points"]]
    assert [row["workload.sequence_length"] for row in rows] == ["2048", "4k", "2048", "4k"]
    plan = meshplan("plans", "show", rows[0]["plan_id"], "--format", "json").json
    assert plan["predicted"]["tokens_per_s"]["value"] == float(rows[0]["tokens_per_s"])
    again = meshplan("sweep", "run", path, "--format", "json")
    assert again.json["points"] == study["points"]


def test_exit_codes_and_words(meshplan: Command, tmp_path: Path) -> None:
    path = write_sweep(tmp_path, TOO_LARGE)
    infeasible = meshplan("sweep", path, "-n", 1)
    assert (infeasible.code, "infeasible" in infeasible.out) == (0, True)
    path.write_text("kind: sweep\nname: '=1+1'\nbase: base.yaml\nover: {model: ['=cmd()']}\n")
    failed = meshplan("sweep", path, "-n", 1)
    assert failed.code == 5
    assert "1 of 1 points have failed; try them again: --retry-failed" in failed.err
    assert "'=cmd()" in meshplan("sweep", "show", "=1+1", "--format", "csv").out
    path.write_text("kind: sweep\nbase: base.yaml\nover: {modell: [a]}\n")
    refused = meshplan("sweep", path)
    assert (refused.code, "modell: unknown key; did you mean 'model'" in refused.err) == (2, True)
    assert meshplan("sweep", path, "--on", "nowhere").code == 2
    path.write_text("kind: sweep\nbase: base.yaml\nbest: usd_per_run\nover: {workload.global_batch_size: [64]}\n")
    without = meshplan("sweep", path, "-n", 1)
    assert (without.code, "no answer has the metric 'usd_per_run'" in without.out) == (2, True)
    assert meshplan("sweep", "show", "nothing").code == 4


def test_a_study_without_a_best_point_says_how_to_get_one(meshplan: Command, tmp_path: Path) -> None:
    """What a device makes is no figure of plans for images: no point was marked, and nothing said so."""
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "kind: sweep\nbase: {kind: diffusion, model: pixart-sigma, objective: throughput_per_device,\n"
        "  cluster: {nodes: [{type: dgx-h100, count: 1}]}, workload: {width: 512, height: 512, steps: 20}}\n"
        "over: {workload.batch_size: [1]}\n"
    )
    shown = " ".join(meshplan("sweep", path, "-n", 1).out.split())
    assert "No point is marked as best by the objective throughput_per_device: name a metric with best:" in shown
    assert "images_per_s" in shown


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_without_ray_it_says_what_to_install(meshplan: Command, tmp_path: Path) -> None:
    outcome = meshplan("sweep", write_sweep(tmp_path), "--on", "ray://127.0.0.1:10001")
    assert outcome.code == 2
    assert "ray://127.0.0.1:10001 needs Ray: pip install 'meshplan[ray]'" in outcome.err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_that_is_killed_goes_on_and_repeats_nothing(
    meshplan: Command, database: Path, tmp_path: Path, how: signal.Signals
) -> None:
    path = write_sweep(tmp_path, SLOW)
    # A larger model without pins: a point takes long enough for the signal to come before the last one.
    free = {**BASE, "model": "llama-3.1-8b"}
    del free["fixed"]
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(free))
    command = [sys.executable, "-c", HEEDING, "sweep", str(path), "-n", "1"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "80"})
    catalog = Catalog.open(str(database))
    ends_at = time.monotonic() + PATIENCE_S
    while len(PlanRows(catalog.engine).list()) < 2:
        assert time.monotonic() < ends_at, "waited in vain"
        time.sleep(0.01)
    started.send_signal(how)
    _, said = started.communicate(timeout=PATIENCE_S)
    before = {row.plan_id: row.created_at for row in PlanRows(catalog.engine).list()}
    assert 2 <= len(before) < NUM_POINTS
    if how is signal.SIGINT:
        assert started.returncode == 130
        assert f"{len(before)} of {NUM_POINTS} points are answered and stored; go on with the same command" in said

    done = meshplan("sweep", path, "-n", 1, "--format", "json")
    assert [row["status"] for row in done.json["points"]] == ["optimal"] * NUM_POINTS
    after = {row.plan_id: row.created_at for row in PlanRows(catalog.engine).list()}
    assert len(after) == NUM_POINTS
    assert {plan_id: after[plan_id] for plan_id in before} == before
    study = find_study("latest", catalog)
    found = Points(catalog.engine).of(one["digest"] for one in study.document["points"])
    assert {one.state for one in found.values()} == {PointState.DONE}
    # What was stored was begun once; only the point in hand, where there was one, was begun again.
    assert sum(one.attempts for one in found.values()) in (NUM_POINTS, NUM_POINTS + 1)
    assert all(one.attempts == 1 for one in found.values() if one.plan_id in before)
