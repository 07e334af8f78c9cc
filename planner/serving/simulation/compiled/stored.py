"""Machine code that an earlier process has left on disk: is it there, and still that of the sources?

Numba compiles a function anew when the file that it stands in has changed. What it calls from other files lies inside
its code, constants too: code that is older than any file of the serving planner is deleted before it can be loaded.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

# What compiled functions call and the constants that they hold stand below it.
SOURCES = Path(__file__).parents[2]
# Numba's files beside the sources: the index of a function and its code.
STORED = "__pycache__/*.nb[ic]"
# The functions by which a run begins: code for one worker, and for several.
ENTRIES = ("run_alone", "run_together")


def drop_outdated(sources: Path) -> None:
    """Delete code that was compiled before the newest change of a source file below a folder."""
    newest = newest_change(sources)
    for stored in sources.rglob(STORED):
        with suppress(OSError):  # gone already, or not ours: then Numba keeps its code elsewhere
            if stored.stat().st_mtime < newest:
                stored.unlink()


def is_stored(sources: Path) -> bool:
    """Whether this Python finds code for every kind of run below a folder, none of it older than a source file there.

    False where Numba keeps its code elsewhere, because the folder cannot be written.
    """
    newest, python = newest_change(sources), f"py{sys.version_info.major}{sys.version_info.minor}"
    for entry in ENTRIES:
        found = sources.rglob(f"__pycache__/*.{entry}-*.{python}.nbi")
        if not any(_changed_s(index) >= newest for index in found):
            return False
    return True


def newest_change(sources: Path) -> float:
    """When a source file below a folder last changed, s."""
    return max((_changed_s(path) for path in sources.rglob("*.py")), default=0.0)


def _changed_s(path: Path) -> float:
    """When a file last changed, s; long ago where it is gone meanwhile."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
