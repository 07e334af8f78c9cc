"""Pipeline schedules in closed form: time of a step, and micro-batches in flight on each stage.

With m micro-batches, stage times t_i = f_i + b_i (forward, backward of one micro-batch) and p stages:

**GPipe**: T = m·max t + (Σ t − max t), exact.

**1F1B**, exact. Stage k runs w_k = min(p − 1 − k, m − 1) forwards ahead. Its first backward starts at

    s_k = max(s_{k+1} + b_{k+1}, Σ_{i≤k} f_i + w_k·max_{i≤k} f_i)

and, by symmetry in time, r_k remains after its last forward:
r_k = max(r_{k+1} + f_{k+1}, Σ_{i≤k} b_i + w_k·max_{i≤k} b_i). Between the two the stage is never idle:

    T = max_k s_k + r_k + (m − w_k − 1)·t_k

(stages with m ≤ p − k run all forwards first, as in GPipe). This is the textbook formula m·max t + (Σ t − max t) if the
last stage is the slowest or all are equal, and less if forwards that run ahead hide a slow early stage.

**Interleaved 1F1B** (v chunks per stage): the same with w_k = 2(p − 1 − k) + (v − 1)p chunks of f/v ahead (at most
m·v − 1), which pass all stages: the last of them ends no earlier than
Σ_i f_i/v + (w_k − p)·max_{i>k} f_i/v + Σ_{i≤k} f_i/v. A lower bound, mostly exact.

**Zero bubble** (backward split; a share ω of t is weight gradients): T = m·max t + β·(Σ t − max t) with
β = 1 − 2ω (ZB-H1, ZB-1p) and 1 − 3ω (ZB-2p and ZB-V, where m ≥ 2p − 1; ZB-1p's below p + 1). Exact for equal
stages, an upper bound otherwise: up to 16 unequal stages are unrolled (:mod:`.unrolled`). Measured
(arXiv:2401.10241, Table 4): 0.37 for ZB-1p (ω = 0.315) and 0 for ZB-2p (ω = 1/3); both values are used.

**V-Half, V-Min, DualPipeV, Hanayo**: unrolled; beyond 16 stages with the β of :data:`CLOSED_FORMS`.

In flight on stage i (from 0), in whole-stage activations, never more than m:

    GPipe  m     1F1B  p − i     interleaved  ((v − 1)·p + 2(p − i − 1) + 1)/v
    ZB-H1, ZB-1p, ZB-V, Hanayo  p     ZB-2p  2p − 1     DualPipeV  p + 1/2
    V-Half, V-Min  :func:`~meshplan.planner.training.pipeline.list_scheduling.life_limit`: about p/2, p/3

The reference is :mod:`.simulation`; how far each closed form is from it stands in ``ClosedForm.error``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.pipeline.list_scheduling import life_limit
from meshplan.planner.training.pipeline.lookup import (
    SHARE_STEP,
    V_UNITS,
    WEIGHT_GRADIENT_SHARE,
    nominal_times,
    weight_gradient_share,
)
from meshplan.planner.training.pipeline.orders import stage_of_chunk
from meshplan.planner.training.pipeline.unrolled import MOST_STAGES, ChunkColumns, rounds_of, unrolled_s
from meshplan.planner.training.problem.schedules import SCHEDULES, Priced

InFlight = Callable[[int, int, int], float]

# Stages whose times differ by less are equal: sums of the same layers in another order.
ALIKE_RELATIVE = 1e-9
# Forward share of a micro-batch without recompute: two of the six FLOPs per parameter and token.
FORWARD_SHARE = 1.0 / 3.0
# Schedules that are always unrolled, and those for which β is exact if all stages are equal.
UNROLLED = frozenset(name for name, row in SCHEDULES.items() if row.priced is Priced.UNROLLED)
UNROLLED_IF_UNEQUAL = frozenset(name for name, row in SCHEDULES.items() if row.priced is Priced.UNROLLED_IF_UNEQUAL)


class ClosedForm(NamedTuple):
    """What a pipeline schedule takes, as formulas.

    Args:
        bubble: (p, v) → β.
        in_flight: (p, v, stage) → micro-batches whose activations the stage holds, without the limit m.
        error: largest relative distance of the closed form from the simulation that was seen over stage times of 0.5 to
            1.5 of each other, up to 16 stages: random ones, for interleaved those that 15 minutes of hill climbing
            found; tests hold it.
    """

    bubble: Callable[[int, int], float]
    in_flight: InFlight
    error: float


def _interleaved_in_flight(p: int, v: int, stage: int) -> float:
    return ((v - 1) * p + 2 * (p - stage - 1) + 1) / v


def _v_shaped_in_flight(schedule: str) -> InFlight:
    """Chunks in flight by their lifetimes; the largest of this and all later stages, because of rounding."""

    def held(p: int, v: int, stage: int) -> float:
        limit = life_limit(p, *V_UNITS[schedule])
        return max(limit(i, 0) + limit(i, 1) for i in range(stage, p)) / 2.0

    return held


ZB_1P_BUBBLE = 1.0 - 2.0 * WEIGHT_GRADIENT_SHARE
# As measured: with 1 − 3ω = 0.055 the mean error of the twelve ZB-2p runs of the same table is 2.5 %, not 1.9 %.
ZB_2P_BUBBLE = 0.0
# 1 − 3ω, as drawn for ω = 1/3 (arXiv:2405.15362).
ZB_V_BUBBLE = 1.0 - 3.0 * WEIGHT_GRADIENT_SHARE
# Bubbles of the simulated orders at ω = 0.315, f = 1/3, p = 16, m = 32; used beyond MOST_STAGES stages only.
V_HALF_BUBBLE, V_MIN_BUBBLE, DUALPIPE_V_BUBBLE, HANAYO_BUBBLE = 0.76, 0.76, 0.35, 0.72
# (p, v) → β; (p, v, stage) → in flight; error, see :class:`ClosedForm`.
CLOSED_FORMS: Mapping[str, ClosedForm] = {
    "none": ClosedForm(lambda p, v: 0.0, lambda p, v, stage: 1.0, 0.0),
    "gpipe": ClosedForm(lambda p, v: 1.0, lambda p, v, stage: np.inf, 0.0),
    "1f1b": ClosedForm(lambda p, v: 1.0, lambda p, v, stage: float(p - stage), 0.0),
    "interleaved": ClosedForm(lambda p, v: 1.0 / v, _interleaved_in_flight, 0.085),
    "zb-h1": ClosedForm(lambda p, v: ZB_1P_BUBBLE, lambda p, v, stage: float(p), 0.01),
    "zb-1p": ClosedForm(lambda p, v: ZB_1P_BUBBLE, lambda p, v, stage: float(p), 0.01),
    "zb-2p": ClosedForm(lambda p, v: ZB_2P_BUBBLE, lambda p, v, stage: float(2 * p - 1), 0.01),
    "zb-v": ClosedForm(lambda p, v: ZB_V_BUBBLE, lambda p, v, stage: float(p), 0.01),
    "v-half": ClosedForm(lambda p, v: V_HALF_BUBBLE, _v_shaped_in_flight("v-half"), 0.01),
    "v-min": ClosedForm(lambda p, v: V_MIN_BUBBLE, _v_shaped_in_flight("v-min"), 0.01),
    "dualpipe-v": ClosedForm(lambda p, v: DUALPIPE_V_BUBBLE, lambda p, v, stage: p + 0.5, 0.01),
    "hanayo": ClosedForm(lambda p, v: HANAYO_BUBBLE, lambda p, v, stage: float(p), 0.01),
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
    """Time from the first forward to the last backward, [n], from β alone: T = m·max t + β·(Σ t − max t).

    An upper bound if stages differ; :func:`staged_pipeline_s` uses the time of every stage.
    """
    bubble: FloatArray | float = CLOSED_FORMS[schedule].bubble(pipeline_parallel, virtual_pipeline_stages)
    if schedule == "zb-2p":  # below 2p − 1 micro-batches there are too few forwards to fill the first round trip
        few = np.clip((2 * pipeline_parallel - 1 - num_microbatches) / max(pipeline_parallel - 1, 1), 0.0, 1.0)
        bubble = bubble + (ZB_1P_BUBBLE - bubble) * few
    return num_microbatches * slowest_stage_s + bubble * (sum_of_stages_s - slowest_stage_s)


def staged_pipeline_s(
    schedule: str,
    *,
    virtual_pipeline_stages: int,
    num_microbatches: IntArray,
    stages_s: FloatArray,
    forward_share: FloatArray | float = FORWARD_SHARE,
) -> FloatArray:
    """Time from the first forward to the last backward, [n], from the time of every stage.

    Args:
        schedule: a key of :data:`CLOSED_FORMS`.
        virtual_pipeline_stages: v.
        num_microbatches: m, [n].
        stages_s: forward + backward of one micro-batch on each stage, [p, n].
        forward_share: forward share of it: one number, [n], or [p, n] where stages differ in it.
    """
    p = len(stages_s)
    slowest = stages_s.max(axis=0)
    upper = pipeline_s(
        schedule,
        pipeline_parallel=p,
        virtual_pipeline_stages=virtual_pipeline_stages,
        num_microbatches=num_microbatches,
        slowest_stage_s=slowest,
        sum_of_stages_s=stages_s.sum(axis=0),
    )
    if schedule in UNROLLED | UNROLLED_IF_UNEQUAL and 1 < p <= MOST_STAGES:
        shares = np.broadcast_to(np.asarray(forward_share, dtype=np.float64), stages_s.shape)
        return _unrolled_rows_s(schedule, virtual_pipeline_stages, stages_s, shares, num_microbatches, upper)
    if schedule not in ("1f1b", "interleaved"):
        return upper
    differs = stages_s[-1] < slowest  # if the last stage is the slowest, β is exact
    shares = np.asarray(forward_share, dtype=np.float64)
    if shares.ndim == stages_s.ndim:
        differs = differs | (shares.max(axis=0) > shares.min(axis=0))
    if not differs.any():
        return upper
    share = np.broadcast_to(shares, stages_s.shape if shares.ndim == stages_s.ndim else slowest.shape)[..., differs]
    # One candidate may be priced under many constants at once; then times have more columns than m.
    m = np.broadcast_to(num_microbatches, slowest.shape)[differs]
    exact = _one_forward_one_backward_s(stages_s[:, differs], share, m, virtual_pipeline_stages)
    seconds = upper.copy()
    seconds[differs] = exact
    return seconds


def _unrolled_rows_s(
    schedule: str, v: int, stages_s: FloatArray, shares: FloatArray, m: IntArray, upper: FloatArray
) -> FloatArray:
    """Time from the unrolled schedule, [n]; for schedules whose β is exact on equal stages, only where they differ."""
    run = np.full(upper.shape, True)
    microbatches = np.broadcast_to(m, upper.shape)
    if schedule in UNROLLED_IF_UNEQUAL:
        run = stages_s.max(axis=0) > stages_s.min(axis=0) * (1.0 + ALIKE_RELATIVE)
        if schedule != "zb-2p":  # ZB-2p's form has a branch for few micro-batches
            run |= microbatches < len(stages_s)
    seconds = upper.copy()
    forward_steps = np.rint(shares.mean(axis=0) / SHARE_STEP)
    for steps in np.unique(forward_steps[run]).tolist():
        rows = run & (forward_steps == steps)
        share, stages = shares[:, rows], stages_s[:, rows]
        weight = np.minimum(weight_gradient_share(schedule, 0.0), 1.0 - share)
        nominal = nominal_times(schedule, steps * SHARE_STEP)
        places = list(stage_of_chunk(schedule, len(stages_s), v))
        times = ChunkColumns(
            forward_s=(share * stages / v)[places],
            input_gradient_s=((1.0 - share - weight) * stages / v)[places],
            weight_gradient_s=(weight * stages / v)[places],
        )
        seconds[rows] = unrolled_s(schedule, len(stages_s), v, times, microbatches[rows], nominal)
    if schedule in ("zb-h1", "zb-1p"):  # extrapolation may be slightly too long
        return np.where(microbatches <= rounds_of(schedule) * len(stages_s), seconds, np.minimum(seconds, upper))
    return seconds


def least_bubble(schedule: str, *, pipeline_parallel: int, virtual_pipeline_stages: int) -> float:
    """β' with T ≥ mean t · (m + β'·(p − 1)) for any stage times: a lower bound for the search.

    β itself if T is the formula of β, because the slowest stage is no faster than the mean. In (interleaved) 1F1B,
    forwards that run ahead can hide the forward part of the bubble; a random search for the worst stage times found no
    more (0.80 and 0.69 of β at a forward share of a third; tests check the bound).
    """
    if schedule in UNROLLED | UNROLLED_IF_UNEQUAL:
        return 0.0  # a slow stage can hide all of it: m·max t is what is sure
    bubble = CLOSED_FORMS[schedule].bubble(pipeline_parallel, virtual_pipeline_stages)
    return bubble * (1.0 - FORWARD_SHARE) if schedule in ("1f1b", "interleaved") else bubble


def _one_forward_one_backward_s(stages_s: FloatArray, share: FloatArray, m: IntArray, v: int) -> FloatArray:
    """The recurrences of the module docstring, from the last stage to the first."""
    p = len(stages_s)
    forward, backward = stages_s * share / v, stages_s * (1.0 - share) / v
    forwards, backwards = _RunningAhead.of(forward), _RunningAhead.of(backward)
    starts = left = longest = np.zeros_like(stages_s[0])
    for k in reversed(range(p)):
        ahead = np.minimum(p - 1 - k, m - 1) if v == 1 else np.minimum(2 * (p - 1 - k) + (v - 1) * p, m * v - 1)
        starts = np.maximum(starts, forwards.end_s(k, ahead))
        left = np.maximum(left, backwards.end_s(k, ahead))
        through = starts + left + (m * v - ahead - 1) * stages_s[k] / v
        # All forwards run before the first backward: each round trip counts once.
        first_trip = starts + backwards.end_s(k, m * v - 1)
        last_trip = left + forwards.end_s(k, m * v - 1)
        through = np.where(ahead + 1 >= m * v, np.maximum(first_trip, last_trip), through)
        longest = np.maximum(longest, through)
        starts, left = starts + backward[k], left + forward[k]
    return longest


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningAhead:
    """End times of passes that run ahead: sums and maxima of pass times up to, and after, each stage, [p, n]."""

    up_to: FloatArray
    slowest_up_to: FloatArray
    slowest_after: FloatArray

    @classmethod
    def of(cls, passes_s: FloatArray) -> _RunningAhead:
        after = np.zeros_like(passes_s)
        after[:-1] = np.maximum.accumulate(passes_s[::-1], axis=0)[::-1][1:]
        return cls(
            up_to=np.cumsum(passes_s, axis=0),
            slowest_up_to=np.maximum.accumulate(passes_s, axis=0),
            slowest_after=after,
        )

    def end_s(self, k: int, ahead: IntArray) -> FloatArray:
        """End of pass number ``ahead`` (from 0) on stage ``k``; passes beyond p − 1 have passed all stages."""
        p = len(self.up_to)
        direct = self.up_to[k] + ahead * self.slowest_up_to[k]
        around = self.up_to[-1] + (ahead - p) * self.slowest_after[k] + self.up_to[k]
        return np.where((ahead >= p) & (k < p - 1), np.maximum(direct, around), direct)


def in_flight(
    schedule: str,
    *,
    pipeline_parallel: int,
    virtual_pipeline_stages: int,
    stage: int | IntArray,
    num_microbatches: IntArray,
) -> FloatArray:
    """Micro-batches whose activations stage ``stage`` holds at its peak, [n]; of a column of stages [stages, n]."""
    on_stage = CLOSED_FORMS[schedule].in_flight
    each = [on_stage(pipeline_parallel, virtual_pipeline_stages, one) for one in np.ravel(stage).tolist()]
    return np.minimum(np.reshape(each, np.shape(stage)), num_microbatches.astype(np.float64))
