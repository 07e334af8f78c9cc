"""Studies in the database: JSON documents in, JSON documents out; what they mean is known in the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from meshplan.catalogs.database.connection import reading, writing
from meshplan.catalogs.database.tables import studies
from meshplan.catalogs.errors import StoreError, closest_names, did_you_mean
from meshplan.catalogs.units import now

LATEST = "latest"
# Fewer characters of an id would match by accident.
MIN_PREFIX_LENGTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """A stored study.

    Args:
        study_id: digest of its questions, in order.
        name: what the user calls it.
        document: the study as plain JSON; its points are named by their digests.
        created_at: ISO 8601, UTC.
    """

    study_id: str
    name: str
    document: Mapping[str, Any]
    created_at: str


class StudyRows:
    """The stored studies of one database.

    Args:
        engine: an opened catalog.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def put(self, study_id: str, *, name: str, document: Mapping[str, Any]) -> None:
        """Store a study; one that is there takes the new name and document, which ask the same questions."""
        content = {"name": name, "document": dict(document)}
        same = studies.c.study_id == study_id
        with writing(self.engine) as connection:
            if connection.execute(sa.update(studies).where(same).values(content)).rowcount:
                return
            last = connection.execute(sa.select(sa.func.max(studies.c.sequence))).scalar()
            connection.execute(
                sa.insert(studies).values(study_id=study_id, created_at=now(), sequence=(last or 0) + 1, **content)
            )

    def get(self, handle: str) -> StudyRow:
        """The study with this id, beginning of an id (at least 4 characters) or name; the last one for ``latest``.

        Of several studies with one name, the last that was begun.

        Raises:
            StoreError: none, or several ids start so.
        """
        newest = sa.select(studies).order_by(studies.c.sequence.desc())
        with reading(self.engine) as connection:
            if handle == LATEST:
                found = connection.execute(newest.limit(1)).mappings().all()
            else:
                either = sa.or_(studies.c.study_id == handle, studies.c.name == handle)
                found = connection.execute(newest.where(either).limit(1)).mappings().all()
                if not found and len(handle) >= MIN_PREFIX_LENGTH:
                    prefix = studies.c.study_id.istartswith(handle, autoescape=True)
                    found = connection.execute(newest.where(prefix)).mappings().all()
            known = connection.execute(sa.select(studies.c.study_id, studies.c.name)).all() if not found else []
        if len(found) == 1:
            return _row(found[0])
        if found:
            raise StoreError(f"{len(found)} studies start with {handle!r}; give more characters")
        hint = did_you_mean(closest_names(handle, [name for row in known for name in row if name]))
        raise StoreError(f"no stored study {handle!r}{hint}; see: meshplan sweep list")

    def list(self) -> tuple[StudyRow, ...]:
        """Every stored study, newest first."""
        with reading(self.engine) as connection:
            query = sa.select(studies).order_by(studies.c.sequence.desc())
            return tuple(_row(row) for row in connection.execute(query).mappings())


def _row(row: Mapping[Any, Any]) -> StudyRow:
    return StudyRow(**{field.name: row[field.name] for field in fields(StudyRow)})
