"""Studies and their points: claimed by one, stored once, taken up again when an owner is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.sqlite import copy_without, engine_of
from meshplan.catalogs.database.state import catalog_state
from meshplan.catalogs.database.studies.points import Points, PointState
from meshplan.catalogs.database.studies.study_rows import StudyRows
from meshplan.catalogs.database.tables import WRITTEN_BY_ANSWERS
from meshplan.catalogs.errors import StoreError

LONG_S, NOT_AT_ALL_S = 1000.0, -60.0
PLAN = {"plan_id": "0123456789ab", "kind": "training", "spec_digest": "s", "catalog_digest": "c"}
ANSWER: dict[str, Any] = {"status": "optimal", "predicted": {"tokens_per_s": 2.5}}


@pytest.fixture
def points(empty_engine: Engine) -> Points:
    return Points(empty_engine)


def state(points: Points, digest: str = "a") -> PointState:
    return points.states([digest])[digest]


def test_from_waiting_to_the_stored_answer(points: Points) -> None:
    points.add(["a", "b", "a"])
    assert points.states("abc") == {"a": PointState.WAITING, "b": PointState.WAITING}
    assert points.claim("a", "me", dead_after_s=LONG_S)
    assert not points.claim("a", "you", dead_after_s=LONG_S)
    assert not points.claim("nothing", "you", dead_after_s=LONG_S)
    assert points.finish("a", "me", ANSWER, plan=PLAN, name="mine")
    done = points.of(["a"])["a"]
    assert (done.state, done.answer, done.plan_id, done.attempts) == (PointState.DONE, ANSWER, "0123456789ab", 1)
    assert PlanRows(points.engine).get("0123456789ab").name == "mine"
    points.add(["a"])  # another study asks the same
    assert points.of(["a"])["a"] == done
    assert not points.claim("a", "you", dead_after_s=NOT_AT_ALL_S)


def test_an_answer_without_a_plan_is_an_answer(points: Points) -> None:
    points.add(["a"])
    points.claim("a", "me", dead_after_s=LONG_S)
    assert points.finish("a", "me", {"status": "infeasible"}, plan=None)
    assert (state(points), PlanRows(points.engine).list()) == (PointState.DONE, ())


def test_the_claim_of_a_dead_owner_lapses_and_what_it_says_later_is_not_stored(points: Points) -> None:
    points.add(["a"])
    points.claim("a", "dead", dead_after_s=LONG_S)
    points.beat("dead")
    assert not points.claim("a", "me", dead_after_s=LONG_S)
    assert points.claim("a", "me", dead_after_s=NOT_AT_ALL_S)
    assert not points.finish("a", "dead", ANSWER, plan=PLAN)
    assert not points.fail("a", "dead", {"title": "no"})
    assert not points.died("a", "dead", {"title": "no"}, most_deaths=1)
    points.release("dead")
    assert PlanRows(points.engine).list() == ()
    assert points.finish("a", "me", ANSWER, plan=PLAN)
    assert (points.of("a")["a"].attempts, len(PlanRows(points.engine).list())) == (2, 1)


def test_a_point_fails_once_it_has_ended_too_many_processes(points: Points) -> None:
    points.add(["a"])
    for again in (True, True, False):
        assert points.claim("a", "me", dead_after_s=LONG_S)
        assert points.died("a", "me", {"title": "killed"}, most_deaths=3) is again
    assert (state(points), points.of("a")["a"].problem) == (PointState.FAILED, {"title": "killed"})
    assert points.retry(["a", "b"]) == 1
    found = points.of("a")["a"]
    assert (found.state, found.deaths, found.problem) == (PointState.WAITING, 0, None)


def test_what_an_owner_gives_back_waits_again(points: Points) -> None:
    points.add(["a", "b"])
    points.claim("a", "me", dead_after_s=LONG_S)
    points.claim("b", "you", dead_after_s=LONG_S)
    points.release("me")
    assert points.states("ab") == {"a": PointState.WAITING, "b": PointState.RUNNING}


def test_of_many_claimers_at_once_one_gets_each_point(points: Points) -> None:
    digests = [f"d{number}" for number in range(40)]
    points.add(digests)
    got: dict[str, list[str]] = {name: [] for name in "xyz"}

    def work(name: str) -> None:
        own = Points(points.engine)
        got[name] += [one for one in digests if own.claim(one, name, dead_after_s=LONG_S)]

    threads = [threading.Thread(target=work, args=(name,)) for name in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one for taken in got.values() for one in taken) == sorted(digests)


def test_more_points_than_one_statement_takes(points: Points) -> None:
    digests = [f"{number:04d}" for number in range(1000)]
    points.add(digests)
    assert set(points.states(digests)) == set(digests)


def test_a_study_is_found_by_id_beginning_and_name(empty_engine: Engine) -> None:
    rows = StudyRows(empty_engine)
    rows.put("0123abcd", name="old", document={"points": []})
    rows.put("0123ffff", name="prices", document={"points": [1]})
    rows.put("0123abcd", name="rates", document={"points": [2]})
    assert [row.name for row in rows.list()] == ["prices", "rates"]
    assert rows.get("rates").document == {"points": [2]}
    assert rows.get("0123abcd") == rows.get("0123a") == rows.get("rates")
    assert rows.get("latest").name == "prices"
    with pytest.raises(StoreError, match="2 studies start with '0123'"):
        rows.get("0123")
    with pytest.raises(StoreError, match="no stored study 'price'; did you mean 'prices'"):
        rows.get("price")


def test_a_copy_of_the_catalog_answers_as_the_catalog_does(database_file: Any) -> None:
    catalog = Catalog.open(str(database_file))
    points = Points(catalog.engine)
    points.add(["a"])
    points.claim("a", "me", dead_after_s=LONG_S)
    points.finish("a", "me", ANSWER, plan=PLAN)
    copied = engine_of(copy_without(catalog.engine, WRITTEN_BY_ANSWERS))
    assert catalog_state(copied) == catalog_state(catalog.engine)
    assert Catalog(copied).device("h100-sxm-80gb") == catalog.device("h100-sxm-80gb")
    assert (PlanRows(copied).list(), Points(copied).of("a")) == ((), {})
    assert len(PlanRows(catalog.engine).list()) == 1
