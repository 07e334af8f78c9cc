"""The source ``sglang``."""

from __future__ import annotations

from meshplan.planner.imports.reading import Given, Reading
from meshplan.planner.imports.sources.engines import SGLANG, read_engine


def recognises(given: Given) -> bool:
    """Whether this is SGLang's."""
    first = given.launch.program[:1]
    return bool(first) and first[0].startswith("sglang")


def read(given: Given) -> Reading:
    """See :func:`meshplan.planner.imports.sources.engines.read_engine`."""
    return read_engine(SGLANG, given, given.loose)
