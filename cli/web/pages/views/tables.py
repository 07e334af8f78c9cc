"""Tables of the command line as tables of a page: the same columns, the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshplan.cli.render import ABSENT, Column, Row


def table(rows: Sequence[Row], columns: Sequence[Column], *, caption: str) -> dict[str, Any]:
    """What the template ``table`` shows.

    Args:
        rows: as a report has them.
        columns: those that no row fills and may be left out are left out.
        caption: what the table answers.
    """
    cells = [[column.cell(row) for column in columns] for row in rows]
    kept = [
        place
        for place, column in enumerate(columns)
        if not column.optional or any(line[place] not in (ABSENT, " ") for line in cells)
    ]
    return {
        "caption": caption,
        "columns": [{"title": columns[place].title, "right": columns[place].right} for place in kept],
        "rows": [
            {"cells": [line[place] for place in kept], "chosen": bool(str(row.get("chosen") or "").strip())}
            for row, line in zip(rows, cells, strict=True)
        ],
    }
