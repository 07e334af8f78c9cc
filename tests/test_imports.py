"""Imports stand at the top of a file. One inside a function says why, on its line or the one above.

The command line is the exception: each command imports what it calls when it is called, so that `--help` is quick.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REASONS = ("start-up", "optional", "Unix only")
FILES = sorted(path for folder in ("catalogs", "planner", "profiler") for path in (ROOT / folder).rglob("*.py"))


def late_imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom))


def unexplained(path: Path) -> Iterator[str]:
    """Late imports of a file that give no reason."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in late_imports(ast.parse(text)):
        above = node.lineno - 2
        while lines[above].lstrip().startswith(("import ", "from ")):  # one reason serves the imports that follow it
            above -= 1
        said = " ".join(lines[above : node.end_lineno])
        if not any(reason in said for reason in REASONS):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {lines[node.lineno - 1].strip()}"


def test_imports_inside_functions_say_why() -> None:
    assert [line for path in FILES for line in unexplained(path)] == []
