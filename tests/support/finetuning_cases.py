"""Plans of fine-tuning for Axolotl and torchtune (plain functions; no fixtures)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from emit_cases import LLAMA_70B, config_for, plan_for, request_for

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.switches import LOSSES

SHARDED = config_for(LLAMA_70B, data_parallel=16, zero_stage=3, activation_recompute="full")
ALONE = config_for(LLAMA_70B, zero_stage=0)


def tuning(
    config: TrainingConfig = SHARDED,
    *,
    shape: ModelShape = LLAMA_70B,
    source: str = "https://huggingface.co/meta-llama/Llama-3.1-70B",
    **workload: Any,
) -> TrainingRequest:
    """A plan of some phase, LoRA of rank 16 unless another is given, of a published model."""
    stated = {"sequence_length": config.sequence_length, "phase": "lora", "lora_rank": 16, **workload}
    plan = plan_for(shape, config)
    plan = replace(plan, spec={**plan.spec, "workload": stated})
    return replace(request_for(replace(shape, source=source), config, hosts=()), plan=plan)


def random_tuning(draw: random.Random, target: str) -> TrainingRequest:
    """A legal plan under the rules of ``target``: data parallelism, with split sequences where it has them."""
    rules = FRAMEWORKS[target]
    while True:
        data = draw.choice((1, 2, 4, 8, 16, 24))
        zero = draw.choice((0, 2, 3))
        offload = zero == 3 and draw.random() < 0.3
        context = draw.choice((1, 1, 2, 8)) if target == "axolotl" else 1
        config = config_for(
            LLAMA_70B,
            data_parallel=data,
            context_parallel=context,
            context_parallel_style="ring" if context == 1 else rules.context_parallel_style,
            data_parallel_shard=draw.choice((data, max(1, data // 2))) if zero else 1,
            zero_stage=zero,
            micro_batch_size=draw.choice((1, 2, 8)),
            num_microbatches=draw.choice((1, 4, 12)),
            sequence_length=draw.choice((512, 4096, 8192)),
            activation_recompute=draw.choice(rules.recompute_modes),
            activation_offload=draw.random() < 0.3,
            parameter_offload=offload,
            optimizer_offload=offload,
            precision=draw.choice(rules.precisions),
        )
        phase = draw.choice(("sft", "lora", "qlora"))
        config = replace(config, quantised_weights=phase == "qlora")
        if target == "torchtune":
            in_backward = phase == "sft" and draw.random() < 0.5
            config = replace(config, loss=draw.choice(LOSSES), optimizer_in_backward=in_backward)
        if not rules.broken(LLAMA_70B, config):
            rank = {"lora_rank": draw.choice((8, 16, 64))} if phase != "sft" else {}
            return tuning(config, phase=phase, precision=config.precision, **rank)
