"""Values of an unexpected shape in imported configurations: read or refused in words, whatever the field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzz_readers import ACCELERATED, STAGES, TUNED
from hostile import places

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import MeshplanError
from meshplan.planner.imports.command import import_command
from meshplan.planner.imports.spec import Answers

ANSWERS = Answers(node_type="dgx-h100", nodes=1, model="llama-3.1-8b", sequence_length=4096, global_batch_size=64)
SHAPES: list[Any] = [None, [1], {"a": {"b": []}}]


@pytest.mark.parametrize(("name", "text"), [("fsdp.yaml", ACCELERATED), ("zero.json", STAGES), ("tune.yaml", TUNED)])
def test_any_field_may_have_any_shape(name: str, text: str, catalog: Catalog, tmp_path: Path) -> None:
    document = yaml.safe_load(text)
    file = tmp_path / name
    answers = [0, 0]
    for *folders, key in places(document):
        for shape in SHAPES:
            changed = copy.deepcopy(document)
            inner = changed
            for folder in folders:
                inner = inner[folder]
            inner[key] = shape
            file.write_text(json.dumps(changed), encoding="utf-8")
            try:
                import_command([str(file)], catalog, ANSWERS)
            except MeshplanError as error:
                answers[1] += bool(str(error))
            else:
                answers[0] += 1
    assert min(answers) > 0
