"""Pareto front of throughput per device against speed per user, and the batch size beyond which little is gained.

Both use the closed forms and include every worker at every load, whether or not it meets the SLOs: the part of the
front that violates them shows what a looser SLO would gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.search.workers import PricedWorker

# A batch is too large when one more request adds less than this share of the rate that the first one added
# (BCA, "Mind the Memory Gap", arXiv:2503.08311, §5: ε of its advisor).
BATCH_GAIN_SHARE = 0.1
MOST_POINTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One worker at one load, not dominated in both figures.

    Args:
        node_type: catalog name of its nodes.
        layout: its degrees of parallelism.
        quantization: its formats.
        num_running: its running requests.
        tokens_per_s_per_user: 1 / time per output token.
        tokens_per_s_per_device: output tokens/s of one device.
        meets_slos: the closed form meets every SLO.
    """

    node_type: str
    layout: Layout
    quantization: Quantization
    num_running: int
    tokens_per_s_per_user: float
    tokens_per_s_per_device: float
    meets_slos: bool


def pareto_front(workers: Sequence[PricedWorker], output_length: float) -> list[ParetoPoint]:
    """The front over all workers and loads, slowest users first; at most :data:`MOST_POINTS`, evenly spaced.

    Args:
        workers: mixed workers.
        output_length: mean generated tokens of a request.
    """
    if output_length <= 1.0:  # one token per answer: there is no time between tokens
        return []
    points: list[tuple[float, float, int, int]] = []
    for index, worker in enumerate(workers):
        speed = 1.0 / worker.steady.tpot_s
        throughput = worker.steady.rate_per_s * output_length / worker.device_share
        points += [(float(u), float(d), index, at) for at, (u, d) in enumerate(zip(speed, throughput, strict=True))]
    points.sort(reverse=True)  # fastest users first
    front, best = [], 0.0
    for per_user, per_device, index, at in points:
        if per_device > best:
            best = per_device
            front.append((per_user, per_device, index, at))
    if len(front) > MOST_POINTS:
        kept = np.unique(np.linspace(0, len(front) - 1, MOST_POINTS).round().astype(int))
        front = [front[position] for position in kept]
    return [_point(workers[index], at, user, device) for user, device, index, at in reversed(front)]


def _point(worker: PricedWorker, at: int, per_user: float, per_device: float) -> ParetoPoint:
    return ParetoPoint(
        node_type=worker.placed.node_type,
        layout=worker.placed.layout,
        quantization=worker.placed.quantization,
        num_running=int(worker.steady.num_seqs[at]),
        tokens_per_s_per_user=per_user,
        tokens_per_s_per_device=per_device,
        meets_slos=bool(worker.feasible[at]),
    )


def useful_batch(worker: PricedWorker) -> int:
    """Requests running beyond which one more brings less than :data:`BATCH_GAIN_SHARE` of the first one's rate."""
    rates = np.maximum.accumulate(worker.steady.rate_per_s)
    counts = worker.steady.num_seqs
    gains = np.diff(rates, prepend=0.0) / np.diff(counts, prepend=0)
    worth = np.flatnonzero(gains >= BATCH_GAIN_SHARE * rates[0] / counts[0])
    return int(worker.steady.num_seqs[worth[-1]]) if len(worth) else int(worker.steady.num_seqs[0])
