"""Launchers in the forms in which tools document them: each is read into a spec that the planner accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
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


def test_a_value_that_only_a_shell_knows_can_be_stated(tmp_path: Path, catalog: Catalog) -> None:
    """A refusal names the option that helps, and the option helps."""
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve Qwen/Qwen3-8B --tensor-parallel-size $1\n")
    with pytest.raises(SpecError, match=r"--env 1=VALUE sets it"):
        import_command([str(script)], catalog, answers_of({}))
    found = import_command([str(script)], catalog, answers_of({}), variables={"1": "4"})
    assert found.spec["fixed"]["tensor_parallel"] == 4


def test_nodes_that_only_a_shell_knows_can_be_stated(tmp_path: Path, catalog: Catalog) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun --nnodes $NODES --nproc_per_node 8 mine.py --batch_size 1 --seq_len 1024\n")
    with pytest.raises(SpecError, match=r"give --nodes, or --env"):
        import_command([str(script)], catalog, answers_of({"model": "llama-3.1-8b"}))
    found = import_command([str(script)], catalog, answers_of({"model": "llama-3.1-8b", "nodes": 2}))
    assert found.spec["cluster"]["nodes"][0]["count"] == 2


def test_a_configuration_is_found_beside_its_script(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}')
    script = tmp_path / "train.sh"
    script.write_text("deepspeed --num_gpus 8 mine.py --deepspeed_config zero.json\n")
    assert read_inputs([str(script)]).values["zero_stage"] == 2


def test_a_recipe_that_is_not_here_is_named() -> None:
    with pytest.raises(SpecError, match=r"reads 'recipes/full.yaml', which is not here"):
        read_inputs(["llamafactory-cli train recipes/full.yaml"])
