"""A recorded trace as rows of words, the names of its columns first: a CSV as it stands, JSON lines by their keys.

Benchmarks record requests as one JSON object a line (Mooncake, aiperf); their values are read as those of a CSV are, so
that there is one place that checks them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.catalogs.untrusted.streams import long_lines


def trace_rows(path: Path) -> tuple[Iterator[list[str]], int]:
    """The rows, and the number of the line that the first row below the names stands in.

    Raises:
        DocumentError: as :func:`~meshplan.catalogs.untrusted.streams.long_lines`; a line is not what its file is.
    """
    lines = long_lines(path)
    first = next(lines, "")
    whole = chain([first] if first else [], lines)
    return (_objects(whole, path), 1) if first.lstrip().startswith("{") else (_table(whole, path), 2)


def _table(lines: Iterator[str], path: Path) -> Iterator[list[str]]:
    try:
        yield from csv.reader(lines)
    except csv.Error as error:
        raise DocumentError(f"{path} is no CSV: {error}") from error


def _objects(lines: Iterator[str], path: Path) -> Iterator[list[str]]:
    """The keys of the first object, then the values of each by these keys; what else an object has follows."""
    names: list[str] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            yield []
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"{path}: line {number} is no JSON object: {error}") from error
        if not isinstance(found, dict):
            raise DocumentError(f"{path}: line {number} is no JSON object, as the first line is")
        if names is None:
            names = list(found)
            yield names
        yield [str(found.pop(name)) for name in names if name in found] + [str(value) for value in found.values()]
