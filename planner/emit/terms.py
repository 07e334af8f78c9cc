"""The mapping table that every framework and engine has: how a term of a plan is written as arguments and read back.

Because one row does both, ``emit`` and ``import`` cannot disagree about what a flag means. Arguments are a flat mapping
from a flag, or the dotted path of a key in a document, to its value; a switch has the value ``""``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshplan.catalogs.errors import Problem
from meshplan.planner.emit.target import Feature

MAX_COUNT = 10**9  # no degree, batch or sequence is longer; keeps products of what is read finite

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One row of a mapping table.

    Args:
        name: the term: a field of ``TrainingConfig``, or of a serving pool's layout, limits or formats.
        write: (configuration, model) of a training plan, or (request, pool) of a serving plan → arguments; empty where
            the target's default already has that value.
        read: arguments → values by term; only what the arguments state. Raises ValueError for an invalid value.
        keys: every argument that ``read`` looks at or that ``write`` can give and ``read`` understands.
        expressed_by: the arguments, for the support matrix.
        verified_by: what checked them.
    """

    name: str
    write: Callable[[Any, Any], Arguments]
    read: Callable[[Arguments], Mapping[str, Any]]
    keys: tuple[str, ...]
    expressed_by: str
    verified_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """What a table understood.

    Args:
        values: by term, only what was stated.
        source_flags: by term, the arguments that state it, as text.
        problems: arguments with invalid values.
    """

    values: Mapping[str, Any]
    source_flags: Mapping[str, str]
    problems: tuple[Problem, ...] = field(default=())


def count(arguments: Arguments, *keys: str) -> int | None:
    """The positive whole number given by the first of ``keys`` that is present; None where none is.

    Raises:
        ValueError: another value, such as text, 0 or more than :data:`MAX_COUNT`.
    """
    for key in keys:
        if key not in arguments:
            continue
        text = str(arguments[key]).strip()
        if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:12]) <= MAX_COUNT:
            raise ValueError(f"{key} {arguments[key]!r} is not a whole number within 1 and {MAX_COUNT}")
        return int(text)
    return None


def fraction(arguments: Arguments, *keys: str) -> float | None:
    """The share above 0 and at most 1 given by the first of ``keys`` that is present; None where none is.

    Raises:
        ValueError: another value.
    """
    for key in keys:
        if key not in arguments:
            continue
        try:
            share = float(str(arguments[key]))
        except ValueError:
            share = 0.0
        if not 0.0 < share <= 1.0:
            raise ValueError(f"{key} {arguments[key]!r} is not a share above 0 and at most 1")
        return share
    return None


def is_true(arguments: Arguments, key: str) -> bool:
    """Whether a key of a document is there and true, as YAML or an override on a command line writes it."""
    return str(arguments.get(key, "")).lower() == "true"


def stated(**values: Any) -> dict[str, Any]:
    """Only the values that are there."""
    return {name: value for name, value in values.items() if value is not None}


def nothing(*_: Any) -> dict[str, Any]:
    """The ``write`` of a term whose arguments another row writes, and the ``read`` of one that is only written."""
    return {}


@dataclass(frozen=True, slots=True)
class Rows:
    """Makes the rows of one target's table.

    Args:
        verified_by: what checked them, where a row does not name another.
    """

    verified_by: str

    def term(
        self,
        name: str,
        write: Callable[[Any, Any], Arguments],
        read: Callable[[Arguments], Mapping[str, Any]],
        *keys: str,
        expressed_by: str = "",
        verified_by: str = "",
    ) -> Term:
        """A row that is written and read back; it is expressed by its keys where nothing else is given."""
        return Term(
            name=name,
            write=write,
            read=read,
            keys=keys,
            expressed_by=expressed_by or ", ".join(keys),
            verified_by=verified_by or self.verified_by,
        )

    def write_only(
        self, name: str, write: Callable[[Any, Any], Arguments], expressed_by: str, *, verified_by: str = ""
    ) -> Term:
        """A row that is not read back, because its arguments alone do not determine the term."""
        return self.term(name, write, nothing, expressed_by=expressed_by, verified_by=verified_by)

    def covered(self, name: str, expressed_by: str, *, verified_by: str = "") -> Term:
        """A term whose arguments another row writes and reads."""
        return self.write_only(name, nothing, expressed_by, verified_by=verified_by)


def write_all(terms: Sequence[Term], plan: Any, part: Any) -> dict[str, Any]:
    """The arguments of a plan, row by row; ``plan`` and ``part`` are what the rows' ``write`` takes."""
    arguments: dict[str, Any] = {}
    for term in terms:
        arguments.update(term.write(plan, part))
    return arguments


def read_all(terms: Sequence[Term], arguments: Arguments) -> ReadBack:
    """The terms read back, row by row; nothing is guessed for what was not stated."""
    values: dict[str, Any] = {}
    source_flags: dict[str, str] = {}
    problems: dict[str, Problem] = {}  # by message: several rows may look at the same argument
    for term in terms:
        try:
            found = term.read(arguments)
        except ValueError as error:
            problems.setdefault(str(error), Problem(path=term.name, message=str(error)))
            continue
        values.update(found)
        text = ", ".join(f"{key} {arguments[key]}".strip() for key in term.keys if key in arguments)
        source_flags.update(dict.fromkeys(found, text))
    return ReadBack(values=values, source_flags=source_flags, problems=tuple(problems.values()))


def nested(arguments: Arguments) -> dict[str, Any]:
    """Dotted keys as a document.

    >>> nested({"bf16.enabled": True, "steps": 1})
    {'bf16': {'enabled': True}, 'steps': 1}
    """
    document: dict[str, Any] = {}
    for path, value in arguments.items():
        *folders, key = path.split(".")
        inner = document
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[key] = value
    return document


def flattened(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A document as dotted keys, the inverse of :func:`nested`.

    Lists become tuples and empty sections are left out: a term may look any value up in a set, whatever a file says.

    >>> flattened({"zero": {"stage": [2], "more": {}}})
    {'zero.stage': (2,)}
    """
    arguments: dict[str, Any] = {}
    for key, value in document.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            arguments.update(flattened(value, f"{path}."))
        else:
            arguments[path] = _hashable(value)
    return arguments


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _hashable(item)) for key, item in value.items())
    return value


def feature_rows(terms: Sequence[Term]) -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return tuple(
        Feature(name=term.name, expressed_by=term.expressed_by, verified_by=term.verified_by) for term in terms
    )
