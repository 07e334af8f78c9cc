"""The reference of spec keys: every key that a model reads is in it, with the type that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.reading.spec_reader import spec_schema
from meshplan.planner.core.reading.spec_reference import reference_rows


def schema_keys(schema: dict[str, Any], part: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted keys by the JSON Schema, which pydantic makes by itself."""
    keys = set()
    for name, entry in part.get("properties", {}).items():
        keys.add(f"{prefix}{name}")
        for one in (entry, *entry.get("anyOf", ()), *entry.get("oneOf", ())):
            inner, mark = (one.get("items", {}), "[]") if "items" in one else (one, "")
            for choice in (inner, *inner.get("anyOf", ())):
                if "$ref" in choice:
                    section = schema["$defs"][choice["$ref"].rsplit("/", 1)[-1]]
                    keys |= schema_keys(schema, section, f"{prefix}{name}{mark}.")
    return keys


@pytest.mark.parametrize("kind", ["training", "serving", "gpu-allocation"])
def test_every_key_of_the_schema_is_in_the_reference(kind: str) -> None:
    model = KINDS[kind].offers("SPEC")
    schema = spec_schema(model)
    rows = list(reference_rows(model))
    assert {row["key"] for row in rows} == schema_keys(schema, schema)
    assert all(row["type"] for row in rows)


def test_types_are_in_words() -> None:
    rows = {row["key"]: row for row in reference_rows(KINDS["training"].offers("SPEC"))}
    assert rows["workload.sequence_length"]["type"] == "tokens, such as 8192 or 8k"
    assert rows["cluster.host_memory"]["type"] == "text such as '80 GiB'"
    assert rows["workload.precision"] == {
        "key": "workload.precision",
        "type": "bf16, fp16, fp8, mxfp8, nvfp4",
        "default": "bf16",
        "meaning": "",
    }
    assert rows["cluster.nodes[].count"]["default"] == "required"
