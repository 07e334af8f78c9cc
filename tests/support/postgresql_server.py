"""A PostgreSQL server of the tests' own: in a temporary folder, on a Unix socket, gone at the end.

Every connection needs a password, so that a message or file that shows one is noticed. The database sorts as people do
(ICU, en-US) where the server can, so that an order that rests on the collation is noticed, too.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSWORD = "jabberwock"  # noqa: S105 - guards nothing; no output may hold it
USER = "meshplan"
# May connect, with the same password, and owns nothing.
READER = "reader"
# The server refuses to run as root; these users own nothing that matters.
_UNPRIVILEGED = ("postgres", "nobody")
_SETTINGS = (
    "fsync=off",
    "full_page_writes=off",
    "synchronous_commit=off",
    "shared_buffers=16MB",
    "max_connections=150",
)


class PostgresqlServer:
    """A running server.

    Args:
        folder: holds its socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._databases = 0

    def url(self, database: str, *, password: str = PASSWORD, user: str = USER) -> str:
        return f"postgresql://{user}:{password}@/{database}?host={self.folder}"

    def run(self, *statements: str) -> None:
        """SQL outside any transaction, by the owner of the server."""
        import psycopg

        with psycopg.connect(
            host=str(self.folder), user=USER, password=PASSWORD, dbname="postgres", autocommit=True
        ) as connection:
            for statement in statements:
                connection.execute(statement)

    def new_database(self, template: str = "template1") -> str:
        """A fresh database, a copy of ``template``; returns its URL."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.run(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def drop(self, url: str) -> None:
        self.run(f"DROP DATABASE {url.partition('?')[0].rpartition('/')[2]} WITH (FORCE)")


def reason_without_server() -> str:
    """Why no server can be started here; empty where one can."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed (pip install 'meshplan[postgresql]')"
    if _binary("initdb") is None or _binary("pg_ctl") is None:
        return "no PostgreSQL server is installed (initdb, pg_ctl)"
    if os.getuid() == 0 and _other_user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return ""


@contextmanager
def postgresql_server() -> Iterator[PostgresqlServer]:
    """A server with one superuser, stopped and removed at the end."""
    # Not below pytest's folder, which other users may not enter; the path of a socket is at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="meshplan-pg-"))
    data, log = folder / "data", folder / "log"
    user = _other_user() if os.getuid() == 0 else None
    try:
        (folder / "password").write_text(PASSWORD)
        if user is not None:
            for path in (folder, folder / "password"):
                shutil.chown(path, user, pwd.getpwnam(user).pw_gid)
        initdb = ("initdb", "-D", data, "-U", USER, "-A", "scram-sha-256", "-E", "UTF8", "--no-locale", "--no-sync")
        secret = (f"--pwfile={folder / 'password'}",)
        if _call(user, *initdb, *secret, "--locale-provider=icu", "--icu-locale=en-US").returncode != 0:
            shutil.rmtree(data, ignore_errors=True)
            _checked(_call(user, *initdb, *secret))
        settings = " ".join(f"-c {setting}" for setting in (*_SETTINGS, "listen_addresses=''"))
        options = f"{settings} -k {folder}"
        _checked(_call(user, "pg_ctl", "-D", data, "-l", log, "-w", "-t", "120", "-o", options, "start"))
        try:
            yield PostgresqlServer(folder)
        finally:
            _call(user, "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binary(name: str) -> str | None:
    """A program of the server: on the path, or where Debian keeps it (newest version first)."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*"), key=lambda path: path.name.zfill(4), reverse=True)
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *(f"{path}/bin" for path in versions)]))


def _other_user() -> str | None:
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in _UNPRIVILEGED if name in known), None)


def _call(user: str | None, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    identity = {} if user is None else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    # The server inherits what it is given: a pipe would stay open until it ends.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            [str(_binary(program)), *map(str, arguments)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=180,
            **identity,
        )
        output.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, output.read())


def _checked(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise RuntimeError(f"{done.args[0]} failed: {done.stdout[-2000:]}")
