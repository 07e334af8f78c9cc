"""A question over HTTP: its body, its options, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.kinds import DEFAULT_TOP, kind_of
from meshplan.planner.core.plan import digest, own_version
from meshplan.planner.core.reading.documents import parse_document
from meshplan.planner.core.reading.spec_reader import plain_numbers, read_spec

MOST_TOP = 1000
VERSION = own_version()
# RFC 8259 and RFC 9512 name the first of each; the others are older names that clients still send.
JSON, YAML = "application/json", "application/yaml"
JSON_TYPES = frozenset({JSON, "text/json"})
YAML_TYPES = frozenset({YAML, "application/x-yaml", "text/yaml", "text/x-yaml"})
QUESTION_TYPES = JSON_TYPES | YAML_TYPES
ROWS_TYPES = frozenset({"application/x-ndjson", "application/jsonl", JSON})


class Options(BaseModel):
    """Options of ``meshplan plan`` that change its answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    top: Annotated[int, Field(ge=1, le=MOST_TOP, description="candidates to keep in the table")] = DEFAULT_TOP
    seed: Annotated[int, Field(ge=0, le=2**32 - 1, description="where pseudo-random choices start from")] = 0
    time_limit_s: Annotated[float | None, Field(gt=0, le=86_400, description="the best so far is taken then")] = None
    certify: Annotated[bool, Field(description="check the answer by a second way")] = False


def read_question(body: bytes, content_type: str) -> dict[str, Any]:
    """The mapping in a body.

    Args:
        body: JSON or YAML.
        content_type: says which.

    Raises:
        SpecError: another type, malformed text, or no mapping.
    """
    text = read_text(body, content_type, QUESTION_TYPES)
    return parse_document(text, is_json=media_type_of(content_type) in JSON_TYPES, name="the body")


def read_text(body: bytes, content_type: str, types: Collection[str]) -> str:
    """The text of a body.

    Args:
        body: UTF-8.
        content_type: says what it is. A plain form or text is refused: pages of other sites can send these unasked.
        types: that are taken.

    Raises:
        SpecError: another type, or no UTF-8.
    """
    media_type = media_type_of(content_type)
    if media_type not in types:
        message = f"the body's type is {media_type!r}; send {' or '.join(sorted(types))}"
        raise SpecError.at("", message, of="the request")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError.at("", f"the body is no UTF-8: {error}", of="the request") from error


def media_type_of(content_type: str) -> str:
    """The type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def check_question(document: Mapping[str, Any]) -> None:
    """Hold a spec against the model of its kind, before it waits for a worker.

    Raises:
        SpecError: every problem at once. Names are looked up later.
    """
    model = kind_of(document).spec_model(document)
    if model is not None:
        read_spec(model, plain_numbers(model, document))


def job_digest(document: Mapping[str, Any], options: Options, state: str) -> str:
    """The same for the same question to the same catalog and version: its answer is the same then, too.

    Args:
        document: the spec.
        options: how it is answered.
        state: of the catalog (:func:`~meshplan.catalogs.database.state.catalog_state`).
    """
    return digest({"spec": document, "options": options.model_dump(), "version": VERSION, "catalog": state})
