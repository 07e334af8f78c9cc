"""Functions that become machine code at their first call, and stay on disk for later processes.

Numba compiles a function anew when the file that it stands in has changed. What it calls from other files lies inside
its code, constants too: code that is older than any file of the serving planner is deleted before it can be loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])
# What compiled functions call and the constants that they hold stand below it.
SOURCES = Path(__file__).parents[2]
# Numba's files beside the sources: the index of a function and its code.
STORED = "__pycache__/*.nb[ic]"


def machine_code(function: F) -> F:
    """Compile with Numba: without reordered arithmetic, so that every figure is that of the same line in Python.

    An index beyond the end of an array raises, as in Python.
    """
    return cast(F, numba.njit(cache=True, boundscheck=True, fastmath=False)(function))


def drop_outdated(sources: Path) -> None:
    """Delete code that was compiled before the newest change of a source file below a folder."""
    newest = max((path.stat().st_mtime for path in sources.rglob("*.py")), default=0.0)
    for stored in sources.rglob(STORED):
        with suppress(OSError):  # gone already, or not ours: then Numba keeps its code elsewhere
            if stored.stat().st_mtime < newest:
                stored.unlink()


drop_outdated(SOURCES)
