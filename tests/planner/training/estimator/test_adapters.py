"""Adapters: streams of memory counted by hand, joined matrices, and where they cost nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, configured, problem_of

from meshplan.catalogs.constants.training import FrameworkRecipe
from meshplan.planner.training.estimator.candidates import LayerKind
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.estimator.operators.adapters import AdapterModel
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.problem.problem import Phase, TrainingProblem

LAYER = LayerKind(is_moe=False, window=None)
HIDDEN, QUERIES = DENSE.hidden_size, DENSE.num_attention_heads * DENSE.head_dim
KEYS, WIDTH = DENSE.num_key_value_heads * DENSE.head_dim, DENSE.intermediate_size


def adapted(*, joins: bool = False, **fields: Any) -> TrainingProblem:
    problem = problem_of(DENSE, phase=Phase.LORA)
    recipe = FrameworkRecipe(joins_projections=joins)
    return replace(
        problem,
        workload=replace(problem.workload, **{"lora_rank": 16, **fields}),
        calibration=replace(problem.calibration, recipe=recipe),
    )


def model_of(problem: TrainingProblem, **choices: Any) -> AdapterModel:
    return AdapterModel(
        compute=ComputeModel(
            shape=problem.shape,
            device=problem.machine.device,
            workload=problem.workload,
            candidates=candidates_of(problem, configured(problem, **choices)),
            calibration=problem.calibration,
        )
    )


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("on_mlp", [False, True])
def test_operators_one_by_one_move_what_peft_writes_out(joins: bool, on_mlp: bool) -> None:
    """Dropout, scale and addition forward; scale, dropout and the sum of two gradients backward."""
    problem = adapted(joins=joins, is_eager=True, adapts_mlp=on_mlp)
    inputs, outputs = (1 if joins else 3) * HIDDEN + QUERIES, QUERIES + 2 * KEYS + HIDDEN
    if on_mlp:
        inputs += (1 if joins else DENSE.mlp_matrices - 1) * HIDDEN + WIDTH
        outputs += (DENSE.mlp_matrices - 1) * WIDTH + HIDDEN
    moved = model_of(problem).traffic(LAYER)
    rate = problem.machine.device.memory_bandwidth_bytes_per_s * problem.calibration.time.memory_op_efficiency
    a_token = 2.0 * problem.workload.sequence_length / rate
    assert moved.forward_s[0] == pytest.approx(a_token * (2 * inputs + (2 + 3) * outputs))
    assert moved.backward_s[0] == pytest.approx(a_token * ((2 + 3) * inputs + 2 * outputs))


def test_fused_split_or_joined_adapters_cost_less_and_frozen_layers_nothing() -> None:
    def seconds(problem: TrainingProblem, **choices: Any) -> float:
        model = model_of(problem, **choices)
        return float((model.products(LAYER) + model.traffic(LAYER)).total_s[0])

    apart = seconds(adapted(is_eager=True))
    assert 0.0 < seconds(adapted()) < apart
    assert seconds(adapted(is_eager=True), tensor_parallel=2) < apart
    assert seconds(adapted(joins=True, is_eager=True)) < apart
    assert seconds(problem_of(DENSE)) == 0.0
