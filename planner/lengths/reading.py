"""Lengths of documents from a file or a histogram, hostile input refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.catalogs.untrusted.documents import DocumentError, parse, read_text
from meshplan.catalogs.untrusted.limits import MAX_JSON_BYTES, MAX_ROWS
from meshplan.catalogs.untrusted.streams import csv_rows, read_arrays
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.lengths.distribution import LengthTable, table_of
from meshplan.planner.lengths.packing import DROP, PackedDocuments
from meshplan.planner.lengths.spec import MAX_DOCUMENT_TOKENS, BinSpec, SequenceLengthsSpec

COLUMN = "length"
# Lengths that stand for those of a range.
POINTS_OF_A_RANGE = 32
# Lines that are named where they are wrong; after that reading stops.
MAX_PROBLEMS = 10


def packed_documents(spec: SequenceLengthsSpec, sequence_length: int, base: Path) -> PackedDocuments:
    """What lies in the sequences of a training question.

    Args:
        spec: as the user wrote it.
        sequence_length: tokens of a sequence.
        base: folder against which the file is resolved.

    Raises:
        SpecError: the file is unreadable or malformed, or no document is left.
    """
    table = _of_histogram(spec.histogram or ()) if spec.file is None else table_of(read_lengths(base / spec.file))
    if spec.longer == DROP and table.lengths[0] > sequence_length:
        message = f"drop leaves no document: the shortest has {table.lengths[0]} tokens, a sequence {sequence_length}"
        raise SpecError.at("workload.sequence_lengths.longer", message)
    return PackedDocuments(
        table=table,
        sequence_length=sequence_length,
        packing=spec.packing,
        longer=spec.longer,
        attends_across=spec.cross_document_attention,
    )


def read_lengths(path: Path) -> IntArray:
    """Tokens of each document of a file: CSV (plain or gzip), JSON, or NumPy's ``.npz``.

    Raises:
        SpecError: unreadable, empty, or with values that are no lengths.
    """
    where = f"the lengths {path}"
    try:
        if path.suffix == ".npz":
            return _of_arrays(path, where)
        if path.suffix == ".json":
            return _checked(list(_numbered(_of_json(path, where), "entry")), where)
        return _checked(list(_of_csv(path, where)), where)
    except (OSError, DocumentError) as error:
        raise SpecError.at("", f"cannot be read: {error}", of=where) from error


def _of_histogram(bins: Sequence[BinSpec]) -> LengthTable:
    lengths: list[int] = []
    counts: list[float] = []
    for one in bins:
        if one.length is not None:
            lengths.append(one.length)
            counts.append(one.count)
        elif one.least is not None and one.most is not None:
            within = _spread(one.least, one.most)
            lengths += within
            counts += [one.count / len(within)] * len(within)
    return table_of(lengths, counts)


def _spread(least: int, most: int) -> list[int]:
    """Lengths that stand for a range: the middles of its equal parts."""
    parts = min(POINTS_OF_A_RANGE, most - least + 1)
    return [round(least + (most - least) * (part + 0.5) / parts) for part in range(parts)]


def _numbered(values: Sequence[Any], name: str) -> Iterator[tuple[str, Any]]:
    return ((f"{name} {number}", value) for number, value in enumerate(values, start=1))


def _of_json(path: Path, where: str) -> Sequence[Any]:
    document = parse(read_text(path, MAX_JSON_BYTES), is_json=True, name=str(path))
    values = document.get("lengths") if isinstance(document, dict) else document
    if not isinstance(values, list):
        raise SpecError.at("", "must be a list of lengths, or an object with 'lengths'", of=where)
    return values


def _of_csv(path: Path, where: str) -> Iterator[tuple[str, Any]]:
    """(line, value) of every line below the header; a file of one column needs none."""
    rows = csv_rows(path)
    first = [name.strip() for name in next(rows, [])]
    if len(first) == 1 and first[0].isdigit():
        column = 0
        yield "line 1", first[0]
    elif COLUMN in first:
        column = first.index(COLUMN)
    else:
        message = f"has no column {COLUMN!r} but {', '.join(map(repr, first)) or 'nothing'}"
        raise SpecError.at("line 1", message, of=where)
    for line, row in enumerate(rows, start=2):
        if row:
            yield f"line {line}", row[column].strip() if column < len(row) else ""


def _of_arrays(path: Path, where: str) -> IntArray:
    arrays = read_arrays(path)
    found = arrays.get(COLUMN, arrays.get("lengths"))
    if found is None and len(arrays) == 1:
        found = next(iter(arrays.values()))
    if found is None or found.ndim != 1 or found.dtype.kind not in "iu":
        raise SpecError.at("", "must hold one array of whole numbers, named 'lengths'", of=where)
    if len(found) > MAX_ROWS:
        raise SpecError.at("", f"has {len(found)} lengths; at most {MAX_ROWS} are read", of=where)
    if not len(found) or found.min() < 1 or found.max() > MAX_DOCUMENT_TOKENS:
        message = f"lengths must be 1 to {MAX_DOCUMENT_TOKENS} tokens, at least one of them"
        raise SpecError.at("", message, of=where)
    return np.asarray(found.astype(np.int64))


def _checked(values: Sequence[tuple[str, Any]], where: str) -> IntArray:
    problems: list[Problem] = []
    lengths: list[int] = []
    for place, value in values:
        length = _whole(value)
        if length is None:
            message = f"must be a whole number of tokens, 1 to {MAX_DOCUMENT_TOKENS}, not {value!r}"
            problems.append(Problem(path=place, message=message))
            if len(problems) >= MAX_PROBLEMS:
                break
        else:
            lengths.append(length)
    if not values:
        problems.append(Problem(path="", message="there are no lengths; give at least one"))
    if problems:
        raise SpecError(problems, of=where)
    return np.array(lengths, dtype=np.int64)


def _whole(value: Any) -> int | None:
    """The length that a value says; None where it says none."""
    if isinstance(value, str):
        is_short = len(value) <= len(str(MAX_DOCUMENT_TOKENS))
        value = int(value) if is_short and value.isascii() and value.isdigit() else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 1 <= value <= MAX_DOCUMENT_TOKENS else None
