"""The source ``vllm``."""

from __future__ import annotations

from meshplan.planner.imports.reading import Given, Reading
from meshplan.planner.imports.sources.engines import VLLM, read_engine


def recognises(given: Given) -> bool:
    """Whether this is vLLM's."""
    first = given.launch.program[:1]
    return bool(first) and (first[0].rsplit("/", 1)[-1] == "vllm" or first[0].startswith("vllm.entrypoints"))


def read(given: Given) -> Reading:
    """See :func:`meshplan.planner.imports.sources.engines.read_engine`."""
    return read_engine(VLLM, given, [word for word in given.loose if word != "serve"])
