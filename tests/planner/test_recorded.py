"""From recorded runs to the constants of one cluster, and back: nobody else notices, and undoing leaves no trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import writing
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner import recorded, store
from meshplan.planner.core.plan import Plan, canonical_json
from meshplan.planner.service import estimate_plan, explain

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"name": "lab", "nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
    "fixed": {"tensor_parallel": 2, "data_parallel": 4, "zero_stage": 1, "activation_recompute": "full"},
}
SERVING: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-8b",
    "cluster": {"name": "lab", "nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"input_length": 500, "output_length": 60, "concurrency": 8, "num_requests": 32},
    "fixed": {"tensor_parallel": 1},
    "constraints": {"max_devices": 1},
}
OTHERS = (
    {"nodes": [{"type": "dgx-h100", "count": 1}]},
    {"name": "other", "nodes": [{"type": "dgx-h100", "count": 1}]},
    {"name": "lab", "nodes": [{"type": "dgx-h200", "count": 1}]},
)


@pytest.fixture
def own(seeded: Path, tmp_path: Path) -> Catalog:
    path = tmp_path / "own.sqlite"
    shutil.copy(seeded, path)
    return Catalog.open(str(path))


def planned(catalog: Catalog, spec: dict[str, Any] = SPEC, **changes: Any) -> Plan:
    made = estimate_plan({**spec, **changes}, catalog)
    store.save(made, PlanRows(catalog.engine))
    return made


def record(catalog: Catalog, made: Plan, factor: float, **more: float) -> None:
    metric = "iteration_s" if made.kind == "training" else "tpot_mean_s"
    figures = {metric: made.predicted[metric].value * factor, **more}
    store.record(made.plan_id, figures, PlanRows(catalog.engine))


def calibrated(catalog: Catalog, accepted: tuple[str, ...] = ()) -> recorded.Gathered:
    found = recorded.gathered(PlanRows(catalog.engine), catalog, accepted=accepted)
    for made in recorded.own_sets(found):
        recorded.keep(made, catalog)
    return found


def text(made: Plan) -> str:
    return canonical_json(made.to_document(clocks=False))


@pytest.mark.parametrize("spec", [SPEC, SERVING])
def test_own_runs_change_plans_of_their_cluster_and_of_no_other(own: Catalog, spec: dict[str, Any]) -> None:
    before = [text(estimate_plan({**spec, "cluster": cluster}, own)) for cluster in OTHERS]
    made = planned(own, spec)
    record(own, made, 1.2)
    calibrated(own)
    after = estimate_plan(spec, own)
    metric = "iteration_s" if spec is SPEC else "tpot_mean_s"
    assert made.predicted[metric].value < after.predicted[metric].value < 1.25 * made.predicted[metric].value
    assert [text(estimate_plan({**spec, "cluster": cluster}, own)) for cluster in OTHERS] == before


def test_a_recorded_serving_plan_says_most_of_its_own_model_and_lengths(own: Catalog) -> None:
    loads = (  # long runs: how fast clients begin is the API server's pace, which no engine's constant moves
        {"workload": {**SERVING["workload"], "concurrency": 32, "num_requests": 1280}},
        {"workload": {**SERVING["workload"], "output_length": 200}},
        {"model": "qwen3-8b"},
    )

    def per_token() -> list[float]:
        return [estimate_plan({**SERVING, **load}, own).predicted["tpot_mean_s"].value for load in loads]

    before = per_token()
    record(own, planned(own, SERVING), 1.2)
    calibrated(own)
    at_others, lengths, model = (after / first for after, first in zip(per_token(), before, strict=True))
    assert at_others == pytest.approx(1.2, abs=0.03)
    assert 1.0 < model < lengths < at_others


@pytest.mark.parametrize("spec", [SPEC, SERVING])
def test_undoing_brings_the_answers_back_bit_for_bit(own: Catalog, spec: dict[str, Any]) -> None:
    made = planned(own, spec)
    rows = own.own_rows()
    record(own, made, 1.2)
    calibrated(own)
    assert estimate_plan(spec, own).plan_id != made.plan_id
    (removed,) = recorded.undo(own)
    assert "@lab:dgx-h100" in removed
    assert text(estimate_plan(spec, own)) == text(made)
    assert own.own_rows() == rows


def test_calibrating_again_changes_nothing(own: Catalog) -> None:
    """Recordings count once, whatever set was stored before."""
    made = planned(own)
    record(own, made, 1.2, peak_memory_bytes=made.predicted["peak_memory_bytes"].value)
    calibrated(own)
    first = estimate_plan(SPEC, own)
    calibrated(own)
    assert text(estimate_plan(SPEC, own)) == text(first)


def test_the_interval_and_where_it_comes_from_are_told(own: Catalog) -> None:
    made = planned(own)
    record(own, made, 1.1)
    calibrated(own)
    once = estimate_plan(SPEC, own)
    other = planned(own, fixed={**SPEC["fixed"], "tensor_parallel": 4, "data_parallel": 2})
    record(own, other, 1.0)
    calibrated(own)
    twice = estimate_plan(SPEC, own)
    widths = [plan.provenance["calibration"]["time_error_p90"] for plan in (made, once, twice)]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3
    sentence = explain(twice).calibration
    assert "adapted to 2 own runs (megatron, hopper@lab:dgx-h100)" in sentence
    assert "without them" in sentence
    source = twice.provenance["sources"]["calibration"]
    assert made.plan_id in source
    assert other.plan_id in source
    assert "iteration_s" in source


def test_an_outlier_stays_out_until_its_owner_vouches_for_it(own: Catalog) -> None:
    made = planned(own)
    record(own, made, 10.0)
    (left,) = calibrated(own).left_out
    assert "outlier" in left.reason
    assert estimate_plan(SPEC, own).plan_id == made.plan_id
    found = calibrated(own, accepted=(made.plan_id,))
    assert found.left_out == ()
    assert estimate_plan(SPEC, own).predicted["iteration_s"].value > 1.3 * made.predicted["iteration_s"].value


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e9, 1e-9])
def test_what_no_run_can_have_taken_is_refused(own: Catalog, value: float) -> None:
    made = planned(own)
    with pytest.raises(SpecError, match="iteration_s"):
        store.record(made.plan_id, {"iteration_s": value}, PlanRows(own.engine))
    assert PlanRows(own.engine).runs(made.plan_id) == ()


def test_figures_of_another_run_are_left_out_with_the_reason(own: Catalog) -> None:
    made = planned(own)
    record(own, made, 1.0, tokens_per_s=made.predicted["tokens_per_s"].value * 2.0)
    record(own, made, 1.0, peak_memory_bytes=1e9)
    record(own, made, 0.25)
    reasons = [item.reason for item in calibrated(own, accepted=(made.plan_id,)).left_out]
    assert "another model, batch or number of devices" in reasons[0]
    assert "less than weights and optimizer states" in reasons[1]
    assert "peak rate" in reasons[2]
    assert estimate_plan(SPEC, own).plan_id == made.plan_id


@pytest.mark.parametrize("document", [[1], {}, {"iteration_s": "fast"}, {"iteration_s": True}, {"speed": 3.0}])
def test_a_damaged_recording_is_left_out_and_the_others_count(own: Catalog, document: object) -> None:
    made = planned(own)
    record(own, made, 1.1)
    record(own, made, 1.1)
    with writing(own.engine) as connection:
        changed = sa.update(tables.recorded_runs).where(tables.recorded_runs.c.id == 1).values(document=document)
        connection.execute(changed)
    found = calibrated(own)
    assert [item.number for item in found.left_out] == [1]
    assert [run.recording.number for run in found.runs["training"]] == [2]


def test_a_serving_plan_without_a_load_is_left_out_with_the_reason(own: Catalog) -> None:
    lengths = {key: value for key, value in SERVING["workload"].items() if key != "concurrency"}
    made = planned(own, SERVING, workload=lengths)
    record(own, made, 1.0)
    (left,) = calibrated(own).left_out
    assert "chose its load itself" in left.reason
