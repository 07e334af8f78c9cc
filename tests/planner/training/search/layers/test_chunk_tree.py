"""The bound that knows chunks against the estimator under every split and every number of recomputed layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, MOE, problem_of
from degree_brute_force import layer_splits

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.candidates import Candidates, split_layers
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.by_counts import least_by_counts_s
from meshplan.planner.training.search.layers.chunk_tree import closed, may_be_closed
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.templates import make_templates, pipeline_splits, template_candidates

assert MOE.moe is not None
LEADING = replace(
    MOE, slug="leading", num_hidden_layers=6, moe=replace(MOE.moe, moe_layers=(False, False, *[True] * 4))
)
# Shape, stages, chunks of each, micro-batches, and how close to the exact step a bound counts as tight: exposed
# gradients differ from split to split; what a fifth group of micro-batches adds is bounded by the first stage's way.
LONGER = replace(DENSE, slug="longer", num_hidden_layers=7)
CASES = [(LEADING, 3, 2, 9, 0.03), (LEADING, 3, 2, 15, 0.08), (DENSE, 2, 2, 6, 0.03), (DENSE, 3, 1, 9, 0.03)]
CASES += [(LONGER, 2, 3, 6, 0.03)]
NAMES = ["leading layers", "many groups", "alike chunks", "one chunk", "unlike chunks of one kind"]


def candidates_of(problem: TrainingProblem, p: int, v: int, m: int) -> Candidates:
    """Two candidates of one pipeline with so many micro-batches."""
    schedule = "1f1b" if v == 1 else "interleaved"
    split = next(
        one
        for one in pipeline_splits(problem)
        if (one.pipeline_parallel, one.virtual_pipeline_stages, one.schedule) == (p, v, schedule)
    )
    templates = make_templates(problem)
    batch = template_candidates(problem, templates, np.arange(len(templates)), split)
    batch = batch.take((batch.num_microbatches == m) & (batch.zero_stage < ZERO_PARAMETERS))
    return batch.take(np.linspace(0, len(batch) - 1, 2).astype(int))


def priced(problem: TrainingProblem, batch: Candidates) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """Layers of each chunk of every split with steps and bytes, [r, n] each, r layers of each chunk recomputed."""
    split = batch.split
    for sizes in layer_splits(problem.shape.num_hidden_layers, split.pipeline_parallel * split.virtual_pipeline_stages):
        own = split_layers(
            problem.shape,
            pipeline_parallel=split.pipeline_parallel,
            virtual_pipeline_stages=split.virtual_pipeline_stages,
            layers_per_chunk=sizes,
            schedule=split.schedule,
        )
        steps, needed = [], []
        for again in range(max(sizes)):
            in_block = (batch.recompute == Recompute.NONE) & (again > 0)
            estimate = TrainingModel(
                shape=problem.shape,
                machine=problem.machine,
                workload=problem.workload,
                candidates=replace(
                    batch,
                    split=own,
                    recompute=np.where(in_block, int(Recompute.BLOCK), batch.recompute),
                    recompute_num_layers=np.where(in_block, again, 0),
                ),
                calibration=problem.calibration,
            ).estimate()
            steps.append(estimate.step_s)
            needed.append(estimate.safe_bytes)
        yield sizes, np.stack(steps), np.stack(needed)


@pytest.mark.parametrize(("shape", "p", "v", "m", "within"), CASES, ids=NAMES)
def test_no_split_beats_what_is_left_of_it(shape: ModelShape, p: int, v: int, m: int, within: float) -> None:
    roomy = problem_of(shape, num_devices=p, global_batch_size=m)
    batch = candidates_of(roomy, p, v, m)
    every = list(priced(roomy, batch))
    all_bytes = np.concatenate([needed.reshape(-1) for _, _, needed in every])
    leaves = tight = checked = 0
    for quantile in (0.15, 1.0):
        limit = float(np.quantile(all_bytes, quantile)) * (1.0 + 1e-9)
        problem = replace(roomy, limits=replace(roomy.limits, memory_bytes=limit))
        exact = {sizes: np.where(needed <= limit, steps, np.inf).min(axis=0) for sizes, steps, needed in every}
        splits = UnevenSplits(problem, batch)
        assert may_be_closed(splits).all()
        best_s = np.stack(list(exact.values())).min(axis=0)
        for row in np.flatnonzero(np.isfinite(best_s)).tolist():
            for share in (1.0, 1.1):
                most_s = np.full(len(batch), share * best_s[row])
                outside_s = splits.outside_s(most_s)
                one = splits.take(np.array([row]))
                found = closed(one, float(most_s[row]), float(outside_s[row]))
                counted_s = least_by_counts_s(one, float(most_s[row]), float(outside_s[row]))
                assert counted_s <= min(best_s[row], most_s[row]) * (1.0 + 1e-9)
                known = dict(found.leaves)
                for sizes, steps in exact.items():
                    least_s = known.get(sizes, found.beyond_s)
                    assert least_s <= steps[row] * (1.0 + 1e-9), (sizes, share)
                leaves += len(known)
                bound_s = min([found.beyond_s, *known.values()])
                checked += share > 1.0
                tight += share > 1.0 and bound_s >= best_s[row] * (1.0 - within)
    assert leaves > 0
    assert tight >= checked / 2, (tight, checked)


def test_other_kinds_between_are_not_spoken_of() -> None:
    assert MOE.moe is not None
    mixed = replace(LEADING, moe=replace(MOE.moe, moe_layers=(False, True) * 3))
    problem = problem_of(mixed, num_devices=3, global_batch_size=9)
    assert not may_be_closed(UnevenSplits(problem, candidates_of(problem, 3, 2, 9))).any()


def test_a_stage_of_millions_of_options_has_no_bound() -> None:
    """20 layers on each of four stages of ten chunks: a question took a quarter of an hour before."""
    problem = problem_of(replace(DENSE, num_hidden_layers=80), num_devices=4, global_batch_size=8)
    splits = UnevenSplits(problem, candidates_of(problem, 4, 10, 8)).take(np.array([0]))
    assert closed(splits, 1e9, 0.0) == ([], -np.inf)


def test_layers_of_stages_bound_what_has_too_many_options() -> None:
    """Seven layers on three stages of two chunks: the slowest stage holds three, whatever its chunks."""
    problem = problem_of(LONGER, num_devices=3, global_batch_size=12)
    batch = candidates_of(problem, 3, 2, 12)
    splits = UnevenSplits(problem, batch).take(np.array([0]))
    costs = splits.stages.costs()
    outside_s = float(splits.outside_s(np.array([1e9]))[0])
    bound_s = least_by_counts_s(splits, 1e9, outside_s)
    assert bound_s - outside_s >= 12 * 3 * costs.layer_s[0, 0]
    assert bound_s <= min(float(steps[:, 0].min()) for _, steps, _ in priced(problem, batch))


def test_layers_of_another_kind_may_fill_a_stage_by_themselves() -> None:
    """The second stage may hold none of the main kind, and takes no time then: 0/0 ruled such splits out before."""
    problem = problem_of(LEADING, num_devices=3, global_batch_size=9)
    batch = candidates_of(problem, 3, 1, 9)
    splits = UnevenSplits(problem, batch)
    best_s = np.min([steps.min(axis=0) for _, steps, _ in priced(problem, batch)], axis=0)
    most_s = 2.0 * best_s
    outside_s = splits.outside_s(most_s)
    for row in range(len(batch)):
        one = splits.take(np.array([row]))
        with np.errstate(invalid="raise"):
            assert least_by_counts_s(one, float(most_s[row]), float(outside_s[row])) <= best_s[row]
