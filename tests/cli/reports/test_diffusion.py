"""Diffusion plans as people read them: on a terminal of 80 columns, on a page, without a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command
from diffusion_questions import spec

from meshplan.cli.web.pages.views.answer import answer_view
from meshplan.planner.core.plan import Plan


def asked(folder: Path, **more: object) -> Path:
    path = folder / "question.json"
    path.write_text(json.dumps(spec(**more)))
    return path


def test_a_plan_is_read_stored_and_emitted(meshplan: Command, tmp_path: Path) -> None:
    outcome = meshplan("plan", asked(tmp_path, model="hunyuanvideo"), "--tag", "film", "--out", tmp_path / "out")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80 + len(str(tmp_path))
    assert "Run 1 replica of 8 devices (ulysses 8), batch 1." in outcome.out
    assert "optimal under the estimate" in outcome.out
    assert (tmp_path / "out" / "generate.sh").is_file()
    assert meshplan("explain", "film", "--instead", "ulysses=1").code == 0
    page = answer_view(Plan.from_document(meshplan("plans", "show", "film", "-f", "json").json))
    assert page["equation"] == "8 GPUs = 1 replica of 8 devices (ulysses 8), batch 1"
    assert [one["caption"] for one in page["tables"]] == ["Candidates", "Memory of a rank"]


@pytest.mark.parametrize("objective", ["usd_per_item", "latency"])
def test_the_next_command_tries_what_the_plan_is_not(objective: str, meshplan: Command, tmp_path: Path) -> None:
    outcome = meshplan("plan", asked(tmp_path, objective=objective))
    (line,) = (line for line in outcome.out.splitlines() if "--instead" in line)
    name, value = line.split()[-1].split("=")
    plan = meshplan("plans", "show", "latest", "-f", "json").json
    assert str(plan["config"][name]) != value
    assert meshplan(*line.split()[1:]).code == 0


def test_no_plan_says_what_binds(meshplan: Command, tmp_path: Path) -> None:
    outcome = meshplan("plan", asked(tmp_path, slo={"latency_s": 0.1}))
    assert outcome.code == 3
    assert "Binding constraint: slo.latency_s" in outcome.out
    assert "Nearest miss: " in outcome.out
    document = meshplan("plan", asked(tmp_path, slo={"latency_s": 0.1}), "-f", "json")
    assert document.code == 3
    assert answer_view(Plan.from_document(document.json))["no_plan"]["miss"].startswith("slo.latency_s: ")


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_misspelt_keys_are_named(command: str, meshplan: Command, tmp_path: Path) -> None:
    outcome = meshplan(command, asked(tmp_path, workload={"heigth": 1024}))
    assert outcome.code == 2
    assert "workload.heigth: unknown key; did you mean 'height'" in outcome.err
