"""Runs whose peaks the estimator itself gives under planted constants of the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from core_cases import DENSE, MOE, configured, problem_of

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, MemoryConstants
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.observations import ObservedRun

FRAMEWORK = "composer"
PLANTED = {
    "fixed_bytes": 1.5e9,
    "communication_bytes": 1.5e9,
    "activation_factor": 1.15,
    "logits_bytes_per_entry": 10.0,
    "extra_bytes_per_parameter": 2.0,
}
WIDE = replace(DENSE, num_hidden_layers=24, hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
CHOICES: tuple[dict[str, Any], ...] = (
    {"data_parallel": 8, "zero_stage": 1},
    {"data_parallel": 8, "zero_stage": 3, "micro_batch_size": 2},
    {"data_parallel": 4, "tensor_parallel": 2, "micro_batch_size": 4},
    {"tensor_parallel": 8, "micro_batch_size": 8},
    {"pipeline_parallel": 4, "data_parallel": 2},
    {"pipeline_parallel": 8, "activation_recompute": "full", "micro_batch_size": 2},
    {"data_parallel": 8, "activation_recompute": "full", "micro_batch_size": 8},
    {"context_parallel": 4, "data_parallel": 2},
    {"data_parallel": 8, "zero_stage": 2, "micro_batch_size": 4},
    {"data_parallel": 8, "zero_stage": 0},
)


def calibrated(constants: MemoryConstants) -> Calibration:
    return Calibration(framework=FRAMEWORK, architecture="any", memory=constants, recipe=recipe_named(FRAMEWORK).recipe)


def measured(planted: Mapping[str, float], *, noise: float = 0.0, groups: int = 4, seed: int = 0) -> list[ObservedRun]:
    """Runs whose peaks the estimator itself gives under the planted constants."""
    random, runs = np.random.default_rng(seed), []
    for number, (shape, choices) in enumerate((shape, choices) for shape in (WIDE, MOE) for choices in CHOICES):
        constants = calibrated(MemoryConstants(**planted))
        if shape is MOE and choices.get("pipeline_parallel") == 8:
            continue
        problem = problem_of(shape, num_devices=8, global_batch_size=64, sequence_length=4096, calibration=constants)
        config = configured(problem, **choices)
        peak = price(problem, config).typical_bytes * float(np.exp(noise * random.standard_normal()))
        runs.append(
            ObservedRun(
                id=f"run-{number}",
                group=f"group-{number % groups}",
                problem=problem,
                config=config,
                framework=FRAMEWORK,
                measured={"peak_memory_bytes": peak},
                derived={},
                filled=(),
                expects_oom=False,
            )
        )
    return runs


def exceeding(runs: Sequence[ObservedRun], constants: MemoryConstants) -> list[str]:
    return [
        run.id
        for run in runs
        if price(replace(run.problem, calibration=calibrated(constants)), run.config).safe_bytes
        < run.measured["peak_memory_bytes"]
    ]
