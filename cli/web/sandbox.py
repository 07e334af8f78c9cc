"""What a process that answers requests may open: the package, its libraries and the catalog, nothing else.

Specs may name files (a model's configuration, a trace). Over HTTP such a name comes from anybody, so a process that
reads requests opens none: :func:`close_files` refuses every ``open`` outside the given folders for the rest of the
process. Python reports them to audit hooks (PEP 578), which cannot be taken off again.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.connection import parse_url
from meshplan.catalogs.database.repository import Catalog

REFUSAL = (
    "a service opens no files that a request names; import the model into the catalog, or write the data in the spec"
)
# Of the system: what random numbers, time zones, processors and memory are read from.
_SYSTEM = (Path("/dev"), Path("/proc"), Path("/sys"), Path("/usr/share/zoneinfo"), Path("/etc/localtime"))


def library_folders() -> tuple[Path, ...]:
    """Where Python's own and installed code lies."""
    code = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # ``python -m`` puts the working directory on the path, too; what lies there is the user's, not code.
    code |= {entry for entry in sys.path if entry and Path(entry).is_dir() and not Path(entry).samefile(os.curdir)}
    code |= {sys.prefix, sys.base_prefix}
    package = Path(__file__).resolve().parents[2]
    return (package, *(Path(folder).resolve() for folder in sorted(code)), *_SYSTEM)


def close_files(folders: Iterable[Path]) -> None:
    """Refuse from now on to open what lies in none of the folders, and to tell whether it is there.

    Args:
        folders: resolved; files named here count as well.
    """
    allowed = tuple(str(folder) for folder in folders)
    look = os.stat

    def is_open(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # a file that is open already
        real = os.path.realpath(os.fsdecode(path))
        return any(real == folder or real.startswith(folder.rstrip("/") + "/") for folder in allowed)

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and not is_open(arguments[0]):
            raise PermissionError(errno.EPERM, REFUSAL)

    def look_inside(path: Any, **options: Any) -> os.stat_result:
        if not is_open(path):
            raise FileNotFoundError(errno.ENOENT, REFUSAL)
        return look(path, **options)

    sys.addaudithook(refuse)
    os.stat = look_inside  # hooks are not told of it, and an answer must not depend on what lies here


def limit_memory(most_bytes: int) -> None:
    """Let allocations fail beyond ``most_bytes`` of the process's own data, instead of the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def closed_catalog(db: str | None, most_bytes: int) -> Catalog:
    """The catalog, in a process that from now on opens nothing else and stays within its memory.

    Args:
        db: database as ``--db`` names it.
        most_bytes: of the process's own data.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    catalog = Catalog.open(db)
    url = parse_url(db)
    files: list[Path] = []
    if url.get_backend_name() == "sqlite" and url.database:
        file = Path(url.database).resolve()
        files = [file.with_name(f"{file.name}{end}") for end in ("", "-wal", "-shm", "-journal")]
    limit_memory(most_bytes)
    close_files([*library_folders(), *files])
    return catalog
