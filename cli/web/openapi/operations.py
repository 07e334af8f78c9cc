"""What ``/openapi.json`` says of a resource beyond its parameters: what it reads, answers and refuses.

Bodies are read by hand, with the readers of the command line, because they may be JSON or YAML and every problem is
told at once; their schemas (:mod:`~meshplan.cli.web.openapi.bodies`) are those readers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.cli.web.asking import JSON, JSON_TYPES, ROWS_TYPES, YAML
from meshplan.cli.web.openapi.bodies import ROWS
from meshplan.cli.web.problems import MEDIA_TYPE
from meshplan.planner.core.kinds import KINDS

ZIP, EVENTS = "application/zip", "text/event-stream"
SCHEMAS = "#/components/schemas/"


def named(schema: str) -> dict[str, Any]:
    """A reference to a schema of the document."""
    return {"$ref": f"{SCHEMAS}{schema}"}


def _refused(description: str) -> dict[str, Any]:
    return {"description": description, "content": {MEDIA_TYPE: {"schema": named("Problem")}}}


# Of every resource: whatever is refused, and however, is a problem document.
REFUSALS: dict[int | str, dict[str, Any]] = {"default": _refused("Refused, with the words of the command line.")}
KIND_PARAMETER: Mapping[str, Any] = {"enum": [*KINDS]}


def reads(schema: str) -> dict[str, Any]:
    """The body that a resource reads, as a part of its operation.

    Args:
        schema: of the content, by name.
    """
    return _body({media_type: {"schema": named(schema)} for media_type in (JSON, YAML)})


def reads_rows() -> dict[str, Any]:
    """The body of measured rows: as JSON a single one, else one a line."""
    return _body(
        {one: {"schema": named("MeasuredRow") if one in JSON_TYPES else dict(ROWS)} for one in sorted(ROWS_TYPES)}
    )


def _body(content: dict[str, Any]) -> dict[str, Any]:
    said = (
        "Well-formed, and yet it cannot be answered: a name that the catalog lacks, keys that exclude each other, "
        "a quantity out of its range, a control character; `errors` has all of them."
    )
    return {"requestBody": {"required": True, "content": content}, "responses": {"422": _refused(said)}}


def answers(
    *statuses: int, media_type: str = JSON, schema: str = "", links: Mapping[str, Mapping[str, str]] | None = None
) -> dict[int | str, dict[str, Any]]:
    """The answers of a resource that are no refusals.

    Args:
        statuses: of HTTP.
        media_type: of all of them.
        schema: of a JSON document, by name; empty for any.
        links: resource → its parameters, taken out of this answer as OpenAPI's runtime expressions.
    """
    words = {200: "The answer.", 201: "Written.", 202: "Asked; the job tells how it goes."}
    text: dict[str, Any] = {"type": "object"} if media_type == JSON else {"type": "string"}
    content = {media_type: {"schema": named(schema) if schema else text}}
    body: dict[str, Any] = {"content": content}
    if links:
        body["links"] = {name: {"operationId": name, "parameters": {**given}} for name, given in links.items()}
    return {status: {"description": words[status], **body} for status in statuses}
