"""One renderer for every command: rows or a document to stdout, as table, JSON, YAML, CSV or Markdown.

People read ``table`` and ``markdown``, so their cells are formatted (``80.0 GiB``); programs read the other three, so
these carry plain SI numbers. Nothing else of meshplan writes to stdout.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshplan.catalogs.untrusted.text import shown
from meshplan.cli.tables import table_lines

Row = Mapping[str, Any]
TABLE_WIDTH = 80  # of a table that does not go to a terminal
ABSENT = "–"


class Format(StrEnum):
    """How an answer is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"
    MARKDOWN = "markdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a listing.

    Args:
        key: of the row.
        title: heading for people; programs see the key.
        right: numbers stand right.
        text: how a value reads in ``table`` and ``markdown``; None for the plain value.
        derive: the cell for people from the whole row, where one value is not enough.
        wrap: the cell may be broken over lines where the table is too wide.
        footnote: long texts such as citations: a table shows a number and lists the texts below.
        optional: left out of a table in which no row has it.
    """

    key: str
    title: str
    right: bool = False
    text: Callable[[Any], str] | None = None
    derive: Callable[[Row], str] | None = None
    wrap: bool = True
    footnote: bool = False
    optional: bool = False

    def cell(self, row: Row) -> str:
        """The cell for people; an absent value is a dash."""
        value = self.derive(row) if self.derive else row.get(self.key)
        if value is None or value == "":
            return ABSENT
        return self.text(value) if self.text else _plain(value)


def show_rows(rows: Sequence[Row], columns: Sequence[Column], form: Format, *, title: str = "") -> None:
    """Print a listing on stdout."""
    _write(rendered_rows(rows, columns, form, title=title, width=_terminal_width()))


def show_text(text: str) -> None:
    """Print text that is already rendered on stdout."""
    _write(text)


def terminal_width() -> int:
    """Columns that a table may use: those of the terminal, at least :data:`TABLE_WIDTH`."""
    return _terminal_width() or TABLE_WIDTH


def show_document(document: Row, form: Format, *, title: str = "") -> None:
    """Print one nested document on stdout; for people and CSV it is flattened to dotted names."""
    _write(rendered_document(document, form, title=title, width=_terminal_width()))


def rendered_rows(
    rows: Sequence[Row], columns: Sequence[Column], form: Format, *, title: str = "", width: int | None = TABLE_WIDTH
) -> str:
    """The text that :func:`show_rows` prints.

    Args:
        rows: one mapping a line; programs get all of it.
        columns: what people get, in order.
        form: see :class:`Format`.
        title: heading of a table.
        width: of a table in characters; None for the terminal's.
    """
    match form:
        case Format.JSON:
            return _json([dict(row) for row in rows])
        case Format.YAML:
            return _yaml([dict(row) for row in rows])
        case Format.CSV:
            return _csv(rows, columns)
        case Format.MARKDOWN:
            return _markdown(rows, columns)
        case Format.TABLE:
            return _table(rows, columns, title=title, width=width)


def rendered_document(document: Row, form: Format, *, title: str = "", width: int | None = TABLE_WIDTH) -> str:
    """The text that :func:`show_document` prints."""
    if form is Format.JSON:
        return _json(dict(document))
    if form is Format.YAML:
        return _yaml(dict(document))
    rows = [{"field": field, "value": value} for field, value in flattened(document)]
    columns = (Column(key="field", title="Field"), Column(key="value", title="Value"))
    return rendered_rows(rows, columns, form, title=title, width=width)


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _yaml(content: Any) -> str:
    from meshplan.catalogs.untrusted.quoting import yaml_text  # start-up: only this form needs a writer of YAML

    return yaml_text(content, allow_unicode=True, width=1000)


def _csv(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    from meshplan.catalogs.untrusted.quoting import csv_cell  # start-up: as above

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = list(dict.fromkeys(key for row in rows for key in row)) or [column.key for column in columns]
    writer.writerow([csv_cell(key) for key in keys])
    writer.writerows([csv_cell(_machine(row.get(key))) for key in keys] for row in rows)
    return text.getvalue()


def present(rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    """The columns that people see: optional ones only where a row has them."""
    return [column for column in columns if not column.optional or any(column.cell(row) != ABSENT for row in rows)]


def _markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    from meshplan.catalogs.untrusted.quoting import markdown_text  # start-up: as above

    shown = present(rows, columns)
    lines = [
        [column.title for column in shown],
        ["---:" if column.right else "---" for column in shown],
        *([markdown_text(column.cell(row)) for column in shown] for row in rows),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _table(rows: Sequence[Row], columns: Sequence[Column], *, title: str, width: int | None) -> str:
    shown = present(rows, columns)
    notes: dict[str, int] = {}
    lines = [[_noted(column, row, notes) for column in shown] for row in rows]
    printed = table_lines(shown, lines, title=title, width=width or TABLE_WIDTH)
    # Notes are not wrapped: a URL must stay in one piece to be opened.
    return "".join(f"{line}\n" for line in (*printed, *(f"[{number}] {note}" for note, number in notes.items())))


def _noted(column: Column, row: Row, notes: dict[str, int]) -> str:
    """The cell, or the number of its footnote."""
    cell = column.cell(row)
    return f"[{notes.setdefault(cell, len(notes) + 1)}]" if column.footnote else cell


def flattened(document: Row, prefix: str = "", *, most_items: float = math.inf) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested document.

    Args:
        document: mappings, and lists of mappings.
        prefix: what the names begin with.
        most_items: longer lists of mappings are left whole.
    """
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{name}.", most_items=most_items)
        elif isinstance(value, list | tuple) and 0 < len(value) <= most_items and isinstance(value[0], Mapping):
            for index, item in enumerate(value):
                yield from flattened(item, f"{name}[{index}].", most_items=most_items)
        else:
            yield name, value


def _plain(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case Mapping() | list() | tuple():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)


def _machine(value: Any) -> Any:
    """A CSV cell: empty for nothing, JSON for what is nested."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (Mapping, list, tuple)) else value


def _terminal_width() -> int | None:
    if not sys.stdout.isatty():
        return TABLE_WIDTH
    import shutil

    return max(TABLE_WIDTH, shutil.get_terminal_size().columns)


def _write(text: str) -> None:
    try:
        sys.stdout.write(shown(text))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
