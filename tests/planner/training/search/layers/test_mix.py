"""Layers that stay gathered beside layers that are recomputed: the solver against every pair, and its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, MOE, machine_with, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from training_constants import with_time

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees

NAME = "gathered_num_layers"
# One replica a device over slow links: gathers cost about as much as recompute.
PINNED = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "data_parallel": 16,
    "data_parallel_shard": 16,
    "zero_stage": 3,
    "expert_parallel": 1,
    "expert_tensor_parallel": 1,
    "micro_batch_size": 1,
}


def question(shape: ModelShape, memory_bytes: float, *, asked: bool = True, **fixed: Any) -> TrainingProblem:
    problem = problem_of(
        shape,
        num_devices=16,
        global_batch_size=32,
        sequence_length=4096,
        machine=machine_with(16, scale_out_bytes_per_s=8e9),
        limits={"memory_bytes": memory_bytes},
        fixed={**PINNED, **fixed},
        search_over=(NAME,) if asked else (),
    )
    return replace(problem, calibration=with_time(problem.calibration, fully_sharded_overlap=0.2))


def mixes(config: TrainingConfig) -> list[TrainingConfig]:
    """Every pair of layers that stay gathered and layers that are recomputed."""
    layers = max(config.layers_per_chunk)
    return [
        replace(config, gathered_num_layers=k, activation_recompute="block" if r else "none", recompute_num_layers=r)
        for k in range(layers + 1)
        for r in range(layers + 1)
    ]


def plain_config(problem: TrainingProblem) -> TrainingConfig:
    free = replace(problem, limits=replace(problem.limits, memory_bytes=1e15), search_over=frozenset())
    solution, _ = search_degrees(free)
    assert solution.assignment is not None
    return replace(solution.assignment.config, activation_recompute="none", recompute_num_layers=0)


@settings(max_examples=15, deadline=None)
@given(shape=st.sampled_from((DENSE, MOE)), share=st.floats(0.0, 1.2))
def test_agrees_with_every_pair(shape: ModelShape, share: float) -> None:
    problem = question(shape, 1e15)
    every = [price(problem, config) for config in mixes(plain_config(problem))]
    least, most = min(one.safe_bytes for one in every), max(one.safe_bytes for one in every)
    limit = least + share * (most - least)
    fitting = [one.step_s for one in every if one.safe_bytes <= limit]
    solution, search = search_degrees(question(shape, limit))
    assert solution.objective is not None
    # Selective and full recompute are searched too, and are no worse than what they replace here.
    assert solution.objective <= min(fitting) * (1 + 1e-9)
    chosen = search.best[0]
    assert chosen.safe_bytes <= limit
    assert price(problem, chosen.config).step_s == pytest.approx(chosen.step_s, rel=1e-12)
    if chosen.config.activation_recompute in {"none", "block"}:
        assert solution.objective == pytest.approx(min(fitting), rel=1e-9)


def test_a_mix_is_taken_where_memory_is_left() -> None:
    problem = question(DENSE, 1e15)
    every = [price(problem, config) for config in mixes(plain_config(problem)) if not config.recompute_num_layers]
    memory = (every[3].safe_bytes + every[4].safe_bytes) / 2
    solution, _ = search_degrees(question(DENSE, memory))
    without, _ = search_degrees(question(DENSE, memory, asked=False))
    assert solution.assignment is not None
    assert without.assignment is not None
    assert 3 <= solution.assignment.config.gathered_num_layers <= DENSE.num_hidden_layers
    assert solution.assignment.step_s < without.assignment.step_s
    assert without.assignment.config.gathered_num_layers == 0


@pytest.mark.parametrize(("pinned", "found"), [(0, 0), (2, 2), (99, 6)])
def test_a_pinned_number_is_taken_as_asked(pinned: int, found: int) -> None:
    solution, search = search_degrees(question(DENSE, 80e9, gathered_num_layers=pinned))
    assert solution.assignment is not None
    assert {scored.config.gathered_num_layers for scored in search.best} == {found}


def test_no_framework_is_asked_for_what_it_cannot_say() -> None:
    problem = replace(question(DENSE, 80e9), rules=MEGATRON)
    _, search = search_degrees(problem)
    assert {scored.config.gathered_num_layers for scored in search.best} == {0}


@pytest.mark.parametrize("keep", [1, 3])
def test_the_bound_loses_nothing(keep: int) -> None:
    free = {name: value for name, value in PINNED.items() if name not in {"data_parallel", "data_parallel_shard"}}
    for memory in (12e9, 20e9, 80e9):
        problem = replace(question(DENSE, memory), fixed=free)
        few, _ = search_degrees(problem, keep=keep)
        many, _ = search_degrees(problem, keep=10_000)
        assert few.assignment == many.assignment
