"""Commands on finished plans: plans, explain, emit, compare."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import SPEC, Command

from meshplan.catalogs.units import format_duration
from meshplan.planner.core.plan import Plan

OTHER = f"{SPEC}fixed: {{activation_recompute: full}}\n"


@pytest.fixture
def database(
    request: pytest.FixtureRequest,
    stored: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A database that keeps the plan, and the other one where a test asks for it."""
    questions = (SPEC, OTHER) if "other_id" in request.fixturenames else (SPEC,)
    path = Path(shutil.copy(stored(*questions), tmp_path / "catalog.sqlite"))
    monkeypatch.setenv("MESHPLAN_DB", str(path))
    return path


def id_of(meshplan: Command, tag: str) -> str:
    return str(meshplan("plans", "show", tag, "--format", "json").json["plan_id"])


@pytest.fixture
def plan_id(meshplan: Command) -> str:
    found = id_of(meshplan, "0")
    assert meshplan("plans", "tag", found, "base").code == 0
    return found


@pytest.fixture
def other_id(meshplan: Command) -> str:
    found = id_of(meshplan, "1")
    assert meshplan("plans", "tag", "1", "--remove").code == 0
    return found


# --- plans ---------------------------------------------------------------------------------------------------------


def test_a_list_has_the_answers(meshplan: Command, plan_id: str) -> None:
    [row] = meshplan("plans", "list", "--format", "json").json
    made = meshplan("plans", "show", plan_id, "--format", "json").json
    assert row["answer"].endswith(f"{format_duration(made['predicted']['iteration_s']['value'])} a step")
    shown = " ".join(meshplan("plans", "list").out.split())
    assert "Answer" in shown
    assert row["status"] == "optimal"
    assert "optimal" not in shown


def test_tags_move_and_go(meshplan: Command, plan_id: str, other_id: str) -> None:
    assert meshplan("plans", "tag", other_id, "base").code == 0
    tags = {row["plan_id"]: row["tag"] for row in json.loads(meshplan("plans", "list", "--format", "json").out)}
    assert tags == {plan_id: None, other_id: "base"}
    assert meshplan("plans", "tag", "base", "--remove").code == 0
    assert meshplan("plans", "show", "base").code == 4
    assert meshplan("plans", "tag", plan_id).code == 2
    assert meshplan("plans", "tag", plan_id, "latest").code == 4


def test_a_deleted_plan_is_gone(meshplan: Command, plan_id: str) -> None:
    assert json.loads(meshplan("plans", "delete", "base", "--format", "json").out) == {
        "plan_id": plan_id,
        "deleted": True,
    }
    assert json.loads(meshplan("plans", "list", "--format", "json").out) == []
    assert meshplan("plans", "show", plan_id).code == 4


def test_a_wrong_handle_gets_a_suggestion(meshplan: Command, plan_id: str) -> None:
    outcome = meshplan("plans", "show", "bace")
    assert outcome.code == 4
    assert "did you mean 'base'" in outcome.err


def test_kinds_filter_the_list(meshplan: Command, plan_id: str) -> None:
    listed = meshplan("plans", "list", "--kind", "training", "--format", "json").out
    assert [row["plan_id"] for row in json.loads(listed)] == [plan_id]
    assert json.loads(meshplan("plans", "list", "--kind", "rank-mapping", "--format", "json").out) == []


def test_measurements_are_attached_and_compared(meshplan: Command, plan_id: str, tmp_path: Path) -> None:
    measured = tmp_path / "measured.json"
    measured.write_text('{"iteration_s": 2.0, "mfu": 0.41}')
    rows = json.loads(meshplan("plans", "record", "base", measured, "--format", "json").out)
    assert [row["metric"] for row in rows] == ["iteration_s", "mfu"]
    document = json.loads(meshplan("compare", "base", "--format", "json").out)
    assert document["measured"][0]["plan_id"] == plan_id
    assert document["measured"][0]["metrics"][0]["measured"] == 2.0
    assert "measured" in meshplan("compare", "base").out


