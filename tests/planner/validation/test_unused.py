"""What a measured run says in vain is told: every key that no prediction and no comparison reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.workloads import USED
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.unused import unused_keys

DATA = Path(__file__).parents[2] / "data"
FILES = ("h100_serving.jsonl", "h100_observations.jsonl", "diffusion_runs.jsonl")
ROWS: list[dict[str, Any]] = [json.loads((DATA / name).read_text().splitlines()[0]) for name in FILES]


def told(row: dict[str, Any], catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """What the row says in vain."""
    (found,) = validate_rows([row], catalog).rows
    assert found.status == "ok", found.reason
    return dict(found.unused)


@pytest.mark.parametrize("row", ROWS, ids=[row["task"] for row in ROWS])
def test_a_key_in_any_section_is_used_or_told(row: dict[str, Any], catalog: Catalog) -> None:
    said = told(row, catalog)
    assert not said
    for section in ("workload", "parallelism", "hardware", "framework", "measured"):
        more = {**row, section: {**row[section], "made_up": 7.5}}
        assert told(more, catalog) == {f"{section}.made_up": ()}
    assert told({**row, "made_up": 1, "tensor_parallel": 4}, catalog) == {
        "made_up": (),
        "tensor_parallel": ("parallelism.tensor_parallel",),
    }
    in_ms = {**row, "measured": {**row["measured"], "latency_ms": 4.0}}
    assert "measured.latency_ms" in told(in_ms, catalog)


def test_a_network_that_is_not_understood_is_told(catalog: Catalog) -> None:
    """The catalog's was taken: whoever wrote another unit or another order would not have seen it."""

    def with_network(text: str) -> dict[str, Any]:
        return {**ROWS[1], "hardware": {**ROWS[1]["hardware"], "inter_node": text}}

    assert "hardware.inter_node" in told(with_network("50 GB/s"), catalog)
    inside = {**ROWS[1], "hardware": {**ROWS[1]["hardware"], "intra_node": "PCIe"}}
    assert told(inside, catalog) == {"hardware.intra_node": ()}
    for text in ("8x200Gb/s HDR IB", "none"):
        assert "hardware.inter_node" not in told(with_network(text), catalog)


def test_what_a_workload_may_have_meant_is_named() -> None:
    stated = {"arrival": "poisson", "input_length": 8, "output_length": 8, "num_requests": 4}

    def said(**more: Any) -> dict[str, tuple[str, ...]]:
        return unused_keys({"workload": {**stated, **more}}, workload=USED, parallelism=(), predicted=())

    assert said(cpu_kv_blocks=4, kv_blocks=9, temperature=0.7) == {
        "workload.cpu_kv_blocks": (),
        "workload.temperature": (),
    }
    assert said(enable_prefix_caching=True, max_model_len=8192) == {
        "workload.enable_prefix_caching": ("workload.prefix_caching",),
        "workload.max_model_len": (),
    }
