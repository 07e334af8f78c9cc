"""The bound of all numbers of chunks at once, against splits of the layers under each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest
from core_cases import DENSE, MOE, problem_of

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.candidates import Candidates, split_layers
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.any_chunks import as_one
from meshplan.planner.training.search.layers.stage_costs import SplitCosts
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.templates import make_templates, pipeline_splits, template_candidates

assert MOE.moe is not None
CHUNKS, LAYERS = (2, 3, 4), 8
ALIKE = replace(DENSE, slug="alike", num_hidden_layers=LAYERS)
LEADING = replace(
    MOE, slug="leading", num_hidden_layers=LAYERS, moe=replace(MOE.moe, moe_layers=(False, *[True] * (LAYERS - 1)))
)
# The LM head needs more than all layers, so that it is best left alone.
HEAVY_HEAD = replace(ALIKE, slug="heavy-head", vocab_size=512_000)


def batches_of(problem: TrainingProblem, stages: int) -> list[Candidates]:
    """Candidates without recompute, a few more under each further number of chunks."""
    templates, found = make_templates(problem), []
    for split in pipeline_splits(problem):
        if split.pipeline_parallel == stages and split.schedule == "interleaved":
            few = np.arange(4 + split.virtual_pipeline_stages)
            batch = template_candidates(problem, templates, few, split)
            found.append(batch.take((batch.recompute == Recompute.NONE) & (batch.zero_stage < 3)))
    return found


def ways(stages: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Layers of every chunk: one or more, but the first and the last may hold none."""
    for inner in product(range(1, LAYERS), repeat=stages * chunks - 2):
        left = LAYERS - sum(inner)
        yield from ((first, *inner, left - first) for first in range(left + 1))


def many_ways(problem: TrainingProblem, batch: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """Steps and bytes of each candidate under many splits, without recompute, with one layer's, with all; [ways, n]."""
    p, v, found = batch.split.pipeline_parallel, batch.split.virtual_pipeline_stages, []
    for way in islice(ways(p, v), 0, None, 3):  # a third of them
        split = split_layers(
            problem.shape,
            pipeline_parallel=p,
            virtual_pipeline_stages=v,
            layers_per_chunk=way,
            schedule="interleaved",
        )
        for again in sorted({0, 1, max(way)}):
            mode = np.full(len(batch), int(Recompute.BLOCK if again else Recompute.NONE))
            estimate = TrainingModel(
                shape=problem.shape,
                machine=problem.machine,
                workload=problem.workload,
                candidates=replace(batch, split=split, recompute=mode, recompute_num_layers=np.full(len(batch), again)),
                calibration=problem.calibration,
            ).estimate()
            found.append((estimate.step_s, estimate.safe_bytes))
    return np.stack([step_s for step_s, _ in found]), np.stack([bytes_ for _, bytes_ in found])


@pytest.mark.parametrize("shape", [ALIKE, LEADING, HEAVY_HEAD], ids=lambda shape: shape.slug)
def test_no_split_under_any_number_of_chunks_beats_the_bound(shape: ModelShape) -> None:
    roomy = problem_of(shape, num_devices=4, global_batch_size=8)
    batches = batches_of(roomy, stages=2)
    assert [batch.split.virtual_pipeline_stages for batch in batches] == list(CHUNKS)
    each = [many_ways(roomy, batch) for batch in batches]
    binding = beyond = 0
    for share in (0.0, 0.02, 0.1, 0.3, 0.6, 1.0):
        limit = float(np.quantile(np.concatenate([needed.ravel() for _, needed in each]), share)) * (1.0 + 1e-9)
        problem = replace(roomy, limits=replace(roomy.limits, memory_bytes=limit))
        splits, places = as_one(problem, batches)
        best_s = [np.where(needed <= limit, steps, np.inf).min(axis=0) for steps, needed in each]
        longest_s = np.full(len(splits.batch), float(np.median(np.concatenate(best_s))))
        for most_s in (np.full(len(splits.batch), np.inf), longest_s):
            bound_s, _ = splits.solve(most_s)
            for (steps, _), own_s, place in zip(each, best_s, places, strict=True):
                of_use = own_s < most_s[place]
                assert (bound_s[place] <= own_s * (1.0 + 1e-9))[of_use].all(), (limit, most_s[0])
                binding += int((of_use & (own_s > steps.min(axis=0))).sum())
                beyond += int(np.isinf(bound_s[place]).sum())
    assert binding > 0
    assert beyond > 0


def test_no_number_of_chunks_keeps_less() -> None:
    """On the first stages the most chunks keep the least in flight, on the last ones the fewest."""
    problem = problem_of(replace(ALIKE, num_hidden_layers=16), num_devices=8, global_batch_size=64)
    batches = batches_of(problem, stages=4)
    assert len(batches) == 3
    rows = np.arange(min(map(len, batches)))
    own = [SplitCosts(problem, batch.take(rows)).memory() for batch in batches]
    least = SplitCosts(problem, batches[0].take(rows), batches[-1].split.virtual_pipeline_stages).memory()
    for each in own:
        assert (least.layer_bytes <= each.layer_bytes * (1.0 + 1e-12)).all()
        assert (least.base_bytes <= each.base_bytes * (1.0 + 1e-12)).all()
    assert (least.layer_bytes == np.minimum.reduce([each.layer_bytes for each in own])).all()
    assert (own[0].layer_bytes > own[-1].layer_bytes).any()
    assert (own[0].layer_bytes < own[-1].layer_bytes).any()


def test_candidates_are_asked_about_once() -> None:
    problem = problem_of(ALIKE, num_devices=4, global_batch_size=8)
    batches = batches_of(problem, stages=2)
    splits, places = as_one(problem, batches)
    assert len(splits.batch) == max(map(len, batches)) < sum(map(len, batches))
    for batch, place in zip(batches, places, strict=True):
        own = splits.batch.take(place)
        for name in ("data_parallel", "micro_batch_size", "zero_stage", "data_parallel_shard"):
            assert (getattr(own, name) == getattr(batch, name)).all()


def test_the_bound_closes_what_each_number_of_chunks_would() -> None:
    """Where micro-batches are many, and the bubble little, the bound of all is close to the bound of each."""
    problem = problem_of(ALIKE, num_devices=4, global_batch_size=64)
    batches = batches_of(problem, stages=2)
    splits, places = as_one(problem, batches)
    bound_s, _ = splits.solve(np.full(len(splits.batch), np.inf))
    for batch, place in zip(batches, places, strict=True):
        alone = UnevenSplits(problem, batch)
        own_s, _ = alone.solve(np.full(len(batch), np.inf))
        own_s = np.maximum(own_s, alone.sharp_bound_s(alone.outside_s(np.full(len(batch), np.inf))))
        assert (bound_s[place] <= own_s * (1.0 + 1e-9)).all()
        many = batch.num_microbatches >= 16
        assert many.any()
        assert (bound_s[place] >= 0.95 * own_s)[many].all()
