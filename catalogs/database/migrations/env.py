"""Alembic's entry point: run the revisions on the connection of
:func:`meshplan.catalogs.database.migrations.upgrade`.
"""

from __future__ import annotations

from alembic import context

from meshplan.catalogs.database.tables import metadata

connection = context.config.attributes["connection"]
# SQLite cannot alter a column in place; batch mode copies the table.
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
# The caller's transaction is the only one: alembic finds it open and neither commits nor rolls back.
context.run_migrations()
