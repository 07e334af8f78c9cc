"""Plans in the database."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.engine import Engine

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.errors import StoreError


@pytest.fixture
def rows(empty_engine: Engine) -> PlanRows:
    return PlanRows(empty_engine)


def plan(plan_id: str, kind: str = "training") -> dict[str, Any]:
    return {
        "plan_id": plan_id,
        "kind": kind,
        "spec_digest": "s",
        "catalog_digest": "c",
        "config": {"x": [1, 2.5, None]},
    }


def test_the_same_plan_twice_is_one_row(rows: PlanRows) -> None:
    assert rows.insert(plan("aaaa11112222"), name="first")
    assert not rows.insert(plan("aaaa11112222"), name="again")
    assert [row.plan_id for row in rows.list()] == ["aaaa11112222"]


def test_a_plan_that_is_stored_again_has_the_name_that_was_given_last(rows: PlanRows) -> None:
    """Who asks an answered question with ``--name chat`` types ``emit chat`` next; the name was not taken."""
    rows.insert(plan("aaaa11112222"))
    rows.insert(plan("aaaa11112222"), name="chat")
    assert rows.get("chat").plan_id == "aaaa11112222"
    rows.insert(plan("aaaa11112222"))
    assert rows.get("chat").plan_id == "aaaa11112222"
    rows.insert(plan("aaaa11112222"), name="rag")
    assert rows.get("rag").name == "rag"


def test_latest_is_what_was_stored_last_also_if_it_was_stored_before(rows: PlanRows) -> None:
    """Who plans an answered question again and emits ``latest`` got the files of another plan."""
    rows.insert(plan("aaaa11112222"))
    rows.insert(plan("bbbb11112222"))
    rows.insert(plan("aaaa11112222"))
    assert rows.get("latest").plan_id == "aaaa11112222"


def test_a_second_opinion_that_comes_later_is_kept(rows: PlanRows) -> None:
    agrees = {"outcome": "agrees", "checks": [{"agrees": True}]}
    rows.insert(plan("aaaa11112222"))
    for certificate in (agrees, {"outcome": "unfinished", "checks": []}):
        rows.insert({**plan("aaaa11112222"), "certificate": certificate})
        assert rows.get("latest").document == {**plan("aaaa11112222"), "certificate": agrees}
    rows.insert(plan("aaaa11112222"))
    assert rows.get("latest").document["certificate"] == agrees


def test_a_plan_comes_back_as_it_went_in(rows: PlanRows) -> None:
    rows.insert(plan("aaaa11112222"))
    assert rows.get("aaaa11112222").document == plan("aaaa11112222")


def test_plans_are_found_by_id_prefix_tag_and_latest(rows: PlanRows) -> None:
    rows.insert(plan("aaaa11112222"), tag="baseline")
    rows.insert(plan("bbbb11112222"))
    assert rows.get("aaaa").plan_id == rows.get("baseline").plan_id == "aaaa11112222"
    assert rows.get("latest").plan_id == "bbbb11112222"
    assert [row.plan_id for row in rows.list()] == ["bbbb11112222", "aaaa11112222"]


def test_a_name_that_one_plan_has_finds_it(rows: PlanRows) -> None:
    """Who calls a plan ``--name chat`` types ``emit chat`` next."""
    rows.insert(plan("aaaa11112222"), name="chat")
    rows.insert(plan("bbbb11112222"), name="rag", tag="chat-now")
    assert rows.get("chat").plan_id == "aaaa11112222"
    with pytest.raises(StoreError, match="did you mean 'chat'"):
        rows.get("chatt")
    rows.insert(plan("cccc11112222"), name="chat")
    with pytest.raises(StoreError, match="2 plans are called 'chat': cccc11112222, aaaa11112222"):
        rows.get("chat")
    rows.insert(plan("dddd11112222"), tag="chat")
    assert rows.get("chat").plan_id == "dddd11112222", "a tag is its plan's alone"


def test_kinds_are_told_apart(rows: PlanRows) -> None:
    rows.insert(plan("aaaa11112222"))
    rows.insert(plan("bbbb11112222", kind="gpu-allocation"))
    assert [row.plan_id for row in rows.list(kind="gpu-allocation")] == ["bbbb11112222"]


def test_ambiguous_and_unknown_handles(rows: PlanRows) -> None:
    with pytest.raises(StoreError, match="no plan is stored yet"):
        rows.get("latest")
    rows.insert(plan("aaaa11112222"), tag="baseline")
    rows.insert(plan("aaaa33334444"))
    with pytest.raises(StoreError, match="2 plans start with 'aaaa': aaaa11112222, aaaa33334444"):
        rows.get("aaaa")
    with pytest.raises(StoreError, match="no stored plan 'aaa'"):
        rows.get("aaa")
    with pytest.raises(StoreError, match="did you mean 'baseline'"):
        rows.get("basline")
    with pytest.raises(StoreError, match="no stored plan '%'"):
        rows.get("%")


def test_wildcards_are_plain_characters(rows: PlanRows) -> None:
    rows.insert(plan("aaaa11112222"))
    with pytest.raises(StoreError, match="no stored plan"):
        rows.get("____")


def test_a_tag_moves(rows: PlanRows) -> None:
    rows.insert(plan("aaaa11112222"), tag="best")
    rows.insert(plan("bbbb11112222"), tag="best")
    assert rows.get("best").plan_id == "bbbb11112222"
    assert rows.get("aaaa").tag is None
    assert rows.tag("aaaa", "best").tag == "best"
    assert rows.tag("aaaa", None).tag is None
    with pytest.raises(StoreError, match="cannot be a tag"):
        rows.tag("aaaa", "latest")


def test_untagging_one_leaves_the_other_untagged_plans(rows: PlanRows) -> None:
    rows.insert(plan("aaaa11112222"))
    rows.insert(plan("bbbb11112222"), tag="x")
    rows.tag("x", None)
    assert [row.tag for row in rows.list()] == [None, None]


def test_an_id_is_its_plans_alone(rows: PlanRows) -> None:
    """Who deletes by id must not delete what somebody else called so."""
    rows.insert(plan("aaaa11112222"))
    rows.insert(plan("bbbb11112222"), tag="cccc11112222")
    with pytest.raises(StoreError, match="cannot be a tag: another plan has this id"):
        rows.tag("bbbb", "aaaa11112222")
    assert rows.get("bbbb").tag == "cccc11112222"
    rows.insert(plan("cccc11112222"))  # a plan that is made later
    assert rows.get("cccc11112222").plan_id == "cccc11112222"
    assert rows.delete("cccc11112222").plan_id == "cccc11112222"
    assert rows.get("cccc11112222").plan_id == "bbbb11112222"


def test_runs_are_recorded_and_go_with_the_plan(rows: PlanRows) -> None:
    rows.insert(plan("aaaa11112222"))
    rows.record("aaaa", {"tokens_per_s": 1.0})
    rows.record("latest", {"tokens_per_s": 2.0})
    assert [run.document["tokens_per_s"] for run in rows.runs("aaaa")] == [1.0, 2.0]
    assert rows.delete("aaaa").plan_id == "aaaa11112222"
    rows.insert(plan("aaaa11112222"))
    assert rows.runs("aaaa") == ()
    with pytest.raises(StoreError, match="no stored plan"):
        rows.record("cccc", {})
