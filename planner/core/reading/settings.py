"""One key of a spec read or changed, named by its dotted path: ``cluster.nodes.0.count``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.errors import SpecError


def put(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the key at ``path`` in place; missing sections are made, elements of lists must be there.

    Args:
        document: a spec as plain data.
        path: keys with dots between; an element of a list by its number, ``nodes.0`` or ``nodes[0]``.
        value: what it becomes.

    Raises:
        SpecError: the path is empty, or walks through what is no section.
    """
    parts = _parts(path)
    if not parts:
        raise SpecError.at(path, "names no key of the spec")
    section: Any = document
    for part in parts[:-1]:
        section = _inside(section, part, path)
    last = parts[-1]
    if isinstance(section, list) and last.isdigit() and int(last) < len(section):
        section[int(last)] = value
    elif isinstance(section, dict):
        section[last] = value
    else:
        raise SpecError.at(path, f"{last!r} is not a key of the spec")


def stated(document: Mapping[str, Any], path: str) -> Any:
    """What the key at ``path`` is, named as in :func:`put`; None where the spec does not have it.

    >>> stated({"cluster": {"nodes": [{"count": 8}]}}, "cluster.nodes.0.count"), stated({}, "model")
    (8, None)
    """
    section: Any = document
    for part in _parts(path):
        if isinstance(section, list) and part.isdigit() and int(part) < len(section):
            section = section[int(part)]
        elif isinstance(section, Mapping):
            section = section.get(part)
        else:
            return None
    return section


def part_of(path: str, section: str) -> str | None:
    """The rest of ``path`` below ``section``, empty for the section itself; None where it lies elsewhere.

    >>> part_of("cluster.nodes[0].count", "cluster.nodes.0"), part_of("a.b", "a.b"), part_of("ab.c", "a")
    ('count', '', None)
    """
    parts, above = _parts(path), _parts(section)
    return ".".join(parts[len(above) :]) if parts[: len(above)] == above else None


def _parts(path: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]+", path.strip()) if part]


def _inside(section: Any, part: str, path: str) -> Any:
    if isinstance(section, list) and part.isdigit() and int(part) < len(section):
        return section[int(part)]
    if isinstance(section, dict):
        return section.setdefault(part, {})
    raise SpecError.at(path, f"{part!r} is not a section of the spec")
