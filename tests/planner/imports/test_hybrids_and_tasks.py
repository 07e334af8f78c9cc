"""What a command says of a hybrid's blocks, and of servers that answer with vectors or scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.emit.training.megatron.hybrid import letters
from meshplan.planner.imports.command import import_command
from meshplan.planner.imports.spec import Answers
from meshplan.planner.service import emit_plan, estimate_plan, write_files

HYBRID: dict[str, Any] = {
    "kind": "training",
    "model": "nemotron-3-nano-30b-a3b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 4}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 256},
    "fixed": {
        "tensor_parallel": 2,
        "data_parallel": 8,
        "expert_parallel": 8,
        "micro_batch_size": 1,
        "zero_stage": 1,
        "pipeline_parallel": 2,
        "layers_per_chunk": [25, 27],
        "activation_recompute": "full",
    },
}
SERVER = Answers(node_type="dgx-h100", input_length=512, concurrency=64)


def test_a_hybrids_pattern_names_its_model_and_its_stages(catalog: Catalog, tmp_path: Path) -> None:
    plan = estimate_plan(HYBRID, catalog)
    write_files(emit_plan(plan, "megatron", catalog), tmp_path / "files")
    files = [str(tmp_path / "files" / "megatron_args.txt")]
    found = import_command(files, catalog, Answers(node_type="dgx-h100", nodes=4), source="megatron").spec
    assert found["model"] == HYBRID["model"]
    assert {name: found["fixed"][name] for name in HYBRID["fixed"]} == HYBRID["fixed"] | {"layers_per_chunk": (25, 27)}


def test_a_pattern_that_cuts_through_a_layer_is_refused(catalog: Catalog) -> None:
    """A layer of Granite 4.0 is a mixer and experts: no chunk ends between them."""
    shape = catalog.model_shape("granite-4.0-h-small")
    blocks = "".join(letters(shape))
    pattern = f"{blocks[:1]}|{blocks[1:]}"
    sizes = f"--hidden-size {shape.hidden_size} --num-attention-heads {shape.num_attention_heads}"
    command = f"pretrain_hybrid.py --hybrid-layer-pattern {pattern} {sizes} --pipeline-model-parallel-size 2"
    command += " --bf16 --global-batch-size 64"
    answers = Answers(node_type="dgx-h100", nodes=1, model=shape.slug, sequence_length=4096)
    with pytest.raises(SpecError, match="ends a chunk after 1 blocks, within a layer of granite"):
        import_command(["torchrun", "--nproc_per_node", "8", *command.split()], catalog, answers)


@pytest.mark.parametrize(
    ("command", "task"),
    [
        ("vllm serve BAAI/bge-m3 --runner pooling", "embed"),
        ("vllm serve BAAI/bge-reranker-v2-m3 --runner pooling", "rerank"),
        ("vllm serve Qwen/Qwen3-Embedding-8B --runner pooling --convert embed", "embed"),
        ("vllm serve Qwen/Qwen3-8B --runner pooling --convert classify", "rerank"),
    ],
)
def test_servers_of_vectors_and_scores(command: str, task: str, catalog: Catalog) -> None:
    imported = import_command(command.split(), catalog, SERVER)
    assert imported.spec["workload"] == {"task": task, "input_length": 512, "concurrency": 64}
    assert imported.unread == ()
