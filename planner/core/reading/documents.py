"""Spec files to plain data: YAML or JSON from a path, through the door of :mod:`meshplan.catalogs.untrusted`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshplan.catalogs.errors import SpecError, why
from meshplan.catalogs.untrusted.documents import DocumentError, parse, read_text
from meshplan.catalogs.untrusted.limits import MAX_JSON_BYTES, MAX_YAML_BYTES
from meshplan.planner.core.reading.doors import SPEC, hint_of, refuse_other


def read_document(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping.

    Args:
        path: ``*.json`` is read as JSON, anything else as YAML (of which JSON is a subset).

    Raises:
        SpecError: missing or unreadable file, malformed text, or not a mapping.
    """
    is_json = path.suffix == ".json"
    try:
        text = read_text(path, MAX_JSON_BYTES if is_json else MAX_YAML_BYTES)
    except (OSError, ValueError) as error:
        raise SpecError.at("", f"cannot read {path}: {why(error)}{hint_of(path)}") from error
    try:
        return parse_document(text, is_json=is_json, name=str(path))
    except SpecError as error:
        raise SpecError.at("", f"{error.problems[0].message}{hint_of(path)}") from error


def read_question(path: Path) -> dict[str, Any]:
    """Read the file of a spec; one that another command takes is refused with that command.

    Raises:
        SpecError: see :func:`read_document`.
    """
    document = read_document(path)
    refuse_other(document, SPEC, name=str(path))
    return document


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
    return read_question(path), base or path.parent


def parse_document(text: str, *, is_json: bool = False, name: str = "spec") -> dict[str, Any]:
    """Parse the text of a spec; see :func:`read_document`."""
    try:
        document = parse(text, is_json=is_json, name=name)
    except DocumentError as error:
        raise SpecError.at("", str(error)) from error
    if not isinstance(document, dict):
        what = (
            "and is empty"
            if document is None
            else f"not {'a list' if isinstance(document, list) else 'a single value'}"
        )
        raise SpecError.at("", f"{name} must hold a mapping such as 'kind: training', {what}")
    return document
