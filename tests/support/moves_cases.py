"""Layouts of small jobs for tests of the bytes that move between them."""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.constants.training import FrameworkRecipe
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.replanning.moves import Layout

RECIPE = FrameworkRecipe()
LAYERS = 12


def config(**choices: Any) -> TrainingConfig:
    usual: dict[str, Any] = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "virtual_pipeline_stages": 1,
        "context_parallel": 1,
        "data_parallel": 1,
        "expert_parallel": 1,
        "expert_tensor_parallel": 1,
        "sequence_parallel": False,
        "zero_stage": 1,
        "activation_recompute": "none",
        "pipeline_schedule": "1f1b",
        "micro_batch_size": 1,
        "num_microbatches": 8,
        "global_batch_size": 64,
        "sequence_length": 1024,
        "precision": "bf16",
    }
    usual |= choices
    chunks = usual["pipeline_parallel"] * usual["virtual_pipeline_stages"]
    usual["pipeline_schedule"] = "none" if usual["pipeline_parallel"] == 1 else "1f1b"
    if usual["virtual_pipeline_stages"] > 1:
        usual["pipeline_schedule"] = "interleaved"
    return TrainingConfig(
        layers_per_chunk=(LAYERS // chunks,) * chunks,
        data_parallel_shard=usual.get("data_parallel_shard", usual["data_parallel"]),
        **{name: value for name, value in usual.items() if name != "data_parallel_shard"},
    )


def layout(made: TrainingConfig, *, first_host: int = 0, per_host: int = 2) -> Layout:
    return Layout(
        config=made,
        places=tuple((first_host + rank // per_host, rank % per_host) for rank in range(made.world_size)),
    )
