"""Plans in the database: JSON documents in, JSON documents out.

What a plan means is known in :mod:`meshplan.planner.core.plan`; here it is a row with a few columns to find it by. A
plan never changes, and measured figures are attached to it. One that is stored again is the last one, under the name
that is given then and with the second opinion that comes along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from meshplan.catalogs.database.connection import reading, writing
from meshplan.catalogs.database.tables import plans, recorded_runs
from meshplan.catalogs.errors import StoreError, closest_names, did_you_mean
from meshplan.catalogs.units import now

LATEST = "latest"
# Fewer characters of an id would match by accident.
MIN_PREFIX_LENGTH = 4
_MAX_LISTED = 5
# The document as text: one that is damaged must not keep the others from being read.
_COLUMNS = tuple(
    sa.cast(column, sa.Text).label(column.name) if column.name == "document" else column for column in plans.c
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A stored plan.

    Args:
        plan_id: digest of the plan.
        kind: ``training``, or a stand-alone problem kind.
        name: what the user calls it, may be empty.
        tag: unique handle, None where untagged.
        spec_digest: digest of the question.
        catalog_digest: digest of the catalog entries that it rests on.
        document: the plan as JSON.
        created_at: ISO 8601, UTC.
    """

    plan_id: str
    kind: str
    name: str
    tag: str | None
    spec_digest: str
    catalog_digest: str
    document: Mapping[str, Any]
    created_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What was measured when a plan was run.

    Args:
        plan_id: which plan.
        document: metric → value and whatever else was noted, as JSON.
        recorded_at: ISO 8601, UTC.
    """

    plan_id: str
    document: Mapping[str, Any]
    recorded_at: str


class PlanRows:
    """The stored plans of one database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def insert(self, document: Mapping[str, Any], *, name: str = "", tag: str | None = None) -> bool:
        """Store a plan document; whether it was new. The same id twice is fine: it is the last one again.

        Args:
            document: with ``plan_id``, ``kind``, ``spec_digest`` and ``catalog_digest``.
            name: what the user calls it; empty leaves the name of a known plan alone.
            tag: unique handle, which moves to it; None leaves tags alone.
        """
        with writing(self.engine) as connection:
            new = insert_plan(connection, document, name=name)
            if not new:
                change = {"sequence": _next_sequence(connection), **({"name": name} if name else {})}
                connection.execute(sa.update(plans).where(plans.c.plan_id == document["plan_id"]).values(change))
            if tag is not None:
                _move_tag(connection, document["plan_id"], tag)
        return new

    def get(self, handle: str) -> PlanRow:
        """The plan with this id, tag, id prefix (at least 4 characters), or the last stored one for ``latest``.

        Raises:
            StoreError: none, or several ids start so.
        """
        with reading(self.engine) as connection:
            return _find(connection, handle)

    def list(self, *, kind: str | None = None) -> tuple[PlanRow, ...]:
        """Every stored plan, newest first."""
        query = sa.select(*_COLUMNS).order_by(plans.c.sequence.desc())
        if kind is not None:
            query = query.where(plans.c.kind == kind)
        with reading(self.engine) as connection:
            return tuple(_plan_row(row) for row in connection.execute(query).mappings())

    def tag(self, handle: str, tag: str | None) -> PlanRow:
        """Give a plan a tag (taking it from any other plan), or take its tag away with None.

        Raises:
            StoreError: no such plan, or the tag could be mistaken for ``latest`` or for another plan's id.
        """
        with writing(self.engine) as connection:
            row = _find(connection, handle)
            _move_tag(connection, row.plan_id, tag)
            return _find(connection, row.plan_id)

    def check_tag(self, tag: str) -> None:
        """Whether a plan that is still to be found may have this tag.

        Raises:
            StoreError: it could be mistaken for ``latest`` or for a stored plan's id.
        """
        with reading(self.engine) as connection:
            _check_tag(connection, tag, None)

    def delete(self, handle: str) -> PlanRow:
        """Remove a plan with its recorded runs, and return what was removed.

        Raises:
            StoreError: no such plan.
        """
        with writing(self.engine) as connection:
            row = _find(connection, handle)
            connection.execute(sa.delete(recorded_runs).where(recorded_runs.c.plan_id == row.plan_id))
            connection.execute(sa.delete(plans).where(plans.c.plan_id == row.plan_id))
        return row

    def record(self, handle: str, document: Mapping[str, Any]) -> RecordedRun:
        """Attach what was measured to a plan.

        Raises:
            StoreError: no such plan.
        """
        with writing(self.engine) as connection:
            row = _find(connection, handle)
            run = RecordedRun(plan_id=row.plan_id, document=dict(document), recorded_at=now())
            connection.execute(
                sa.insert(recorded_runs).values(plan_id=run.plan_id, document=run.document, recorded_at=run.recorded_at)
            )
        return run

    def runs(self, handle: str) -> tuple[RecordedRun, ...]:
        """What was measured for a plan, oldest first.

        Raises:
            StoreError: no such plan.
        """
        with reading(self.engine) as connection:
            plan_id = _find(connection, handle).plan_id
            query = sa.select(recorded_runs).where(recorded_runs.c.plan_id == plan_id).order_by(recorded_runs.c.id)
            return tuple(
                RecordedRun(plan_id=plan_id, document=row["document"], recorded_at=row["recorded_at"])
                for row in connection.execute(query).mappings()
            )


