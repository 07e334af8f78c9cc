"""Puts emitted files on disk: all of them or none, inside the output folder, never over files that were not offered.

Each file is written to a temporary name in its own folder and renamed, so that a reader never sees half a file. When
any step fails, what was created is removed and what was replaced is put back.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshplan.catalogs.errors import EmitError
from meshplan.planner.emit.artifact import Artifact

_FILE_MODE = 0o644
_SCRIPT_MODE = 0o755
_LISTED_FILES = 3


def write_artifacts(artifacts: Sequence[Artifact], out: Path, *, force: bool = False) -> tuple[Path, ...]:
    """Write ``artifacts`` below ``out`` and return their paths.

    Args:
        artifacts: what to write; their paths are relative.
        out: output folder, created when missing.
        force: replace files that exist.

    Raises:
        EmitError: a path leaves ``out`` (also through a symbolic link), a file exists and ``force`` is false, two
            artifacts share a path, or the disk refuses. Nothing has changed then.
    """
    with _explained(out):
        _check(artifacts, out, force=force)
    undo = contextlib.ExitStack()
    written = []
    with _explained(out), undo:
        _make_folder(out, undo)
        for artifact in artifacts:
            written.append(_write(artifact, out, undo))
        undo.pop_all()
    return tuple(written)


@contextlib.contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise EmitError(f"cannot write {where}: {error.strerror}; choose another --out or mend its rights") from error


def _check(artifacts: Sequence[Artifact], out: Path, *, force: bool) -> None:
    paths = [str(artifact.path) for artifact in artifacts]
    doubled = sorted({path for path in paths if paths.count(path) > 1})
    if doubled:
        raise EmitError(f"two files would have the path {doubled[0]}; this is a bug of the emitter")
    if out.exists() and not out.is_dir():
        raise EmitError(f"{out} is not a folder; choose another --out")
    root = out.resolve()
    for artifact in artifacts:
        target = out / artifact.path
        if (
            artifact.path.is_absolute()
            or not target.parent.resolve().is_relative_to(root)
            or ".." in artifact.path.parts
        ):
            raise EmitError(f"{artifact.path} leads out of {out} (a symbolic link, perhaps); refusing to write there")
        if target.is_symlink():
            raise EmitError(f"{target} is a symbolic link; refusing to write through it, remove it first")
        if target.is_dir():
            raise EmitError(f"{target} is a folder, a file of that name is to be written; remove it first")
    existing = [path for path in paths if (out / path).exists()]
    if existing and not force:
        more = len(existing) - _LISTED_FILES
        listed = ", ".join(existing[:_LISTED_FILES]) + (f" and {more} more" if more > 0 else "")
        raise EmitError(f"{out} already holds {listed}; use --force to replace them, or another --out")


def _make_folder(folder: Path, undo: contextlib.ExitStack) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir()
        undo.callback(_remove_folder, path)


def _write(artifact: Artifact, out: Path, undo: contextlib.ExitStack) -> Path:
    target = out / artifact.path
    _make_folder(target.parent, undo)
    before = _content(target)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    undo.callback(temporary.unlink, missing_ok=True)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
        stream.write(artifact.content)
    temporary.chmod(_SCRIPT_MODE if artifact.executable else _FILE_MODE)
    temporary.replace(target)
    undo.callback(_restore, target, before)
    return target


def _content(path: Path) -> tuple[bytes, int] | None:
    return (path.read_bytes(), path.stat().st_mode) if path.exists() else None


def _restore(path: Path, before: tuple[bytes, int] | None) -> None:
    if before is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(before[0])
        path.chmod(before[1])


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else put a file there meanwhile
        folder.rmdir()
