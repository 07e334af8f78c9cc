"""Fleets from models and workloads on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

EXAMPLE = Path(__file__).parents[3] / "allocation.yaml"
SPEC: dict[str, Any] = {
    "kind": "gpu-allocation",
    "name": "chat",
    "model": "llama-3.1-8b",
    "market": {"offers": [{"type": "aws-g6e-xlarge", "max_nodes": 9}, {"type": "dgx-h100"}]},
    "workload": {
        "buckets": [
            {"input_tokens": [16, 256], "output_tokens": [8, 128], "request_rate_per_s": 10.0},
            {"input_tokens": [257, 4000], "output_tokens": [8, 512], "request_rate_per_s": 3.0},
        ]
    },
    "slo": {"ttft_p99_s": 3.0, "tpot_mean_s": 0.06},
    "schedule": {"hourly_rate_factor": [0.3, 1.0, 0.3]},
    "switching": {"start_usd": 0.1},
    "replay": {"num_requests": 500},
}


def written(document: dict[str, Any], folder: Path) -> Path:
    path = folder / "fleet.json"
    path.write_text(json.dumps(document))
    return path


def test_a_fleet_is_shown_stored_and_emitted(meshplan: Command, tmp_path: Path) -> None:
    outcome = meshplan("plan", written(SPEC, tmp_path), "--out", tmp_path / "fleet", "--tag", "chat")
    assert outcome.code == 0
    for heading in ("every SLO is met in replay", "Fleet at", "Routing", "Replay of", "Cost against SLO"):
        assert heading in outcome.out
    assert "USD/h is the least" in outcome.out
    assert "TTFT p99 ≤ " in outcome.out
    assert "Schedule (3 of 3 hours)" in outcome.out
    assert outcome.out.count("meshplan plans show") == 1
    assert "meshplan emit" not in outcome.out  # its files are written
    assert max(len(line) for line in outcome.out.splitlines()) <= 80
    assert (tmp_path / "fleet" / "router_weights.json").is_file()
    assert meshplan("plans", "show", "chat").code == 0
    assert meshplan("explain", "chat").code == 0
    assert meshplan("emit", "chat", "--target", "sglang", "--out", tmp_path / "other").code == 6
    rows = meshplan("plans", "show", "chat", "--format", "json").json["answer"]["fleets"][0]["units"]
    assert sum(row["usd_per_hour"] for row in rows) > 0


def test_a_violated_slo_is_an_answer_with_exit_code_3(meshplan: Command, tmp_path: Path) -> None:
    outcome = meshplan("plan", written({**SPEC, "slo": {"ttft_p99_s": 0.001}}, tmp_path))
    assert outcome.code == 3
    assert "no replica on any offer serves" in outcome.out
    assert "slo.ttft_p99_s" in outcome.out


def test_the_schema_takes_the_example(meshplan: Command) -> None:
    import jsonschema
    import yaml

    schema = meshplan("catalog", "schema", "--kind", "gpu-allocation").json
    jsonschema.validate(yaml.safe_load(EXAMPLE.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"kind": "gpu-allocation"}, schema)
