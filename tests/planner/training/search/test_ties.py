"""What an expert takes first among plans of equal time: pairs that differ in one choice, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, MOE, configured, problem_of

from meshplan.planner.core.budget import Budget
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.search.report import TIE_WIDTH
from meshplan.planner.training.search.seen import PricedBatch
from meshplan.planner.training.search.ties import complexity, settle_ties

Choices = dict[str, Any]


def rank(problem: TrainingProblem, config: TrainingConfig) -> tuple[float, ...]:
    return tuple(float(column[0]) for column in complexity(problem, candidates_of(problem, config)))


# The expert's choice, the other one.
DENSE_PAIRS: dict[str, tuple[Choices, Choices]] = {
    "tensor parallelism before full recompute": ({"tensor_parallel": 2}, {"activation_recompute": "full"}),
    "a few recomputed layers before tensor parallelism": (
        {"activation_recompute": "block", "recompute_num_layers": 1},
        {"tensor_parallel": 2},
    ),
    "a whole sequence on a device": ({"tensor_parallel": 2}, {"context_parallel": 2}),
    "few stages": ({"pipeline_parallel": 2}, {"pipeline_parallel": 4}),
    "shards over all replicas of a domain": (
        {"zero_stage": 3, "data_parallel": 8, "data_parallel_shard": 4},
        {"zero_stage": 3, "data_parallel": 8, "data_parallel_shard": 2},
    ),
    "equal layers between the ends before few chunks": (
        {"pipeline_parallel": 2, "virtual_pipeline_stages": 3, "layers_per_chunk": (0, 1, 1, 1, 1, 0)},
        {"pipeline_parallel": 2, "virtual_pipeline_stages": 2, "layers_per_chunk": (1, 2, 1, 0)},
    ),
}
MOE_PAIRS: dict[str, tuple[Choices, Choices]] = {
    "experts split before stages": (
        {"pipeline_parallel": 2, "expert_parallel": 4, "tensor_parallel": 2},
        {"pipeline_parallel": 4},
    ),
    "experts over the domain": ({"expert_parallel": 4}, {"expert_parallel": 2}),
    "no messages of experts leave the domain": ({"expert_parallel": 2}, {"expert_parallel": 8}),
    "whole experts": ({"expert_parallel": 2}, {"expert_parallel": 2, "expert_tensor_parallel": 2}),
}


@pytest.mark.parametrize("name", [*DENSE_PAIRS, *MOE_PAIRS])
def test_the_expert_takes_the_first(name: str) -> None:
    shape, (first, other) = (DENSE, DENSE_PAIRS[name]) if name in DENSE_PAIRS else (MOE, MOE_PAIRS[name])
    problem = problem_of(shape, num_devices=8, global_batch_size=8)
    problem = replace(problem, machine=replace(problem.machine, domain_size=4))
    assert rank(problem, configured(problem, **first)) < rank(problem, configured(problem, **other))


@pytest.mark.parametrize(("architecture", "sharded_first"), [("ampere", False), ("hopper", False), ("blackwell", True)])
def test_megatrons_sharding_goes_with_tensor_parallelism_from_blackwell_on(
    architecture: str, sharded_first: bool
) -> None:
    """One hardware queue for the one, several for the other: two dimensions under ZeRO-1 come before."""
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8, rules=MEGATRON)
    device = replace(problem.machine.device, architecture=architecture)
    problem = replace(problem, machine=replace(problem.machine, device=device))
    sharded = configured(problem, tensor_parallel=4, data_parallel=2, zero_stage=3)
    split = configured(problem, tensor_parallel=4, context_parallel=2, zero_stage=1)
    assert (rank(problem, sharded) < rank(problem, split)) is sharded_first


@pytest.mark.parametrize("stopped", ["Ctrl-C", "time"])
def test_what_is_found_is_kept_when_the_search_for_ties_is_cut_short(stopped: str) -> None:
    solution, search = search_degrees(problem_of(DENSE, num_devices=4, global_batch_size=8))
    budget = Budget(time_limit_s=0.0 if stopped == "time" else None)
    if stopped == "Ctrl-C":
        budget.interrupt()
    settled = settle_ties(search, solution, budget)
    assert solution.objective is not None
    assert settled.objective is not None
    assert settled.objective <= solution.objective / (1.0 - TIE_WIDTH)
    assert settled.bound == solution.bound


def test_a_plan_on_fewer_devices_is_no_tie() -> None:
    """As if one had been priced that is faster on a single device."""
    problem = problem_of(DENSE, num_devices=4, global_batch_size=8)
    solution, search = search_degrees(problem)
    assert solution.objective is not None
    alone = candidates_of(problem, configured(problem))
    faster = np.array([0.9 * solution.objective])
    search.incumbents.seen.batches.append(
        PricedBatch(
            candidates=replace(alone, split=next(one for one in search.space.splits if one.pipeline_parallel == 1)),
            objective=faster,
            step_s=faster,
            safe_bytes=faster,
        )
    )
    settled = settle_ties(search, solution)
    assert settled.assignment is not None
    assert (alone.world_size.tolist(), settled.assignment.config.world_size) == ([1], 4)
