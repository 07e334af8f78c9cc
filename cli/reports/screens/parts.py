"""What first screens of all kinds share: bars on half a screen, and as many plans as fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from meshplan.cli.render import Row
from meshplan.cli.reports.quantities import bar, percent

MOST_LINES = 40
# Lines that `meshplan plan` prints below: the plan's id and the commands that come next.
_FOOTER_LINES = 6
_MOST_PLANS = 5
MOST_BARS = 6
_LEAST_SHARE = 0.01
# Columns of half a screen, and of the bar in it.
_HALF, _BAR = 39, 10


def time_bars(breakdown: Sequence[Row], title: str) -> list[str]:
    """The largest parts of a step or an iteration."""
    rows = [row for row in breakdown if row["share"] >= _LEAST_SHARE][:MOST_BARS]
    largest = max((row["share"] for row in rows), default=1.0)
    return [title, *(bar_line(str(row["name"]), percent(row["share"]), row["share"] / largest) for row in rows)]


def bar_line(name: str, value: str, share: float) -> str:
    """Name, value and bar within half a screen; a longer name is cut."""
    room = _HALF - _BAR - 9
    shown = name if len(name) <= room else f"{name[: room - 1]}…"
    return f"{shown:<{room}} {value:>6}  {bar(share, _BAR)}"


def side_by_side(left: Sequence[str], right: Sequence[str]) -> str:
    """Two blocks of lines, each on its half of the screen."""
    return "".join(f"{one:<{_HALF}}  {two}".rstrip() + "\n" for one, two in zip_longest(left, right, fillvalue=""))


def fitted(head: Sequence[str], table: Callable[[int], str], tail: Sequence[str]) -> str:
    """The sections with as many plans in the table as fit the screen, at least one."""
    count = _MOST_PLANS
    while True:
        text = "\n".join(section for section in (*head, table(count), *tail) if section)
        if count == 1 or text.count("\n") + _FOOTER_LINES <= MOST_LINES:
            return text
        count -= 1
