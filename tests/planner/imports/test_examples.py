"""Launchers in the forms in which tools document them: each is read into a spec that the planner accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.imports.command import import_command, read_inputs
from meshplan.planner.imports.spec import Answers

EXAMPLES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "data" / "imports" / "launchers.yaml").read_text(encoding="utf-8")
)


def inputs_of(example: dict[str, Any], folder: Path) -> list[str]:
    """A file, or the command as one word."""
    if "file" not in example:
        return [example["text"]]
    (folder / example["file"]).write_text(example["text"])
    return [str(folder / example["file"])]


def answers_of(example: dict[str, Any]) -> Answers:
    """What no launcher states."""
    return Answers(
        node_type="dgx-h100",
        model=example.get("model"),
        nodes=example.get("nodes"),
        input_length=1000,
        output_length=500,
        concurrency=16,
        **example.get("lengths", {}),
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_an_example_is_read(example: dict[str, Any], tmp_path: Path, catalog: Catalog) -> None:
    reading = read_inputs(inputs_of(example, tmp_path))
    assert {name: reading.values.get(name) for name in example["values"]} == example["values"]
    found = import_command(inputs_of(example, tmp_path), catalog, answers_of(example))
    assert found.spec["kind"] in {"training", "serving"}


def test_an_unknown_flag_is_told_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(
        "#!/bin/bash\n# starts it\nvllm serve org/model \\\n  --tensor-parallel-size 2 \\\n  --no-such-flag 3\n"
    )
    assert read_inputs([str(script)]).unread == ["line 5: --no-such-flag 3"]
