"""The service does what its OpenAPI document says: every request that this allows gets an answer that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from web_cases import SPEC

PROBLEM = "application/problem+json"
WORDS = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
# Streams until a job ends; what it sends is tested by itself.
STREAMS = ("/api/v1/jobs/{job_id}/events",)
EXAMPLES = 15


def values(schema: dict[str, Any], definitions: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema of a parameter allows."""
    if "$ref" in schema:
        return values(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return st.one_of([values(one, definitions) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    found: st.SearchStrategy[Any] = {
        "null": st.none,
        "boolean": st.booleans,
        "integer": lambda: st.integers(least, most),
        "number": lambda: st.floats(least, most, exclude_min="exclusiveMinimum" in schema),
        "array": lambda: st.lists(values(schema["items"], definitions), max_size=3),
        "string": lambda: WORDS,
    }[schema["type"]]()
    return found


def bodies(operation: dict[str, Any]) -> st.SearchStrategy[tuple[str, bytes]]:
    """A type that is read and a body: of the schema at its top, random below."""
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return st.just(("", b""))
    schema = next(iter(content.values()))["schema"]
    if schema["type"] == "string":
        found = WORDS
    else:
        required = {
            name: st.sampled_from(schema["properties"][name].get("enum", [schema["properties"][name].get("const")]))
            for name in schema.get("required", ())
        }
        spec = st.builds(lambda part, more: {**SPEC, **more, **part}, st.fixed_dictionaries(required), _some)
        found = st.one_of(spec, _some).map(json.dumps)
    return st.tuples(st.sampled_from(sorted(content)), found.map(lambda text: text.encode("utf-8", "replace")))


_some = st.dictionaries(st.sampled_from([*SPEC, "slo", "objective", "name"]) | WORDS, VALUES, max_size=4)


@pytest.fixture(scope="session")
def operations(client: TestClient) -> list[tuple[str, str, dict[str, Any]]]:
    document = client.get("/openapi.json").json()
    return [(method, path, operation) for path, item in document["paths"].items() for method, operation in item.items()]


@pytest.fixture(scope="session")
def definitions(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()["components"]["schemas"]
    return found


@pytest.fixture
def tidy(client: TestClient) -> Iterator[None]:
    """Questions that were taken as good are not left to the workers of other tests."""
    yield
    for job in client.get("/api/v1/jobs?state=queued&limit=200").json()["jobs"]:
        client.delete(f"/api/v1/jobs/{job['job_id']}")


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_answers_are_those_of_the_document(
    client: TestClient, tidy: None, operations: Any, definitions: dict[str, Any], data: st.DataObject
) -> None:
    for method, path, operation in operations:
        if path in STREAMS:
            continue
        query, where = [], path
        for parameter in operation.get("parameters", ()):
            value = data.draw(values(parameter["schema"], definitions))
            if parameter["in"] == "path":
                where = where.replace(f"{{{parameter['name']}}}", quote(str(value) or "-", safe=""))
            elif value is not None:
                several = value if isinstance(value, list) else [value]
                query += [
                    (parameter["name"], json.dumps(one) if one is True or one is False else one) for one in several
                ]
        media_type, body = data.draw(bodies(operation))
        answer = client.request(method, where, params=query, content=body, headers={"content-type": media_type})
        allowed = operation["responses"].get(str(answer.status_code))
        assert answer.status_code < 500 or answer.status_code == 503, (method, where, body, answer.text)
        got = answer.headers["content-type"].partition(";")[0]
        if allowed is None:
            schema = operation["responses"]["default"]["content"][PROBLEM]["schema"]
            assert (got, answer.status_code >= 400) == (PROBLEM, True), (method, where, answer.text)
            jsonschema.validate(answer.json(), schema)
            assert answer.json()["status"] == answer.status_code
        else:
            assert got in allowed["content"], (method, where)


def test_every_resource_says_what_it_reads_and_how_it_refuses(operations: Any) -> None:
    for method, path, operation in operations:
        assert PROBLEM in operation["responses"]["default"]["content"], path
        assert operation["description"], path
        assert ("requestBody" in operation) == (method == "post"), path
