"""Opens the catalog: a missing or empty database is created and seeded, one of another revision is rejected.

Creation is ONE transaction: tables, seed data and the schema revision appear together or not at all, and of two
processes that start at once the second waits and then finds the work done. Alembic is not imported for that (it costs
start-up time); a test proves that both ways give the same schema.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from meshplan.catalogs.database.connection import connect, parse_url, shown, stored_revision, writing
from meshplan.catalogs.database.migrations import known_revisions
from meshplan.catalogs.database.tables import SCHEMA_REVISION, metadata
from meshplan.catalogs.errors import CatalogError, CatalogVersionError


def open_database(text: str | None = None) -> Engine:
    """Open the catalog database, creating and seeding it when it is missing or empty.

    Args:
        text: URL or path; None for the default.

    Raises:
        CatalogVersionError: written by another revision of meshplan.
        CatalogError: missing folder, no permission, not a database, not a meshplan catalog.
    """
    url = parse_url(text)
    engine = connect(url)
    try:
        revision = stored_revision(engine)
        if revision is None:
            _create(engine)
        elif revision != SCHEMA_REVISION:
            raise version_error(engine.url, revision)
    except CatalogError:
        engine.dispose()
        raise
    return engine


def write_revision(connection: Connection) -> None:
    """Stamp the current schema revision the way alembic does, without importing it."""
    version_table = sa.Table(
        "alembic_version",
        sa.MetaData(),
        sa.Column("version_num", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
    )
    version_table.create(connection)
    connection.execute(sa.insert(version_table).values(version_num=SCHEMA_REVISION))


def _create(engine: Engine) -> None:
    # start-up: seeds and their YAML are read on first use only.
    from meshplan.catalogs.database.seeds import write_seeds

    with writing(engine) as connection:
        if sa.inspect(connection).get_table_names():
            return  # another process was quicker
        metadata.create_all(connection)
        write_seeds(connection)
        write_revision(connection)


def version_error(url: URL, revision: str) -> CatalogVersionError:
    """The error for a database of another revision, with the way out."""
    if revision in known_revisions():
        backup = "copy the file" if url.get_backend_name() == "sqlite" else "run pg_dump"
        return CatalogVersionError(
            f"{shown(url)} has schema revision {revision}, this meshplan needs {SCHEMA_REVISION}; "
            f"{backup} if you want a backup, then run: meshplan catalog upgrade --db {shown(url)}"
        )
    return CatalogVersionError(
        f"{shown(url)} has schema revision {revision}, which this meshplan (revision {SCHEMA_REVISION}) does not know: "
        "a newer meshplan wrote it. Install that version, or give another file with --db; "
        "'meshplan catalog upgrade' cannot go back"
    )
