"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    f"meshplan.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
    for folder in ("catalogs", "cli", "planner", "profiler")
    for path in (ROOT / folder).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert done.attempted > 0
    assert done.failed == 0
