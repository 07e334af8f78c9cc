"""Bytes that move, against a real resharding: ranks on CPU that send each other what they lack, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from core_cases import DENSE
from moves_cases import LAYERS, RECIPE, config, layout
from resharding import RANKS, SIDE, work

from meshplan.planner.training.replanning.moves import moves

SMALL = replace(DENSE, num_hidden_layers=LAYERS, hidden_size=SIDE, vocab_size=0)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"data_parallel": 4}, {"data_parallel": 3}),
        ({"tensor_parallel": 2, "data_parallel": 2}, {"tensor_parallel": 4}),
        ({"pipeline_parallel": 2, "data_parallel": 2}, {"tensor_parallel": 3}),
        ({"data_parallel": 2}, {"pipeline_parallel": 4}),
    ],
)
def test_a_real_resharding_moves_as_many_bytes(tmp_path: Path, before: dict[str, int], after: dict[str, int]) -> None:
    torch = pytest.importorskip("torch")
    old, new = config(**before), config(**after)
    context = torch.multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(rank, str(tmp_path), old, new)) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(one["right"] for one in found)
    # Layers' squares alone: every parameter of a layer as many bytes of states, no weights, embedding or head.
    recipe = replace(RECIPE, weight_bytes=0.0, optimizer_bytes=12.0)
    taken = moves(SMALL, recipe, layout(old, per_host=1), layout(new, per_host=1))
    share = sum(one["received"] for one in found) / (LAYERS * SIDE**2)
    whole = sum(SMALL.layer_parameters(layer) for layer in range(LAYERS)) * recipe.optimizer_bytes
    assert taken.moved == pytest.approx(share * whole)
