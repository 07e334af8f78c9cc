"""Puts emitted files on disk: all of them or none, inside the output folder, never over files that were not offered.

A folder that is new, empty or holds nothing but an earlier plan's files is exchanged as a whole. Beside other files
each one is written under another name and renamed, and put back when a step fails; its manifest is written last. The
manifest (:data:`MANIFEST`, in the format of ``sha256sum``) has the digest of every file: ``launch.sh`` looks at it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path

from meshplan.catalogs.errors import EmitError
from meshplan.catalogs.writing import FILE_MODE, SCRIPT_MODE, explained, write_file, write_folder
from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.emit.text import MANIFEST

_LISTED_FILES = 3
_MAX_MANIFEST_BYTES = 2**22


def write_artifacts(artifacts: Sequence[Artifact], out: Path, *, force: bool = False) -> tuple[Path, ...]:
    """Write ``artifacts`` and their manifest below ``out`` and return their paths.

    Args:
        artifacts: what to write; their paths are relative.
        out: output folder, created when missing.
        force: replace files that exist; a folder that holds nothing else is replaced as a whole.

    Raises:
        EmitError: a path leaves ``out`` (also through a symbolic link), a file exists and ``force`` is false, two
            artifacts share a path, or the disk refuses. Nothing has changed then.
    """
    files = [*artifacts, _manifest(artifacts)]
    with explained(out):
        _check(files, out, force=force)
        if _is_ours(out):
            content = {str(one.path): (one.content, SCRIPT_MODE if one.executable else FILE_MODE) for one in files}
            write_folder(out, content)
        else:
            _write_beside(files, out)
    return tuple(out / artifact.path for artifact in artifacts)


def packed(artifacts: Sequence[Artifact]) -> bytes:
    """The files and their manifest as a ZIP archive; the same files give the same bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for one in (*artifacts, _manifest(artifacts)):
            entry = zipfile.ZipInfo(str(one.path))  # of 1980: the time of packing is no part of it
            entry.external_attr = (stat.S_IFREG | (SCRIPT_MODE if one.executable else FILE_MODE)) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, one.content)
    return content.getvalue()


def _manifest(artifacts: Sequence[Artifact]) -> Artifact:
    lines = (f"{hashlib.sha256(one.content.encode()).hexdigest()}  {one.path}\n" for one in artifacts)
    return Artifact(path=MANIFEST, content="".join(lines))


def _is_ours(out: Path) -> bool:
    """Whether everything in the folder was written by us and may go: it is absent, empty, or as its manifest lists."""
    if not out.exists():
        return True
    if out.is_symlink() or out.resolve() == Path.cwd():  # neither can be renamed away
        return False
    there = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir() or path.is_symlink()}
    return there <= _listed(out / MANIFEST) | {MANIFEST.name}


def _listed(manifest: Path) -> set[str]:
    try:
        with manifest.open(encoding="utf-8") as stream:
            return {line.rstrip("\n").partition("  ")[2] for line in stream.read(_MAX_MANIFEST_BYTES).splitlines()}
    except (OSError, ValueError):
        return set()


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


def _write_beside(files: Sequence[Artifact], out: Path) -> None:
    """Write into a folder that holds other files too; the manifest, which comes last, is away meanwhile."""
    with contextlib.ExitStack() as undo:
        _remove(out / MANIFEST, undo)
        for artifact in files:
            target = out / artifact.path
            _make_folder(target.parent, undo)
            before = _content(target)
            undo.callback(_restore, target, before)
            mode = SCRIPT_MODE if artifact.executable else FILE_MODE
            write_file(target, artifact.content, force=True, mode=mode)
        undo.pop_all()


def _remove(path: Path, undo: contextlib.ExitStack) -> None:
    before = _content(path)
    path.unlink(missing_ok=True)
    undo.callback(_restore, path, before)


def _make_folder(folder: Path, undo: contextlib.ExitStack) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir()
        undo.callback(_remove_folder, path)


def _content(path: Path) -> tuple[str, int] | None:
    return (path.read_text(encoding="utf-8", errors="surrogateescape"), path.stat().st_mode) if path.exists() else None


def _restore(path: Path, before: tuple[str, int] | None) -> None:
    if before is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(before[0], encoding="utf-8", errors="surrogateescape")
        path.chmod(before[1])


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else put a file there meanwhile
        folder.rmdir()
