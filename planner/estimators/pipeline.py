"""Pipeline schedules: how long a step is, and how many micro-batches a stage keeps in flight.

With m micro-batches, stage times t_i (forward + backward of one micro-batch) and p stages, a step takes

    T = m·max_i t_i + β·(Σ_i t_i − max_i t_i)

where β tells what the schedule leaves of 1F1B's bubble. In flight on stage i (from 0), in whole-stage activations:

    GPipe      β = 1          m
    1F1B       β = 1          p − i
    interleaved β = 1/v       ((v − 1)·p + 2(p − i − 1) + 1)/v          (Narayanan et al., arXiv:2104.04473, §2.2)
    ZB-1p      β = 0.37       p      (Qi et al., arXiv:2401.10241: 1F1B's memory; β as measured there)
    ZB-2p      β = 0          2p − 1
    ZB-V       β = 0.05       p

never more than m. For one stage there is no bubble and one micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.planner.estimators.candidates import FloatArray, IntArray

InFlight = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One pipeline schedule.

    Args:
        bubble: (p, v) → β.
        in_flight: (p, v, stage) → micro-batches whose activations the stage holds, without the limit m.
        hides_neighbour_messages: stage-to-stage messages run behind compute.
        splits_backward: weight gradients are computed apart from input gradients.
        source: citation.
    """

    bubble: Callable[[int, int], float]
    in_flight: InFlight
    hides_neighbour_messages: bool
    splits_backward: bool
    source: str


def _interleaved_in_flight(p: int, v: int, stage: int) -> float:
    return ((v - 1) * p + 2 * (p - stage - 1) + 1) / v


ZB_1P_BUBBLE = 0.37
ZB_V_BUBBLE = 0.05
_ZERO_BUBBLE = "Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241"
SCHEDULES: Mapping[str, Schedule] = {
    "none": Schedule(
        bubble=lambda p, v: 0.0,
        in_flight=lambda p, v, stage: 1.0,
        hides_neighbour_messages=True,
        splits_backward=False,
        source="one stage",
    ),
    "gpipe": Schedule(
        bubble=lambda p, v: 1.0,
        in_flight=lambda p, v, stage: np.inf,
        hides_neighbour_messages=False,
        splits_backward=False,
        source="Huang et al., GPipe, arXiv:1811.06965",
    ),
    "1f1b": Schedule(
        bubble=lambda p, v: 1.0,
        in_flight=lambda p, v, stage: float(p - stage),
        hides_neighbour_messages=False,
        splits_backward=False,
        source="Narayanan et al., PipeDream-Flush, arXiv:2006.09503",
    ),
    "interleaved": Schedule(
        bubble=lambda p, v: 1.0 / v,
        in_flight=_interleaved_in_flight,
        hides_neighbour_messages=True,
        splits_backward=False,
        source="Narayanan et al., arXiv:2104.04473, §2.2",
    ),
    "zb-1p": Schedule(
        bubble=lambda p, v: ZB_1P_BUBBLE,
        in_flight=lambda p, v, stage: float(p),
        hides_neighbour_messages=False,
        splits_backward=True,
        source=_ZERO_BUBBLE,
    ),
    "zb-2p": Schedule(
        bubble=lambda p, v: 0.0,
        in_flight=lambda p, v, stage: float(2 * p - 1),
        hides_neighbour_messages=False,
        splits_backward=True,
        source=_ZERO_BUBBLE,
    ),
    "zb-v": Schedule(
        bubble=lambda p, v: ZB_V_BUBBLE,
        in_flight=lambda p, v, stage: float(p),
        hides_neighbour_messages=False,
        splits_backward=True,
        source=_ZERO_BUBBLE,
    ),
}


def pipeline_s(
    schedule: str,
    *,
    pipeline_parallel: int,
    virtual_pipeline_stages: int,
    num_microbatches: IntArray,
    slowest_stage_s: FloatArray,
    sum_of_stages_s: FloatArray,
) -> FloatArray:
    """Seconds from the first forward to the last backward, [n]; the equation of the module docstring."""
    bubble = SCHEDULES[schedule].bubble(pipeline_parallel, virtual_pipeline_stages)
    return num_microbatches * slowest_stage_s + bubble * (sum_of_stages_s - slowest_stage_s)


def in_flight(
    schedule: str, *, pipeline_parallel: int, virtual_pipeline_stages: int, stage: int, num_microbatches: IntArray
) -> FloatArray:
    """Micro-batches whose activations stage ``stage`` holds at its peak, [n]."""
    held = SCHEDULES[schedule].in_flight(pipeline_parallel, virtual_pipeline_stages, stage)
    return np.minimum(held, num_microbatches.astype(np.float64))
