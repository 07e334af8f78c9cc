"""SQLite as the store: one file, many readers, one writer at a time (WAL), read where it cannot be written.

A transaction that writes takes the file's write lock when it begins: upgrading a read lock later can fail without
waiting.
"""

from __future__ import annotations

import os
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.pool import NullPool, StaticPool

# How long a process waits for another one's write. Writing the whole seed takes a fraction of a second.
BUSY_TIMEOUT_MS = 30_000
# Execution option of a connection that is going to write.
WRITES = "meshplan_writes"

# Fragment of SQLite's message → what to do about it.
EXPLANATIONS = (
    ("readonly database", "the file or its folder is read-only; make it writable (chmod u+w) or copy it elsewhere"),
    ("unable to open", "cannot be opened; check that the folder exists and that you may read and write there"),
    ("not a database", "is not an SQLite database; give another file with --db, or move this one away"),
    ("malformed", "is damaged; restore a copy, or move it away so that a fresh catalog is made"),
    ("is locked", "another process holds it for too long; end that process and try again"),
    ("disk is full", "the disk is full; make room and try again, nothing was half-written"),
    # A full disk has no room for the file of WAL's shared memory either, and SQLite calls that so.
    ("disk I/O error", "the disk is full or failing; look with df, make room and try again, nothing was half-written"),
)
# What passes, or depends on rights: the catalog itself may be sound.
PASSING = ("is locked", "readonly database", "unable to open", "disk is full", "disk I/O error")


def sqlite_engine(url: URL) -> Engine:
    """An engine on an SQLite file, or on memory."""
    # A file is opened in microseconds; keeping it open would only leave handles behind in forked workers.
    in_file = url.database not in (None, "", ":memory:")
    options: dict[str, Any] = {"poolclass": NullPool} if in_file else {}
    if in_file and _is_read_only(Path(str(url.database))):
        options["creator"] = _read_only_connection(Path(str(url.database)))
    engine = sa.create_engine(url, **options)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def copy_without(engine: Engine, emptied: Iterable[sa.Table]) -> bytes:
    """The content of an SQLite catalog as it stands, without the rows of some tables.

    Args:
        engine: an opened catalog in a file or in memory.
        emptied: tables whose rows stay behind, in an order that their references allow.
    """
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with engine.connect() as connection:
            of_driver: Any = connection.connection.driver_connection
            of_driver.backup(copy)
        for table in emptied:
            copy.execute(f'DELETE FROM "{table.name}"')  # noqa: S608 - names of our own tables
        copy.execute("VACUUM")
        content = bytearray(copy.serialize())
    finally:
        copy.close()
    # A database in memory has no log of its own, and is refused while its header says that it has one (bytes 18 and 19,
    # "file format write and read version", https://sqlite.org/fileformat.html: 1 is the rollback journal, 2 is WAL).
    content[18:20] = bytes((1, 1))
    return bytes(content)


def engine_of(content: bytes) -> Engine:
    """An engine on a copy in memory (:func:`copy_without`), for one process."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.deserialize(content)
    engine = sa.create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _is_read_only(file: Path) -> bool:
    """Whether the file is there, and it or its folder cannot be written: a container image, a shared mount."""
    return file.is_file() and not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))


def _read_only_connection(file: Path) -> Callable[[], sqlite3.Connection]:
    """Opens a file without the files beside it that WAL needs; what only these hold is read where they are there."""
    log = file.with_name(f"{file.name}-wal")
    has_log = log.is_file() and log.stat().st_size > 0
    options = "mode=ro" if has_log else "mode=ro&immutable=1"
    address = f"file:{urllib.parse.quote(str(file.resolve()))}?{options}"
    return lambda: sqlite3.connect(address, uri=True, check_same_thread=False)


def _configure(connection: Any, _record: object) -> None:
    # The driver would open transactions on its own, and not before CREATE TABLE; _begin does it for all.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA foreign_keys = ON")
    # WAL lets readers go on during a write. It is a property of the file; where it cannot be set (a read-only file, a
    # file system without shared memory) the catalog still works, only with more waiting.
    try:
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError:
        return


def _begin(connection: Connection) -> None:
    statement = "BEGIN IMMEDIATE" if connection.get_execution_options().get(WRITES) else "BEGIN"
    connection.exec_driver_sql(statement)
