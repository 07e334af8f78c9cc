"""Random conditions of a run, and what a simulation event by event makes of them."""

from __future__ import annotations

import random

import numpy as np
from run_events import Simulated

from meshplan.planner.goodput.checkpoints import best_interval, efficiency
from meshplan.planner.goodput.conditions import Checkpoints, Interruptions
from meshplan.planner.goodput.spares import waiting_share

HOUR = 3600.0


def drawn(seed: int) -> tuple[Interruptions, Checkpoints, float]:
    """A random setting and an interval between checkpoints."""
    draw = random.Random(seed)
    per_s = 1.0 / (HOUR * 10 ** draw.uniform(-0.5, 2.0))
    stops = Interruptions(
        per_s=per_s,
        restart_s=10 ** draw.uniform(1.0, 3.1),
        broken_share=draw.choice([0.0, draw.uniform(0.1, 1.0)]),
        repair_s=10 ** draw.uniform(3.0, 5.0),
        spares=draw.choice([0, 0, 1, 3]),
        late_share=draw.choice([0.0, 0.0, 0.1]),
        late_s=10 ** draw.uniform(1.0, 3.0),
    )
    costs = Checkpoints(block_s=10 ** draw.uniform(-1.0, 2.0), durable_s=draw.choice([0.0, 10 ** draw.uniform(0, 2.5)]))
    longest = max(3.0 * best_interval(stops, costs).interval_s, costs.durable_s)
    return stops, costs, draw.uniform(max(30.0, costs.durable_s), max(60.0, longest))


def simulated_ratio(stops: Interruptions, costs: Checkpoints, interval_s: float, *, seed: int, many: int) -> float:
    """Training time over wall time of one long run."""
    run = Simulated(
        per_s=stops.per_s,
        restart_s=stops.restart_s,
        block_s=costs.block_s,
        durable_s=costs.durable_s,
        interval_s=interval_s,
        broken_share=stops.broken_share,
        repair=lambda draw: draw.lognormvariate(np.log(stops.repair_s) - 0.5, 1.0),
        spares=stops.spares,
        late_share=stops.late_share,
        late_s=stops.late_s,
        seed=seed,
    )
    guess = float(efficiency(interval_s, stops, costs)) * (1.0 - waiting_share(stops))
    training_s = max(many / stops.per_s * guess, 100 * interval_s)
    training_s = -(-training_s // interval_s) * interval_s
    return training_s / run.wall_time(training_s)
