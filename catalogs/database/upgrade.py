"""``catalog upgrade``: bring a database to this version's schema and seed numbers, on request only."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.engine import Engine

from meshplan.catalogs.database.connection import connect, parse_url, shown, stored_revision, writing
from meshplan.catalogs.database.migrations import known_revisions, upgrade
from meshplan.catalogs.database.opening import open_database, version_error
from meshplan.catalogs.database.postgresql import mend_sequences
from meshplan.catalogs.database.seeds import refresh_seeds
from meshplan.catalogs.database.tables import SCHEMA_REVISION, metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """What was done.

    Args:
        database: as messages name it.
        from_revision: schema revision before; None where the database was new.
        to_revision: schema revision now.
        seeds_refreshed: the seed numbers were another version's and have been replaced.
    """

    database: str
    from_revision: str | None
    to_revision: str
    seeds_refreshed: bool


def upgrade_database(text: str | None = None) -> Upgrade:
    """Upgrade the database at a URL or path (None for the default); a missing one is created.

    Raises:
        CatalogVersionError: a newer meshplan wrote it.
        CatalogError: it cannot be opened or written, or is no catalog.
    """
    engine = connect(parse_url(text))
    try:
        return _upgraded(engine, text)
    finally:
        engine.dispose()


def _upgraded(engine: Engine, text: str | None) -> Upgrade:
    before = stored_revision(engine)
    if before is None:
        open_database(text).dispose()
        return Upgrade(
            database=shown(engine.url), from_revision=None, to_revision=SCHEMA_REVISION, seeds_refreshed=True
        )
    if before not in known_revisions():
        raise version_error(engine.url, before)
    if before != SCHEMA_REVISION:
        upgrade(engine)
    if engine.dialect.name == "postgresql":
        with writing(engine) as connection:
            mend_sequences(connection, metadata.sorted_tables)
    return Upgrade(
        database=shown(engine.url),
        from_revision=before,
        to_revision=SCHEMA_REVISION,
        seeds_refreshed=refresh_seeds(engine),
    )