def test_milliseconds_are_doubted_also_below_a_thousand_times(meshplan: Command, plan_id: str, tmp_path: Path) -> None:
    predicted = meshplan("plans", "show", plan_id, "--format", "json").json["predicted"]["iteration_s"]["value"]
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"iteration_s": 700.0 * predicted}))
    outcome = meshplan("plans", "record", plan_id, measured)
    assert outcome.code == 0
    assert "is 700 times the predicted" in outcome.err
    assert "SI units are meant" in outcome.err


def test_unknown_metrics_are_refused_with_the_closest(meshplan: Command, plan_id: str, tmp_path: Path) -> None:
    measured = tmp_path / "measured.json"
    measured.write_text('{"iteration": 2.0, "mfu": -1}')
    outcome = meshplan("plans", "record", "base", measured)
    assert outcome.code == 2
    assert "2 problems in what was measured" in outcome.err
    assert "did you mean 'iteration_s'" in outcome.err
    assert meshplan("compare", "base").code == 4


# --- compare -------------------------------------------------------------------------------------------------------


def test_a_comparison_lists_differences_and_the_reason(meshplan: Command, plan_id: str, other_id: str) -> None:
    document = json.loads(meshplan("compare", "base", other_id, "--format", "json").out)
    assert document["plans"] == [plan_id, other_id]
    assert [item["field"] for item in document["question"]] == ["fixed.activation_recompute"]
    recompute = next(item["values"] for item in document["choices"] if item["field"] == "activation_recompute")
    assert recompute[0] in ("none", "block")
    assert recompute[1] == "full"
    assert "recompute" in document["reasons"][0]
    text = meshplan("compare", "base", other_id).out
    assert max(map(len, text.splitlines())) <= 80
    assert f"{other_id}: a step takes" in text


def test_a_pair_shows_its_intervals(meshplan: Command, plan_id: str, other_id: str) -> None:
    lines = meshplan("compare", plan_id, other_id).out.splitlines()
    step = next(place for place, line in enumerate(lines) if line.startswith("step time"))
    assert re.fullmatch(r"between +\S+ … \S+ m?s +\S+ … \S+ m?s +(overlap|disjoint)", lines[step + 1])
    rows = list(csv.DictReader(io.StringIO(meshplan("compare", plan_id, other_id, "--format", "csv").out)))
    assert {"predicted", "predicted, low", "predicted, high"} <= {row["section"] for row in rows}


def test_another_price_is_named_as_what_the_figures_rest_on(meshplan: Command, plan_id: str, tmp_path: Path) -> None:
    first = Plan.from_document(meshplan("plans", "show", plan_id, "--format", "json").json)
    later = tmp_path / "later.json"
    later.write_text(json.dumps(replace(first, catalog_digest="0" * 64).to_document()))
    text = meshplan("compare", plan_id, later).out
    assert "catalog entries" in text
    assert "meshplan catalog history" in text
    assert "make the same choices" in text


def test_more_than_two_plans_fit_the_page(meshplan: Command, plan_id: str, other_id: str) -> None:
    text = meshplan("compare", plan_id, other_id, plan_id).out
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("form", ["csv", "markdown", "yaml"])
def test_a_comparison_has_every_form(form: str, meshplan: Command, plan_id: str, other_id: str) -> None:
    outcome = meshplan("compare", plan_id, other_id, "--format", form)
    assert outcome.code == 0
    assert "activation_recompute" in outcome.out


# --- explain -------------------------------------------------------------------------------------------------------


def test_explain_says_why(meshplan: Command, plan_id: str) -> None:
    outcome = meshplan("explain", "base")
    assert outcome.code == 0
    for words in (
        "Proof:",
        "optimal under the model",
        "Limits:",
        "device memory",
        "Constants:",
        "Why not …?",
        "Sources",
    ):
        assert words in outcome.out
    document = json.loads(meshplan("explain", "base", "--format", "json").out)
    assert document["plan_id"] == plan_id
    assert document["alternatives"]
    assert sum(document["share_of_time_by_evidence"].values()) == pytest.approx(1.0)


