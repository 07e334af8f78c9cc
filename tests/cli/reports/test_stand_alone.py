"""The stand-alone kinds on the command line: the answer under ``answer``, stored, written, infeasible with exit 3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

ALLOCATION: dict[str, Any] = {
    "kind": "gpu-allocation",
    "name": "two types",
    "gpu_types": [
        {"name": "L4", "usd_per_hour": 1.0, "max_count": None},
        {"name": "H100", "usd_per_hour": 7.0, "max_count": None},
    ],
    "buckets": [{"input_tokens": [1, 100], "output_tokens": [1, 100]}],
    "request_rate_per_s": [10.0],
    "max_request_rate_per_s": {"L4": [1.0], "H100": [10.0]},
    "max_utilization": 1.0,
    "min_spare_replicas": 0,
}
PLACEMENT: dict[str, Any] = {
    "kind": "expert-placement",
    "name": "four experts",
    "num_layers": 1,
    "num_experts": 4,
    "top_k": 1,
    "num_devices": 2,
    "devices_per_node": 2,
    "num_redundant_experts": 0,
    "objective": "balance",
    "load": [[4, 3, 2, 1]],
}


def written(document: dict[str, Any], folder: Path) -> Path:
    path = folder / "instance.json"
    path.write_text(json.dumps(document))
    return path


def test_the_answer_stands_under_its_key(meshplan: Command, tmp_path: Path) -> None:
    document = meshplan("plan", written(ALLOCATION, tmp_path), "--format", "json").json
    assert document["solution"]["status"] == "optimal"
    assert document["answer"]["counts"] == {"L4": 0, "H100": 1} or document["answer"]["counts"] == {"H100": 1}
    assert document["answer"]["cost_usd_per_hour"] == pytest.approx(7.0)


def test_a_balanced_placement_is_proven(meshplan: Command, tmp_path: Path) -> None:
    answer = meshplan("plan", written(PLACEMENT, tmp_path), "--format", "json").json["answer"]
    assert answer["balancedness"] == pytest.approx(1.0)
    assert answer["status"] == "optimal"


def test_an_answer_is_stored_shown_and_written_as_its_plan_file(meshplan: Command, tmp_path: Path) -> None:
    path, out = written(ALLOCATION, tmp_path), tmp_path / "out"
    outcome = meshplan("plan", path, "--out", out, "--tag", "fleet")
    assert outcome.code == 0
    assert "gpu-allocation two types: optimal, objective 7, bound 7" in outcome.out
    assert {file.name for file in out.iterdir()} == {"plan.json", "SHA256SUMS"}
    assert meshplan("plans", "show", out / "plan.json", "--format", "json").json["answer"]["cost_usd_per_hour"] == 7.0
    assert meshplan("explain", "fleet").code == 0
    assert meshplan("explain", "fleet", "--instead", "tensor_parallel=2").code == 2
    assert meshplan("emit", "fleet", "--out", tmp_path / "other").code == 6


def test_no_answer_is_an_answer_with_exit_code_3(meshplan: Command, tmp_path: Path) -> None:
    document = {**ALLOCATION, "max_request_rate_per_s": {"L4": [0.0], "H100": [0.0]}}
    outcome = meshplan("plan", written(document, tmp_path), "--format", "json")
    assert outcome.code == 3
    assert outcome.json["solution"]["status"] == "infeasible"
    assert outcome.json["answer"]["status"] == "infeasible"


def test_two_allocations_compare_by_cost(meshplan: Command, tmp_path: Path) -> None:
    first = meshplan("plan", written(ALLOCATION, tmp_path), "--format", "json").json["plan_id"]
    cheaper = {**ALLOCATION, "request_rate_per_s": [3.0]}
    second = meshplan("plan", written(cheaper, tmp_path), "--format", "json").json["plan_id"]
    metrics = meshplan("compare", first, second, "--format", "json").json["metrics"]
    assert [(item["metric"], item["changes"][1]) for item in metrics] == [("objective", pytest.approx(3.0 / 7.0 - 1))]
    assert "objective" in meshplan("compare", first, second).out
