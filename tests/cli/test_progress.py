"""The progress line: only for terminals, only for long work, one line, wiped at the end."""

from __future__ import annotations

import io

import pytest

from meshplan.cli import progress
from meshplan.planner.core.solution import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test turns."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


STATE = Progress(incumbent=57.6, bound=40.25, note="pipeline splits 3/12")


def test_short_work_writes_nothing(clock: list[float]) -> None:
    terminal = Terminal()
    with progress.progress_line(terminal) as show:
        assert show is not None
        clock[0] = 0.4
        show(STATE)
    assert terminal.getvalue() == ""


def test_long_work_rewrites_one_line_and_wipes_it(clock: list[float]) -> None:
    terminal = Terminal()
    with progress.progress_line(terminal) as show:
        assert show is not None
        for moment in (0.6, 0.61, 0.65, 1.7):
            clock[0] = moment
            show(STATE)
    written = terminal.getvalue()
    assert written.count("best 57.6") == 2
    assert "bound 40.25" in written
    assert "\n" not in written
    assert written.endswith("\r\x1b[K")


def test_a_pipe_gets_no_progress() -> None:
    with progress.progress_line(io.StringIO()) as show:
        assert show is None


def test_the_line_fits_a_terminal() -> None:
    text = progress.progress_text(Progress(incumbent=1e300, bound=None, note="x" * 200), 1e6)
    assert len(text) < 80


def test_without_an_incumbent_only_the_work_is_named() -> None:
    assert (
        progress.progress_text(Progress(incumbent=None, bound=None, note="n"), 3.2) == "n · 3 s, Ctrl-C keeps the best"
    )
