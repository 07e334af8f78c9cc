"""JSON and YAML into plain values, hostile input refused.

A document has no duplicate keys (YAML silently keeps the last one otherwise), no non-finite numbers, few aliases (a
kilobyte of aliases can expand to gigabytes), no control characters, and is not nested deeply. What comes out is what
JSON knows, so that every document has a digest. Numbers are read as in YAML 1.2: ``1e12`` is a number, ``1:30`` and
``2026-11-21`` are text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from meshplan.catalogs.untrusted.commas import without_comma
from meshplan.catalogs.untrusted.limits import MAX_ALIAS_EXPANSION, MAX_ALIASES, MAX_DEPTH, MAX_DIGITS
from meshplan.catalogs.untrusted.text import control_character

_TAG = "tag:yaml.org,2002:"
# PyYAML reads YAML 1.1, where 1e12 is text, 190:20:30 a number and 2026-11-21 a date.
_REREAD_TAGS = {f"{_TAG}{name}" for name in ("int", "float", "timestamp")}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NUMBER_STARTS = list("-+.0123456789")
# libyaml reads about ten times faster than the pure Python reader; some platforms lack it.
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# What json.dumps makes of control characters (it leaves those beyond ASCII as they are).
_DUMPED_CONTROL = re.compile(
    r"(?<!\\)(?:\\\\)*\\(?:u00|[bfr])|[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)


class DocumentError(ValueError):
    """A document that is not read; says why."""


class _Refused(yaml.YAMLError):
    """Something the YAML standard allows and a document does not."""


class _StrictLoader(_BASE):  # type: ignore[misc]  # either of two safe loaders
    """Safe YAML without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        _refuse_decimal_commas(node)
        seen: set[str] = set()
        for key_node, _ in node.value:
            is_merge = key_node.tag == f"{_TAG}merge"
            key = "<<" if is_merge else str(self.construct_object(key_node, deep=True))
            if key in seen:
                line = key_node.start_mark.line + 1
                raise _Refused(f"line {line}: the key {key!r} appears twice; keep one")
            seen.add(key)
        pairs: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return pairs


def _refuse_decimal_commas(node: yaml.MappingNode) -> None:
    """``{limit: 2,5}`` is a limit of 2 and a key 5 without a value: inside braces a comma ends an entry."""
    if not node.flow_style:
        return
    for (key, value), (rest, nothing) in pairwise(node.value):
        is_missing = nothing.tag == f"{_TAG}null" and nothing.value == ""
        are_scalars = isinstance(key, yaml.ScalarNode) and isinstance(rest, yaml.ScalarNode)
        if is_missing and are_scalars and value.tag == f"{_TAG}int" and rest.value[:1].isdigit():
            fix = without_comma(f"{value.value},{rest.value}")
            line = rest.start_mark.line + 1
            raise _Refused(f"line {line}: {key.value}: a comma inside braces ends an entry{fix}")


def _read_integer(loader: Any, node: yaml.ScalarNode) -> int:
    return _integer(loader.construct_scalar(node))


_StrictLoader.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in resolvers if tag not in _REREAD_TAGS]
    for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(f"{_TAG}int", re.compile(rf"^(?:{_INTEGER.pattern})$"), _NUMBER_STARTS)
_StrictLoader.add_implicit_resolver(f"{_TAG}float", re.compile(rf"^(?:{_FLOAT.pattern})$"), _NUMBER_STARTS)
_StrictLoader.add_constructor(f"{_TAG}int", _read_integer)


def read_text(path: Path, most_bytes: int) -> str:
    """The text of a file, which may also be a pipe; a byte-order mark is left out, Windows line ends become plain.

    Raises:
        DocumentError: it is larger, a folder, or no UTF-8; the words leave out the path, which callers name.
        OSError: it cannot be read.
    """
    if path.is_dir():
        raise DocumentError("it is a folder; give a file")
    with path.open("rb") as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        size = path.stat().st_size
        raise DocumentError(f"it has {max(size, len(content)):,} bytes; at most {most_bytes:,} are read")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DocumentError(f"it is not UTF-8: {not_utf8(error)}; save it as UTF-8") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """Where a text stops being UTF-8, as an editor counts."""
    before = error.object[: error.start]
    line, column = before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1) + 1
    return f"byte 0x{error.object[error.start]:02x} in line {line}, column {column}"


def parse(text: str, *, is_json: bool, name: str, reads_infinity: bool = False) -> Any:
    """The values of one document: mappings, lists, text and numbers, never other objects.

    Args:
        text: of the document.
        is_json: read it as JSON, else as YAML.
        name: how messages call it.
        reads_infinity: ``Infinity`` and ``NaN`` of JSON become text; published configurations hold them.

    Raises:
        DocumentError: malformed, or beyond a limit.
    """
    try:
        if is_json:
            document = json.loads(
                text,
                object_pairs_hook=_no_duplicates,
                parse_constant=_as_text if reads_infinity else _no_constants,
                parse_int=_integer,
            )
        else:
            _require_small(text)
            document = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a safe loader; the rule knows them by name
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        form, why = "JSON" if is_json else "YAML", _in_one_line(error)
        raise DocumentError(f"{name} is not {form} that meshplan reads: {why}") from error
    require_plain(document, name)
    return document


