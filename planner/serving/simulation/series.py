"""How full the workers were over time: a few hundred averages instead of every iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.simulation.run import ServingRun

# As many as a terminal or a small picture can show.
NUM_BINS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Averages over equal spans of time; arrays of one length.

    Args:
        end_s: end of each span.
        decoding: requests that decode, all workers together.
        prefilling: requests in prefill.
        queued: requests that no worker runs: waiting, thrown out, or on their way between pools.
        kv_use: share of all KV cache in use.
        output_tokens_per_s: of requests in proportion to the time that they decode.
    """

    end_s: FloatArray
    decoding: FloatArray
    prefilling: FloatArray
    queued: FloatArray
    kv_use: FloatArray
    output_tokens_per_s: FloatArray


def series(run: ServingRun, *, num_bins: int = NUM_BINS) -> Series:
    """Cut a run into equal spans, from the first arrival on."""
    served = run.is_served
    start = float(run.arrival_s[served].min(initial=np.inf)) if served.any() else 0.0
    edges = np.linspace(start, max(run.end_s, start), num_bins + 1)
    width = max(float(edges[1] - edges[0]), np.finfo(float).tiny)
    decoding = prefilling = kv_tokens = np.zeros(num_bins)
    for worker in run.workers:
        stretches = worker.segments
        spans = (stretches.start_s, stretches.end_s)
        decoding = decoding + _over_bins(edges, *spans, stretches.num_decoding)
        prefilling = prefilling + _over_bins(edges, *spans, stretches.num_prefilling)
        kv_tokens = kv_tokens + _over_bins(edges, *spans, stretches.kv_tokens)
    present = _over_bins(edges, run.arrival_s[served], run.finish_s[served], np.ones(np.count_nonzero(served)))
    several = served & (run.output_length > 1)
    spans = (run.first_token_s[several], run.finish_s[several])
    rates = (run.output_length[several] - 1) / np.maximum(spans[1] - spans[0], np.finfo(float).tiny)
    capacity = sum(worker.kv_capacity_tokens for worker in run.workers)
    return Series(
        end_s=edges[1:],
        decoding=decoding / width,
        prefilling=prefilling / width,
        queued=np.maximum(present - decoding - prefilling, 0.0) / width,
        kv_use=kv_tokens / width / max(capacity, 1),
        output_tokens_per_s=_over_bins(edges, *spans, rates) / width,
    )


def _over_bins(edges: FloatArray, start: FloatArray, end: FloatArray, values: FloatArray) -> FloatArray:
    """∫ of Σ values over their spans, bin by bin: differences of the ∫ up to each edge, a line between ends."""
    times = np.concatenate((start, end))
    order = np.argsort(times, kind="stable")
    times = times[order]
    if not len(times):
        return np.zeros(len(edges) - 1)
    heights = np.cumsum(np.concatenate((values, -values))[order])
    area = np.concatenate(([0.0], np.cumsum(heights[:-1] * np.diff(times))))
    return np.diff(np.interp(edges, times, area))
