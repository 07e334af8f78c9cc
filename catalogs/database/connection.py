"""Where the catalog lives and how it is reached: a URL, an SQLAlchemy engine, transactions, errors that name the fix.

Nothing here creates or checks a catalog; that is :mod:`meshplan.catalogs.database.opening`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from meshplan.catalogs.database import postgresql, sqlite
from meshplan.catalogs.errors import CatalogError, CatalogUnavailableError

ENVIRONMENT_VARIABLE = "MESHPLAN_DB"
DEFAULT_FILE_NAME = "catalog.sqlite"
HIDDEN = "***"  # what SQLAlchemy writes for a password, too
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
        url = sa.make_url(given)
    except (ArgumentError, ValueError) as error:
        raise CatalogError(
            f"cannot read the database URL {_masked(given)!r}; write a file path or a URL like "
            "'sqlite:////data/catalog.sqlite' or 'postgresql://user@host/meshplan'"
        ) from error
    backend = url.get_backend_name()
    if backend == "sqlite":
        return url
    if backend in ("postgresql", "postgres"):
        return postgresql.postgresql_url(url)
    raise CatalogError(f"the catalog is kept in sqlite or postgresql, not in {backend!r}; mend the database URL")


def connect(url: URL) -> Engine:
    """An engine with meshplan's transaction rules, nothing checked, connected or created but the default folder.

    Raises:
        CatalogError: a missing folder, or PostgreSQL without its driver.
    """
    if url.get_backend_name() == "postgresql":
        return postgresql.postgresql_engine(url)
    _require_folder(url)
    return sqlite.sqlite_engine(url)


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection for reading, which sees one state throughout; errors come out as :class:`CatalogError`."""
    options = postgresql.READING if _is_postgresql(engine) else {}
    with translated_errors(engine.url), engine.connect().execution_options(**options) as connection:
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One write transaction, alone among all writers: committed at the end, rolled back on any error."""
    with _transaction(engine, postgresql.WRITING) as connection:
        yield connection


@contextmanager
def queueing(engine: Engine) -> Iterator[Connection]:
    """One write transaction beside others, for statements that decide by the rows they lock.

    PostgreSQL runs them side by side; SQLite has one writer in any case.
    """
    with _transaction(engine, postgresql.QUEUEING) as connection:
        yield connection


@contextmanager
def _transaction(engine: Engine, of_postgresql: Mapping[str, Any]) -> Iterator[Connection]:
    options = of_postgresql if _is_postgresql(engine) else {sqlite.WRITES: True}
    with (
        translated_errors(engine.url),
        engine.connect().execution_options(**options) as connection,
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
    hidden = {key: HIDDEN for key in url.query if "password" in key}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def without_password(text: str) -> str:
    """What a user gave as ``--db``, fit to be repeated in a command that is printed."""
    return shown(parse_url(text)) if "://" in text and not text.startswith("sqlite") else text


def has_password(text: str) -> bool:
    """Whether what a user gave as ``--db`` holds a password, so that no printed command can name it."""
    return HIDDEN in without_password(text)


@contextmanager
def translated_errors(url: URL) -> Iterator[None]:
    """Turn what the database raises into a :class:`CatalogError` that names the fix."""
    store = postgresql if url.get_backend_name() == "postgresql" else sqlite
    try:
        yield
    except DBAPIError as error:
        message = " ".join(str(error.orig).split()) if store is postgresql else str(error.orig)
        kind = CatalogUnavailableError if any(sign in message for sign in store.PASSING) else CatalogError
        raise kind(f"{shown(url)}: {_explained(message, store.EXPLANATIONS)}") from error
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


def _is_postgresql(engine: Engine) -> bool:
    return engine.url.get_backend_name() == "postgresql"


def _masked(text: str) -> str:
    """A text that should have been a URL, as messages may repeat it."""
    return re.sub(r"//.*@", f"//{HIDDEN}@", text)


def _explained(message: str, explanations: Iterable[tuple[str, str]]) -> str:
    for fragment, explanation in explanations:
        if fragment in message:
            return f"{explanation} ({message})"
    return f"the database says: {message}"
