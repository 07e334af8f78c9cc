"""Spec files to plain data: YAML or JSON from a path, hostile input refused.

A document is at most :data:`MAX_BYTES` long, has no duplicate keys (YAML silently keeps the last one otherwise), no
non-finite numbers and few aliases (a megabyte of aliases can expand to gigabytes).
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from meshplan.catalogs.errors import Problem, SpecError

MAX_BYTES = 64 * 2**20
MAX_YAML_BYTES = 2**20
MAX_ALIASES = 100
MAX_DEPTH = 50


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
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in seen:
                line = key_node.start_mark.line + 1
                raise _Refused(f"line {line}: the key {key!r} stands twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice; keep one")
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _problem(f"cannot read {path}: {error}") from error
    return parse_document(text, is_json=path.suffix == ".json", name=str(path))


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
    strange = [key for key in document if not isinstance(key, str)]
    if strange:
        raise _problem(f"{name}: the keys {strange!r} are not text")
    return document


def _problem(message: str) -> SpecError:
    return SpecError([Problem(path="", message=message)])
