"""The bounds of a step by themselves, against the time of 1F1B, which they say nothing longer than."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshplan.planner.training.estimator.step import RECOMPUTED_FORWARD_SHARE
from meshplan.planner.training.mixed.bounding.fills import Cells, Fill, Form, PoolRows
from meshplan.planner.training.pipeline.closed_forms import FORWARD_SHARE, staged_pipeline_s


def test_no_bound_is_longer_than_1f1b() -> None:
    draw, tight = np.random.default_rng(20), {"A": 0.0, "B": 0.0, "C": 0.0}
    for _ in range(400):
        stages, m = int(draw.integers(1, 12)), int(draw.integers(1, 20))
        # Few distinct times, as layers of few types have: many stages are the slowest, or none behind it is short.
        times = draw.choice(draw.uniform(0.05, 1.0, size=3), size=stages)
        share = draw.choice([FORWARD_SHARE, RECOMPUTED_FORWARD_SHARE], size=(stages, 1))
        step = float(
            staged_pipeline_s(
                "1f1b",
                virtual_pipeline_stages=1,
                num_microbatches=np.array([m]),
                stages_s=times[:, None],
                forward_share=share,
            )[0]
        )
        work, slowest, theta = times.sum(), times.max(), draw.uniform(0.5, 1.0) * times.max()
        bounds = {
            "A": 2.0 * work + (m - 1 - stages) * slowest,
            "B": times[times >= theta].sum() + (m - 1) * theta,
            "C": work + (m - 1) * slowest - FORWARD_SHARE * (stages - 1) * slowest,
        }
        assert max(bounds.values()) <= step * (1.0 + 1e-9), (times, share, m)
        best = max(bounds, key=lambda name: bounds[name])
        tight[best] = max(tight[best], bounds[best] / step)
    # Each is the best one somewhere, and reached.
    assert min(tight.values()) > 0.99, tight


def dealt(layers: int, stages: int):
    """Every way to deal layers to so many stages at most; the first is in use, and may have the LM head."""
    ways = itertools.product(range(1, layers + 1), *[range(layers + 1)] * (stages - 1))
    yield from (way for way in ways if sum(way) == layers)


@pytest.mark.parametrize("head_s", [0.0, 0.7, 2.5])
@pytest.mark.parametrize("threshold", [0.55, 0.8, 1.0])
def test_the_least_time_of_long_stages_is_that_of_every_way_to_deal_layers(head_s: float, threshold: float) -> None:
    layers, stages, slowest = 9, 3, 5.0
    own = PoolRows(
        rows=np.array([0]),
        layer_s=np.array([1.0]),
        head_s=np.array([head_s]),
        stages=np.array([stages]),
        fitting=np.full((1, stages), float(layers)),
        ending_s=np.zeros((1, layers)),
        inside_s=np.zeros(1),
        crossing_s=np.zeros(1),
    )
    fill = Fill.of(own, Cells.of([slowest], [slowest], [0.0], [np.inf]), layers, 4)
    added = fill.added(Form(work=0.0, long=1.0, threshold=threshold))[:, 0, 0]
    for with_head, extra_s in ((0, 0.0), (1, head_s)):
        for held in range(1, layers + 1):
            least = np.inf
            for way in dealt(held, stages):
                times = np.array(way, dtype=float) + np.array([extra_s, *[0.0] * (stages - 1)])
                if times.max() <= slowest:
                    least = min(least, times[times >= threshold * slowest].sum())
            # A pool without a way to hold so many layers has no plan.
            assert added[with_head, held] == least or np.isinf(least), (with_head, held)
