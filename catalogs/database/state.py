"""A catalog at one moment: a word for all that it holds (the same word, the same numbers), and entries read once."""

from __future__ import annotations

import hashlib
import json
from functools import cache

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import reading
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.transfer import USER

# What a question looks up; all of it is frozen, or only read.
_READ_ONCE = ("device", "link", "node_type", "model_name", "model_shape", "prices", "calibration")


def catalog_state(engine: Engine) -> str:
    """Digest of the seed numbers' version, of everything that a user added, and of the cluster profiles.

    Two answers to one question under the same digest rest on the same catalog.
    """
    content = hashlib.sha256()
    queries = [sa.select(table).where(table.c.origin == USER) for table in tables.ENTRIES]
    queries += [sa.select(tables.meta), sa.select(tables.cluster_profiles)]
    with reading(engine) as connection:
        for query in queries:
            rows = (json.dumps(list(row), sort_keys=True, default=str) for row in connection.execute(query))
            for text in sorted(rows):
                content.update(f"{len(text)}:{text}".encode())
            content.update(b";")
    return content.hexdigest()


class SteadyCatalog(Catalog):
    """The catalog as it stood when each entry was first asked for.

    Eleven connections of an estimate take longer than the estimate. Whoever holds one says until when it holds: as long
    as :func:`catalog_state` is the same, nothing that is kept has changed.

    Args:
        engine: an opened database.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        for name in _READ_ONCE:
            setattr(self, name, cache(getattr(self, name)))


@cache
def _kept(engine: Engine) -> dict[str, SteadyCatalog]:
    return {}


def steady(catalog: Catalog, state: str) -> SteadyCatalog:
    """What is kept of a catalog for as long as its state is ``state``; another state begins anew.

    Args:
        catalog: whose database.
        state: its :func:`catalog_state`, as far as the caller knows it.
    """
    kept = _kept(catalog.engine)
    if state not in kept:
        kept.clear()
        kept[state] = SteadyCatalog(catalog.engine)
    return kept[state]
