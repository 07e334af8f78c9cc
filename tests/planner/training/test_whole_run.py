"""A training plan for a whole run: what interruptions change in its answer, and that the proof counts them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.cli.reports.whole_run.forecast import run_sentence
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.training.plan import config_from_document
from meshplan.planner.training.problem.choices import PINNABLE

DAY = 86_400.0
# So many that a large job hardly gets anywhere.
MANY_FAILURES = 6.0


def question(*, spare_nodes: int = 0, **run: Any) -> dict[str, Any]:
    return {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 4}], "spare_nodes": spare_nodes},
        "workload": {"sequence_length": 4096, "global_batch_size": 256, "num_training_tokens": "300B"},
        "run": run,
    }


def with_constraints(document: dict[str, Any], **constraints: Any) -> dict[str, Any]:
    return {**document, "constraints": constraints}


def run_s(plan: Plan) -> float:
    return plan.predicted["run_time_s"].value


def pins_of(plan: Plan) -> dict[str, Any]:
    config = config_from_document(plan.config)
    usual = {item.name: item.default for item in fields(config)}
    pins = {one.name: getattr(config, one.name) for one in PINNABLE}
    return {name: value for name, value in pins.items() if value != usual[name]}


def test_a_run_takes_its_training_time_over_the_ratio(catalog: Catalog) -> None:
    plan = make_plan(question(failures="llama3-h100"), catalog)
    assert plan.run is not None
    ratio = plan.predicted["effective_training_time_ratio"].value
    steps = 300e9 / (4096 * 256)
    assert plan.run["training_s"] == pytest.approx(plan.predicted["iteration_s"].value * steps)
    assert run_s(plan) == pytest.approx(plan.run["training_s"] / ratio)
    assert plan.predicted["run_time_s"].low < run_s(plan) < plan.predicted["run_time_s"].high


def test_without_a_run_nothing_changes(catalog: Catalog) -> None:
    document = question()
    del document["run"]
    plan = make_plan(document, catalog)
    assert plan.run is None
    assert "effective_training_time_ratio" not in plan.predicted


def test_more_nodes_can_lose(catalog: Catalog) -> None:
    document = question(failures_per_node_day=MANY_FAILURES, restart_time="30 min", repair_time="3 d")
    free = make_plan(document, catalog)
    whole = make_plan(with_constraints(document, min_devices=32), catalog)
    assert free.config["world_size"] < 32
    assert run_s(free) < run_s(whole)


def test_a_run_that_never_ends_is_no_plan_and_fewer_interruptions_are_one(catalog: Catalog) -> None:
    document = question(failures_per_node_day=500.0, restart_time="1 h")
    plan = make_plan(document, catalog)
    assert plan.solution["binding_constraint"].startswith("interruptions: a run on any number of devices")
    (change,) = [one for one in plan.solution["least_change"] if one["constraint"] == "interruptions"]
    rate = float(change["change"].removeprefix("run.failures_per_node_day: "))
    assert make_plan(question(failures_per_node_day=rate, restart_time="1 h"), catalog).config
    assert not make_plan(question(failures_per_node_day=2.2 * rate, restart_time="1 h"), catalog).config


@pytest.mark.parametrize("failures", [20.0, 500.0])
def test_the_report_of_a_run_that_never_ends_names_no_end(failures: float, catalog: Catalog) -> None:
    plan = make_plan(question(failures_per_node_day=20.0, restart_time="1 h"), catalog)
    document = question(failures_per_node_day=failures, restart_time="1 h")
    estimated = estimate_plan({**document, "fixed": pins_of(plan)}, catalog)
    said = run_sentence(estimated)
    assert ("makes no progress" in said) is (failures == 500.0)
    assert ("it ends after" in said) is (failures == 20.0)


@pytest.mark.parametrize("most", [8, 16])
def test_no_smaller_cluster_beats_the_plan(catalog: Catalog, most: int) -> None:
    document = question(failures_per_node_day=MANY_FAILURES, restart_time="30 min")
    free = make_plan(document, catalog)
    part = make_plan(with_constraints(document, max_devices=most, min_devices=most), catalog)
    assert run_s(part) >= run_s(free) * (1.0 - free.solution["gap"]) * (1.0 - 1e-9)


def test_the_estimate_of_a_plan_is_its_prediction(catalog: Catalog) -> None:
    document = question(failures="rsc-1", spare_nodes=1, finish_by="20 d")
    plan = make_plan(document, catalog)
    again = estimate_plan({**document, "fixed": pins_of(plan)}, catalog)
    assert again.run == plan.run
    assert again.predicted == plan.predicted


def test_spares_come_out_of_the_cluster_and_are_paid(catalog: Catalog) -> None:
    none, two = (make_plan(question(spare_nodes=spares), catalog) for spares in (0, 2))
    assert two.config["world_size"] <= 16
    hourly = two.predicted["usd_per_run"].value / (run_s(two) / 3600.0)
    node = none.predicted["usd_per_hour"].value / none.config["world_size"] * 8
    assert hourly == pytest.approx(node * (two.config["world_size"] / 8 + 2))


def test_a_limit_on_the_run_counts_interruptions(catalog: Catalog) -> None:
    pins = {"fixed": {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1}}
    calm = make_plan({**question(failures_per_node_day=0), **pins}, catalog)
    within = run_s(calm) / DAY * 1.05
    document = {**question(failures_per_node_day=2.0, restart_time="1 h"), **pins}
    answer = make_plan(with_constraints(document, max_run_time=f"{within} d"), catalog)
    assert answer.solution["status"] == "infeasible"
    assert answer.solution["binding_constraint"].startswith("max_run_time: at most ")
    (needed,) = (row["change"] for row in answer.solution["least_change"] if row["constraint"] == "max_run_time")
    assert "for the run" in needed


def test_the_probability_of_a_date_falls_with_the_date(catalog: Catalog) -> None:
    days = run_s(make_plan(question(), catalog)) / DAY
    found = []
    for share in (0.7, 1.0, 1.4):
        plan = make_plan(question(finish_by=f"{share * days} d"), catalog)
        assert plan.run is not None
        found.append(plan.run["finish_by_probability"])
    assert found[0] < 0.2 < found[1] < 0.8 < found[2]


def test_a_second_way_agrees_under_interruptions(catalog: Catalog) -> None:
    plan = make_plan(question(failures_per_node_day=1.0), catalog, certify=True)
    assert plan.certificate is not None
    assert plan.certificate["outcome"] == "agrees"


@pytest.mark.parametrize(
    ("run", "word"),
    [
        ({"failures": "rsc-1", "failures_per_node_day": 1}, "either failures"),
        ({"failures": "nobody"}, "run.failures"),
        ({"silent_share": 0.1}, "silent_age"),
        ({"checkpoint": {"interval": "1 s", "store_bandwidth": "100 MB/s"}}, "shorter than one checkpoint"),
        ({"checkpoint": {"intervall": "1 h"}}, "interval"),
        ({"straggler_slowdown": 0.5}, "straggler_slowdown"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(catalog: Catalog, run: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        make_plan(question(**run), catalog)


def test_a_run_needs_its_tokens(catalog: Catalog) -> None:
    document = question()
    del document["workload"]["num_training_tokens"]
    with pytest.raises(SpecError, match="run needs workload"):
        make_plan(document, catalog)
