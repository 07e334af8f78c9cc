"""The source ``sglang``."""

from __future__ import annotations

from meshplan.planner.imports.engines import SGLANG, read_engine
from meshplan.planner.imports.reading import Given, Reading


def recognises(given: Given) -> bool:
    """Whether this is SGLang's."""
    first = given.launch.program[:1]
    return bool(first) and first[0].startswith("sglang")


def read(given: Given) -> Reading:
    """See :func:`meshplan.planner.imports.engines.read_engine`."""
    return read_engine(SGLANG, given, given.loose)
