"""The order of operations of each pipeline schedule, written (:mod:`.orders`) or searched (:mod:`.list_scheduling`).

A searched order depends on the relative times of F, B and W; :func:`nominal_times` rounds them, so that estimates and
simulations of a configuration use the same order.
"""

from __future__ import annotations

import math
from functools import cache

from meshplan.planner.training.pipeline.list_scheduling import EQUAL, Nominal, both_ends, life_limit, v_shaped, waves
from meshplan.planner.training.pipeline.orders import (
    PipelineOrder,
    dualpipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
    zb_v,
)
from meshplan.planner.training.problem.schedules import SCHEDULES

# Share of a micro-batch's time in weight gradients. Fitted: it makes ZB-1p's bubble 0.37 of 1F1B's, as in the
# throughput of the twelve ZB-1p runs of arXiv:2401.10241, Table 4. It is a third for matrix products alone, less
# with attention, which has no weights.
WEIGHT_GRADIENT_SHARE = 0.315
# ZB-2p's twelve runs of the same table have no bubble, as with a third (mean error 1.9 %, with 0.315 2.5 %).
ZB_2P_WEIGHT_GRADIENT_SHARE = 1.0 / 3.0
# Schedules whose stages follow each other into the next step without a flush (arXiv:2401.10241, §4).
UNFLUSHED = frozenset(name for name, row in SCHEDULES.items() if not row.flushes)
# Units between neighbouring stages down and up the V, forward and backward together (arXiv:2405.15362, §3): they make
# the peak a half and a third of 1F1B's.
V_UNITS = {"v-half": (4, 2), "v-min": (2, 2)}
# Forward shares for which orders are searched are multiples of this; a quarter and a third are.
SHARE_STEP = 1.0 / 24.0


def weight_gradient_share(schedule: str, forward_share: float) -> float:
    """Share of a micro-batch's time in weight gradients, at most what the forward pass leaves."""
    usual = ZB_2P_WEIGHT_GRADIENT_SHARE if schedule == "zb-2p" else WEIGHT_GRADIENT_SHARE
    return min(usual, 1.0 - forward_share)


def nominal_times(schedule: str, forward_share: float) -> Nominal:
    """Shares of a micro-batch in F, B and W for which an order is searched."""
    forward = round(round(forward_share / SHARE_STEP) * SHARE_STEP, 9)
    weight = weight_gradient_share(schedule, forward)
    return forward, 1.0 - forward - weight, weight


@cache
def pipeline_order(schedule: str, p: int, v: int, m: int, *, nominal: Nominal = EQUAL) -> PipelineOrder:
    """The order of all operations of a schedule.

    Args:
        schedule: a key of :data:`~meshplan.planner.training.problem.schedules.SCHEDULES`.
        p: stages.
        v: chunks per stage.
        m: micro-batches.
        nominal: relative times of F, B and W for which searched schedules are made.

    Raises:
        ValueError: no such schedule, or one that cannot run m micro-batches on p stages.
    """
    if schedule in V_UNITS:
        return v_shaped(p, m, life_limit(p, *V_UNITS[schedule]), math.inf, nominal)
    makers = {
        "none": lambda: gpipe(p, m),
        "gpipe": lambda: gpipe(p, m),
        "1f1b": lambda: one_forward_one_backward(p, m),
        "interleaved": lambda: interleaved(p, m, v),
        "zb-h1": lambda: zb_h1(p, m),
        "zb-1p": lambda: zb_h1(p, m),
        "zb-2p": lambda: zb_h2(p, m),
        "zb-v": lambda: _zb_v(p, m, nominal),
        "dualpipe-v": lambda: dualpipe_v(p, m),
        "hanayo": lambda: waves(p, m, v, nominal),
        "dualpipe": lambda: both_ends(p, m, nominal),
    }
    if schedule not in makers:
        known = ", ".join(sorted({*makers, *V_UNITS}))
        raise ValueError(f"no pipeline schedule {schedule!r}; there are {known}")
    return makers[schedule]()


def _zb_v(p: int, m: int, nominal: Nominal) -> PipelineOrder:
    """The written order, or below 2p − 1 micro-batches a searched one within the same memory."""
    if m >= 2 * p - 1:
        return zb_v(p, m)
    return v_shaped(p, m, lambda stage, turn: 2 * p, 2 * p, nominal)