def insert_plan(connection: Connection, document: Mapping[str, Any], *, name: str = "") -> bool:
    """Store a plan document within the caller's write transaction; whether it was new.

    Of one that is there already, only a second opinion that has something to say is kept.
    """
    here = plans.c.plan_id == document["plan_id"]
    known = connection.execute(sa.select(*_COLUMNS).where(here)).mappings().first()
    if known is not None:
        stored, certificate = _plan_row(known).document, document.get("certificate")
        if stored and certificate and (certificate["checks"] or "certificate" not in stored):
            changed = {**stored, "certificate": certificate}
            connection.execute(sa.update(plans).where(here).values(document=changed))
        return False
    connection.execute(
        sa.insert(plans).values(
            plan_id=document["plan_id"],
            kind=document["kind"],
            name=name,
            spec_digest=document["spec_digest"],
            catalog_digest=document["catalog_digest"],
            document=dict(document),
            created_at=now(),
            sequence=_next_sequence(connection),
        )
    )
    return True


def _next_sequence(connection: Connection) -> int:
    """The place of a plan behind all others."""
    last: int | None = connection.execute(sa.select(sa.func.max(plans.c.sequence))).scalar()
    return (last or 0) + 1


def _find(connection: Connection, handle: str) -> PlanRow:
    if handle == LATEST:
        row = connection.execute(sa.select(*_COLUMNS).order_by(plans.c.sequence.desc()).limit(1)).mappings().first()
        if row is None:
            raise StoreError("no plan is stored yet; make one: meshplan plan SPEC")
        return _plan_row(row)
    exact = sa.select(*_COLUMNS).where(sa.or_(plans.c.tag == handle, plans.c.plan_id == handle))
    # An id is its plan's alone, whatever tag was there before the plan was: who deletes by id deletes what he means.
    rows = (
        connection.execute(exact.order_by(sa.case((plans.c.plan_id == handle, 0), else_=1)).limit(1)).mappings().all()
    )
    if not rows and len(handle) >= MIN_PREFIX_LENGTH:
        prefix = sa.select(*_COLUMNS).where(plans.c.plan_id.istartswith(handle, autoescape=True))
        rows = connection.execute(prefix.order_by(plans.c.plan_id)).mappings().all()
    if len(rows) == 1:
        return _plan_row(rows[0])
    if rows:
        ids = ", ".join(row["plan_id"] for row in rows[:_MAX_LISTED])
        raise StoreError(f"{len(rows)} plans start with {handle!r}: {ids}; give more characters")
    called = sa.select(*_COLUMNS).where(plans.c.name == handle).order_by(plans.c.sequence.desc())
    named = connection.execute(called).mappings().all() if handle else []
    if len(named) == 1:
        return _plan_row(named[0])
    if named:
        ids = ", ".join(row["plan_id"] for row in named[:_MAX_LISTED])
        raise StoreError(f"{len(named)} plans are called {handle!r}: {ids}, the newest first; give an id")
    known = connection.execute(sa.select(plans.c.plan_id, plans.c.tag, plans.c.name)).all()
    hint = did_you_mean(closest_names(handle, [name for row in known for name in row if name]))
    raise StoreError(f"no stored plan {handle!r}{hint}; see: meshplan plans list")


def _move_tag(connection: Connection, plan_id: str, tag: str | None) -> None:
    if tag is not None:
        _check_tag(connection, tag, plan_id)
    connection.execute(sa.update(plans).where(plans.c.tag == tag).values(tag=None))
    connection.execute(sa.update(plans).where(plans.c.plan_id == plan_id).values(tag=tag))


def _check_tag(connection: Connection, tag: str, plan_id: str | None) -> None:
    """Refuse what would never be found, or would be found in place of another plan than ``plan_id``."""
    if tag == LATEST or not tag.strip():
        raise StoreError(f"{tag!r} cannot be a tag: {LATEST!r} always means the last stored plan, and empty means none")
    if tag != plan_id and connection.execute(sa.select(plans.c.plan_id).where(plans.c.plan_id == tag)).first():
        raise StoreError(f"{tag!r} cannot be a tag: another plan has this id; choose another word")


def _plan_row(row: Mapping[Any, Any]) -> PlanRow:
    """A row whose document is damaged has an empty one: it can still be listed and deleted."""
    values = {column.name: row[column.name] for column in fields(PlanRow)}
    try:
        document = json.loads(values["document"])
    except (TypeError, ValueError, RecursionError):
        document = {}
    return PlanRow(**{**values, "document": document if isinstance(document, dict) else {}})
