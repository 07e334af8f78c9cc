"""Reading the fields of a measured run: each value has the type that its key asks for, or a reason is given.

Rows come from users' own files and may contain anything: a section that is no object, a count that is no whole number,
a measurement below zero.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from meshplan.catalogs.errors import did_you_mean
from meshplan.catalogs.flag_names import bare, keys_meant

Choice = TypeVar("Choice")
# No count of a run is larger (tokens of a sequence, sequences of a batch, devices); products of two stay exact.
MOST = 100_000_000
# Characters of a wrong value that a message repeats.
SHOWN = 60
# Similarity (difflib: twice the characters in common over those of both) from which on a key is another one misspelt;
# difflib's own 0.6 takes kv_cache_dtype for trace_type.
SIMILAR = 0.75


class UnsupportedError(Exception):
    """An observation that the estimator cannot answer; the message is the reason."""


def shown(value: object) -> str:
    """A wrong value as messages repeat it.

    >>> shown("x" * 100)[-4:]
    'xxx…'
    """
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "an enormous number"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def misnamed(key: str, values: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """What a key of a section that nothing reads may mean: what a framework calls so, else the closest known key;
    nothing where that is stated, too.

    >>> misnamed("tensor_parallel_size", {}, {"tensor_parallel", "data_parallel"})
    ('tensor_parallel',)
    >>> misnamed("cpu_kv_blocks", {"kv_blocks": 4}, {"kv_blocks"}), misnamed("kv_cache_dtype", {}, {"trace_type"})
    ((), ())
    """
    found = [keys_meant(key, known)]
    found += [tuple(difflib.get_close_matches(form, sorted(known), n=1, cutoff=SIMILAR)) for form in (bare(key), key)]
    meant = next((names for names in found if names), ())
    return () if any(values.get(name) is not None for name in meant) else meant


def row_id(row: Mapping[str, Any]) -> str:
    """The unique name of a row."""
    name = row.get("id")
    if not isinstance(name, str):
        raise UnsupportedError(f"id must be a text, is {shown(name)}")
    return name


def caveats(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The remarks of a row's publisher."""
    stated = row.get("caveats")
    return tuple(map(str, stated)) if isinstance(stated, list) else ()


def has_caveat(row: Mapping[str, Any], mark: str) -> bool:
    """Whether one of the remarks contains ``mark``."""
    return any(mark in caveat for caveat in caveats(row))


class Section:
    """One object of a row, such as ``parallelism``.

    Args:
        row: the whole row.
        name: key of the section.
        required: a row without it is refused; otherwise it reads as empty.
    """

    def __init__(self, row: Mapping[str, Any], name: str, *, required: bool = True) -> None:
        value = row.get(name)
        if value is None:
            if required:
                raise UnsupportedError(f"the observation does not state {name}")
            value = {}
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise UnsupportedError(f"{name} must be an object, is {shown(value)}")
        self.name = name
        self.values: Mapping[str, Any] = value

    def refuse_misnamed(self, known: Collection[str]) -> None:
        """Refuse a key that is nearly one of ``known``, which the section lacks: it would be taken as not stated.

        Raises:
            UnsupportedError: with the key that is read.
        """
        for key in sorted(self.values.keys() - set(known)):
            meant = misnamed(key, self.values, known) if self.states(key) else ()
            if meant:
                raise UnsupportedError(f"{self.name}.{shown(key)[1:-1]} is not read{did_you_mean(meant)}")

    def refuse_misplaced(self, known: Collection[str], *others: Section) -> None:
        """Refuse a key of ``known`` that another section states and this one does not: it would be taken as not stated.

        Raises:
            UnsupportedError: with the place where it is read.
        """
        for other in others:
            for key in sorted(other.values):
                meant = (key,) if key in known else keys_meant(key, known)
                if meant and other.states(key) and not any(map(self.states, meant)):
                    raise UnsupportedError(f"{other.name}.{key} is not read there; write {self.name}.{meant[0]}")

    def states(self, key: str) -> bool:
        """Whether the row has a value for ``key``."""
        return self.values.get(key) is not None

    def wrong(self, key: str, asked: str) -> UnsupportedError:
        """The reason that refuses the value of ``key``."""
        return UnsupportedError(f"{self.name}.{key} must be {asked}, is {shown(self.values.get(key))}")

    def text(self, key: str, default: str | None = None) -> str:
        """A text; ``default`` where the row does not say."""
        value = self._stated(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """A whole number from ``least`` to ``most``; ``default`` where the row does not say."""
        value = self._stated(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most or value % 1:
            raise self.wrong(key, f"a whole number from {least:,} to {most:,}")
        return int(value)

    def number(self, key: str, *, or_zero: bool = False) -> float:
        """A finite number above 0, or 0 where that is allowed."""
        value = self._stated(key, None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (_is_positive(value) or (or_zero and value == 0)):
            raise self.wrong(key, f"a finite number {'of at least' if or_zero else 'above'} 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false; ``default`` where the row does not say."""
        value = self._stated(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def one_of(self, key: str, choices: Mapping[str, Choice], default: str | None = None) -> Choice:
        """What one of the texts in ``choices`` stands for; that of ``default`` where the row does not say."""
        text = self.text(key, default)
        if text not in choices:
            raise self.wrong(key, f"one of {', '.join(choices)}")
        return choices[text]

    def counts(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers from 0; None where the row does not say."""
        if not self.states(key):
            return None
        value = self.values[key]
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MOST for item in value):
            raise self.wrong(key, "a list of whole numbers")
        return tuple(value)

    def measurements(self) -> dict[str, Any]:
        """Flags, and numbers that are finite and above zero; a value that was not measured (null) is left out."""
        stated = {key: value for key, value in self.values.items() if value is not None}
        for key, value in stated.items():
            if isinstance(value, bool):
                continue
            if not isinstance(value, int | float) or not _is_positive(value):
                raise self.wrong(key, "a finite number above 0")
        return stated

    def _stated(self, key: str, default: Any) -> Any:
        if self.states(key):
            return self.values[key]
        if default is None:
            near = [word for word in sorted(self.values) if misnamed(word, {}, {key}) and self.states(word)]
            hint = f": {shown(near[0])} is not read" if near else ""
            raise UnsupportedError(f"the observation does not state {self.name}.{key}{hint}")
        return default


def _is_positive(value: float) -> bool:
    try:
        return math.isfinite(float(value)) and value > 0
    except OverflowError:
        return False
