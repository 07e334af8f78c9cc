"""JSON Schema of a stand-alone problem's instance: its keys, what each takes, which are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
