"""Reads the instance of a stand-alone problem: numbers and arrays, every problem at once, each with its path.

An array is a nested list, or ``{"file": "NAME.npz", "key": "NAME"}``. Such a file lies in the instance's own folder
(after links are resolved), is a NumPy archive, and is read without unpickling anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.errors import closest_names, did_you_mean
from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.catalogs.untrusted.streams import array_names, read_arrays
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.problems import Problems

_REFERENCE = '{"file": "NAME.npz", "key": "NAME"}'
_NUMERIC_KINDS = "iuf"  # NumPy's signed, unsigned and floating dtypes
_MOST_CHARACTERS = 60


class InstanceReader(Problems):
    """The problems found so far; what it reads is None where something was wrong.

    Args:
        base: folder of the instance; array files are looked for here and nowhere else.
    """

    def __init__(self, base: Path) -> None:
        super().__init__()
        self._base = base

    def keys(self, item: Mapping[str, Any], known: Sequence[str], path: str = "") -> None:
        """Complain about keys that are not ``known``."""
        for key in item:
            if key not in known:
                hint = did_you_mean(closest_names(str(key), known)) or f"; known keys: {', '.join(known)}"
                self.say(f"{path}.{key}" if path else str(key), f"unknown key{hint}")

    def one_of(self, value: Any, path: str, known: Sequence[str]) -> str:
        """One of the ``known`` names; the first stands in for a wrong one."""
        if value in known:
            return str(value)
        hint = did_you_mean(closest_names(str(value), known))
        what = f"one of {', '.join(known)}" if len(known) > 1 else repr(known[0])
        self.say(path, f"expected {what}, got {describe(value)}{hint}")
        return known[0]

    def text(self, value: Any, path: str, what: str = "text") -> str:
        """A text; empty after a complaint."""
        if not isinstance(value, str):
            self.say(path, f"expected {what}, got {describe(value)}")
            return ""
        return value

    def integer(self, value: Any, path: str, *, least: int) -> int | None:
        """A whole number."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self._expected(value, path, f"a whole number >= {least}")
        return None

    def number(
        self,
        value: Any,
        path: str,
        what: str = "a finite number >= 0",
        holds: Callable[[float], bool] = lambda number: number >= 0.0,
    ) -> float | None:
        """A finite number of which ``holds`` is true.

        Args:
            value: as given.
            path: where it stands in the document.
            what: which numbers ``holds`` lets pass, for the message.
            holds: see ``what``.
        """
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
        if math.isfinite(number) and holds(number):
            return number
        self._expected(value, path, what)
        return None

    def array(self, value: Any, path: str, *, holes: bool = False) -> FloatArray | None:
        """An array of numbers, of any shape.

        Args:
            value: nested lists, or the reference of a file.
            path: where it stands in the document.
            holes: whether a list may hold null for a number that is not known; it becomes NaN.
        """
        if isinstance(value, Mapping):
            array = self._from_file(value, path)
        elif isinstance(value, list | np.ndarray):
            try:
                array = np.asarray(value)
                if holes and array.dtype.kind == "O":
                    array = array.astype(np.float64)
            except (TypeError, ValueError, OverflowError):
                array = np.asarray(None)
        else:
            self._expected(value, path, f"an array (nested lists of numbers) or {_REFERENCE}")
            return None
        if array is not None and array.dtype.kind not in _NUMERIC_KINDS:
            wrong = "it holds something that is not a number, or rows of different lengths"
            self.say(path, f"is not a rectangular array of numbers: {wrong}")
            return None
        return None if array is None else array.astype(np.float64)

    def shaped(self, value: Any, path: str, shape: tuple[int, ...]) -> FloatArray | None:
        """An array of numbers of one shape; an empty list is one of every shape without entries."""
        array = self.array(value, path)
        if array is None or array.shape == shape or (array.size == 0 and 0 in shape):
            return None if array is None else array.reshape(shape)
        self.say(path, f"has shape {list(array.shape)}, expected {list(shape)}")
        return None

    def _expected(self, value: Any, path: str, what: str) -> None:
        given = f"expected {what}, got {describe(value)}"
        self.say(path, f"is missing; expected {what}" if value is None else given)

    def _from_file(self, reference: Mapping[str, Any], path: str) -> np.ndarray[Any, Any] | None:
        name, entry = reference.get("file"), reference.get("key")
        if set(reference) != {"file", "key"} or not isinstance(name, str) or not isinstance(entry, str):
            self.say(path, f"is {describe(dict(reference))}; an array in a file is written {_REFERENCE}")
            return None
        try:
            file = (self._base / name).resolve()
            if Path(name).is_absolute() or file.parent != self._base.resolve():
                self.say(f"{path}.file", f"{name!r} does not lie beside the instance, in its own folder; copy it there")
                return None
            if not file.is_file():
                self.say(f"{path}.file", f"there is no {name!r} beside the instance")
                return None
            names = array_names(file)
            if entry in names:
                return read_arrays(file, {entry})[entry]
            self.say(f"{path}.key", f"{name!r} has no array {entry!r}{did_you_mean(closest_names(entry, names))}")
        except DocumentError as error:
            self.say(f"{path}.file", f"{name!r} {error}")
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            self.say(f"{path}.file", f"{name!r} is not an .npz of plain numbers: {error}")
        return None


def describe(value: Any) -> str:
    """A value as messages show it, cut short."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


# --- the same as a JSON Schema ---

# An array is a nested list, or a member of a NumPy archive beside the instance.
ARRAY: Mapping[str, Any] = {
    "anyOf": [
        {"type": "array"},
        {
            "type": "object",
            "properties": {"file": {"type": "string"}, "key": {"type": "string"}},
            "required": ["file", "key"],
            "additionalProperties": False,
        },
    ]
}
COUNT: Mapping[str, Any] = {"type": "integer", "minimum": 1}
WHOLE: Mapping[str, Any] = {"type": "integer", "minimum": 0}
AMOUNT: Mapping[str, Any] = {"type": "number", "minimum": 0}
TEXT: Mapping[str, Any] = {"type": "string"}


def instance_schema(
    kind: str, keys: Mapping[str, tuple[Mapping[str, Any], str]], *, required: Sequence[str]
) -> dict[str, Any]:
    """The schema (draft 2020-12).

    Args:
        kind: of the instance.
        keys: key → (what it takes, its meaning).
        required: keys that have no default.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"meshplan {kind} instance",
        "type": "object",
        "properties": {
            "kind": {"const": kind},
            **{key: {**what, "description": meaning} for key, (what, meaning) in keys.items()},
        },
        "required": ["kind", *required],
        "additionalProperties": False,
    }
