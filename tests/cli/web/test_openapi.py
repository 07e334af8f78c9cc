"""The service does what its OpenAPI document says: every request that this allows gets an answer that it names."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from command_line import CAPACITIES, Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from web_cases import SPEC, ended

from meshplan.catalogs.database.document import FORMAT
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.transfer import export_document
from meshplan.catalogs.errors import SpecError
from meshplan.cli.web.asking import check_question
from meshplan.cli.web.pages.ask import EXAMPLE_TEXTS
from meshplan.cli.web.settings import Settings
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.reading.documents import parse_document

PROBLEM = "application/problem+json"
WORDS = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
# Streams until a job ends; what it sends is tested by itself.
STREAMS = ("/api/v1/jobs/{job_id}/events",)
EXAMPLES = 10
CHANGES = 200
# How messages begin that tell of the form of a question.
FORM = ("is required", "unknown key", "must be ")


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
    """A type that is read and a body: a question with random parts, or anything."""
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return st.just(("", b""))
    spec = st.builds(lambda kind, more: {**SPEC, **more, "kind": kind}, st.sampled_from([*KINDS]), _some)
    entries = _some.map(lambda some: {"format": FORMAT, **some})
    found = st.one_of(spec, entries, _some).map(json.dumps) | WORDS
    return st.tuples(st.sampled_from(sorted(content)), found.map(lambda text: text.encode("utf-8", "replace")))


_some = st.dictionaries(st.sampled_from([*SPEC, "slo", "objective", "name", "devices"]) | WORDS, VALUES, max_size=4)


@pytest.fixture(scope="session")
def document(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def validator(document: dict[str, Any], schema: str) -> jsonschema.Draft202012Validator:
    """Of a named schema of the document."""
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return jsonschema.Draft202012Validator({**reference, "components": document["components"]})


@pytest.fixture(scope="session")
def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, operation) for path, item in document["paths"].items() for method, operation in item.items()]


@pytest.fixture
def tidy(client: TestClient) -> Iterator[None]:
    """Questions that were taken as good are not left to the workers of other tests."""
    yield
    for job in client.get("/api/v1/jobs?state=queued&limit=200").json()["jobs"]:
        client.delete(f"/api/v1/jobs/{job['job_id']}")


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_answers_are_those_of_the_document(
    client: TestClient, tidy: None, operations: Any, document: dict[str, Any], data: st.DataObject
) -> None:
    definitions = document["components"]["schemas"]
    validators = {name: validator(document, name) for name in ("Job", "Problem")}
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
        content = (allowed or operation["responses"]["default"])["content"]
        assert got in content, (method, where, answer.text)
        assert (got == PROBLEM) == (answer.status_code >= 400), (method, where, answer.text)
        schema = content[got]["schema"].get("$ref", "").rpartition("/")[2]
        if schema:
            assert validators[schema].is_valid(answer.json()), (method, where, answer.text)
        assert got != PROBLEM or answer.json()["status"] == answer.status_code


def test_every_resource_says_what_it_reads_and_how_it_refuses(operations: Any) -> None:
    for method, path, operation in operations:
        assert PROBLEM in operation["responses"]["default"]["content"], path
        assert operation["description"], path
        assert ("requestBody" in operation) == (method == "post"), path


QUESTIONS = [SPEC, *(parse_document(text) for text in EXAMPLE_TEXTS.values())]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a document."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


# No texts of digits and no booleans: the reader takes them as numbers, the document need not say so.
REPLACEMENTS: tuple[Any, ...] = (None, -1, 0, 3, 1e30, "", "x", [], [None], {}, {"x": 1})


def changed(question: dict[str, Any], random: Random) -> dict[str, Any]:
    """The question with one part taken away, renamed or replaced."""
    result = copy.deepcopy(question)
    container, key = random.choice(list(places(result)))
    value = container.pop(key)
    if isinstance(container, list):
        container.insert(key, random.choice(REPLACEMENTS))
        return result
    done = random.choice(["take", "rename", "replace"])
    if done != "take":
        container[f"{key}s" if done == "rename" else key] = value if done == "rename" else random.choice(REPLACEMENTS)
    return result


def test_the_document_refuses_what_the_reader_refuses(document: dict[str, Any]) -> None:
    """What only the reader refuses are keys that exclude each other, and quantities out of range."""
    random, specs = Random(0), validator(document, "Spec")
    for _ in range(CHANGES):
        question = changed(random.choice(QUESTIONS), random)
        allowed = specs.is_valid(question)
        try:
            check_question(question)
        except SpecError as error:
            form = [one.message for one in error.problems if one.message.startswith(FORM)]
            assert not (allowed and form), (question, form)
        else:
            assert allowed, question


def test_a_bare_kind_is_no_question(document: dict[str, Any]) -> None:
    specs = validator(document, "Spec")
    assert not any(specs.is_valid({"kind": kind}) for kind in KINDS)
    assert all(specs.is_valid(question) for question in QUESTIONS)


def test_the_catalog_is_a_document_that_can_be_imported(document: dict[str, Any], settings: Settings) -> None:
    exported = export_document(Catalog.open(settings.db).engine)
    validator(document, "CatalogDocument").validate(exported)


def test_an_instance_is_read_before_it_waits_for_a_worker(client: TestClient) -> None:
    refused = client.post("/api/v1/plans", json={"kind": "rank-mapping", "num_nodes": 4})
    assert refused.status_code == 422
    assert "pipeline_parallel" in refused.json()["detail"]


def test_capacities_given_by_hand_are_a_question(
    client: TestClient, working: None, document: dict[str, Any], meshplan: Command, tmp_path: Path
) -> None:
    """The command line answers them; here they were read as a market of the catalog's nodes and refused."""
    asked = client.post("/api/v1/plans", json=CAPACITIES)
    assert asked.status_code == 202, asked.text
    found = client.get(ended(client, asked.json()["job_id"])["plan"]).json()
    (tmp_path / "spec.json").write_text(json.dumps(CAPACITIES))
    told = meshplan("plan", tmp_path / "spec.json", "--format", "json").json
    assert (found["plan_id"], found["answer"]) == (told["plan_id"], told["answer"])
    specs, wrong = validator(document, "Spec"), {**CAPACITIES, "request_rate_per_s": None}
    assert (specs.is_valid(CAPACITIES), specs.is_valid(wrong)) == (True, False)
    refused = client.post("/api/v1/plans", json=wrong)
    assert [one["path"] for one in refused.json()["errors"]] == ["request_rate_per_s"]


def test_every_method_of_an_address_is_named(client: TestClient) -> None:
    assert client.request("PATCH", "/api/v1/jobs/1").headers["allow"] == "DELETE, GET"
