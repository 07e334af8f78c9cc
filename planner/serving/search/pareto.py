"""What no deployment beats: throughput per device against speed per user, and the batch beyond which nothing is gained.

Both rest on the closed forms, so they show every worker at every load, promises aside: what a looser promise would buy
is the part of the front that the promises forbid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.requests import Layout
from meshplan.planner.serving.search.workers import PricedWorker

# A batch grows past its use when one more request brings less than this share of what the first one brought
# (BCA, "Mind the Memory Gap", arXiv:2503.08311, §5: ε of its advisor).
BATCH_GAIN_SHARE = 0.1
MOST_POINTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One worker at one load that nothing beats in both figures.

    Args:
        node_type: where it lies.
        layout: its degrees.
        quantization: its formats.
        num_running: requests running in it.
        tokens_per_s_per_user: 1 / time per output token.
        tokens_per_s_per_device: output tokens/s of one device.
        keeps_promises: within the promises, in closed form.
    """

    node_type: str
    layout: Layout
    quantization: Quantization
    num_running: int
    tokens_per_s_per_user: float
    tokens_per_s_per_device: float
    keeps_promises: bool


def pareto_front(workers: Sequence[PricedWorker], output_length: float) -> list[ParetoPoint]:
    """The front over all workers and loads, slowest users first; at most :data:`MOST_POINTS`, evenly picked.

    Args:
        workers: mixed workers.
        output_length: mean generated tokens of a request.
    """
    if output_length <= 1.0:  # one token an answer: nobody waits between tokens
        return []
    points: list[tuple[float, float, int, int]] = []
    for index, worker in enumerate(workers):
        speed = 1.0 / worker.steady.tpot_s
        throughput = worker.steady.rate_per_s * output_length / worker.num_devices
        points += [(float(u), float(d), index, at) for at, (u, d) in enumerate(zip(speed, throughput, strict=True))]
    points.sort(reverse=True)  # fastest users first
    front, best = [], 0.0
    for speed_, per_device, index, at in points:
        if per_device > best:
            best = per_device
            front.append((speed_, per_device, index, at))
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
        keeps_promises=bool(worker.feasible[at]),
    )


def useful_batch(worker: PricedWorker) -> int:
    """Requests running beyond which one more brings less than :data:`BATCH_GAIN_SHARE` of the first one's rate."""
    rates = np.maximum.accumulate(worker.steady.rate_per_s)
    counts = worker.steady.num_seqs
    gains = np.diff(rates, prepend=0.0) / np.diff(counts, prepend=0)
    worth = np.flatnonzero(gains >= BATCH_GAIN_SHARE * rates[0] / counts[0])
    return int(worker.steady.num_seqs[worth[-1]]) if len(worth) else int(worker.steady.num_seqs[0])
