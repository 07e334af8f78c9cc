"""Reads a CSV of measurements strictly: every column has a name with its unit, every value its sane range.

Published tables exist with swapped columns, with a header that does not fit its rows, and with times in a unit that
nobody states. Such a table would poison every number that is fitted to it, so it is rejected as a whole, with the
first problems of each kind and their line numbers, and never half imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshplan.catalogs.errors import CatalogError, Problem, closest_names, did_you_mean
from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.catalogs.untrusted.streams import csv_rows

# More say nothing new, and a shifted column breaks every row.
MAX_PROBLEMS = 10
Row = dict[str, Any]
Check = Callable[[Row], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvColumn:
    """One column of a table.

    Args:
        name: heading; ends with the SI unit where the value has one.
        low: least sane value; None for a text.
        high: greatest sane value.
        integer: whole numbers only.
        choices: the texts that may stand there; empty for any text.
    """

    name: str
    low: float | None = None
    high: float = math.inf
    integer: bool = False
    choices: tuple[str, ...] = ()

    def value(self, text: str) -> Any:
        """The cell's value.

        Raises:
            ValueError: says what is wrong with it.
        """
        if self.low is None:
            if not text or (self.choices and text not in self.choices):
                raise ValueError(f"{self.name}: {text!r} is not one of {', '.join(self.choices) or 'the texts'}")
            if not self.choices and is_number(text):
                raise ValueError(f"{self.name}: a number ({text}) where a text belongs; are columns swapped?")
            return text
        if not is_number(text):
            raise ValueError(f"{self.name}: {text!r} is not a finite number")
        value = float(text)
        if self.integer and value != int(value):
            raise ValueError(f"{self.name}: {text} is not a whole number; are columns swapped?")
        if not self.low <= value <= self.high:
            raise ValueError(f"{self.name}: {text} is outside {self.low:g} … {self.high:g}; another unit, or swapped?")
        return int(value) if self.integer else value


def read_table(path: Path, columns: Sequence[CsvColumn], *, check: Check | None = None) -> list[Row]:
    """Every row of a CSV (``.gz`` too), typed.

    Args:
        path: the file.
        columns: those that must be there, in any order; others are rejected.
        check: physical plausibility of a whole row: a message, or None.

    Raises:
        CatalogError: unreadable, or malformed in any row; lists the problems.
    """
    try:
        return _rows(path, csv_rows(path), columns, check)
    except (OSError, DocumentError) as error:
        raise CatalogError(f"cannot read the table {path}: {error}") from error


def refusal(path: Path, problems: Sequence[Problem]) -> CatalogError:
    """The error that lists what is wrong with a file."""
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return CatalogError(f"{path.name} is malformed; nothing was imported:\n{lines}")


def header_problems(header: Sequence[str], columns: Sequence[CsvColumn]) -> Iterator[Problem]:
    """Missing, unknown, repeated and unitless headings."""
    names = [column.name for column in columns]
    for name in header:
        if name not in names:
            with_unit = [known for known in names if known.rpartition("_")[0] == name]
            hint = f"; no unit: name it {with_unit[0]!r}" if with_unit else did_you_mean(closest_names(name, names))
            yield Problem(path="header", message=f"unknown column {name!r}{hint}")
        elif header.count(name) > 1:
            yield Problem(path="header", message=f"column {name!r} comes {header.count(name)} times")
    for name in names:
        if name not in header:
            yield Problem(path="header", message=f"no column {name!r}; the file has {', '.join(header)}")


def _rows(path: Path, reader: Any, columns: Sequence[CsvColumn], check: Check | None) -> list[Row]:
    header: list[str] = next(reader, [])
    problems = list(header_problems(header, columns))
    if problems:
        raise refusal(path, problems)
    by_name = {column.name: column for column in columns}
    ordered = [by_name[name] for name in header]
    rows: list[Row] = []
    for line, cells in enumerate(reader, start=2):
        message: str | None = None
        if len(cells) != len(ordered):
            message = f"{len(cells)} values under {len(ordered)} headings"
        else:
            try:
                row = {column.name: column.value(cell) for column, cell in zip(ordered, cells, strict=True)}
            except ValueError as error:
                message = str(error)
            else:
                message = check(row) if check else None
                rows.append(row)
        if message:
            problems.append(Problem(path=f"line {line}", message=message))
            if len(problems) >= MAX_PROBLEMS:
                problems.append(Problem(path="", message="reading stopped here; there may be more"))
                break
    if not rows and not problems:
        problems.append(Problem(path="", message="the table has no rows"))
    if problems:
        raise refusal(path, problems)
    return rows


def is_number(text: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
