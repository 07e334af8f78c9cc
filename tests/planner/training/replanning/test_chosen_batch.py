"""A question whose batch is open: the plan at the batch that trains soonest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.cli.reports.training.plan import report
from meshplan.planner.batch_size.noise import NoiseScale, batches_for
from meshplan.planner.compare import compare_plans
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import estimate_plan, explain_instead, make_plan
from meshplan.planner.store import plan_from_document
from meshplan.planner.training import service as training

LENGTH, DEVICES = 4096, 16


def question(noise: dict[str, Any] | None = None, **workload: Any) -> dict[str, Any]:
    stated = {"tokens": "0:256k,1:1M", "batches": ["256k", "512k", "1M"]} if noise is None else noise
    return {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": DEVICES // 8}]},
        "workload": {
            "sequence_length": LENGTH,
            "global_batch_size": "auto",
            "num_training_tokens": "100B",
            "gradient_noise_scale": stated,
            **workload,
        },
    }


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return make_plan(question(), catalog)


def test_the_batch_is_the_one_that_is_done_first(plan: Plan) -> None:
    assert plan.answer is not None
    found = plan.answer["batches"]
    times = {row["batch_tokens"]: row["run_s"] for row in found["rows"]}
    best = min(times, key=times.__getitem__)
    assert found["best_fixed_batch_tokens"] == best == plan.config["global_batch_size"] * LENGTH
    assert plan.predicted["run_time_s"].value == pytest.approx(times[best], rel=1e-6)
    assert found["schedule_s"] <= found["best_fixed_s"] * (1 + 1e-12)


def test_its_question_states_the_batch(plan: Plan, catalog: Catalog) -> None:
    workload = plan.spec["workload"]
    assert {"global_batch_size", "gradient_noise_scale"} & set(workload) == set()
    assert make_plan(plan.spec, catalog).config == plan.config


def test_a_plan_stored_with_its_noise_scale_is_still_answered(plan: Plan, catalog: Catalog) -> None:
    workload = {**plan.spec["workload"], "gradient_noise_scale": {"tokens": "2M"}}
    old = plan_from_document(replace(plan, spec={**plan.spec, "workload": workload}).to_document(), name="an old plan")
    assert plan_from_document(old.to_document(), name="a file").plan_id == old.plan_id
    assert compare_plans([plan, old]).question == ()
    other, _ = explain_instead(old, {"tensor_parallel": 2}, catalog)
    assert other is not None
    assert training.predict(old, {"global_batch_tokens": 2**19}, catalog)
    (fewer,) = training.replan(Question(document=old.spec, catalog=catalog), old, without=(1,))
    assert fewer.plan is not None


def test_another_batch_is_predicted_however_the_plan_states_its_own(plan: Plan, catalog: Catalog) -> None:
    assert "global_batch_tokens" in plan.spec["workload"]
    by_sequences = training.predict(plan, {"global_batch_size": 256}, catalog)
    assert by_sequences == training.predict(plan, {"global_batch_tokens": 256 * LENGTH}, catalog)
    assert by_sequences["iteration_s"].value != plan.predicted["iteration_s"].value


def test_tokens_follow_the_law(plan: Plan) -> None:
    assert plan.answer is not None
    rows = plan.answer["batches"]["rows"]
    # 1/N on average between 256k and 1M, interpolated in the logarithm: (1/256k − 1/1M)/ln 4.
    inverse = (1 / 2**18 - 1 / 2**20) / 1.386294
    for row in rows:
        assert row["tokens"] == pytest.approx(1e11 * (1 + row["batch_tokens"] * inverse), rel=1e-3)


def test_it_is_read_back_and_shown(plan: Plan) -> None:
    again = plan_from_document(plan.to_document(), name="a file")
    assert again.answer == plan.answer
    text = report(again, width=80)
    assert "The same loss at every batch" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_restarts_in_its_own_time(catalog: Catalog) -> None:
    document = {**question(), "run": {"restart_time": "300 d", "failures": "rsc-2"}}
    made = make_plan(document, catalog)
    assert made.answer is not None
    layouts = {
        row["batch_tokens"]: {key: value for key, value in row["config"].items() if key != "num_microbatches"}
        for row in made.answer["batches"]["rows"]
    }
    used = {part["batch_tokens"] for part in made.answer["batches"]["schedule"]}
    # No schedule pays 300 days: what it changes between differs in accumulation alone.
    one = layouts[next(iter(used))]
    for batch in used:
        assert {**layouts[batch], "global_batch_size": 0} == {**one, "global_batch_size": 0}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (question({"tokens": "lots"}), "gradient_noise_scale.tokens"),
        (question(num_training_tokens=None), "needs gradient_noise_scale and num_training_tokens"),
        (question({"tokens": "4M", "batches": [5000]}), "no multiple of 4096"),
        (question(global_batch_size="most"), "whole number"),
        # It was planned with a batch of one sequence, and its report ended as a bug.
        (
            {
                **question(),
                "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}, {"type": "dgx-a100-80gb", "count": 1}]},
            },
            "global_batch_size: auto is not planned on",
        ),
    ],
)
def test_what_is_wrong_is_said(catalog: Catalog, document: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make_plan(document, catalog)


@pytest.mark.parametrize("tokens", ["64M", "64k"])
def test_no_half_or_double_of_the_batch_trains_sooner(catalog: Catalog, tokens: str) -> None:
    """The least batch that was looked at, an eighth of the noise scale, trained 9 % later than an eighth of it."""
    made = make_plan(question({"tokens": tokens}), catalog)
    assert made.answer is not None
    best = made.answer["batches"]["best_fixed_batch_tokens"]
    near = make_plan(question({"tokens": tokens, "batches": [best // 4, best // 2, best, 2 * best]}), catalog)
    assert near.answer is not None
    assert near.answer["batches"]["best_fixed_batch_tokens"] == best


def test_pins_leave_out_batches_that_they_do_not_divide(catalog: Catalog) -> None:
    """They were held against a batch of one sequence, and every question that pins data parallelism was refused."""
    made = make_plan({**question({"tokens": "256k"}), "fixed": {"data_parallel": 16, "micro_batch_size": 4}}, catalog)
    assert made.answer is not None
    batches = [row["batch_tokens"] for row in made.answer["batches"]["rows"]]
    assert len(batches) > 1
    assert all(batch % (64 * LENGTH) == 0 for batch in batches)


def test_batches_that_the_user_names_are_held_against_the_pins(catalog: Catalog) -> None:
    named = question({"tokens": "256k", "batches": [32 * LENGTH, 64 * LENGTH]})
    with pytest.raises(SpecError, match="does not divide the global batch of 32"):
        make_plan({**named, "fixed": {"data_parallel": 16, "micro_batch_size": 4}}, catalog)


def test_pins_that_divide_no_batch_are_said(catalog: Catalog) -> None:
    with pytest.raises(SpecError, match="7 does not divide"):
        make_plan({**question({"tokens": "256k"}), "fixed": {"data_parallel": 7}}, catalog)


def test_one_configuration_has_one_batch(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="ask meshplan plan"):
        estimate_plan(question(), catalog, base=tmp_path)


def test_batches_around_the_noise_are_shared_by_the_devices() -> None:
    noise = NoiseScale(shares=(0.0, 1.0), tokens=(2.0**20, 2.0**23))
    found = batches_for(noise, sequence_length=LENGTH, devices=24)
    assert all(batch % (3 * LENGTH) == 0 for batch in found)
    assert 2**17 <= found[0] <= 2**18
    assert 2**23 <= found[-1] <= 2**24
    assert batches_for(NoiseScale(shares=(0.0,), tokens=(1.0,)), sequence_length=LENGTH, devices=24) == [LENGTH]
