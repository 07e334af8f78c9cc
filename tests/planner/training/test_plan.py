"""The plan as data: intervals, tables, round trips, the same bytes each time."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, MOE, configured, problem_of
from emit_cases import SHAPES

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.planner.core.plan import Plan, canonical_json, plain, shape_from_document
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.plan import (
    breakdown,
    config_document,
    config_from_document,
    evidence_of,
    predicted,
    provenance,
    rejected_rows,
    runner_up_rows,
    time_interval,
)
from meshplan.planner.training.problem.problem import TrainingObjective
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.search.mapping.mapping_report import rank_table
from meshplan.planner.training.search.report import TIE_WIDTH
from meshplan.planner.training.service import resolve

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 32, "num_training_tokens": 1e9},
    "fixed": {"tensor_parallel": 2},
}


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return make_plan(SPEC, catalog)


def test_a_configuration_survives_its_document() -> None:
    config = configured(problem_of(MOE), tensor_parallel=2, pipeline_parallel=2, expert_parallel=2)
    document = json.loads(json.dumps(config_document(config)))
    assert config_from_document(document) == config
    assert document["world_size"] == config.world_size


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.slug)
def test_a_model_survives_its_document(shape: Any) -> None:
    assert shape_from_document(json.loads(json.dumps(plain(shape)))) == shape


def test_the_rank_table_fills_hosts_in_order(plan: Plan) -> None:
    table = plan.rank_table
    assert table is not None
    assert len(table) == len(set(table)) == plan.config["world_size"]
    assert table[0] == (0, 0)
    assert list(table) == sorted(table)
    per_host = Counter(host for host, _ in table)
    assert all(count <= 8 for count in per_host.values())
    assert all(per_host[host] == 8 for host in list(per_host)[:-1])


def test_the_rank_table_of_part_of_a_host(catalog: Catalog) -> None:
    resolved = resolve(SPEC, catalog)
    config = configured(resolved.problem, tensor_parallel=2, data_parallel=2)
    assert rank_table(resolved.problem.machine, config, None) == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_every_interval_contains_its_value(plan: Plan) -> None:
    for name, interval in plan.predicted.items():
        assert 0.0 < interval.low <= interval.value <= interval.high, name
    assert {"iteration_s", "mfu", "tokens_per_s", "peak_memory_bytes", "usd_per_run"} <= set(plan.predicted)
    assert plan.predicted["mfu"].value < 1.0


def test_metrics_agree_with_each_other(plan: Plan) -> None:
    value = {name: interval.value for name, interval in plan.predicted.items()}
    devices, tokens = plan.config["world_size"], 4096 * 32
    assert value["tokens_per_s"] * value["iteration_s"] == pytest.approx(tokens)
    assert value["tokens_per_s_per_device"] * devices == pytest.approx(value["tokens_per_s"])
    assert value["samples_per_s"] * 4096 == pytest.approx(value["tokens_per_s"])
    assert value["mfu"] == pytest.approx(value["model_flops_per_s_per_device"] / 989e12, rel=1e-3)
    assert value["hfu"] >= value["mfu"]


def test_the_breakdown_is_the_step(plan: Plan) -> None:
    assert sum(row["seconds"] for row in plan.breakdown) == pytest.approx(plan.predicted["iteration_s"].value)
    assert sum(row["share"] for row in plan.breakdown) == pytest.approx(1.0)
    assert sum(plan.provenance["share_of_time_by_evidence"].values()) == pytest.approx(1.0)
    levels = {level.value for level in EvidenceLevel}
    assert {row["evidence"] for row in plan.breakdown} <= levels


def test_memory_rows_sum_and_fit(plan: Plan) -> None:
    worst = plan.memory["worst"]
    parts = [
        value
        for name, value in worst.items()
        if name.endswith("_bytes") and name.split("_")[0] not in ("typical", "safe")
    ]
    assert sum(parts) == pytest.approx(worst["typical_bytes"])
    assert worst["typical_bytes"] <= worst["safe_bytes"] <= plan.memory["limit_bytes"]
    assert worst in plan.memory["stages"]
    assert sum(row["num_stages"] for row in plan.memory["stages"]) == plan.config["pipeline_parallel"]


def test_the_same_question_gives_the_same_bytes(plan: Plan, catalog: Catalog) -> None:
    again = make_plan(json.loads(json.dumps(SPEC)), catalog)
    assert canonical_json(again.to_document(clocks=False)) == canonical_json(plan.to_document(clocks=False))
    assert "wall_s" in plan.to_document()["solution"]
    assert "wall_s" not in plan.to_document(clocks=False)["solution"]


def test_a_plan_survives_its_json(plan: Plan) -> None:
    back = Plan.from_document(json.loads(json.dumps(plan.to_document())))
    assert back == replace(
        plan,
        rank_table=back.rank_table,
        spec=back.spec,
        solution=back.solution,
        config=back.config,
        memory=back.memory,
        breakdown=back.breakdown,
        provenance=back.provenance,
        alternatives=back.alternatives,
        rejected=back.rejected,
    )
    assert back.digest == plan.digest


def test_the_chosen_plan_stands_first_and_equals_once(plan: Plan) -> None:
    ranked = [row for row in plan.alternatives if "chosen" in row]
    assert [row["chosen"] for row in ranked] == [True] + [False] * (len(ranked) - 1)
    assert ranked[0]["config"] == dict(plan.config)
    times = [row["iteration_s"] for row in ranked]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= min(times) / (1.0 - TIE_WIDTH), "the simplest of the plans that tie is chosen"
    assert len({(row["iteration_s"], row["safe_bytes"]) for row in ranked}) == len(ranked)


def test_rejections_are_counted(plan: Plan) -> None:
    assert all(row["count"] >= 0 and row["reason"] for row in plan.rejected)
    problem = problem_of(MOE, limits={"memory_bytes": 6.5e9})
    _, search = search_degrees(problem)
    rows = rejected_rows(search.report, is_found=True)
    over = next(row for row in rows if row["reason"] == "over the limit: device memory")
    assert over["count"] == search.report.over_limit["device memory"]
    assert price(problem, config_from_document(over["example"])).safe_bytes == pytest.approx(
        6.5e9 + over["nearest_miss"]
    )
    assert runner_up_rows(search.best, TrainingObjective.THROUGHPUT, top=3)[0]["chosen"]


def test_one_configuration_that_does_not_fit_is_infeasible_but_priced(catalog: Catalog) -> None:
    spec = {**SPEC, "model": "llama-3.1-70b", "fixed": {"data_parallel": 16, "zero_stage": 0}}
    priced = estimate_plan(spec, catalog)
    assert priced.solution["status"] == "infeasible"
    assert priced.memory["worst"]["safe_bytes"] > priced.memory["limit_bytes"]
    assert priced.predicted["iteration_s"].value > 0


def test_evidence_follows_the_source_of_the_rate(catalog: Catalog) -> None:
    problem = resolve(SPEC, catalog).problem
    assert evidence_of(problem, "matrix products") is EvidenceLevel.FITTED
    assert evidence_of(problem, "optimizer step", optimizer_offload=True) is EvidenceLevel.ASSUMED
    unknown = replace(problem, machine=replace(problem.machine, device=replace(problem.machine.device, gemm_curves={})))
    assert evidence_of(unknown, "matrix products") is EvidenceLevel.DATASHEET
    assert evidence_of(problem, "tensor-parallel communication") is problem.machine.link_level
    literature = replace(problem, calibration=replace(problem.calibration, num_runs=0))
    assert evidence_of(literature, "step overhead") is EvidenceLevel.ASSUMED


def test_predictions_without_price_or_tokens(catalog: Catalog) -> None:
    spec = {**SPEC, "workload": {"sequence_length": 4096, "global_batch_size": 32}}
    resolved = resolve(spec, catalog)
    priced = price(resolved.problem, configured(resolved.problem, tensor_parallel=2))
    assert "run_time_s" not in predicted(resolved, priced)
    assert "usd_per_run" not in predicted(resolved, priced)
    assert all(row["seconds"] > 0 for row in breakdown(resolved.problem, priced))


def test_a_schedule_without_measured_runs_has_a_wider_interval_and_says_so(catalog: Catalog) -> None:
    problem = problem_of(DENSE)
    piped = configured(problem, pipeline_parallel=2)
    measured, unmeasured = (
        time_interval(problem, 1.0, config=replace(piped, pipeline_schedule=name)) for name in ("1f1b", "zb-v")
    )
    assert unmeasured.low < measured.low < 1.0 < measured.high < unmeasured.high
    resolved = resolve(SPEC, catalog)
    problem = resolved.problem
    config = configured(problem, pipeline_parallel=2)
    for schedule, labelled in (("1f1b", False), ("zb-1p", False), ("gpipe", True), ("zb-h1", True), ("v-half", True)):
        config = replace(config, virtual_pipeline_stages=2 if schedule == "v-half" else 1)
        layers = problem.shape.num_hidden_layers // (2 * config.virtual_pipeline_stages)
        config = replace(config, layers_per_chunk=(layers,) * (2 * config.virtual_pipeline_stages))
        said = provenance(resolved, price(problem, replace(config, pipeline_schedule=schedule)))
        assert ("not_validated" in said) == labelled
        if labelled:
            assert schedule in said["not_validated"][0]
