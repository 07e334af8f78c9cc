"""Tables for people as lines of text: aligned columns; cells are broken over lines where a table is too wide."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal, Protocol

_LEAST_WRAPPED_WIDTH = 8  # narrower columns of broken words are unreadable
_BETWEEN = "  "  # columns
_SEPARATORS = "/._-"  # of ids, keys and addresses, after which a line may end
_PLAIN = frozenset("✔–—…×·→−§±≤≥µ")  # what our cells have besides ASCII, one cell of a terminal wide each
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
    return plain_lines(columns, cells, title=title, width=width) or any_lines(columns, cells, title=title, width=width)


def plain_lines(columns: Sequence[Heading], cells: Sequence[Sequence[str]], *, title: str, width: int) -> list[str]:
    """The same without rich, whose import is 0.04 s of each command that prints a table; none where columns would be
    close or words broken, a column is empty, or a text may not take as many cells as it has characters.
    """
    heads = [column.title for column in columns]
    whole = [max(map(len, texts)) for texts in zip(heads, *cells, strict=True)]
    if not whole or not all(whole) or len(title) > width or _MARKUP.intersection("".join(heads)):
        return []
    if not all(map(_is_plain, (title, *heads, *(text for line in cells for text in line)))):
        return []
    between = len(_BETWEEN) * (len(whole) - 1)
    sizes = _fitting_sizes(columns, whole, width - between)
    is_close = any(size < min(_LEAST_WRAPPED_WIDTH, longest) for size, longest in zip(sizes, whole, strict=True))
    if is_close or sum(sizes) + between > width:
        return []
    lines = [[_broken(text, size) for text, size in zip(line, sizes, strict=True)] for line in (heads, *cells)]
    if any(len(part) > size for line in lines for parts, size in zip(line, sizes, strict=True) for part in parts):
        return []

    def laid(texts: Sequence[str]) -> str:
        each = zip(columns, texts, sizes, strict=True)
        return _BETWEEN.join(f"{text:>{size}}" if one.right else f"{text:<{size}}" for one, text, size in each).rstrip()

    above, *rows = lines
    head = [laid(texts) for texts in zip_longest(*map(reversed, above), fillvalue="")][::-1]  # its last lines are full
    below = [laid(texts) for line in rows for texts in zip_longest(*line, fillvalue="")]
    return [*([title.rstrip()] if title else []), *head, "─" * (sum(sizes) + between), *below]


def _fitting_sizes(columns: Sequence[Heading], whole: Sequence[int], width: int) -> list[int]:
    """Characters of each column: of those that may be wrapped, the widest become narrower together until all fit.

    Args:
        columns: which may be wrapped.
        whole: characters of their longest texts.
        width: characters of all together; where none may be wrapped, or not so far, they are more.
    """
    # As rich has it, which counts what stands between two columns to the first of them.
    sizes = [size + 1 for size in whole[:-1]] + [whole[-1]]
    may_wrap = [index for index, column in enumerate(columns) if column.wrap]
    width += len(sizes) - 1
    while (excess := sum(sizes) - width) > 0 and (widest := max((sizes[index] for index in may_wrap), default=0)) > 0:
        second = max((sizes[index] for index in may_wrap if sizes[index] < widest), default=0)
        most = min(excess, widest - second)
        those = [index for index in may_wrap if sizes[index] == widest]
        for left, index in zip(range(len(those), 0, -1), those, strict=True):
            cut = min(most, round(excess / left))
            sizes[index] -= cut
            excess -= cut
    return [size - 1 for size in sizes[:-1]] + [sizes[-1]]


def _broken(text: str, size: int) -> list[str]:
    """A text in lines of so many characters, broken between words; longer words stand alone."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and len(lines[-1]) + 1 + len(word) <= size:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _with_breaks(text: str, size: int) -> str:
    r"""A text whose words of more than ``size`` characters (ids, URLs) have line ends after their separators.

    >>> _with_breaks("Qwen/Qwen2.5-7B-Instruct", 18)
    'Qwen/Qwen2.5-7B-\nInstruct'
    """
    return " ".join("\n".join(_pieces(word, size)) for word in text.split(" "))


def _pieces(word: str, size: int) -> Iterator[str]:
    """A word in parts of at most ``size`` characters, each to its last separator; the rest whole where it has none."""
    while len(word) > size and (end := 1 + max(word.rfind(sign, 0, size) for sign in _SEPARATORS)) > 0:
        yield word[:end]
        word = word[end:]
    yield word


def _is_plain(text: str) -> bool:
    """Whether each character is one cell wide on any terminal, and stays where it is."""
    return (text == " " or text == text.strip()) and all(" " <= one <= "~" or one in _PLAIN for one in text)


def any_lines(columns: Sequence[Heading], cells: Sequence[Sequence[str]], *, title: str, width: int) -> list[str]:
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
    whole = [max(map(len, texts)) for texts in zip((column.title for column in columns), *cells, strict=True)]
    sizes = _fitting_sizes(columns, whole, width - len(_BETWEEN) * (len(columns) - 1))
    for line in cells:
        shown = zip(columns, line, sizes, strict=True)
        # Text, not str: brackets are no markup.
        table.add_row(*(Text(_with_breaks(text, size) if column.wrap else text) for column, text, size in shown))
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
