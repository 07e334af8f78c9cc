"""Training plans as words of Megatron-LM's command line, and random ones, legal or not."""

from __future__ import annotations

import random
from typing import Any

from emit_cases import SHAPES, config_for, request_for

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training.megatron import job as emitter
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingConfig


def words(config: TrainingConfig, shape: ModelShape) -> list[str]:
    return [word for flag in emitter.unchecked_flags(config, shape) for word in flag]


def environment(config: TrainingConfig, shape: ModelShape) -> dict[str, str]:
    variables = emitter.environment(request_for(shape, config))
    return {name: value for name, value in variables.items() if value is not None}


def refusal(megatron: Any, shape: ModelShape, config: TrainingConfig) -> str | None:
    return megatron.refusal(words(config, shape), world_size=config.world_size, environment=environment(config, shape))


def random_config(shape: ModelShape, draw: random.Random) -> TrainingConfig:
    """Any configuration of at most 128 devices, legal or not."""
    stages, virtual = draw.choice((1, 1, 2, 3, 4, 8)), draw.choice((1, 1, 2, 3))
    chunks = stages * virtual
    layers = [1] * chunks
    for _ in range(shape.num_hidden_layers - chunks):
        layers[draw.randrange(chunks)] += 1
    choices: dict[str, Any] = {
        "tensor_parallel": draw.choice((1, 1, 2, 4, 5, 8)),
        "pipeline_parallel": stages,
        "virtual_pipeline_stages": virtual,
        "context_parallel": draw.choice((1, 1, 2)),
        "data_parallel": draw.choice((1, 2, 3, 4, 8)),
        "zero_stage": draw.choice((0, 1, 1, 2, 3)),
        "activation_recompute": draw.choice(("none", "selective", "block", "full")),
        "micro_batch_size": draw.choice((1, 2)),
        "num_microbatches": draw.choice((1, 2, 6, 8, 12)),
        "precision": draw.choice(("bf16", "bf16", "fp16") if shape.moe else ("bf16", "fp16", "fp8", "mxfp8")),
    }
    if choices["zero_stage"] == 1:
        choices["optimizer_offload"] = draw.random() < 0.25
        if choices["optimizer_offload"]:
            choices["optimizer_offload_percent"] = draw.choice((7, 50, 100))
    if choices["activation_recompute"] == "none" and stages == 1 and choices["zero_stage"] <= 1:
        choices["activation_offload_num_layers"] = draw.choice((0, 1, shape.num_hidden_layers - 2))
    if choices["context_parallel"] > 1:
        choices["context_parallel_style"] = draw.choice(("ring", "all-gather", "all-to-all", "all-to-all+ring"))
    if choices.get("context_parallel_style") == "all-to-all+ring":
        choices |= {"context_parallel": 4, "context_parallel_heads": 2}
    if choices["activation_recompute"] == "block":
        choices["recompute_num_layers"] = draw.choice((1, 2, max(layers)))
    if draw.random() < 0.5:
        choices["layers_per_chunk"] = tuple(layers)
    if shape.moe is not None:
        choices["expert_parallel"] = draw.choice((1, 2, 4, 8))
        choices["expert_tensor_parallel"] = draw.choice((1, 1, 2))
        choices["expert_capacity_factor"] = draw.choice((0.0, 0.0, 1.0, 1.25))
        choices["expert_dispatcher"] = draw.choice(("alltoall", "alltoall", "deepep", "hybridep"))
        choices["expert_parallel_overlap"] = draw.random() < 0.25 and choices["activation_recompute"] in (
            "none",
            "selective",
        )
    if choices["zero_stage"]:
        choices["data_parallel_shard"] = draw.choice((choices["data_parallel"], max(1, choices["data_parallel"] // 2)))
        if choices["zero_stage"] == 3 and choices["data_parallel_shard"] < choices["data_parallel"]:
            choices["outer_zero_stage"] = draw.choice((0, 1))
    return config_for(shape, **choices)


def random_plans(*, legal: bool, seed: int, count: int) -> list[tuple[ModelShape, TrainingConfig]]:
    draw = random.Random(seed)
    found: list[tuple[ModelShape, TrainingConfig]] = []
    while len(found) < count:
        shape = draw.choice(SHAPES)
        config = random_config(shape, draw)
        # These chunks have at least a layer each, so the sum is the only thing that may not fit.
        fits = config.world_size <= 128 and sum(config.layers_per_chunk) == shape.num_hidden_layers
        if fits and (not MEGATRON.broken(shape, config)) is legal:
            found.append((shape, config))
    return found
