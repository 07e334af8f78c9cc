"""Training plans whose spec says how long documents are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner import assign_groups, assign_sequences, document_queue
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.training.plan_document import TrainingPlanDocument

MIX = [{"length": 700, "count": 90}, {"length": 6000, "count": 9}, {"length": 32_768, "count": 1}]


def question(histogram: Any = None, *, fixed: dict[str, Any] | None = None, **lengths: Any) -> dict[str, Any]:
    workload: dict[str, Any] = {"sequence_length": 32_768, "global_batch_size": 32}
    if histogram is not None:
        workload["sequence_lengths"] = {"histogram": histogram, **lengths}
    return {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}]},
        "workload": workload,
        "fixed": fixed or {},
    }


SHORT = {"tensor_parallel": 2, "pipeline_parallel": 1, "context_parallel": 1, "micro_batch_size": 2, "zero_stage": 1}
PIPELINE = {"pipeline_parallel": 4, "tensor_parallel": 2, "data_parallel": 2, "context_parallel": 1}
GROUPS = {"pipeline_parallel": 1, "tensor_parallel": 1, "context_parallel": 4, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def made(catalog: Catalog) -> Plan:
    return make_plan(question(MIX, fixed=PIPELINE), catalog)


def test_one_length_is_the_plan_of_that_length(catalog: Catalog) -> None:
    plain, one = make_plan(question(), catalog), make_plan(question([{"length": 32_768, "count": 5}]), catalog)
    assert one.config == plain.config
    assert one.predicted == plain.predicted
    assert {key: one.solution[key] for key in ("status", "objective", "bound")} == {
        key: plain.solution[key] for key in ("status", "objective", "bound")
    }
    assert plain.lengths is None
    assert one.lengths is not None
    assert one.lengths["waiting_s"] == 0.0
    steps = [way["step_s"] for way in one.lengths["ways"]]
    assert steps == pytest.approx([plain.predicted["iteration_s"].value] * len(steps))


def test_no_attention_apart_from_the_products_is_even(catalog: Catalog) -> None:
    # In larger groups the products alone are faster than in small ones, by more than short documents attend.
    spec = question([{"length": 300, "count": 5}, {"length": 3000, "count": 1}], packing="whole", fixed=SHORT)
    spec["workload"] |= {"sequence_length": 4096, "global_batch_size": 64, "phase": "sft"}
    plan = make_plan(spec | {"model": "llama-3.1-8b", "constraints": {"target": "megatron"}}, catalog)
    assert plan.lengths is not None


def test_short_documents_take_less_and_long_ones_make_others_wait(catalog: Catalog, made: Plan) -> None:
    plain = estimate_plan({**question(), "fixed": _pins(made)}, catalog)
    assert made.predicted["iteration_s"].value < plain.predicted["iteration_s"].value
    parts = {row["name"]: row["seconds"] for row in made.breakdown}
    before = {row["name"]: row["seconds"] for row in plain.breakdown}
    assert parts["attention"] < 0.5 * before["attention"]
    assert parts["matrix products"] == pytest.approx(before["matrix products"])
    assert parts["waiting for longer documents"] > 0.0
    assert sum(parts.values()) == pytest.approx(made.predicted["iteration_s"].value)


def test_sequences_of_few_tokens_are_not_tried_at_none(catalog: Catalog) -> None:
    # Longer micro-batches are rounded down to what the ranks split: 24 tokens times 1.25 to none where 64 share them.
    spec = question([{"least": 1, "most": 4096, "count": 1}])
    spec["workload"] |= {"sequence_length": 2, "global_batch_size": 64}
    plan = make_plan(spec, catalog)
    assert plan.lengths is not None
    assert plan.lengths["groups"] is None or plan.lengths["groups"]["most_tokens"] >= 2


def test_the_order_of_a_file_does_not_matter(catalog: Catalog, tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(10, 20_000, 500)
    for name, values in (("a", lengths), ("b", np.sort(lengths))):
        (tmp_path / f"{name}.json").write_text(json.dumps(values.tolist()))
    plans = []
    for name in "ab":
        spec = question(fixed=PIPELINE)
        spec["workload"]["sequence_lengths"] = {"file": f"{name}.json"}
        plans.append(make_plan(spec, catalog, base=tmp_path))
    assert plans[0].predicted == plans[1].predicted
    assert plans[0].lengths == plans[1].lengths


def test_the_bound_holds_for_every_pin(catalog: Catalog) -> None:
    best = make_plan(question(MIX), catalog)
    assert best.solution["status"] == "optimal"
    for pins in (PIPELINE, GROUPS):
        pinned = make_plan(question(MIX, fixed=pins), catalog)
        if pinned.config:
            assert pinned.solution["objective"] >= best.solution["bound"] * (1 - 1e-9)
            assert pinned.solution["objective"] >= pinned.solution["bound"] * (1 - 1e-9)


def test_the_expected_step_is_that_of_simulated_ones(made: Plan) -> None:
    assert made.lengths is not None
    ways = {way["name"]: way for way in made.lengths["ways"]}
    come = ways["as they come"]
    assert come["step_s"] == pytest.approx(made.predicted["iteration_s"].value, rel=0.05)
    assert come["low_s"] <= come["step_s"] <= come["high_s"]
    assert ways["sequences by work"]["step_s"] < come["step_s"]
    assert ways["long documents held"]["imbalance"] < come["imbalance"]


def test_mixed_groups_are_never_worse_than_the_plan(catalog: Catalog) -> None:
    # Megatron-LM masks by document without context parallelism only.
    plan = make_plan({**question(MIX, fixed=GROUPS), "constraints": {"target": "any"}}, catalog)
    assert plan.lengths is not None
    ways = {way["name"]: way["step_s"] for way in plan.lengths["ways"]}
    assert ways["mixed groups"] <= ways["as they come"] * (1 + 1e-9)
    assert ways["attention apart"] <= ways["as they come"] * (1 + 1e-9)
    assert ways["buckets"] > 0.0
    assert {row["size"] for row in plan.lengths["group_sizes"]} > {1}
    found = assign_groups([700] * 200 + [32_768] * 2, Plan.from_document(plan.to_document()))
    assert sum(found.sizes) == 16
    assert sorted(document for own in found.documents for document in own) == list(range(202))
    with pytest.raises(SpecError, match="fits into no group"):
        assign_groups([10**7], plan)


def test_padding_is_not_trained(catalog: Catalog) -> None:
    histogram = [{"length": 20_000, "count": 1}]
    plan = make_plan(question(histogram, packing="whole", fixed=PIPELINE), catalog)
    assert plan.lengths is not None
    assert plan.lengths["documents"]["filled"] == pytest.approx(20_000 / 32_768)
    rate = 32 * 20_000 / plan.predicted["iteration_s"].value
    assert plan.predicted["tokens_per_s"].value == pytest.approx(rate)


def test_a_stored_plan_is_enough_for_a_loader(made: Plan, tmp_path: Path) -> None:
    text = json.dumps(made.to_document())
    TrainingPlanDocument.model_validate_json(text)
    (tmp_path / "plan.json").write_text(text)
    code = """
