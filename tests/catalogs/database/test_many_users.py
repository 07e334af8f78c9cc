"""Many processes at once on one store: nothing is lost, nothing is there twice, nobody fails.

`tests/benchmarks/many_users.py` does the same with more of everything.
"""

from __future__ import annotations

import sqlalchemy as sa
from store_cases import Store
from store_crowd import crowd

from meshplan.catalogs.database.connection import connect, parse_url, writing
from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.migrations import upgrade
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.tables import jobs
from meshplan.catalogs.database.upgrade import upgrade_database


def test_first_users_make_one_catalog(store: Store) -> None:
    came = crowd("first-use", store.empty(), 4)
    assert came["failures"] == 0, came["errors"]
    assert (came["plans"], came["tags"], came["sequences_differ"]) == (4, 4, True)


def test_upgrades_race_to_one_result(store: Store) -> None:
    url = store.empty()
    engine = connect(parse_url(url))
    upgrade(engine, "0001")
    engine.dispose()
    came = crowd("upgrade", url, 4)
    assert came["failures"] == 0, came["errors"]
    assert not upgrade_database(url).seeds_refreshed


def test_imports_race_to_one_result(store: Store) -> None:
    came = crowd("import", store.seeded(), 4)
    assert came["failures"] == 0, came["errors"]
    assert came["devices"] == ["common", *(f"own-{number}" for number in range(4))]


def test_writers_lose_and_repeat_nothing(store: Store) -> None:
    came = crowd("write", store.seeded(), 4, 10)
    assert came["failures"] == 0, came["errors"]
    assert (came["plans"], came["tags"], came["sequences_differ"]) == (4 * 10 + 10, 1, True)


def test_plans_that_are_tagged_at_once_keep_their_tags(store: Store) -> None:
    """A plan has one tag: of those who give one to the same plan each is told its own, and the last stays."""
    url = store.seeded()
    came = crowd("tag", url, 3, 10)
    assert came["failures"] == 0, came["errors"]
    assert (came["plans"], came["tags"]) == (4, 4)
    engine = open_database(url)
    rows = PlanRows(engine)
    own = [rows.get(f"own-{number}").plan_id for number in range(3)]
    assert own == [f"{number:04x}00000000" for number in range(3)]
    assert str(rows.get("ffff00000000").tag).startswith("shared-")
    engine.dispose()


def test_submitters_and_workers_do_every_question_once(store: Store) -> None:
    url = store.seeded()
    came = crowd("submit", url, 4, 12)
    assert came["failures"] == 0, came["errors"]
    assert came["jobs"] == {"queued": 12}
    came = crowd("work", url, 4)
    assert came["failures"] == 0, came["errors"]
    assert (came["jobs"], came["questions"], came["plans"]) == ({"done": 12}, 12, 12)
    assert (came["attempts"], came["done_without_plan"]) == (12, 0)


def test_killed_workers_lose_and_repeat_nothing(store: Store) -> None:
    came = crowd("kill", store.seeded(), 3, 8)
    assert came["failures"] == 0, came["errors"]
    assert came["kills"] == 8
    assert came["jobs"] == {"done": came["submitted"]}
    assert (came["questions"], came["plans"], came["done_without_plan"]) == (came["submitted"], came["submitted"], 0)
    assert came["sequences_differ"]


def test_numbers_go_on_after_rows_that_another_tool_copied_in(store: Store) -> None:
    url = store.seeded()
    engine = open_database(url)
    queue = Jobs(engine)
    first = queue.submit({}, kind="training", digest="a")
    with writing(engine) as connection:
        row = dict(connection.execute(sa.select(jobs)).mappings().one())
        connection.execute(sa.insert(jobs).values(**{**row, "number": 2, "job_id": "copied", "digest": "b"}))
    upgrade_database(url)
    assert queue.submit({}, kind="training", digest="c").number == first.number + 2
    engine.dispose()
