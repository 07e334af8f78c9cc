"""Power of a deployment over time, from the iterations of a simulated run.

The work of each iteration, seconds at a device's peak rates, is spread evenly over its time and added up by window. A
window's work over its length is its utilisation, of which the power curve (:mod:`meshplan.planner.cluster.power`) makes
watts: the curve is one of means over time, waiting included.

A window is 1 s long (:data:`WINDOW_S`): the boards of NVIDIA themselves report no finer mean since Ampere (``nvidia-smi
--help-query-gpu``, ``power.draw``: "returns average power draw over 1 sec"), while breakers trip by how large an
overload is and how long it lasts, and carry a short one (Fu, Wang, Lefurgy: How Much Power Oversubscription Is Safe and
Allowed in Data Centers?, ICAC 2011). Peaks within a window, as those between two kinds of iterations, are not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.planner.cluster.power import DeviceWork, capped_share, peak_bytes_per_j, power_share
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.estimator.power.work import iteration_work
from meshplan.planner.serving.problem.config import Pool, ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.simulation.metrics import over_bins
from meshplan.planner.serving.simulation.run import Segments, ServingRun

WINDOW_S = 1.0
# Fewest windows that show a distribution: with fewer not even the 99th percentile is seen.
FEWEST_WINDOWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Power of all boards of one copy of a deployment, [windows], W.

    Args:
        expected_w: by the power curve.
        upper_w: at the upper end of the curve's 90 % interval, which ends at the limits of the boards. The error is the
            curve's and the same in every window and every copy: it does not average out.
    """

    expected_w: FloatArray
    upper_w: FloatArray


def summary(power_w: FloatArray) -> dict[str, Any]:
    """Mean, percentiles and largest of powers in windows, W."""
    p50, p99 = np.quantile(power_w, (0.5, 0.99))
    figures = {"mean_w": power_w.mean(), "p50_w": p50, "p99_w": p99, "peak_w": power_w.max()}
    return {name: float(value) for name, value in figures.items()}


def draw_over_time(
    problem: ServingProblem, config: ServingConfig, run: ServingRun, *, start_s: float, end_s: float
) -> Draw:
    """Power of a deployment in each whole window between two times of its run.

    Args:
        problem: whose power curve and machines count; the limits of all boards are known.
        config: the deployment; its devices are whole, and compute all layers.
        run: with the iterations of all workers of its pools, in order.
        start_s: of the first window.
        end_s: no window ends later.
    """
    num_windows = max(math.floor((end_s - start_s) / WINDOW_S), 0)
    edges = start_s + WINDOW_S * np.arange(num_windows + 1)
    factor = math.exp(problem.power.error_p90.get("power", 0.0))
    expected, upper = np.zeros(num_windows), np.zeros(num_windows)
    kinds = [pool for pool in config.pools for _ in range(pool.num_workers)]
    workers = {pool: pool_worker(problem.site, pool, problem.workload, config.speculation) for pool in config.pools}
    for pool, of_worker in zip(kinds, run.workers, strict=True):
        device = problem.machines[pool.node_type].device
        use = work_by_window(workers[pool], of_worker.segments, edges).times(1.0 / WINDOW_S)
        share = power_share(problem.power.constants, use, peak_bytes_per_j(device))
        boards_w = pool.layout.num_devices * (device.tdp_w or math.nan)
        limit = limit_w(problem, pool) / (device.tdp_w or math.nan)
        share = share if limit >= 1.0 else capped_share(share, limit)
        expected += boards_w * share
        upper += boards_w * np.minimum(share * factor, limit)
    return Draw(expected_w=expected, upper_w=upper)


def limit_w(problem: ServingProblem, pool: Pool) -> float:
    """Power limit of each board of a pool, W: its own, or a lower one that is set; NaN where its own is unknown."""
    own = problem.machines[pool.node_type].device.tdp_w
    return math.nan if own is None else min(own, pool.power_cap_w or own)


def segment_work(worker: Worker, segments: Segments) -> DeviceWork:
    """[segments] Work of a device, mean over those of the worker, in all iterations of each segment."""
    iterations = np.maximum(segments.steps, 1.0)
    speed = 1.0 if worker.speculation is None else worker.speculation.tokens_per_step
    grown = segments.num_decoding * speed * (iterations - 1.0) / 2.0
    one = iteration_work(
        worker,
        decodes=segments.num_decoding,
        cached_tokens=np.where(segments.num_decoding > 0, segments.kv_tokens + grown, 0.0),
        prompt_tokens=segments.prompt_tokens,
        num_prompts=segments.num_prefilling,
    )
    return one.times(iterations)


def work_by_window(worker: Worker, segments: Segments, edges_s: FloatArray) -> DeviceWork:
    """[windows] Work of a device between each two of rising times; a segment's iterations are spread evenly over it."""
    seconds = np.maximum(segments.end_s - segments.start_s, np.finfo(float).tiny)
    work = segment_work(worker, segments)
    parts = {name: getattr(work, name) / seconds for name in DeviceWork.__dataclass_fields__}
    return DeviceWork(
        **{
            name: np.maximum(over_bins(edges_s, segments.start_s, segments.end_s, per_s), 0.0)
            for name, per_s in parts.items()
        }
    )
