"""The bound of each split of the layers against the estimator, under all numbers of recomputed layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, MOE, problem_of
from degree_brute_force import layer_splits

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit, split_layers
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.estimator.priced import training_model
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.every_split import all_sizes, every_split_s
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.templates import make_templates, pipeline_splits, template_candidates

# What holds a step's exposed gradients, which differ from split to split, to a few per cent of it.
TIGHT = 0.05


def step_and_bytes(problem: TrainingProblem, batch: Candidates, again: int) -> tuple[np.ndarray, np.ndarray]:
    """Step and safe memory, with the first ``again`` layers of each chunk recomputed where nothing else is."""
    in_block = (batch.recompute == Recompute.NONE) & (again > 0)
    batch = replace(
        batch,
        recompute=np.where(in_block, int(Recompute.BLOCK), batch.recompute),
        recompute_num_layers=np.where(in_block, again, 0),
    )
    estimate = training_model(problem, batch).estimate()
    return estimate.step_s, estimate.safe_bytes


def best_of(problem: TrainingProblem, batch: Candidates, split: PipelineSplit) -> np.ndarray:
    """The least step of each candidate with these layers within memory, [n]; infinite where none is."""
    own = replace(batch, split=split)
    least = np.full(len(batch), np.inf)
    for again in range(max(split.layers_per_chunk)):
        step_s, needed = step_and_bytes(problem, own, again)
        least = np.minimum(least, np.where(needed <= problem.limits.memory_bytes, step_s, np.inf))
    return least


@pytest.mark.parametrize(
    ("shape", "stages", "chunks", "schedule"),
    [(DENSE, 3, 1, "1f1b"), (MOE, 2, 2, "interleaved"), (MOE, 2, 1, "zb-1p")],
    ids=["dense", "chunks", "zero bubble"],
)
def test_no_plan_of_a_split_beats_its_bound(shape: ModelShape, stages: int, chunks: int, schedule: str) -> None:
    roomy = problem_of(shape, num_devices=2 * stages, global_batch_size=4)
    usual = next(
        one
        for one in pipeline_splits(roomy)
        if (one.pipeline_parallel, one.virtual_pipeline_stages, one.schedule) == (stages, chunks, schedule)
    )
    templates = make_templates(roomy)
    batch = template_candidates(roomy, templates, np.arange(0, len(templates), 11), usual)
    _, needed = step_and_bytes(roomy, batch, 0)
    finite = binding = tight = 0
    for quantile in (0.1, 0.5, 1.0):
        limits = replace(roomy.limits, memory_bytes=float(np.quantile(needed, quantile)) * (1.0 + 1e-9))
        problem = replace(roomy, limits=limits)
        found = every_split_s(UnevenSplits(problem, batch), np.full(len(batch), np.inf))
        assert found is not None
        bounds = {tuple(sizes): own for sizes, own in zip(found[0].tolist(), found[1], strict=True)}
        for sizes in layer_splits(shape.num_hidden_layers, stages * chunks):
            exact_s = best_of(problem, batch, split_layers(shape, **split_of(usual, sizes)))
            bound_s = bounds.get(sizes, np.full(len(batch), np.inf))  # a stage too long for memory under any candidate
            assert (bound_s <= exact_s * (1.0 + 1e-9)).all(), sizes
            known = np.isfinite(exact_s)
            finite, binding = finite + int(known.sum()), binding + int(np.isinf(bound_s).sum())
            close = known & (batch.zero_stage < ZERO_PARAMETERS) & (bound_s >= exact_s * (1.0 - TIGHT))
            tight += int(close.sum())
    assert binding > 0
    assert tight > finite / 4


def split_of(usual: PipelineSplit, sizes: tuple[int, ...]) -> dict[str, object]:
    """What :func:`split_layers` asks for."""
    return {
        "pipeline_parallel": usual.pipeline_parallel,
        "virtual_pipeline_stages": usual.virtual_pipeline_stages,
        "layers_per_chunk": sizes,
        "schedule": usual.schedule,
    }


def test_all_splits_are_there() -> None:
    for chunks in (2, 3, 4):
        ends = [int(chunk not in (0, chunks - 1)) for chunk in range(chunks)]
        sizes = all_sizes(range(chunks), ends, np.full(chunks, 6), layers=6)
        assert sizes is not None
        assert sorted(map(tuple, sizes.tolist())) == sorted(layer_splits(6, chunks))
    held = all_sizes([0, 1, 1, 0], [0, 1, 1, 0], np.array([3, 4]), layers=6)
    assert held is not None
    assert {(a + d, b + c) for a, b, c, d in held.tolist()} == {(2, 4), (3, 3)}
