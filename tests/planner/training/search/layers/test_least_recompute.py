"""The least recompute of any split, against every split."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from core_cases import DENSE, MOE, problem_of

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.candidates import PipelineSplit, split_layers
from meshplan.planner.training.estimator.priced import training_model
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.least_recompute import (
    fewest_in_flight,
    least_recompute_s,
    least_recomputed,
)
from meshplan.planner.training.search.layers.stage_costs import SplitCosts
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.templates import make_templates, pipeline_splits, template_candidates

STAGES, LAYERS, LIMIT = 3, 6, 10.0
# The LM head needs more than all layers, so that it is best left alone.
HEAVY_HEAD = replace(DENSE, slug="heavy-head", vocab_size=512_000)


def replace_layers(problem: TrainingProblem, split: PipelineSplit, layers: tuple[int, ...]) -> PipelineSplit:
    """The split with other layers on its chunks."""
    return split_layers(
        problem.shape,
        pipeline_parallel=split.pipeline_parallel,
        virtual_pipeline_stages=split.virtual_pipeline_stages,
        layers_per_chunk=layers,
        schedule=split.schedule,
    )


def whole_recomputes(room: np.ndarray, layer: np.ndarray, saved: np.ndarray) -> float:
    """Fewest recomputed layers over all splits of whole layers, by trying all."""
    best = np.inf
    for counts in product(range(LAYERS + 1), repeat=STAGES):
        if sum(counts) != LAYERS:
            continue
        again = 0.0
        for i, count in enumerate(counts):
            need = count * layer[i] - room[i]
            if need > 0.0:
                least = need / saved[i] if saved[i] > 0.0 else np.inf
                again += np.ceil(least) if least <= count else np.inf
            again = np.inf if room[i] < 0.0 else again
        best = min(best, again)
    return float(best)


def test_no_split_recomputes_less() -> None:
    rng = np.random.default_rng(3)
    finite = beyond = positive = 0
    for _ in range(60):
        room = rng.uniform(-0.5, LIMIT, STAGES)
        layer, saved = rng.uniform(2.0, 9.0, STAGES), rng.uniform(0.0, 6.0, STAGES) * (rng.random(STAGES) < 0.8)
        bound = float(
            least_recomputed(
                room_bytes=room[:, None], layer_bytes=layer[:, None], saved_bytes=saved[:, None], num_layers=LAYERS
            )[0]
        )
        exact = whole_recomputes(room, layer, saved)
        assert bound <= exact
        finite, beyond, positive = finite + np.isfinite(exact), beyond + np.isinf(bound), positive + (0 < bound < 9)
    assert min(finite, beyond, positive) > 5


@pytest.mark.parametrize("shape", [DENSE, MOE, HEAVY_HEAD], ids=lambda shape: shape.slug)
def test_what_is_found_impossible_fits_under_no_split(shape: ModelShape) -> None:
    """Against the estimator's memory, split by split of two stages, one of which may hold no layer, and fully sharded.

    The limit is what some candidate needs exactly under its best split, without recompute and with all of it.
    """
    roomy = problem_of(shape, num_devices=4, global_batch_size=4)
    templates, layers = make_templates(roomy), shape.num_hidden_layers
    impossible = tight = 0
    for split in pipeline_splits(roomy):
        if split.pipeline_parallel != 2 or split.virtual_pipeline_stages > 1:
            continue
        batch = template_candidates(roomy, templates, np.arange(0, len(templates), 5), split)
        ways = [replace_layers(roomy, split, (first, layers - first)) for first in range(layers + 1)]
        models = [training_model(roomy, replace(batch, split=way)).memory for way in ways]
        needed = np.stack([np.maximum.reduce([stage.safe_bytes for stage in model.stages()]) for model in models])
        for quantile in (0.0, 0.3, 0.6):
            limit = float(np.quantile(needed.min(axis=0), quantile)) * (1.0 + 1e-9)
            problem = replace(roomy, limits=replace(roomy.limits, memory_bytes=limit))
            fits = needed.min(axis=0) <= limit
            beyond = np.isinf(least_recompute_s(problem, batch))
            assert not (fits & beyond).any()
            bound_s, _ = UnevenSplits(problem, batch).solve(np.full(len(batch), np.inf))
            assert not (fits & np.isinf(bound_s)).any()
            impossible, tight = impossible + int(beyond.sum()), tight + int(fits.sum())
    assert impossible > 0
    assert tight > 0


def test_1f1b_keeps_the_fewest_in_flight() -> None:
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8)
    for split in pipeline_splits(problem):
        few = fewest_in_flight(split)
        batch = template_candidates(problem, make_templates(problem), slice(0, 4), split)
        own = SplitCosts(problem, batch).memory()
        least = SplitCosts(problem, replace(batch, split=few)).memory()
        assert (least.layer_bytes <= own.layer_bytes * (1.0 + 1e-12)).all()
