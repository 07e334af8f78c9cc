"""Splits of the layers where gradients take long: the bound against the price of every split."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, configured, machine_with, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.estimator.priced import candidates_of, price
from meshplan.planner.training.pipeline.closed_forms import staged_pipeline_s
from meshplan.planner.training.pipeline.idle import least_idle_s
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.layers import uneven
from meshplan.planner.training.search.layers.compositions import chunks_of, compositions

# The embedding and the LM head weigh as much as several layers: the stage with most gradients is not the slowest.
SHAPE = replace(DENSE, num_hidden_layers=8, vocab_size=128_000)


def question(rate: float) -> TrainingProblem:
    machine = machine_with(16, domain_size=1, devices_per_host=1, scale_out_bytes_per_s=rate)
    return problem_of(SHAPE, num_devices=16, global_batch_size=64, sequence_length=2048, machine=machine)


def every_split(problem: TrainingProblem, config: TrainingConfig) -> dict[tuple[int, ...], float]:
    """Layers of each stage → step."""
    stages, layers = config.pipeline_parallel, SHAPE.num_hidden_layers
    splits = [
        (*cuts, layers - sum(cuts))
        for cuts in itertools.product(range(layers + 1), repeat=stages - 1)
        if sum(cuts) <= layers and all(cuts[1:])
    ]
    return {split: price(problem, replace(config, layers_per_chunk=split)).step_s for split in splits}


@pytest.mark.parametrize("rate", [50e9, 1e9, 0.2e9])
@pytest.mark.parametrize("stages", [2, 4])
def test_no_split_beats_the_weighed_bound(rate: float, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = question(rate)
    config = configured(problem, pipeline_parallel=stages, data_parallel=16 // stages)
    steps = every_split(problem, config)
    best = min(steps, key=steps.__getitem__)
    monkeypatch.setattr(uneven, "compositions", lambda *_, **__: None)
    splits = uneven.UnevenSplits(problem, candidates_of(problem, config))
    bound, found = splits.solve(np.array([1.01 * price(problem, config).step_s]))
    assert bound[0] <= steps[best] * (1.0 + 1e-9)
    if rate <= 1e9:  # gradients take most of the step
        assert bound[0] >= 0.97 * steps[best]
        assert min(steps[tuple(one.counts[:, 0].tolist())] for one in found) <= steps[best] * 1.01


def test_the_chunks_of_a_stage_are_as_even_as_they_can_be_with_the_longest_in_the_middle() -> None:
    split = candidates_of(
        question(1e9), configured(question(1e9), pipeline_parallel=2, virtual_pipeline_stages=3)
    ).split
    assert chunks_of(split, [7, 5], 12) == (2, 2, 3, 2, 2, 1)
    assert chunks_of(split, [11, 1], 12) is None
    # Of three layers that lead the model two lie on the first chunk, one on the second, which holds others too.
    assert chunks_of(split, [7, 5], 12, [2, 1]) == (2, 2, 3, 2, 2, 1)
    assert chunks_of(split, [7, 5], 12, [1, 2]) == (1, 2, 3, 2, 3, 1)
    assert chunks_of(split, [7, 5], 12, [0, 3]) == (0, 3, 4, 1, 3, 1)


def test_every_composition_is_found() -> None:
    seconds = np.tile(np.arange(1.0, 6.0), (3, 1))
    found = compositions(seconds, 4.0, first=1, fewest=[1, 1, 1], layers=8)
    assert found is not None
    wanted = [cuts for cuts in itertools.product(range(1, 5), repeat=3) if sum(cuts) == 8]
    assert sorted(map(tuple, found.T.tolist())) == wanted


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.05, 3.0), min_size=2, max_size=6), st.integers(1, 14), st.sampled_from([0.25, 1 / 3]))
def test_no_pipeline_is_over_before_a_stage_has_idled(times: list[float], m: int, share: float) -> None:
    stages, steps = np.array(times)[:, None], np.array([m])
    taken = staged_pipeline_s(
        "1f1b", virtual_pipeline_stages=1, num_microbatches=steps, stages_s=stages, forward_share=share
    )
    for i, own in enumerate(times):
        idle = least_idle_s(
            warm_up=len(times) - i,
            num_microbatches=steps,
            forward_s=np.array([share * own]),
            backward_s=np.array([(1.0 - share) * own]),
            after_s=stages[i + 1 :].sum(axis=0),
        )
        assert sum(times[:i]) + m * own + idle[0] <= taken[0] * (1.0 + 1e-9)
