"""PostgreSQL as the store: many machines, one catalog.

The driver is psycopg 3: ``pip install 'meshplan[postgresql]'``.

Three kinds of transaction, chosen by the caller (:mod:`meshplan.catalogs.database.connection`):

- *reading* sees one state of the database throughout (``REPEATABLE READ``, read only), as an SQLite transaction does;
- *writing* takes one advisory lock first and is alone among the writers of this database, as SQLite's writer is. What
  depends on what is there – no table yet, the highest sequence, who has a tag – is then read and written without
  a gap. Its statements each see what is committed when they begin (``READ COMMITTED``): a snapshot would be taken
  before the lock is got, and show the state from before the wait;
- *queueing* writes without that lock, for single statements that decide by the rows they lock.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from meshplan.catalogs.database.sqlite import BUSY_TIMEOUT_MS
from meshplan.catalogs.errors import CatalogError

DRIVER = "postgresql+psycopg"
INSTALL = "pip install 'meshplan[postgresql]'"
# What libpq would wait for a host that drops packets: minutes.
CONNECT_TIMEOUT_S = 10
# Execution option of a connection that is going to write alone.
ALONE = "meshplan_alone"
# The key of the advisory lock of all writers of one database: "meshplan" in ASCII, so that it meets no other program's.
WRITERS_LOCK = int.from_bytes(b"meshplan", "big")

READING: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
QUEUEING: dict[str, Any] = {"isolation_level": "READ COMMITTED"}
WRITING: dict[str, Any] = {**QUEUEING, ALONE: True}

# Fragment of the server's or libpq's message → what to do about it; the first one that is found counts.
_FULL = "the server takes no more connections; raise its max_connections, or run fewer workers"
_SILENT = "no server answers there; start it, or mend the URL"
_STANDBY = "the server takes no writes; give the URL of the primary"
_BROKEN = "the connection broke; try again, nothing was half-written"
EXPLANATIONS = (
    ("password authentication failed", "the server does not take this user and password"),
    ("no password supplied", "the server asks for a password; give one by PGPASSWORD or ~/.pgpass"),
    ('FATAL: database "', "create the database first (createdb NAME), or mend the URL"),
    ('FATAL: role "', "the server has no such user; mend the URL"),
    ("permission denied for schema", "this user may not create the catalog: GRANT CREATE ON SCHEMA public TO USER"),
    ("permission denied for", "this user lacks a right: GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES … TO USER"),
    ("read-only transaction", _STANDBY),
    ("read-write mode during recovery", _STANDBY),
    ("too many clients", _FULL),
    ("remaining connection slots", _FULL),
    ("lock timeout", "another process writes for too long; look at pg_stat_activity, and try again"),
    ("No space left on device", "the server's disk is full; make room and try again, nothing was half-written"),
    ("Connection refused", _SILENT),
    ("No such file or directory", _SILENT),
    ("failed to resolve host", "there is no such host; mend the URL"),
    ("could not translate host name", "there is no such host; mend the URL"),
    ("timeout expired", "the server does not answer; is it running, and may this machine reach it?"),
    ("server closed the connection", _BROKEN),
    ("terminating connection", _BROKEN),
    ("the connection is lost", _BROKEN),
    ("the connection is closed", _BROKEN),
    ("connection failed", "cannot connect"),
)
# What passes, or depends on rights: the catalog itself may be sound.
PASSING = tuple(fragment for fragment, _ in EXPLANATIONS)
# A forked process may not talk over its parent's connections: it forgets them and opens its own.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forget_parents_connections() -> None:
    for engine in _engines:
        engine.dispose(close=False)


def _close_connections() -> None:
    for engine in _engines:
        engine.dispose()


atexit.register(_close_connections)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_connections)


def postgresql_url(url: URL) -> URL:
    """The URL with meshplan's driver named.

    Raises:
        CatalogError: another driver, no database, or a password that was not percent-encoded.
    """
    if url.drivername not in ("postgres", "postgresql", DRIVER):
        raise CatalogError(f"meshplan talks to PostgreSQL through {DRIVER}, not {url.drivername}; mend the URL")
    if "@" in (url.host or ""):
        # What stands there is part of a password; it is not repeated.
        raise CatalogError("cannot read the database URL: a password with @, : or / is percent-encoded (@ is %40)")
    if not url.database:
        raise CatalogError("the database URL names no database; write postgresql://user@host/meshplan")
    return url.set(drivername=DRIVER)


def postgresql_engine(url: URL) -> Engine:
    """An engine on a PostgreSQL server; nothing is connected yet.

    Raises:
        CatalogError: the driver is not installed.
    """
    settings: dict[str, Any] = {
        "fallback_application_name": "meshplan",
        # Poolers between (pgbouncer) and an upgrade meanwhile both break prepared statements.
        "prepare_threshold": None,
    }
    if "connect_timeout" not in url.query:
        settings["connect_timeout"] = CONNECT_TIMEOUT_S
    try:
        # A server that was restarted has closed what the pool holds: every connection is tried when it is taken.
        engine = sa.create_engine(url, connect_args=settings, pool_pre_ping=True)
    except ImportError as error:
        raise CatalogError(f"PostgreSQL needs the driver psycopg 3, which is not installed: {INSTALL}") from error
    event.listen(engine, "begin", _begin)
    _engines.add(engine)
    return engine


def mend_sequences(connection: Connection, tables: Iterable[sa.Table]) -> None:
    """Let numbers go on after the highest one that is there: rows that another tool copied in bring theirs along."""
    # start-up: SQLite needs nothing of this dialect
    from sqlalchemy.dialects.postgresql import REGCLASS

    for table in tables:
        column = table.autoincrement_column
        if column is None:
            continue
        sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
        last = sa.func.coalesce(sa.func.pg_sequence_last_value(sa.cast(sequence, REGCLASS)), 0)
        highest = sa.func.max(column)
        # Only forward: a number that a transaction has taken and not yet written must not be given again.
        connection.execute(sa.select(sa.func.setval(sequence, highest)).select_from(table).having(highest > last))


class by_code_point(FunctionElement[str]):  # noqa: N801 - reads as the SQL that it is
    """A text column to sort by, in the order of Python and SQLite; PostgreSQL may sort as people of a country do."""

    type = sa.String()
    inherit_cache = True


@compiles(by_code_point)
def _as_it_is(element: by_code_point, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.clauses, **options))


@compiles(by_code_point, "postgresql")
def _with_collation(element: by_code_point, compiler: Any, **options: Any) -> str:
    return f'{compiler.process(element.clauses, **options)} COLLATE "C"'


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get(ALONE):
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {BUSY_TIMEOUT_MS}")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITERS_LOCK})")
