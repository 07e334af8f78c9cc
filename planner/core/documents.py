"""Spec files to plain data: YAML or JSON from a path, hostile input refused.

A document is at most :data:`MAX_BYTES` long, has no duplicate keys (YAML silently keeps the last one otherwise), no
non-finite numbers and few aliases (a megabyte of aliases can expand to gigabytes). What comes out is what JSON knows,
so that every document has a digest. Numbers are read as in YAML 1.2: ``1e12`` is a number, ``1:30`` and ``2026-11-21``
are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from meshplan.catalogs.errors import Problem, SpecError

MAX_BYTES = 64 * 2**20
MAX_YAML_BYTES = 2**20
MAX_ALIASES = 100
MAX_DEPTH = 50
_TAG = "tag:yaml.org,2002:"
# PyYAML reads YAML 1.1, where 1e12 is text, 190:20:30 a number and 2026-11-21 a date.
_REREAD_TAGS = {f"{_TAG}{name}" for name in ("int", "float", "timestamp")}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NUMBER_STARTS = list("-+.0123456789")


class _Refused(yaml.YAMLError):
    """Something the YAML standard allows and a spec does not."""


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without duplicate keys, and with a limit on aliases and nesting."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.num_aliases = 0
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self.num_aliases += 1
            if self.num_aliases > MAX_ALIASES:
                raise _Refused(f"more than {MAX_ALIASES} aliases; write the values out")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels")
        event: Any = yaml.SafeLoader.peek_event(self)  # type: ignore[no-untyped-call]  # the stubs leave it untyped
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise _Refused(f"the tag {tag} is not read; write the plain value")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            is_merge = key_node.tag == f"{_TAG}merge"
            key = "<<" if is_merge else str(self.construct_object(key_node, deep=True))
            if key in seen:
                line = key_node.start_mark.line + 1
                raise _Refused(f"line {line}: the key {key!r} appears twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read_integer(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_StrictLoader.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in resolvers if tag not in _REREAD_TAGS]
    for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(f"{_TAG}int", re.compile(rf"^(?:{_INTEGER.pattern})$"), _NUMBER_STARTS)
_StrictLoader.add_implicit_resolver(f"{_TAG}float", re.compile(rf"^(?:{_FLOAT.pattern})$"), _NUMBER_STARTS)
_StrictLoader.add_constructor(f"{_TAG}int", _read_integer)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice; keep one")
    return document


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not a number that a spec can hold")


def read_document(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping.

    Args:
        path: ``*.json`` is read as JSON, anything else as YAML (of which JSON is a subset).

    Raises:
        SpecError: missing or unreadable file, malformed text, or not a mapping.
    """
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise _problem(f"{path} is a folder; give a YAML or JSON file")
        limit = MAX_BYTES if path.suffix == ".json" else MAX_YAML_BYTES
        if size > limit:
            raise _problem(f"{path} has {size} bytes; a spec has at most {limit}")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise _problem(f"cannot read {path}: {error}") from error
    return parse_document(text, is_json=path.suffix == ".json", name=str(path))


def read_spec_file(spec: Mapping[str, Any] | str | Path, base: Path | None) -> tuple[Mapping[str, Any], Path]:
    """A spec as plain data, and the folder against which the paths in it are resolved.

    Args:
        spec: the mapping itself, or the path of a YAML or JSON file.
        base: that folder; None for the file's own, or the working directory for a mapping.

    Raises:
        SpecError: see :func:`read_document`.
    """
    if isinstance(spec, Mapping):
        return spec, base or Path()
    path = Path(spec)
    return read_document(path), base or path.parent


def parse_document(text: str, *, is_json: bool = False, name: str = "spec") -> dict[str, Any]:
    """Parse the text of a spec; see :func:`read_document`."""
    try:
        if is_json:
            document = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
        else:
            loader = _StrictLoader(text)
            try:
                document = loader.get_single_data()
            finally:
                loader.dispose()
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise _problem(f"{name} is not {'JSON' if is_json else 'YAML'} that meshplan reads: {error}") from error
    if not isinstance(document, dict):
        raise _problem(f"{name} must hold a mapping such as 'kind: training', not {type(document).__name__}")
    _require_json(document, name)
    return document


def _require_json(document: dict[str, Any], name: str) -> None:
    """Refuse what JSON cannot express: infinities, keys that are no text, cycles, half of a surrogate pair."""
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _problem(f"{name} holds what JSON cannot express: {error}") from error
    strange = [key for key in _keys(document) if not isinstance(key, str)]
    if strange:
        raise _problem(f"{name}: the keys {strange!r} are not text; quote them")


def _keys(value: Any) -> Iterator[Any]:
    """Every key of every mapping in ``value``; long lists of numbers, which have none, are passed over quickly."""
    if isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _keys(item)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for item in value:
            yield from _keys(item)


def _problem(message: str) -> SpecError:
    return SpecError([Problem(path="", message=message)])