def _in_one_line(error: Exception) -> str:
    """What a parser found and where: YAML's own text has a line for each, and calls the file ``<unicode string>``."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error)
    parts = (getattr(error, "context", None), getattr(error, "problem", None))
    return f"line {mark.line + 1}, column {mark.column + 1}: {', '.join(part for part in parts if part)}"


def require_plain(document: Any, name: str) -> None:
    """Refuse what JSON cannot express or nobody should print: infinities, odd keys, cycles, control characters.

    Raises:
        DocumentError: with the place.
    """
    for _, value in walked(document, name):
        if isinstance(value, dict):
            strange = [key for key in value if not isinstance(key, str)]
            if strange:
                raise DocumentError(f"{name}: the keys {strange!r} are not text; quote them")
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        _refuse_infinite(document, name)
        raise DocumentError(f"{name} holds what JSON cannot express: {error}") from error
    if _DUMPED_CONTROL.search(text):
        _refuse_control_characters(document, name)


def walked(document: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every mapping and list; the parts of a path are joined by NUL. Never deeper than the limit."""
    stack: list[tuple[str, Any]] = [("", document)]
    while stack:
        path, value = stack.pop()
        if path.count("\0") > MAX_DEPTH:
            raise DocumentError(f"{name} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            yield path, value
            stack += [(f"{path}\0{key}", item) for key, item in value.items() if isinstance(item, dict | list)]
        elif isinstance(value, list):
            yield path, value
            stack += [(f"{path}\0[{at}]", item) for at, item in enumerate(value) if isinstance(item, dict | list)]


def _refuse_control_characters(document: Any, name: str) -> None:
    for place, key, item in _pairs(document, name):
        for text in (key, item):
            sign = control_character(text) if isinstance(text, str) else None
            if sign is not None:
                raise DocumentError(f"{name}: {ascii(place)[1:-1]} holds the control character {sign}; remove it")


def _refuse_infinite(document: Any, name: str) -> None:
    """Say where a number is that JSON cannot express: ``.nan``, ``.inf``, 1e999."""
    for place, _, item in [("", "", document), *_pairs(document, name)]:
        if isinstance(item, float) and not math.isfinite(item):
            where = f"{name}: {place}" if place else name
            raise DocumentError(f"{where} is {item}, which JSON cannot express; give a finite number, or leave it away")


def _pairs(document: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """(place, key or number, item) of everything in mappings and lists."""
    for path, value in walked(document, name):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield ".".join([*path.split("\0")[1:], str(key)]).replace(".[", "["), key, item


class _Expansion:
    """How large a YAML document grows where its aliases are written out, event by event."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: dict[str, int] = {}
        # (anchor, expanded characters so far) of each open mapping or list
        self._open: list[tuple[str | None, int]] = [(None, 0)]
        self._num_aliases = 0

    def alias(self, anchor: str) -> None:
        self._num_aliases += 1
        if self._num_aliases > MAX_ALIASES:
            raise _Refused(f"more than {MAX_ALIASES} aliases; write the values out")
        if any(anchor == above for above, _ in self._open):
            raise _Refused(f"JSON cannot express that {anchor!r} contains itself")
        self._add(self._sizes.get(anchor, 0) + 1, None)

    def scalar(self, text: str, anchor: str | None) -> None:
        self._add(len(text) + 1, anchor)

    def begin(self, anchor: str | None) -> None:
        self._open.append((anchor, 1))
        if len(self._open) > MAX_DEPTH + 1:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels")

    def end(self) -> None:
        anchor, size = self._open.pop()
        self._add(size, anchor)

    def _add(self, size: int, anchor: str | None) -> None:
        if anchor is not None:
            self._sizes[anchor] = size
        above, so_far = self._open[-1]
        self._open[-1] = (above, so_far + size)
        if so_far + size > self._most:
            raise _Refused(f"its aliases add more than {MAX_ALIAS_EXPANSION:,} characters; write the values out")


def _require_small(text: str) -> None:
    """Refuse YAML that is nested deeply, or grows beyond the limit where its aliases are written out."""
    expansion = _Expansion(2 * len(text) + MAX_ALIAS_EXPANSION)
    for event in yaml.parse(text, Loader=_BASE):
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise _Refused(f"the tag {tag} is not read; write the plain value")
        match event:
            case yaml.AliasEvent():
                expansion.alias(str(event.anchor))
            case yaml.ScalarEvent():
                expansion.scalar(event.value, event.anchor)
            case yaml.CollectionStartEvent():
                expansion.begin(event.anchor)
            case yaml.CollectionEndEvent():
                expansion.end()


def _integer(text: str) -> int:
    if len(text.lstrip("+-")) > MAX_DIGITS:
        raise DocumentError(f"a whole number has {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        seen: set[str] = set()
        twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DocumentError(f"the key {twice!r} appears twice; keep one")
    return document


def _no_constants(name: str) -> Any:
    raise DocumentError(f"{name} is not a number that a document can hold")


def _as_text(name: str) -> str:
    return name
