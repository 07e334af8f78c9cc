"""Recompute of the first layers of each chunk: between none and full in time and memory, and never out of order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, LATENT, MOE, configured, problem_of, questions
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.estimator.candidates import split_layers
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.priced import Priced, candidates_of, price
from meshplan.planner.training.pipeline.closed_forms import staged_pipeline_s
from meshplan.planner.training.pipeline.lookup import pipeline_order
from meshplan.planner.training.pipeline.simulation import ChunkTimes, simulate
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.simulated import simulated_step_s

Question = tuple[TrainingProblem, TrainingConfig]
FEW = settings(max_examples=60, deadline=None)


def block(problem: TrainingProblem, config: TrainingConfig, layers: int) -> Priced:
    mode = "block" if layers else "none"
    return price(problem, replace(config, activation_recompute=mode, recompute_num_layers=layers))


@FEW
@given(question=questions())
def test_more_layers_never_take_less_time_nor_more_memory(question: Question) -> None:
    problem, config = question
    priced = [block(problem, config, n) for n in range(max(config.layers_per_chunk) + 1)]
    for fewer, more in itertools.pairwise(priced):
        assert more.step_s >= fewer.step_s * (1 - 1e-12)
        assert more.recompute_flops_share > fewer.recompute_flops_share
        for light, heavy in zip(more.stages, fewer.stages, strict=True):
            assert light.safe_bytes <= heavy.safe_bytes * (1 + 1e-12)
            assert light.typical_bytes <= heavy.typical_bytes * (1 + 1e-12)


@FEW
@given(question=questions())
def test_no_block_is_below_full_recompute_in_memory(question: Question) -> None:
    problem, config = question
    full = price(problem, replace(config, activation_recompute="full", recompute_num_layers=0))
    whole = block(problem, config, max(config.layers_per_chunk))
    if problem.shape.num_nextn_predict_layers == 0:
        assert whole.safe_bytes == pytest.approx(full.safe_bytes, rel=1e-12)
        assert whole.step_s == pytest.approx(full.step_s, rel=0.02)  # the forward share of a stage is its own
    else:  # Megatron-LM does not recompute the multi-token-prediction layer with blocks
        assert whole.safe_bytes >= full.safe_bytes * (1 - 1e-12)


@FEW
@given(question=questions(), share=st.floats(0.0, 1.0))
def test_the_least_block_is_the_first_that_fits(question: Question, share: float) -> None:
    problem, config = question
    config = replace(config, activation_recompute="none", recompute_num_layers=0)
    longest = max(config.layers_per_chunk)
    safe = [block(problem, config, n).safe_bytes for n in range(longest + 1)]
    limit = safe[-1] + share * (safe[0] - safe[-1])
    limit = min(safe, key=lambda value: abs(value - limit)) * (1 + 1e-9)  # off the edge, where rounding decides
    memory = MemoryModel(
        shape=problem.shape,
        workload=problem.workload,
        candidates=candidates_of(problem, config),
        calibration=problem.calibration,
    )
    least = memory.least_recomputed([stage.safe_bytes for stage in memory.stages()], limit)[0]
    assert least == next(n for n, value in enumerate(safe) if value <= limit)


def test_where_nothing_is_enough_the_least_block_is_longer_than_any_chunk() -> None:
    problem = problem_of(DENSE)
    memory = MemoryModel(
        shape=DENSE,
        workload=problem.workload,
        candidates=candidates_of(problem, configured(problem)),
        calibration=problem.calibration,
    )
    safe = [stage.safe_bytes for stage in memory.stages()]
    assert memory.least_recomputed(safe, 1e9).tolist() == [DENSE.num_hidden_layers + 1]


def test_the_first_layers_are_of_the_kinds_that_come_first() -> None:
    """MOE's first layer is dense: a block of one on the first stage recomputes no expert."""
    split = split_layers(MOE, pipeline_parallel=2, virtual_pipeline_stages=1, layers_per_chunk=(2, 2), schedule="1f1b")
    first, second = split.classes
    assert first.recomputed(np.array([0, 1, 2, 9])).tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]
    assert second.recomputed(np.array([0, 1, 2])).tolist() == [[0, 0, 0], [0, 1, 2]]


def test_a_chunk_counts_for_itself() -> None:
    """Two chunks a stage, blocks of one: two layers of each stage are recomputed (Megatron-LM counts by chunk)."""
    problem = problem_of(replace(DENSE, num_hidden_layers=8), num_devices=2, global_batch_size=8)
    choices = {"pipeline_parallel": 2, "virtual_pipeline_stages": 2}
    one = configured(problem, activation_recompute="block", recompute_num_layers=1, **choices)
    assert price(problem, one).recompute_flops_share == pytest.approx(0.5 / 3)
    plain, whole = (
        price(problem, configured(problem, activation_recompute=mode, **choices)) for mode in ("none", "full")
    )
    half = price(problem, one)
    assert half.breakdown_s["recompute"] == pytest.approx(whole.breakdown_s["recompute"] / 2)
    assert plain.step_s < half.step_s < whole.step_s


@FEW
@given(
    stages=st.lists(st.tuples(st.floats(0.5, 1.5), st.floats(0.15, 0.5)), min_size=2, max_size=9),
    m=st.integers(1, 30),
)
def test_1f1b_is_exact_where_stages_differ_in_their_forward_part(stages: list[tuple[float, float]], m: int) -> None:
    seconds, shares = (np.array(values)[:, None] for values in zip(*stages, strict=True))
    shares[-1] += 1e-6  # never alike
    closed = staged_pipeline_s(
        "1f1b", virtual_pipeline_stages=1, num_microbatches=np.array([m]), stages_s=seconds, forward_share=shares
    )
    forward = (seconds * shares)[:, 0].tolist()
    backward = (seconds * (1 - shares))[:, 0].tolist()
    times = ChunkTimes(forward_s=forward, input_gradient_s=backward, weight_gradient_s=[0.0] * len(forward))
    assert closed[0] == pytest.approx(simulate(pipeline_order("1f1b", len(forward), 1, m), times).flushed_s, rel=1e-9)


@pytest.mark.parametrize("shape", [DENSE, MOE, LATENT], ids=lambda shape: shape.slug)
def test_the_simulation_agrees_on_blocks(shape: object) -> None:
    problem = problem_of(shape, num_devices=2, global_batch_size=8)
    for n in (1, 2):
        config = configured(problem, pipeline_parallel=2, activation_recompute="block", recompute_num_layers=n)
        assert price(problem, config).step_s == pytest.approx(simulated_step_s(problem, config), rel=1e-9)
