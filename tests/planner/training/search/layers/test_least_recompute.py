"""The least recompute of any split, against every split."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from core_cases import DENSE, MOE, problem_of

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.search.layers.least_recompute import (
    fewest_in_flight,
    least_recompute_s,
    least_recomputed,
)
from meshplan.planner.training.search.layers.stage_costs import SplitCosts
from meshplan.planner.training.search.templates import make_templates, pipeline_splits, template_candidates

STAGES, LAYERS, LIMIT = 3, 6, 10.0
MEMORY_BYTES = 2e9


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


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "experts"])
def test_what_is_found_impossible_fits_under_no_split(shape: ModelShape) -> None:
    """Against the dynamic programme's memory, split by split of two stages, under every schedule."""
    problem = problem_of(shape, num_devices=8, global_batch_size=8, limits={"memory_bytes": MEMORY_BYTES})
    templates = make_templates(problem)
    impossible = possible = 0
    for split in pipeline_splits(problem):
        batch = template_candidates(problem, templates, np.arange(0, len(templates), 5), split)
        if split.pipeline_parallel != 2 or not len(batch):
            continue
        least_s = least_recompute_s(problem, batch)
        costs = SplitCosts(problem, batch)
        own = costs.costs()
        before, layers = own.layers_before(), shape.num_hidden_layers
        for row in range(len(batch)):
            fits = False
            for first in range(layers + 1):
                counts = np.stack([before[:, first], before[:, layers] - before[:, first]])
                kept = own.layer_bytes[:, :, row] - own.saved_bytes[:, :, row]
                needed = own.base_bytes[:, row] + (counts * kept).sum(axis=1)
                fits |= bool((needed <= problem.limits.memory_bytes).all())
            assert fits or np.isinf(least_s[row]) or least_s[row] >= 0.0
            assert not (fits and np.isinf(least_s[row]))
            impossible, possible = impossible + np.isinf(least_s[row]), possible + fits
    assert impossible > 0
    assert possible > 0


def test_1f1b_keeps_the_fewest_in_flight() -> None:
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8)
    for split in pipeline_splits(problem):
        few = fewest_in_flight(split)
        batch = template_candidates(problem, make_templates(problem), slice(0, 4), split)
        own = SplitCosts(problem, batch).memory()
        least = SplitCosts(problem, replace(batch, split=few)).memory()
        assert (least.layer_bytes <= own.layer_bytes * (1.0 + 1e-12)).all()
