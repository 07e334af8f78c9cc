"""Points of studies in the database: each question once, whoever asks it, and who is at work on it.

::

    add ─► waiting ──claim──► running ──finish──► done
              ▲                 │ ├─────fail────► failed ──retry──► waiting
              └──release, died──┘ │
                  (claim: its owner was not heard of for long enough)

A point is named by the digest of its question, so two studies that ask the same thing share it. An owner (one running
``meshplan sweep``) claims a point, says now and then that it lives, and stores the answer together with its plan in
one transaction that holds only while the claim does: an answer is stored once, however many are at work and whoever is
killed. Every change is one statement that decides by the row it locks; ages are told by the clock of the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Engine

from meshplan.catalogs.database.connection import queueing, reading, writing
from meshplan.catalogs.database.job_rows import clock
from meshplan.catalogs.database.plan_rows import insert_plan
from meshplan.catalogs.database.tables import study_points

# Rows of one statement: SQLite takes 32,766 parameters, older builds 999.
_BATCH = 300


class PointState(StrEnum):
    """Where a point stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


FINISHED = (PointState.DONE, PointState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One question of a study, as it stood when it was read.

    Args:
        digest: of the question.
        state: where it stands.
        owner: who is at work on it, or was last.
        attempts: how often it was claimed.
        deaths: how many processes ended while they answered it.
        answer: the headline of the answer, plain JSON.
        plan_id: the stored plan; None where none exists, or none is stored.
        problem: why it failed, plain JSON.
    """

    digest: str
    state: PointState
    owner: str | None
    attempts: int
    deaths: int
    answer: Mapping[str, Any] | None
    plan_id: str | None
    problem: Mapping[str, Any] | None


_COLUMNS = tuple(study_points.c[name] for name in Point.__dataclass_fields__)


class Points:
    """The points of one database.

    Args:
        engine: an opened catalog.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add(self, digests: Sequence[str]) -> None:
        """Let points wait; those that are there stay as they are."""
        dialect = postgresql if self.engine.dialect.name == "postgresql" else sqlite
        start = {"state": PointState.WAITING, "attempts": 0, "deaths": 0}
        with queueing(self.engine) as connection:
            for some in _batches(digests):
                new = [{"digest": digest, **start} for digest in some]
                connection.execute(dialect.insert(study_points).values(new).on_conflict_do_nothing())

    def of(self, digests: Iterable[str]) -> dict[str, Point]:
        """Digest → point, of those that there are."""
        found: dict[str, Point] = {}
        with reading(self.engine) as connection:
            for chosen in _among(digests):
                for row in connection.execute(sa.select(*_COLUMNS).where(chosen)).mappings():
                    found[row["digest"]] = Point(**{**row, "state": PointState(row["state"])})
        return found

    def states(self, digests: Iterable[str]) -> dict[str, PointState]:
        """Digest → where it stands, without reading the answers."""
        query = sa.select(study_points.c.digest, study_points.c.state)
        with reading(self.engine) as connection:
            rows = [row for chosen in _among(digests) for row in connection.execute(query.where(chosen))]
        return {digest: PointState(state) for digest, state in rows}

    # --- the owner of a claim -------------------------------------------------------------------------------------

    def claim(self, digest: str, owner: str, *, dead_after_s: float) -> bool:
        """Take a point that waits, or whose owner is dead; whether it is the owner's now.

        Args:
            digest: of the point.
            owner: name of the claimer, unlike any other.
            dead_after_s: an owner counts as dead that was not heard of for so long.
        """
        is_free = sa.or_(
            study_points.c.state == PointState.WAITING,
            sa.and_(study_points.c.state == PointState.RUNNING, study_points.c.beat_s < clock() - dead_after_s),
        )
        return self._changed(
            sa.and_(study_points.c.digest == digest, is_free),
            state=PointState.RUNNING,
            owner=owner,
            attempts=study_points.c.attempts + 1,
            beat_s=clock(),
        )

    def beat(self, owner: str) -> None:
        """Say that an owner lives."""
        self._changed(_held(owner), beat_s=clock())

    def finish(
        self, digest: str, owner: str, answer: Mapping[str, Any], *, plan: Mapping[str, Any] | None, name: str = ""
    ) -> bool:
        """Store an answer, and its plan where there is one; nothing where the claim no longer holds.

        Args:
            digest: of the point.
            owner: who claimed it.
            answer: its headline.
            plan: the document of the plan.
            name: what the user calls the plan, if it is new.
        """
        done = {"state": PointState.DONE, "answer": dict(answer), "problem": sa.null(), "finished_s": clock()}
        done["plan_id"] = None if plan is None else plan["plan_id"]
        change = sa.update(study_points).where(_held(owner, digest)).values(done)
        # A plan takes its place in the order of plans: alone among writers.
        with writing(self.engine) as connection:
            if not connection.execute(change).rowcount:
                return False
            if plan is not None:
                insert_plan(connection, plan, name=name)
        return True

    def fail(self, digest: str, owner: str, problem: Mapping[str, Any]) -> bool:
        """There is no answer, and trying again would not help; whether the claim still held."""
        failed = {"state": PointState.FAILED, "problem": dict(problem), "finished_s": clock()}
        return self._changed(_held(owner, digest), **failed)

    def died(self, digest: str, owner: str, problem: Mapping[str, Any], *, most_deaths: int) -> bool:
        """The process that answered it has ended: it waits again, or has failed once that came too often.

        Returns:
            Whether it waits again.
        """
        deaths = study_points.c.deaths + 1
        is_last = deaths >= most_deaths
        change = (
            sa.update(study_points)
            .where(_held(owner, digest))
            .values(
                deaths=deaths,
                state=sa.case((is_last, PointState.FAILED), else_=PointState.WAITING),
                problem=dict(problem),
                finished_s=sa.case((is_last, clock()), else_=sa.null()),
            )
            .returning(study_points.c.state)
        )
        with queueing(self.engine) as connection:
            row = connection.execute(change).first()
        return row is not None and row.state == PointState.WAITING

    def release(self, owner: str) -> None:
        """Give back every claim of an owner who ends."""
        self._changed(_held(owner), state=PointState.WAITING)

    def retry(self, digests: Iterable[str]) -> int:
        """Let failed points wait again; how many."""
        again = {"state": PointState.WAITING, "deaths": 0, "problem": sa.null(), "finished_s": sa.null()}
        with queueing(self.engine) as connection:
            failed = study_points.c.state == PointState.FAILED
            changes = [sa.update(study_points).where(some, failed).values(again) for some in _among(digests)]
            return sum(connection.execute(change).rowcount for change in changes)

    def _changed(self, condition: sa.ColumnElement[bool], **values: Any) -> bool:
        with queueing(self.engine) as connection:
            return connection.execute(sa.update(study_points).where(condition).values(values)).rowcount > 0


def _held(owner: str, digest: str | None = None) -> sa.ColumnElement[bool]:
    """Claims of an owner that stand; the one of a point, where it is given."""
    mine = sa.and_(study_points.c.state == PointState.RUNNING, study_points.c.owner == owner)
    return mine if digest is None else sa.and_(mine, study_points.c.digest == digest)


def _among(digests: Iterable[str]) -> Iterator[sa.ColumnElement[bool]]:
    """Conditions that name the points, a batch each."""
    for some in _batches(digests):
        yield study_points.c.digest.in_(some)


def _batches(digests: Iterable[str]) -> Iterator[list[str]]:
    """The digests, each once, as many as one statement takes at a time."""
    each = list(dict.fromkeys(digests))
    return (each[at : at + _BATCH] for at in range(0, len(each), _BATCH))