def test_explain_draws_the_schedule(meshplan: Command, plan_id: str, tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    outcome = meshplan("explain", "base", "--timeline", picture)
    assert outcome.code == 0
    assert "stage 0 " in outcome.out
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    document = json.loads(meshplan("explain", "base", "--timeline", picture, "--force", "--format", "json").out)
    assert document["step_s"] > 0
    refused = meshplan("explain", "base", "--timeline", picture)
    assert (refused.code, "--force" in refused.err) == (6, True)
    assert meshplan("explain", "base", "--timeline", tmp_path / "missing" / "schedule.svg").code == 6


def test_explain_prices_another_choice(meshplan: Command, plan_id: str) -> None:
    outcome = meshplan("explain", "base", "--instead", "tensor_parallel=4", "activation_recompute=full")
    assert outcome.code == 0
    assert outcome.out.startswith("tensor_parallel=4, activation_recompute=full instead: +")
    document = json.loads(meshplan("explain", "base", "--instead", "tensor_parallel=4", "--format", "json").out)
    assert document["other"]["config"]["tensor_parallel"] == 4
    assert document["comparison"]["plans"][0] == plan_id
    short = json.loads(meshplan("explain", "base", "--instead", "tp=4", "--format", "json").out)
    assert short["instead"] == {"tensor_parallel": 4}
    assert short["reason"] == document["reason"]
    several = json.loads(meshplan("explain", "base", "--instead", "tp=4,pp=1", "--format", "json").out)
    assert several["instead"] == {"tensor_parallel": 4, "pipeline_parallel": 1}


def test_explain_says_why_another_choice_does_not_fit(meshplan: Command, plan_id: str) -> None:
    choices = ["tensor_parallel=1", "pipeline_parallel=1", "activation_recompute=none", "micro_batch_size=64"]
    outcome = meshplan("explain", "base", "--instead", *choices)
    assert outcome.code == 3
    assert "does not fit" in outcome.out
    document = json.loads(meshplan("explain", "base", "--instead", *choices, "--format", "json").out)
    assert document["other"] is None
    assert "does not fit" in document["reason"]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("tensor_paralel=4", "did you mean 'tensor_parallel'"),
        ("tpp=4", "unknown choice; did you mean 'tp'"),
        ("tensor_parallel=3", "does not divide"),
        ("tensor_parallel", "CHOICE=VALUE"),
        ("tensor_parallel=many", "whole number"),
        ("sequence_parallel=1", "true or false"),
    ],
)
def test_explain_refuses_choices_that_are_none(choice: str, words: str, meshplan: Command, plan_id: str) -> None:
    outcome = meshplan("explain", "base", "--instead", choice)
    assert outcome.code == 2
    assert words in outcome.err


# --- emit ----------------------------------------------------------------------------------------------------------


def test_a_stored_plan_is_emitted_as_planned(meshplan: Command, plan_id: str, spec: Path, tmp_path: Path) -> None:
    assert meshplan("emit", "base", "--target", "megatron", "--out", tmp_path / "a").code == 0
    assert meshplan("plan", spec, "--out", tmp_path / "b").code == 0
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {path.name for path in (tmp_path / "b").iterdir()}
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_a_plan_file_can_be_shown_explained_compared_and_emitted(
    meshplan: Command, plan_id: str, tmp_path: Path
) -> None:
    meshplan("emit", "base", "--out", tmp_path / "a")
    file = tmp_path / "a" / "plan.json"
    other_database = ("--db", tmp_path / "other.sqlite")
    assert meshplan("plans", "show", file, *other_database).code == 0
    assert meshplan("explain", file, *other_database).code == 0
    assert meshplan("compare", file, file, *other_database).code == 0
    assert meshplan("emit", file, "--out", tmp_path / "b", *other_database).code == 0
    assert file.read_bytes() == (tmp_path / "b" / "plan.json").read_bytes()


def test_an_unknown_target_is_refused_with_the_closest(meshplan: Command, plan_id: str, tmp_path: Path) -> None:
    outcome = meshplan("emit", "base", "--target", "megatorn", "--out", tmp_path / "a")
    assert outcome.code == 6
    assert "did you mean 'megatron'" in outcome.err
    assert not (tmp_path / "a").exists()
