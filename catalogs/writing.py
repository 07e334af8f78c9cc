"""Files and folders that are complete or absent: written beside their place under another name, then renamed.

What was there before is never touched without ``force``, and nothing is written through a symbolic link. A process that
is killed leaves at most a temporary file or folder, which the next write to the same place removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshplan.catalogs.errors import EmitError

FILE_MODE = 0o644
SCRIPT_MODE = 0o755
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.meshplan-(?P<process>[0-9]+)-[0-9a-f]{8}")
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of linux/fs.h and fcntl.h
_NOT_OFFERED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def write_file(path: Path, text: str, *, force: bool, mode: int = FILE_MODE) -> None:
    """Write one file.

    Raises:
        EmitError: it exists and ``force`` is false, it is a link or a folder, or the disk refuses. Nothing has changed.
    """
    with explained(path):
        if path.is_symlink():
            raise EmitError(f"{path} is a symbolic link; refusing to write through it, remove it first")
        if path.is_dir():
            raise EmitError(f"{path} is a folder; give the name of a file")
        if path.exists() and not path.is_file():  # a pipe, or a device such as /dev/stdout
            path.write_text(text, encoding="utf-8")
            return
        if path.exists() and not force:
            raise EmitError(f"{path} exists; use --force to replace it, or another name")
        remove_leftovers(path)
        temporary = _temporary(path)
        try:
            _written(temporary, text, mode)
            if force:
                temporary.replace(path)
            else:
                os.link(temporary, path)  # unlike a rename, this refuses a file that appeared meanwhile
        finally:
            temporary.unlink(missing_ok=True)


def write_folder(folder: Path, files: Mapping[str, tuple[str, int]]) -> None:
    """Put a folder in the place of ``folder``, which is absent or may go as a whole.

    Args:
        folder: its parents are created.
        files: path below it → text and mode.

    Raises:
        OSError: the disk refuses. Nothing has changed.
    """
    made = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    temporary = _temporary(folder)
    try:
        for name, (text, mode) in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            _written(temporary / name, text, mode)
        _swap(temporary, folder)
    except OSError:
        for parent in made:
            with contextlib.suppress(OSError):  # somebody else put a file there meanwhile
                parent.rmdir()
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(place: Path) -> None:
    """Remove what killed processes left beside ``place``, and bring back a folder that was on its way out."""
    if not place.parent.is_dir():
        return
    for entry in place.parent.iterdir():
        found = _TEMPORARY.fullmatch(entry.name)
        if found is None or found["name"] != place.name or _is_running(int(found["process"])):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


@contextlib.contextmanager
def explained(place: Path) -> Iterator[None]:
    """What the disk refuses as an :class:`EmitError`."""
    try:
        yield
    except OSError as error:
        # The place that was asked for, not the temporary file beside it.
        raise EmitError(f"cannot write {place}: {error.strerror}; choose another place or mend its rights") from error


def _temporary(place: Path) -> Path:
    return place.parent / f".{place.name}.meshplan-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _written(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    path.chmod(mode)


def _swap(new: Path, place: Path) -> None:
    """``new`` in the place of ``place``, in one step where the system offers it; what was there is then at ``new``."""
    if not place.exists() or not any(place.iterdir()):
        new.rename(place)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    if exchange is not None:
        if exchange(_HERE, os.fsencode(new), _HERE, os.fsencode(place), _EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NOT_OFFERED:
            raise OSError(number, os.strerror(number), str(place))
    # Two steps: in between the folder is absent, never half of it.
    old = _temporary(place)
    place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True
