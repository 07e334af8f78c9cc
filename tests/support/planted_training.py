"""Measured training runs that the estimator itself makes under planted constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from core_cases import DENSE, MOE, configured, machine_with, problem_of

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, TimeConstants
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.observations import ObservedRun

FRAMEWORK = "megatron"
PLANTED = replace(
    TimeConstants(),
    gemm_efficiency=0.75,
    attention_kernel_efficiency=0.45,
    memory_op_efficiency=0.55,
    scale_up_efficiency=0.6,
    network_efficiency=0.85,
    expert_gemm_efficiency=0.5,
    host_s_per_layer=1.0e-3,
    step_overhead_s=30e-3,
)
LARGE = replace(DENSE, hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=8)
CHOICES: tuple[dict[str, Any], ...] = (
    {"data_parallel": 16},
    {"data_parallel": 16, "zero_stage": 3},
    {"data_parallel": 4, "tensor_parallel": 4},
    {"data_parallel": 2, "tensor_parallel": 8},
    {"data_parallel": 4, "pipeline_parallel": 2, "tensor_parallel": 2},
    {"data_parallel": 8, "micro_batch_size": 2, "activation_recompute": "full", "tensor_parallel": 2},
    {"data_parallel": 4, "context_parallel": 4},
)


def planted(constants: TimeConstants, framework: str = FRAMEWORK) -> Calibration:
    return Calibration(
        framework=framework,
        architecture="hopper",
        time=constants,
        recipe=recipe_named(framework).recipe,
        cluster_error_p90={"dense": 0.1, "adapters": 0.1, "experts": 0.2},
    )


def runs_of(
    constants: TimeConstants = PLANTED,
    *,
    framework: str = FRAMEWORK,
    noise: float = 0.0,
    shapes: Sequence[Any] = (LARGE, MOE),
) -> list[ObservedRun]:
    """Steps that the estimator itself takes under ``constants``: short and long sequences, every choice."""
    random, runs = np.random.default_rng(7), []
    for shape in shapes:
        for sequence in (512, 4096, 32768):
            for choices in CHOICES:
                degrees = {"expert_parallel": 4} if shape.moe is not None and "context_parallel" not in choices else {}
                if shape.moe is not None and choices.get("data_parallel") == 2:
                    degrees = {"expert_parallel": 8}
                problem = problem_of(
                    shape,
                    num_devices=16,
                    global_batch_size=64,
                    sequence_length=sequence,
                    machine=machine_with(16),
                    calibration=planted(constants, framework),
                )
                config = configured(problem, **choices, **degrees)
                step = price(problem, config).step_s * float(np.exp(noise * random.standard_normal()))
                name = f"{framework}-{len(runs)}"
                runs.append(
                    ObservedRun(
                        id=name,
                        group=f"{framework}|{shape.slug}|{sequence}",
                        problem=problem,
                        config=config,
                        framework=framework,
                        measured={"iteration_s": step},
                        derived={},
                        filled=(),
                        expects_oom=False,
                    )
                )
    return runs


def errors(runs: Sequence[ObservedRun], calibration: Calibration) -> np.ndarray[Any, Any]:
    models = [calibration.for_model(run.problem.shape.slug) for run in runs]
    predicted = [
        price(replace(run.problem, calibration=used), run.config).step_s for run, used in zip(runs, models, strict=True)
    ]
    return np.array([p / run.measured["iteration_s"] - 1.0 for p, run in zip(predicted, runs, strict=True)])
