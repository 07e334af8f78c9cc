"""Which of several configurations is taken where their predicted values cannot be told apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.diffusion.problem.degrees import DiffusionConfig


def simplicity(config: DiffusionConfig) -> tuple[int, ...]:
    """A key by which simpler configurations come first: exact before stale, short rings, few devices.

    A ring computes attention block by block and merges partial outputs, which all-to-alls of Ulysses need not; it is
    for heads that do not divide further.
    """
    return (
        config.pipefusion,
        config.ring,
        config.tensor_parallel,
        config.replica_devices,
        config.cfg_parallel,
        config.batch_size,
    )


def preferred(configs: Sequence[DiffusionConfig], cost: FloatArray, *, tie: float) -> int:
    """Index of the simplest configuration whose cost is within ``tie`` of the least.

    >>> preferred([DiffusionConfig(ring=2), DiffusionConfig(ulysses=2)], np.array([1.0, 1.004]), tie=0.01)
    1
    """
    near = np.flatnonzero(cost <= cost.min() * (1.0 + tie)).tolist()
    return int(min(near, key=lambda index: (simplicity(configs[index]), float(cost[index]))))
