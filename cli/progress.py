"""One line on stderr with the state of a long search: incumbent, bound, what is being done.

Nothing is written unless stderr is a terminal and the work has taken :data:`QUIET_S`; the line is wiped at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from meshplan.planner.core.solution import OnProgress, Progress

QUIET_S = 0.5
REFRESH_S = 0.1
_WIPE = "\r\x1b[K"
_MAX_LINE = 79


def progress_text(progress: Progress, elapsed_s: float) -> str:
    """One line: current activity, incumbent, bound."""
    parts = [progress.note]
    if progress.incumbent is not None:
        parts.append(f"best {progress.incumbent:.6g}")
    if progress.bound is not None:
        parts.append(f"bound {progress.bound:.6g}")
    parts.append(f"{elapsed_s:.0f} s, Ctrl-C keeps the best")
    return " · ".join(part for part in parts if part)[:_MAX_LINE]


@contextmanager
def progress_line(stream: TextIO | None = None) -> Iterator[OnProgress | None]:
    """Yield the callback for a solver; None where stderr is no terminal.

    Args:
        stream: where to write; stderr where None.
    """
    shown = sys.stderr if stream is None else stream
    if not shown.isatty():
        yield None
        return
    started = time.monotonic()
    last = started + QUIET_S - REFRESH_S

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= REFRESH_S:
            last = now
            shown.write(_WIPE + progress_text(progress, now - started))
            shown.flush()

    try:
        yield show
    finally:
        if last >= started + QUIET_S:
            shown.write(_WIPE)
            shown.flush()
