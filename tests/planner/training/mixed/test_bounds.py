"""The bounds of a step by themselves, against the time of 1F1B, which they say nothing longer than."""

from __future__ import annotations

import numpy as np

from meshplan.planner.training.estimator.step import RECOMPUTED_FORWARD_SHARE
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
