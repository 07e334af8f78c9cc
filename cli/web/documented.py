"""What ``/openapi.json`` says beyond the parameters: bodies that are read by hand, kinds of answers, problems.

A body is a spec of one of several kinds in JSON or YAML, so it is checked by the reader that the command line uses and
not by a model of FastAPI; its exact form is ``GET /schema/{kind}``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from meshplan.catalogs.database.document import FORMAT
from meshplan.cli.web.asking import QUESTION_TYPES, ROWS_TYPES
from meshplan.cli.web.problems import MEDIA_TYPE
from meshplan.planner.core.kinds import KINDS

JSON, ZIP, EVENTS = "application/json", "application/zip", "text/event-stream"
_PROBLEM: Mapping[str, Any] = {
    "title": "Problem",
    "description": "RFC 9457; `errors` says where each problem of a spec is.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["path", "message"],
                "properties": {"path": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}
# Of every resource: whatever is refused, and however, is a problem document.
REFUSALS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Refused, with the words of the command line.",
        "content": {MEDIA_TYPE: {"schema": _PROBLEM}},
    }
}
SPEC: Mapping[str, Any] = {
    "type": "object",
    "description": "A spec; `GET /schema/{kind}` has every key of a kind.",
    "required": ["kind"],
    "properties": {"kind": {"type": "string", "enum": sorted(KINDS)}},
}
MEASURED: Mapping[str, Any] = {
    "type": "object",
    "description": "Metric of the plan → value in SI units.",
    "additionalProperties": {"type": "number"},
}
ENTRIES: Mapping[str, Any] = {
    "type": "object",
    "description": "A document of `meshplan catalog export`.",
    "required": ["format"],
    "properties": {"format": {"const": FORMAT}},
}
ROWS: Mapping[str, Any] = {"type": "string", "description": "One JSON object a line: measured runs."}


def reads(schema: Mapping[str, Any], types: Collection[str] = QUESTION_TYPES) -> dict[str, Any]:
    """The body that a resource reads, as a part of its operation.

    Args:
        schema: of the content.
        types: in which it may come.
    """
    content = {media_type: {"schema": schema} for media_type in sorted(types)}
    return {"requestBody": {"required": True, "content": content}}


def rows_body() -> dict[str, Any]:
    """The body of measured rows."""
    return reads(ROWS, ROWS_TYPES)


def answers(*statuses: int, media_type: str = JSON) -> dict[int | str, dict[str, Any]]:
    """The answers of a resource that are no refusals.

    Args:
        statuses: of HTTP.
        media_type: of all of them.
    """
    words = {200: "The answer.", 201: "Written.", 202: "Asked; the job tells how it goes."}
    schema = {"type": "object"} if media_type == JSON else {"type": "string"}
    return {status: {"description": words[status], "content": {media_type: {"schema": schema}}} for status in statuses}
