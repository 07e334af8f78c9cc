"""``/openapi.json`` as a whole: what FastAPI knows of the resources, the schemas of bodies, questions to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from meshplan.cli.web.openapi.bodies import schemas
from meshplan.cli.web.openapi.operations import named

# A small question of one node, and the same with its choices pinned: what the document shows as examples.
QUESTION: Mapping[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
}
PINNED: Mapping[str, Any] = {**QUESTION, "fixed": {"tensor_parallel": 2, "pipeline_parallel": 1, "context_parallel": 1}}
_EXAMPLES: Mapping[str, Mapping[str, Any]] = {"Spec": QUESTION, "PinnedSpec": PINNED}


def documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """The function that makes the document, once, when somebody asks for it.

    Args:
        app: with all of its resources.
    """
    plain = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None or "Spec" not in app.openapi_schema["components"]["schemas"]:
            made = plain()
            made["components"]["schemas"] = {**made["components"].get("schemas", {}), **schemas()}
            _show_examples(made)
        return plain()

    return document


def _show_examples(document: dict[str, Any]) -> None:
    """Put a question beside every body that is one."""
    shown = {named(name)["$ref"]: example for name, example in _EXAMPLES.items()}
    for operations in document["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                example = shown.get(content["schema"].get("$ref", ""))
                if example is not None:
                    content["examples"] = {"training": {"value": dict(example)}}
