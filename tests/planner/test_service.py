"""The straight line from a spec to a plan, and what is asked of a finished plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError, SpecError
from meshplan.planner.core.budget import resident_bytes
from meshplan.planner.core.plan import Plan, canonical_json, shape_from_document
from meshplan.planner.emit.artifact import plan_artifact
from meshplan.planner.service import emit_plan, estimate_plan, explain_instead, make_plan, plan_target
from meshplan.planner.training.search.degrees import DegreeSearch
from meshplan.planner.training.search.report import TIE_WIDTH
from meshplan.planner.training.service import resolve

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64, "num_training_tokens": 1e9},
}


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return make_plan(SPEC, catalog)


def problems(spec: dict[str, Any], catalog: Catalog, base: Path = Path()) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        make_plan(spec, catalog, base=base)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_a_plan_is_optimal_and_within_its_limits(plan: Plan) -> None:
    assert plan.solution["status"] == "optimal"
    assert 0.0 <= plan.solution["gap"] <= TIE_WIDTH
    assert plan.memory["worst"]["safe_bytes"] <= plan.memory["limit_bytes"]
    assert plan.rank_table is not None
    assert len(set(plan.rank_table)) == plan.config["world_size"] <= 8
    assert sum(row["share"] for row in plan.breakdown) == pytest.approx(1.0)
    for interval in plan.predicted.values():
        assert 0 < interval.low <= interval.value <= interval.high


def test_the_same_question_gives_the_same_bytes(plan: Plan, catalog: Catalog) -> None:
    again = make_plan(json.loads(json.dumps(SPEC)), catalog)
    assert canonical_json(again.to_document(clocks=False)) == canonical_json(plan.to_document(clocks=False))
    assert again.plan_id == plan.plan_id


def test_a_plan_survives_its_json(plan: Plan) -> None:
    back = Plan.from_document(json.loads(json.dumps(plan.to_document())))
    assert back.to_document() == plan.to_document()
    assert back.digest == plan.digest


def test_money_and_days_follow_from_the_step(plan: Plan) -> None:
    steps = 1e9 / (4096 * 64)
    metrics = plan.predicted
    assert metrics["run_time_s"].value == pytest.approx(metrics["iteration_s"].value * steps)
    assert metrics["usd_per_run"].value == pytest.approx(
        metrics["run_time_s"].value / 3600 * metrics["usd_per_hour"].value
    )
    assert metrics["tokens_per_s"].value * metrics["iteration_s"].value == pytest.approx(4096 * 64)


def test_no_well_known_alternative_is_faster(plan: Plan) -> None:
    rivals = [row for row in plan.alternatives if "reason" in row]
    assert rivals
    assert all(row["reason"] for row in rivals)
    assert all(row["iteration_s"] >= plan.predicted["iteration_s"].value for row in rivals if row["iteration_s"])


def test_alternatives_end_with_the_time_limit_and_with_ctrl_c(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = make_plan(SPEC, catalog, time_limit_s=1e-9)
    assert limited.config
    assert not [row for row in limited.alternatives if "reason" in row]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshplan.planner.training.alternatives.instead", interrupted)
    assert make_plan(SPEC, catalog).solution["status"] == "optimal"


def test_what_a_notebook_holds_is_no_part_of_the_memory_limit(catalog: Catalog) -> None:
    held = resident_bytes()
    assert make_plan(SPEC, catalog, memory_limit_bytes=0.9 * held).solution["status"] == "optimal"
    alone = make_plan(SPEC, catalog, memory_limit_bytes=0.9 * held, since_start=True)
    assert "memory limit" in alone.solution["stopped"]


def test_top_asks_for_more_candidates(catalog: Catalog) -> None:
    many = make_plan(SPEC, catalog, top=40)
    ranked = [row for row in many.alternatives if "chosen" in row]
    assert len(ranked) > 24
    assert [row["chosen"] for row in ranked] == [True] + [False] * (len(ranked) - 1)
    chosen, *others = (row["iteration_s"] for row in ranked)
    assert others == sorted(others)
    assert chosen <= min(others) * (1.0 + TIE_WIDTH)  # ties go to the simplest plan


def test_pinning_the_chosen_degrees_changes_nothing(plan: Plan, catalog: Catalog) -> None:
    pins = {key: plan.config[key] for key in ("tensor_parallel", "pipeline_parallel", "zero_stage", "micro_batch_size")}
    pinned = make_plan({**SPEC, "fixed": pins}, catalog)
    assert pinned.predicted["iteration_s"].value == pytest.approx(plan.predicted["iteration_s"].value)


def test_every_unknown_name_is_reported_at_once_with_the_closest(catalog: Catalog) -> None:
    spec = {
        **SPEC,
        "model": "lama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-h10", "count": 1}]},
        "constraints": {"target": "megatorn"},
    }
    found = problems(spec, catalog)
    assert set(found) == {"model", "cluster.nodes[0].type", "constraints.target"}
    assert "llama-3.1-8b" in found["model"]
    assert "dgx-h100" in found["cluster.nodes[0].type"]
    assert "megatron" in found["constraints.target"]


def test_an_unknown_device_in_place_gets_the_closest_names(catalog: Catalog) -> None:
    link = {"bandwidth": "450 GB/s", "latency": "3 us"}
    cluster = {"devices": {"type": "h100-sxn", "per_node": 8, "nodes": 1}, "links": {"intra_node": link}}
    assert "h100-sxm-80gb" in problems({**SPEC, "cluster": cluster}, catalog)["cluster.devices.type"]


def test_every_impossible_degree_is_reported_at_once(catalog: Catalog) -> None:
    fixed = {"tensor_parallel": 3, "pipeline_parallel": 64, "expert_parallel": 2, "data_parallel": 7}
    found = problems({**SPEC, "fixed": fixed}, catalog)
    assert set(found) == {f"fixed.{name}" for name in fixed} | {"fixed"}
    assert "legal: [1, 2, 4" in found["fixed.tensor_parallel"]


@pytest.mark.parametrize("kind", [None, 7, ["training"], "trainning", "servin"])
def test_an_unknown_kind_names_the_known_ones(kind: object, catalog: Catalog) -> None:
    assert "training" in problems({**SPEC, "kind": kind}, catalog)["kind"]


@pytest.mark.parametrize(
    "config",
    [
        '{"model_type": "resnet", "depths": [3, 4, 6, 3]}',
        '{"architectures": ["ViTModel"], "image_size": 224}',
        "[]",
        "{",
        '{"model_type": "llama"}',
    ],
)
def test_a_config_that_is_no_transformer_is_a_problem_of_the_spec(
    config: str, catalog: Catalog, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert set(problems({**SPEC, "model": "./config.json"}, catalog, tmp_path)) == {"model"}


@pytest.mark.parametrize("model", ["missing/config.json", "../..", "a\x00b.json", "./", "/dev/null", "~/x.json"])
def test_a_model_path_that_cannot_be_read_is_a_problem_of_the_spec(
    model: str, catalog: Catalog, tmp_path: Path
) -> None:
    assert set(problems({**SPEC, "model": model}, catalog, tmp_path)) == {"model"}


@pytest.fixture(scope="module")
def infeasible(catalog: Catalog) -> Plan:
    return make_plan({**SPEC, "model": "llama-3.1-70b"}, catalog)


def test_a_cluster_that_cannot_hold_the_model_says_what_would(infeasible: Plan, catalog: Catalog) -> None:
    solution = infeasible.solution
    assert solution["status"] == "infeasible"
    assert "device memory" in solution["binding_constraint"]
    assert solution["nearest_miss"]["excess"] > 0
    wanted = next(change for change in solution["least_change"] if change["constraint"] == "max_devices")
    nodes = int(wanted["change"].split()[0]) // 8

    def fits(count: int) -> bool:
        cluster = {"nodes": [{"type": "dgx-h100", "count": count}]}
        problem = resolve({**infeasible.spec, "cluster": cluster}, catalog).problem
        return DegreeSearch(problem, keep=1).has_plan()

    assert (fits(nodes), fits(nodes - 1)) == (True, False)


def test_a_plan_that_does_not_exist_survives_its_json(infeasible: Plan) -> None:
    back = Plan.from_document(json.loads(json.dumps(infeasible.to_document())))
    assert back.to_document() == infeasible.to_document()


def test_a_budget_that_binds_says_how_much_would_do(catalog: Catalog) -> None:
    cluster = {
        "devices": {"type": "h100-sxm-80gb", "per_node": 1, "nodes": 1},
        "links": {"intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"}},
        "usd_per_hour_per_node": 3.0,
    }
    spec = {**SPEC, "model": "llama-3.2-1b", "cluster": cluster, "constraints": {"max_usd_per_run": 1.0}}
    plan = make_plan(spec, catalog)
    assert plan.solution["status"] == "infeasible"
    assert plan.solution["binding_constraint"] == "max_usd_per_run: at most $1.00 for the run"


# --- one pinned configuration --------------------------------------------------------------------------------------


def test_an_estimate_of_the_plan_agrees_with_the_plan(catalog: Catalog) -> None:
    """Of one stage: an estimate cannot be told uneven stages, which a plan may have."""
    plan = make_plan({**SPEC, "fixed": {"pipeline_parallel": 1}}, catalog)
    names = {"tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel", "micro_batch_size"}
    names |= {"data_parallel_shard", "virtual_pipeline_stages", "zero_stage", "activation_recompute"}
    names |= {"sequence_parallel", "pipeline_schedule"}
    names |= {"recompute_num_layers"} & set(plan.config)
    one = estimate_plan({**SPEC, "fixed": {name: plan.config[name] for name in names}}, catalog)
    assert one.config == plan.config
    assert one.predicted == plan.predicted
    assert one.memory == plan.memory


def test_an_estimate_that_does_not_fit_is_still_priced(catalog: Catalog) -> None:
    one = estimate_plan({**SPEC, "fixed": {"tensor_parallel": 1, "zero_stage": 0, "micro_batch_size": 8}}, catalog)
    assert one.solution["status"] == "infeasible"
    assert one.solution["oom"] is True
    assert one.predicted["iteration_s"].value > 0


def test_an_estimate_names_every_rule_that_its_choices_break(catalog: Catalog) -> None:
    fixed = {"tensor_parallel": 8, "data_parallel": 2, "micro_batch_size": 64}
    with pytest.raises(SpecError, match="16"):
        estimate_plan({**SPEC, "fixed": fixed}, catalog)


@pytest.mark.parametrize(
    ("fixed", "path"),
    [
        ({"pipeline_schedule": "interleaved"}, "fixed.pipeline_schedule"),
        ({"pipeline_schedule": "none", "pipeline_parallel": 2}, "fixed.pipeline_schedule"),
        ({"expert_tensor_parallel": 5}, "fixed.expert_tensor_parallel"),
        ({"virtual_pipeline_stages": 64}, "fixed"),
    ],
)
def test_an_estimate_refuses_choices_that_contradict_each_other(
    fixed: dict[str, Any], path: str, catalog: Catalog
) -> None:
    with pytest.raises(SpecError) as caught:
        estimate_plan({**SPEC, "fixed": fixed}, catalog)
    assert path in {problem.path for problem in caught.value.problems}


# --- another choice ------------------------------------------------------------------------------------------------


def test_instead_prices_the_other_choice(plan: Plan, catalog: Catalog) -> None:
    other_degree = 4 if plan.config["tensor_parallel"] != 4 else 2
    other, reason = explain_instead(plan, {"tensor_parallel": other_degree}, catalog)
    assert other is not None
    assert other.config["tensor_parallel"] == other_degree
    assert other.predicted["iteration_s"].value >= plan.predicted["iteration_s"].value
    assert "step time" in reason


@pytest.mark.parametrize("choice", ["context_parallel", "pipeline_parallel"])
def test_instead_is_the_plan_with_the_choice_pinned(catalog: Catalog, choice: str) -> None:
    """Ties are settled in both: the fastest of equals was taken, and a choice that the plan makes itself cost time."""
    cluster = {"nodes": [{"type": "dgx-a100-40gb", "count": 1}]}
    workload = {"sequence_length": 2048, "global_batch_size": 32}
    spec = {**SPEC, "model": "llama-2-13b", "cluster": cluster, "workload": workload}
    asked = make_plan(spec, catalog)
    for value in (asked.config[choice], 1):
        other, reason = explain_instead(asked, {choice: value}, catalog)
        pinned = make_plan({**spec, "fixed": {choice: value}}, catalog)
        assert other is not None
        assert (other.config, other.predicted) == (pinned.config, pinned.predicted)
        assert value != asked.config[choice] or reason == "+0.0% step time"


def test_instead_says_why_nothing_fits(plan: Plan, catalog: Catalog) -> None:
    other, reason = explain_instead(plan, {"zero_stage": 0, "tensor_parallel": 1, "pipeline_parallel": 1}, catalog)
    assert other is None
    assert "does not fit" in reason


def test_instead_refuses_unknown_and_impossible_choices(plan: Plan, catalog: Catalog) -> None:
    with pytest.raises(SpecError, match="did you mean 'tensor_parallel'"):
        explain_instead(plan, {"tensor_paralel": 4}, catalog)
    with pytest.raises(SpecError, match="does not divide"):
        explain_instead(plan, {"tensor_parallel": 3}, catalog)


def test_instead_keeps_the_model_that_the_plan_was_made_for(catalog: Catalog, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(catalog.model("llama-3.1-8b")))
    plan = make_plan({**SPEC, "model": "config.json"}, catalog, base=tmp_path)
    config.unlink()
    other, _ = explain_instead(plan, {"zero_stage": 1 if plan.config["zero_stage"] != 1 else 0}, catalog)
    assert other is not None


# --- launcher files ------------------------------------------------------------------------------------------------


def test_launcher_files_carry_the_plan_and_its_digest(plan: Plan, catalog: Catalog) -> None:
    emitted = emit_plan(plan, "megatron", catalog)
    texts = {str(item.path): item.content for item in emitted.artifacts}
    assert Plan.from_document(json.loads(texts["plan.json"])).digest == plan.digest
    assert all(plan.digest in text for name, text in texts.items() if name != "plan.json")


def test_plan_files_are_the_same_bytes_whenever_they_are_made(plan: Plan, catalog: Catalog) -> None:
    assert plan_artifact(plan).content == plan_artifact(make_plan(SPEC, catalog)).content


def test_only_known_targets_are_written(plan: Plan, catalog: Catalog) -> None:
    with pytest.raises(EmitError, match="did you mean 'megatron'"):
        emit_plan(plan, "megatorn", catalog)
    with pytest.raises(EmitError, match="leave --framework out"):
        emit_plan(plan, "megatron", catalog, framework="vllm")


def test_a_plan_without_an_answer_launches_nothing(infeasible: Plan, catalog: Catalog) -> None:
    with pytest.raises(EmitError, match="no configuration"):
        emit_plan(infeasible, "megatron", catalog)
    with pytest.raises(SpecError, match="no choices to change"):
        explain_instead(infeasible, {"tensor_parallel": 2}, catalog)


def test_the_target_is_the_one_of_the_spec(plan: Plan) -> None:
    assert plan_target(plan) == "megatron"
    assert plan_target(replace(plan, spec={**plan.spec, "constraints": {"target": "torchtitan"}})) == "torchtitan"
    assert plan_target(replace(plan, kind="rank-mapping", spec={"kind": "rank-mapping"})) is None


@pytest.mark.parametrize("slug", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "gemma-2-27b", "mixtral-8x7b"])
def test_the_model_in_a_plan_is_the_model_that_was_asked_for(slug: str, catalog: Catalog) -> None:
    from meshplan.planner.core.plan import plain

    shape = catalog.model_shape(slug)
    assert shape_from_document(json.loads(json.dumps(plain(shape)))) == shape


def test_names_are_looked_up_even_in_a_malformed_spec(catalog: Catalog) -> None:
    spec = {
        **SPEC,
        "model": "llama-3.1-8c",
        "cluster": {"nodes": [{"type": "dgx-h10", "count": 0}]},
    }
    found = problems(spec, catalog)
    assert set(found) == {"cluster.nodes[0].count", "cluster.nodes[0].type", "model"}
    assert "did you mean 'dgx-h100'" in found["cluster.nodes[0].type"]
    assert "llama-3.1-8b" in found["model"]


@pytest.mark.parametrize("junk", [None, 3, "text", [], [3], {"nodes": 3}, {"nodes": [3]}, {"devices": "x"}])
def test_junk_clusters_are_spec_errors(catalog: Catalog, junk: object) -> None:
    assert problems({**SPEC, "cluster": junk}, catalog)
