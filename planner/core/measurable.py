"""What of a plan can be measured: the metrics that it predicts, and its memory as PyTorch counts it."""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.planner.core.plan import Interval, Plan

# Bytes that tensors held at the peak (torch.cuda.max_memory_allocated).
ALLOCATED = "allocated_memory_bytes"
PEAK = "peak_memory_bytes"


def measurable(plan: Plan) -> Mapping[str, Interval]:
    """Predicted metrics; of a training plan also the memory that tensors hold, which training frameworks print.

    Tensors hold the peak without what is fixed: the device's context, communication buffers and the allocator's cache
    lie outside them.
    """
    worst, peak = plan.memory.get("worst"), plan.predicted.get(PEAK)
    if not isinstance(worst, Mapping) or "fixed_bytes" not in worst or peak is None:
        return plan.predicted
    fixed = float(worst["fixed_bytes"])
    ends = (max(end - fixed, 0.0) for end in (peak.value, peak.low, peak.high))
    value, low, high = ends
    return {**plan.predicted, ALLOCATED: Interval(value=value, low=low, high=high)}
