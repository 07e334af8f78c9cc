"""Plans kept and found again, and what was measured for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError, StoreError
from meshplan.planner import store
from meshplan.planner.core.plan import Interval, Plan
from meshplan.planner.service import make_plan

SPEC = {
    "kind": "training",
    "model": "llama-3.2-1b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 32},
}


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return make_plan(SPEC, catalog)


@pytest.fixture
def rows(database: Path) -> PlanRows:
    return PlanRows(Catalog.open(str(database)).engine)


@pytest.mark.parametrize("handle", ["latest", "baseline", "id", "prefix"])
def test_a_stored_plan_is_found_by_every_handle(handle: str, plan: Plan, rows: PlanRows) -> None:
    assert store.save(plan, rows, tag="baseline")
    given = {"id": plan.plan_id, "prefix": plan.plan_id[:5]}.get(handle, handle)
    found = store.load(given, rows)
    assert found.to_document() == plan.to_document()


def test_the_same_plan_is_stored_once(plan: Plan, rows: PlanRows) -> None:
    assert store.save(plan, rows)
    later = replace(plan, solution={**plan.solution, "wall_s": 99.0})
    assert not store.save(later, rows)
    assert store.load("latest", rows).solution["wall_s"] == plan.solution["wall_s"]


def test_a_plan_file_is_as_good_as_a_stored_plan(plan: Plan, rows: PlanRows, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_document(clocks=False)))
    assert store.load(str(path), rows).plan_id == plan.plan_id


def test_an_edited_plan_file_is_refused(plan: Plan, rows: PlanRows, tmp_path: Path) -> None:
    document = plan.to_document()
    document["predicted"]["iteration_s"]["value"] /= 2
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError, match="was edited"):
        store.load(str(path), rows)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"kind": "training"}',
        '{"kind": "training", "spec": 1, "spec_digest": 2, "catalog_digest": 3, "config": 4, "predicted": 5}',
        '{"plan_id": null, "predicted": {"mfu": {"value": 1}}}',
    ],
)
def test_a_file_that_is_no_plan_is_refused(content: str, rows: PlanRows, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(StoreError, match="not the JSON of a plan"):
        store.load(str(path), rows)


def test_a_missing_handle_gets_the_closest_one(plan: Plan, rows: PlanRows) -> None:
    with pytest.raises(StoreError, match="no plan is stored yet"):
        store.load("latest", rows)
    store.save(plan, rows, tag="baseline")
    with pytest.raises(StoreError, match="did you mean 'baseline'"):
        store.load("baselin", rows)
    with pytest.raises(SpecError, match="cannot read"):
        store.load("missing/plan.json", rows)


def test_what_was_measured_is_attached(plan: Plan, rows: PlanRows) -> None:
    store.save(plan, rows)
    store.record("latest", {"iteration_s": 2.5, "mfu": 0.4}, rows)
    store.record("latest", {"iteration_s": 2.6}, rows)
    assert [run.document["iteration_s"] for run in rows.runs(plan.plan_id)] == [2.5, 2.6]


def test_every_wrong_measurement_is_reported_and_none_is_stored(plan: Plan, rows: PlanRows) -> None:
    store.save(plan, rows)
    measured = {"iteration": 1.0, "mfu": "0.4", "tokens_per_s": -1, "hfu": float("nan"), "samples_per_s": True}
    with pytest.raises(SpecError) as caught:
        store.record("latest", {**measured, "iteration_s": 2.0}, rows)
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert set(found) == set(measured)
    assert "did you mean 'iteration_s'" in found["iteration"]
    assert "problems in what was measured" in str(caught.value)
    assert rows.runs(plan.plan_id) == ()


def test_an_empty_measurement_says_what_a_plan_predicts(plan: Plan, rows: PlanRows) -> None:
    store.save(plan, rows)
    with pytest.raises(SpecError, match="iteration_s"):
        store.record("latest", {}, rows)


def test_a_plan_without_predictions_records_nothing(plan: Plan, rows: PlanRows) -> None:
    bare = replace(plan, kind="rank-mapping", predicted={}, answer={"assignment": [0, 1]})
    store.save(bare, rows)
    assert store.load("latest", rows).answer == {"assignment": [0, 1]}
    with pytest.raises(SpecError, match="no metric"):
        store.record("latest", {"iteration_s": 1.0}, rows)


def test_intervals_survive_the_store(plan: Plan, rows: PlanRows) -> None:
    store.save(plan, rows)
    assert all(isinstance(item, Interval) for item in store.load("latest", rows).predicted.values())