import json, sys
from meshplan.planner import Plan, assign_sequences
plan = Plan.from_document(json.load(open(sys.argv[1])))
found = assign_sequences([6000] * 40 + [900] * 300, plan)
print(sum(len(micro) for rank in found.ranks for micro in rank), round(found.imbalance, 3), found.gap < 0.01)
print([name for name in ("sqlalchemy", "ortools", "pulp", "pydantic") if name in sys.modules])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counted, loaded = done.stdout.splitlines()
    assert counted.startswith("340 1.0")
    assert counted.endswith("True")
    assert loaded == "[]"


def test_a_queue_under_a_plan(made: Plan) -> None:
    queue = document_queue(made)
    queue.add([6000] * 20 + [900] * 400)
    step = queue.next_step()
    assert step is not None
    assert len(step.assignment.ranks) == made.config["data_parallel"]


def test_what_a_loader_gets_wrong(catalog: Catalog, made: Plan) -> None:
    plain = make_plan(question(fixed=PIPELINE), catalog)
    with pytest.raises(SpecError, match=r"without workload\.sequence_lengths"):
        assign_sequences([1], plain)
    for wrong in ([], [0], [1.5], [[1]]):
        with pytest.raises(SpecError, match="whole numbers of tokens above 0"):
            assign_sequences(wrong, made)
    with pytest.raises(SpecError, match="cannot be rearranged: it has a pipeline"):
        assign_groups([1], made)
    with pytest.raises(SpecError, match="finds no room"):
        assign_sequences([32_768] * 200, made)


def test_sequence_lengths_of_another_kind_of_attention(catalog: Catalog) -> None:
    across = make_plan(question(MIX, fixed=PIPELINE, cross_document_attention=True), catalog)
    plain = make_plan(question(fixed=PIPELINE), catalog)
    assert across.predicted == plain.predicted


def _pins(plan: Plan) -> dict[str, Any]:
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel", "micro_batch_size")
    others = (
        "activation_recompute",
        "zero_stage",
        "pipeline_schedule",
        "virtual_pipeline_stages",
        "data_parallel_shard",
    )
    pins = {name: plan.config[name] for name in (*names, *others)}
    if plan.config["activation_recompute"] == "block":
        pins["recompute_num_layers"] = plan.config["recompute_num_layers"]
    return {**pins, "layers_per_chunk": plan.config["layers_per_chunk"]}
