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


STATE = Progress(incumbent=57.6, bound=40.25, note="pipeline splits 3/12", unit="s a step")


def test_short_work_writes_nothing(clock: list[float]) -> None:
    terminal = Terminal()
    with progress.progress_line(terminal) as show:
        clock[0] = 0.4
        show(STATE)
    assert terminal.getvalue() == ""


def test_long_work_rewrites_one_line_and_wipes_it(clock: list[float]) -> None:
    terminal = Terminal()
    with progress.progress_line(terminal) as show:
        for moment in (0.6, 0.61, 0.65, 1.7):
            clock[0] = moment
            show(STATE)
    written = terminal.getvalue()
    assert written.count("best 57.6") == 2
    assert "bound 40.25" in written
    assert "\n" not in written
    assert written.endswith("\r\x1b[K")


def test_a_log_gets_a_line_every_ten_seconds(clock: list[float]) -> None:
    log = io.StringIO()
    with progress.progress_line(log) as show:
        for moment in (0.6, 9.9, 10.1, 19.0, 20.2):
            clock[0] = moment
            show(STATE)
    assert log.getvalue().splitlines() == [
        f"meshplan: {moment} s · best 57.6 s a step · bound 40.25 s a step · gap 30.1% · pipeline splits 3/12"
        for moment in (10, 20)
    ]


def test_the_line_fits_a_terminal(clock: list[float]) -> None:
    terminal = Terminal()
    with progress.progress_line(terminal) as show:
        clock[0] = 1.0
        show(Progress(incumbent=1e300, bound=None, note="x" * 200))
    assert len(terminal.getvalue()) < 80 + 2 * len("\r\x1b[K")


def test_without_an_incumbent_this_is_said() -> None:
    text = progress.progress_text(Progress(incumbent=None, bound=None, note="n"), 3.2)
    assert text == "3 s · nothing found yet · n"
