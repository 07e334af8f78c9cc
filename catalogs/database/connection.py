"""Where the catalog lives and how it is reached: a URL, an SQLAlchemy engine, transactions, errors that name the fix.

Nothing here creates or checks a catalog; that is :mod:`meshplan.catalogs.database.opening`.
"""

from __future__ import annotations

import os
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from meshplan.catalogs.errors import CatalogError, CatalogUnavailableError

ENVIRONMENT_VARIABLE = "MESHPLAN_DB"
DEFAULT_FILE_NAME = "catalog.sqlite"
# How long a process waits for another one's write. Writing the whole seed takes a fraction of a second.
BUSY_TIMEOUT_MS = 30_000
_WRITE = "meshplan_write"
_ALEMBIC_VERSION = sa.table("alembic_version", sa.column("version_num", sa.String))


def default_url() -> str:
    """``MESHPLAN_DB`` where set, else a file in the user's data directory."""
    configured = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if configured:
        return configured
    folder = Path(platformdirs.user_data_dir("meshplan", appauthor=False))
    if not folder.is_absolute():
        raise CatalogUnavailableError(
            f"there is no home directory to keep the catalog in; name a file with --db or {ENVIRONMENT_VARIABLE}"
        )
    return str(folder / DEFAULT_FILE_NAME)


def parse_url(text: str | None = None) -> URL:
    """Read ``--db``: an SQLAlchemy URL or the path of an SQLite file; None stands for :func:`default_url`.

    Raises:
        CatalogError: not a URL.
    """
    given = text if text else default_url()
    if "://" not in given:
        return URL.create("sqlite", database=str(Path(given).expanduser()))
    try:
        return sa.make_url(given)
    except ArgumentError as error:
        raise CatalogError(
            f"cannot read the database URL {given!r}; write a file path or a URL like "
            "'sqlite:////data/catalog.sqlite' or 'postgresql+psycopg://user@host/meshplan'"
        ) from error


def connect(url: URL) -> Engine:
    """An engine with meshplan's transaction rules, nothing checked or created but the default folder."""
    if url.get_backend_name() == "sqlite":
        _require_folder(url)
    # An SQLite file is opened in microseconds; keeping it open would only leave handles behind in forked workers.
    in_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    options: dict[str, Any] = {"poolclass": NullPool} if in_file else {}
    if in_file and _is_read_only(Path(str(url.database))):
        options["creator"] = _read_only_connection(Path(str(url.database)))
    try:
        engine = sa.create_engine(url, **options)
    except NoSuchModuleError as error:
        raise CatalogError(f"no SQLAlchemy dialect for {url.drivername!r}; use sqlite or postgresql") from error
    except ModuleNotFoundError as error:
        raise CatalogError(f"{url.drivername!r} needs the package {error.name!r}: pip install {error.name}") from error
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection for reading; errors come out as :class:`CatalogError`."""
    with translated_errors(engine.url), engine.connect() as connection:
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One write transaction: committed at the end, rolled back on any error."""
    with (
        translated_errors(engine.url),
        engine.connect().execution_options(**{_WRITE: True}) as connection,
        connection.begin(),
    ):
        yield connection


def stored_revision(engine: Engine) -> str | None:
    """Schema revision of the database; None when it holds no table at all.

    Raises:
        CatalogError: it has tables, but they are not a catalog's.
    """
    with reading(engine) as connection:
        tables = set(sa.inspect(connection).get_table_names())
        if not tables:
            return None
        if "alembic_version" not in tables or "facts" not in tables:
            raise CatalogError(
                f"{shown(engine.url)} is a database, but not a meshplan catalog (it has {len(tables)} other tables); "
                f"give another file with --db or {ENVIRONMENT_VARIABLE}"
            )
        return str(connection.execute(sa.select(_ALEMBIC_VERSION.c.version_num)).scalar_one())


def shown(url: URL) -> str:
    """The database as messages name it: a plain path for SQLite, never a password."""
    if url.get_backend_name() == "sqlite" and url.database:
        return url.database
    return url.render_as_string(hide_password=True)


@contextmanager
def translated_errors(url: URL) -> Iterator[None]:
    """Turn what the database raises into a :class:`CatalogError` that names the fix."""
    try:
        yield
    except DBAPIError as error:
        message = str(error.orig)
        kind = CatalogUnavailableError if any(sign in message for sign in _PASSING) else CatalogError
        raise kind(f"{shown(url)}: {_explained(message)}") from error
    except SQLAlchemyError as error:
        raise CatalogError(f"{shown(url)}: {error}") from error


def _require_folder(url: URL) -> None:
    """The default folder is made; a folder that the user named must exist."""
    if not url.database or url.database == ":memory:" or url.query.get("uri"):
        return
    folder = Path(url.database).parent
    if folder.is_dir():
        return
    if folder == Path(default_url()).parent and not os.environ.get(ENVIRONMENT_VARIABLE):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CatalogUnavailableError(
                f"cannot create {folder} ({error.strerror}); give a writable file with --db or {ENVIRONMENT_VARIABLE}"
            ) from error
    else:
        raise CatalogError(f"the folder {folder} does not exist; create it first: mkdir -p {folder}")


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


def _configure_sqlite(connection: Any, _record: object) -> None:
    # The driver would open transactions on its own, and not before CREATE TABLE; _begin_sqlite does it for all.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA foreign_keys = ON")
    # WAL lets readers go on during a write. It is a property of the file; where it cannot be set (a read-only file, a
    # file system without shared memory) the catalog still works, only with more waiting.
    try:
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError:
        return


def _begin_sqlite(connection: Connection) -> None:
    # A write transaction takes its lock at once: upgrading a read lock later can fail without waiting.
    statement = "BEGIN IMMEDIATE" if connection.get_execution_options().get(_WRITE) else "BEGIN"
    connection.exec_driver_sql(statement)


# What passes, or depends on rights: the catalog itself may be sound.
_PASSING = ("is locked", "readonly database", "unable to open", "disk is full", "disk I/O error", "connection failed")
_EXPLANATIONS = (
    ("readonly database", "the file or its folder is read-only; make it writable (chmod u+w) or copy it elsewhere"),
    ("unable to open", "cannot be opened; check that the folder exists and that you may read and write there"),
    ("not a database", "is not an SQLite database; give another file with --db, or move this one away"),
    ("malformed", "is damaged; restore a copy, or move it away so that a fresh catalog is made"),
    ("is locked", "another process holds it for too long; end that process and try again"),
    ("disk is full", "the disk is full; make room and try again, nothing was half-written"),
    # A full disk has no room for the file of WAL's shared memory either, and SQLite calls that so.
    ("disk I/O error", "the disk is full or failing; look with df, make room and try again, nothing was half-written"),
)


def _explained(message: str) -> str:
    for fragment, explanation in _EXPLANATIONS:
        if fragment in message:
            return f"{explanation} ({message})"
    return f"the database says: {message}"
