"""Load of the workers over time, as averages over equal intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.simulation.run import ServingRun

# As many as a terminal or a small picture can show.
NUM_BINS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Averages over equal intervals of time; arrays of one length.

    Args:
        end_s: end of each interval.
        decoding: requests that decode, all workers together.
        prefilling: requests in prefill.
        queued: requests that no worker runs: waiting, preempted, or in transfer between pools.
        kv_use: share of all KV cache in use.
    """

    end_s: FloatArray
    decoding: FloatArray
    prefilling: FloatArray
    queued: FloatArray
    kv_use: FloatArray


def series(run: ServingRun, *, num_bins: int = NUM_BINS) -> Series:
    """Averages over ``num_bins`` equal intervals from the first arrival to the last token."""
    served = run.is_served
    start = float(run.arrival_s[served].min(initial=np.inf)) if served.any() else 0.0
    edges = np.linspace(start, max(run.end_s, start), num_bins + 1)
    width = max(float(edges[1] - edges[0]), np.finfo(float).tiny)
    decoding = prefilling = kv_tokens = np.zeros(num_bins)
    for worker in run.workers:
        segments = worker.segments
        spans = (segments.start_s, segments.end_s)
        decoding = decoding + _over_bins(edges, *spans, segments.num_decoding)
        prefilling = prefilling + _over_bins(edges, *spans, segments.num_prefilling)
        kv_tokens = kv_tokens + _over_bins(edges, *spans, segments.kv_tokens)
    present = _over_bins(edges, run.arrival_s[served], run.finish_s[served], np.ones(np.count_nonzero(served)))
    capacity = sum(worker.kv_capacity_tokens for worker in run.workers)
    return Series(
        end_s=edges[1:],
        decoding=decoding / width,
        prefilling=prefilling / width,
        queued=np.maximum(present - decoding - prefilling, 0.0) / width,
        kv_use=kv_tokens / width / max(capacity, 1),
    )


def _over_bins(edges: FloatArray, start: FloatArray, end: FloatArray, values: FloatArray) -> FloatArray:
    """Integral over each bin of Σ values, each value counting from its start to its end."""
    times = np.concatenate((start, end))
    order = np.argsort(times, kind="stable")
    times = times[order]
    if not len(times):
        return np.zeros(len(edges) - 1)
    heights = np.cumsum(np.concatenate((values, -values))[order])
    area = np.concatenate(([0.0], np.cumsum(heights[:-1] * np.diff(times))))
    return np.diff(np.interp(edges, times, area))
