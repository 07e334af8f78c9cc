"""One word for all that a catalog holds: the same word, the same numbers."""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import reading
from meshplan.catalogs.database.transfer import USER


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
