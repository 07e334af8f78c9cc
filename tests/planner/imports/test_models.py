"""Which model of the catalog a command means whose flags give sizes only."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.imports.command import import_command
from meshplan.planner.imports.spec import Answers

ANSWERS = Answers(node_type="dgx-h100", nodes=8)
LLAMA_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --rotary-base 500000 --untie-embeddings-and-output-weights"
)
QWEN_7B = (
    "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention "
    "--num-query-groups 4 --rotary-base 1000000 --add-qkv-bias --untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize(
    ("sizes", "positions", "model"),
    [
        (LLAMA_70B, 8192, "llama-3-70b"),
        (LLAMA_70B, 131072, "llama-3.1-70b"),
        (LLAMA_70B, 32768, "llama-3-70b"),  # no release reads so many: the base model all the same
        (QWEN_7B, 4096, "qwen2-7b"),
    ],
)
def test_a_base_model_comes_before_what_was_made_of_it(
    sizes: str, positions: int, model: str, catalog: Catalog, tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py {sizes} --max-position-embeddings {positions} "
        "--seq-length 8192 --micro-batch-size 1 --global-batch-size 64 --bf16 --tensor-model-parallel-size 8\n"
    )
    found = import_command([str(script)], catalog, ANSWERS)
    (assumed,) = (one for one in found.assumed if one.term == "model")
    assert assumed.value == model
    assert "deepseek-r1-distill" in assumed.why  # equal in every flag, and named as such


def test_a_model_that_is_named_needs_no_sizes(catalog: Catalog, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    run = "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --bf16"
    script.write_text(f"{run} --global-batch-size 64 --tensor-model-parallel-size 2\n")
    named = Answers(node_type="dgx-h100", model="llama-3.1-8b")
    assert import_command([str(script)], catalog, named).spec["model"] == "llama-3.1-8b"
    script.write_text(f"{run} --global-batch-size 64 --num-layers 80\n")
    with pytest.raises(SpecError, match="--num-layers 80, the model has 32"):
        import_command([str(script)], catalog, named)
