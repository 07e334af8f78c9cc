"""``meshplan explain PLAN --power-budget``: the answer in every format, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CAPACITIES, Command

SPEC = """\
kind: serving
model: llama-3.1-8b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {input_length: 1000, output_length: 100, request_rate_per_s: 2, num_requests: 200}
slo: {ttft_p99_s: 1.0, tpot_p95_s: 0.03}
"""


@pytest.fixture
def database(stored: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that keeps the question's plan as ``0`` and a fleet as ``1``."""
    path = Path(shutil.copy(stored(SPEC, json.dumps(CAPACITIES)), tmp_path / "catalog.sqlite"))
    monkeypatch.setenv("MESHPLAN_DB", str(path))
    return path


def test_the_answer_in_every_format(meshplan: Command) -> None:
    asked = ("explain", "0", "--power-budget", "40kW", "--power-risk", "0.01")
    found = meshplan(*asked, "--format", "json").json
    assert found["power_budget_w"] == 40_000.0
    assert found["risk"] == 0.01
    counts = {row["by"]: row["copies"] for row in found["copies"]}
    text = meshplan(*asked)
    assert text.code == 0
    assert max(map(len, text.out.splitlines())) <= 80
    said = " ".join(text.out.split())
    assert f"40 kW hold {counts['risk, upper end of watts']} copies of plan {found['plan_id']}" in said
    assert f"{counts['risk, expected watts']} by expected watts" in said
    assert "in 1 in 100 of the windows of 1 s" in said
    for words in ("One copy draws", "Copies by", "Safety net", "TTFT p99", "SLOs met", "Not counted", "--host-power"):
        assert words in said
    rows = dict(list(csv.reader(io.StringIO(meshplan(*asked, "--format", "csv").out)))[1:])
    assert float(rows["one_copy.rated_w"]) == found["one_copy"]["rated_w"]
    assert f"| plan_id | {found['plan_id']} |" in meshplan(*asked, "--format", "markdown").out
    assert "power_budget_w: 40000.0" in meshplan(*asked, "--format", "yaml").out


def test_stated_hosts_count(meshplan: Command) -> None:
    asked = ("explain", "0", "--power-budget", "40 kW", "--format", "json")
    bare, hosted = meshplan(*asked).json, meshplan(*asked, "--host-power", "3kW").json
    assert hosted["one_copy"]["rated_w"] == bare["one_copy"]["rated_w"] + 3_000.0
    assert hosted["copies"][0]["copies"] < bare["copies"][0]["copies"]
    assert "3 kW included" in meshplan(*asked[:-2], "--host-power", "3kW").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("0", "--power-budget", "40"), "'40' has no unit"),
        (("0", "--power-budget", "40 kB"), "a power (W)"),
        (("0", "--power-budget", "0 W"), "is above 0 W"),
        (("0", "--power-budget", "40kW", "--power-risk", "2"), "not 2"),
        (("0", "--power-risk", "0.01"), "says nothing without --power-budget"),
        (("0", "--host-power", "3kW"), "says nothing without --power-budget"),
        (("0", "--power-budget", "40kW", "--instead", "tp=2"), "counts copies of the plan as it is"),
        (("0", "--power-budget", "100W"), "are less than one copy takes: 700 W rated"),
        (("1", "--power-budget", "40kW"), "has no power over time; plans of serving have"),
    ],
)
def test_what_it_refuses(options: tuple[str, ...], words: str, meshplan: Command) -> None:
    outcome = meshplan("explain", *options)
    assert outcome.code == 2
    assert words in outcome.err
    assert not outcome.out
