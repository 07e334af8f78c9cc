"""The state of a long search on stderr: incumbent, bound, gap, what is being done; or how far a sweep is.

On a terminal one line that is rewritten and wiped at the end, once the work has taken :data:`QUIET_S`; elsewhere, in a
log, a line every :data:`LOG_EVERY_S`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from meshplan.planner.core.solution import OnProgress, Progress

QUIET_S = 0.5
REFRESH_S = 0.1
LOG_EVERY_S = 10.0
_WIPE = "\r\x1b[K"
_MAX_LINE = 79


def progress_text(progress: Progress, elapsed_s: float) -> str:
    """One line: time, incumbent, bound and gap in the plan's units, current activity."""
    best, bound = progress.incumbent, progress.bound
    unit = f" {progress.unit}" if progress.unit else ""
    parts = [f"{elapsed_s:.0f} s"]
    if best is not None and math.isfinite(best):
        parts.append(f"best {best:.5g}{unit}")
    else:
        parts.append("nothing found yet")
    if bound is not None and math.isfinite(bound):
        parts.append(f"bound {bound:.5g}{unit}")
        if best is not None and math.isfinite(best) and best:
            parts.append(f"gap {abs(best - bound) / abs(best):.1%}")
    return " · ".join([*parts, progress.note])


@contextmanager
def progress_line(stream: TextIO | None = None) -> Iterator[OnProgress]:
    """Yield the callback for a solver.

    Args:
        stream: where to write; stderr where None.
    """
    with status_line(stream) as show:
        yield lambda progress: show(lambda elapsed_s: progress_text(progress, elapsed_s))


@contextmanager
def status_line(stream: TextIO | None = None) -> Iterator[Callable[[Callable[[float], str]], None]]:
    """Yield what shows a status: a function of the elapsed seconds, called only where its text is written.

    Args:
        stream: where to write; stderr where None.
    """
    shown = sys.stderr if stream is None else stream
    is_terminal = shown.isatty()
    started = time.monotonic()
    first, every = (QUIET_S, REFRESH_S) if is_terminal else (LOG_EVERY_S, LOG_EVERY_S)
    last = started + first - every

    def show(text_at: Callable[[float], str]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every:
            last = now
            text = text_at(now - started)
            shown.write(_WIPE + text[:_MAX_LINE] if is_terminal else f"meshplan: {text}\n")
            shown.flush()

    try:
        yield show
    finally:
        if is_terminal and last >= started + QUIET_S:
            shown.write(_WIPE)
            shown.flush()
