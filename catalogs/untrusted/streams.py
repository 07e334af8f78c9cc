"""Compressed files, opened without believing what they say about their own size."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.catalogs.untrusted.limits import MAX_ARRAYS_BYTES, MAX_ROWS, MAX_TEXT_BYTES

_CHUNK_BYTES = 2**18
_GZIP_MAGIC = b"\x1f\x8b"
# What a damaged or hostile archive makes NumPy and zlib raise.
_DAMAGED = (
    ValueError,
    EOFError,
    KeyError,
    SyntaxError,
    tokenize.TokenError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)

Array = np.ndarray[Any, Any]


class _Capped(io.RawIOBase):
    """A stream that refuses to give more than its limit, however much is behind it."""

    def __init__(self, stream: Any, most_bytes: int, path: Path) -> None:
        super().__init__()
        self._stream, self._left, self._most, self._path = stream, most_bytes, most_bytes, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._stream.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DocumentError(f"{self._path} is no gzip file, or is cut short: {error}") from error
        self._left -= len(content)
        if self._left < 0:
            raise DocumentError(f"{self._path} holds more than {self._most} bytes of text; at most that are read")
        buffer[: len(content)] = content
        return len(content)


def long_lines(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> Iterator[str]:
    """The lines of a file, plain or compressed with gzip, their ends included; a byte-order mark is left out.

    Raises:
        DocumentError: larger than ``most_bytes`` (after decompression), more than :data:`MAX_ROWS` lines, damaged, or
            no UTF-8.
        OSError: it cannot be read.
    """
    with path.open("rb") as raw:
        is_compressed = raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
        stream: Any = gzip.GzipFile(fileobj=raw) if is_compressed else raw
        capped = io.BufferedReader(_Capped(stream, most_bytes, path), _CHUNK_BYTES)
        number = -1
        try:
            for number, line in enumerate(io.TextIOWrapper(capped, encoding="utf-8-sig", newline="")):
                if number > MAX_ROWS:
                    raise DocumentError(f"{path} has more than {MAX_ROWS} lines; at most that are read")
                yield line
        except UnicodeDecodeError as error:
            where = f"byte 0x{error.object[error.start]:02x} in line {number + 2} or after"
            raise DocumentError(f"{path} is not UTF-8: {where}; save it as UTF-8") from error


def csv_rows(path: Path) -> Iterator[list[str]]:
    """The rows of a CSV, plain or compressed with gzip; see :func:`long_lines`."""
    return _table(long_lines(path), path)


def named_rows(path: Path) -> tuple[Iterator[list[str]], int]:
    """A table as rows of words, the names of its columns first, and the line in which the first row below them stands.

    A CSV as it stands; JSON lines, as which benchmarks record, by the keys of the first: their values are then checked
    where those of a CSV are.

    Raises:
        DocumentError: as :func:`long_lines`; a line is not what its file is.
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
        yield [str(found.pop(name, "")) for name in names] + [str(value) for value in found.values()]


def read_arrays(path: Path, names: set[str] | None = None) -> Mapping[str, Array]:
    """The arrays of an ``.npz``; nothing is unpickled, and no header is believed before its data are there.

    Args:
        path: of the archive.
        names: which ones; None for all.

    Raises:
        DocumentError: no such archive, other than plain numbers, or beyond the limit.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            left = MAX_ARRAYS_BYTES
            found: dict[str, Array] = {}
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                if names is not None and name not in names:
                    continue
                with archive.open(member) as stream:
                    content = stream.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise DocumentError(f"its arrays have more than {MAX_ARRAYS_BYTES} bytes; at most that are read")
                found[name] = _array(content)
            return found
    except _DAMAGED as error:
        raise DocumentError(f"is not an .npz of plain numbers; save it with numpy.savez ({error})") from error


def array_names(path: Path) -> tuple[str, ...]:
    """Names of the arrays of an ``.npz``; see :func:`read_arrays`."""
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(member.removesuffix(".npy") for member in archive.namelist())
    except _DAMAGED as error:
        raise DocumentError(f"is not an .npz of plain numbers; save it with numpy.savez ({error})") from error


def _array(content: bytes) -> Array:
    """One ``.npy``; its header may claim no more data than there are."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    size = dtype.itemsize
    for length in shape:
        size *= length
    if dtype.hasobject:
        raise DocumentError("an array holds Python objects; save plain numbers")
    if size > len(content) - stream.tell():
        raise DocumentError(f"an array claims {size} bytes and has {len(content) - stream.tell()}")
    stream.seek(0)
    array: Array = np.load(stream, allow_pickle=False)
    return array
