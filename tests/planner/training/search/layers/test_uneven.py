"""Layers of stages and chunks that differ: what the search finds, and what a plan's own split is worth as a pin."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.service import estimate_plan, make_plan

LINKS = {
    "intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"},
    "inter_node": {"bandwidth": "50 GB/s", "latency": "5 us"},
}
# Few micro-batches on two stages: the LM head of a small model weighs several layers.
UNEVEN: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.2-3b",
    "cluster": {"devices": {"type": "a100-sxm-40gb", "per_node": 8, "nodes": 2}, "links": LINKS},
    "workload": {"sequence_length": 1024, "global_batch_size": 12, "precision": "bf16"},
    "constraints": {"target": "megatron"},
}
GROUPS: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 64}]},
    "workload": {"sequence_length": 8192, "global_batch_size": 512, "precision": "bf16"},
    "constraints": {"target": "torchtitan"},
}
PINS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        UNEVEN,
        {"pipeline_parallel": 2, "virtual_pipeline_stages": 7, "layers_per_chunk": [*[2] * 12, 3, 1]},
    ),
    (GROUPS, {"data_parallel_shard": 16}),
    (GROUPS, {"data_parallel_shard": 64}),
]


@pytest.mark.parametrize(("question", "pins"), PINS, ids=["uneven layers", "groups of 16", "groups of 64"])
def test_a_pin_beats_no_bound(question: dict[str, Any], pins: dict[str, Any], catalog: Catalog) -> None:
    free, pinned = make_plan(question, catalog), make_plan({**question, "fixed": pins}, catalog)
    assert pinned.solution["objective"] >= free.solution["objective"] * (1.0 - free.solution["gap"]) * (1.0 - 1e-9)
    assert free.solution["gap"] <= free.solution["tie_width"]
    assert free.solution["status"] == "optimal"


def test_a_plan_may_be_pinned_as_it_is(catalog: Catalog) -> None:
    """Also where the LM head has a stage of its own."""
    fixed = {"pipeline_parallel": 4, "virtual_pipeline_stages": 1, "layers_per_chunk": [9, 9, 10, 0]}
    question = {**UNEVEN, "fixed": fixed}
    made = make_plan(question, catalog)
    assert made.config["layers_per_chunk"] == [9, 9, 10, 0]
    keys = ("tensor_parallel", "context_parallel", "data_parallel", "micro_batch_size", "zero_stage")
    pins = {**fixed, **{key: made.config[key] for key in keys}}
    pins["activation_recompute"] = made.config["activation_recompute"]
    priced = estimate_plan({**question, "fixed": pins}, catalog)
    assert priced.predicted["iteration_s"].value == pytest.approx(made.predicted["iteration_s"].value, rel=1e-12)
