"""Tables for people as lines of text: aligned columns; cells are broken over lines where a table is too wide."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal, Protocol

_LEAST_WRAPPED_WIDTH = 8  # narrower columns of broken words are unreadable
_BETWEEN = "  "  # columns
_PLAIN = frozenset("✔–—…×·−§±≤≥µ")  # what our cells have besides ASCII, one cell of a terminal wide each
_MARKUP = frozenset("[:")  # what a heading may have that rich reads as markup


class Heading(Protocol):
    """What a table needs to know of a column, see :class:`meshplan.cli.render.Column`."""

    @property
    def title(self) -> str:
        """What stands above it."""

    @property
    def right(self) -> bool:
        """Cells stand right."""

    @property
    def wrap(self) -> bool:
        """Cells may be broken over lines."""


def table_lines(
    columns: Sequence[Heading], cells: Sequence[Sequence[str]], *, title: str = "", width: int
) -> list[str]:
    """The lines of a table.

    Args:
        columns: headings, and how cells are laid out.
        cells: line by line.
        title: above the table; none where it is empty.
        width: characters of a line.
    """
    return fitting_lines(columns, cells, title=title, width=width) or wrapped_lines(
        columns, cells, title=title, width=width
    )


def fitting_lines(columns: Sequence[Heading], cells: Sequence[Sequence[str]], *, title: str, width: int) -> list[str]:
    """The same of a table that needs no wrapping, without rich, whose import is 0.04 s of each command that prints one;
    none where the table is too wide, a column is empty, or a text may not take as many cells as it has characters.
    """
    heads = [column.title for column in columns]
    sizes = [max(map(len, texts)) for texts in zip(heads, *cells, strict=True)]
    whole = sum(sizes) + len(_BETWEEN) * (len(sizes) - 1)
    if not sizes or not all(sizes) or max(whole, len(title)) > width or _MARKUP.intersection("".join(heads)):
        return []
    if not all(map(_is_plain, (title, *heads, *(text for line in cells for text in line)))):
        return []

    def line(texts: Sequence[str]) -> str:
        laid = zip(columns, texts, sizes, strict=True)
        return _BETWEEN.join(f"{text:>{size}}" if one.right else f"{text:<{size}}" for one, text, size in laid).rstrip()

    return [*([title.rstrip()] if title else []), line(heads), "─" * whole, *map(line, cells)]


def _is_plain(text: str) -> bool:
    """Whether each character is one cell wide on any terminal, and stays where it is."""
    return (text == " " or text == text.strip()) and all(" " <= one <= "~" or one in _PLAIN for one in text)


def wrapped_lines(columns: Sequence[Heading], cells: Sequence[Sequence[str]], *, title: str, width: int) -> list[str]:
    """The same of any table."""
    from rich import box  # start-up: see above
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    least = 0
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, overflow="fold", no_wrap=not column.wrap)
        widest = max(len(text) for text in (column.title, *(line[index] for line in cells)))
        least += (min(widest, _LEAST_WRAPPED_WIDTH) if column.wrap else widest) + (2 if index else 0)
    for line in cells:
        # Text, not str: brackets are no markup.
        table.add_row(*map(Text, line))
    text = io.StringIO()
    if least > width:
        table.padding = 0
        least -= len(columns) - 1
    # Rather close columns, or a table too wide, than cells cut off.
    console = Console(file=text, width=max(width, least), highlight=False, no_color=True)
    if title:
        console.print(Text(title))
    console.print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]
