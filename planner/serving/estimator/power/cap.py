"""A worker whose boards run under a lower power limit: how much slower it is.

A board under a limit L that would ask for P₀ lowers its clock until it stays below. Dynamic power is C·V²·f, and the
voltage falls with the clock f, so that with w the power of a board that waits::

    clock = ((L - w) / (P₀ - w))^(1/3)        where P₀ > L, else 1

Device times of an iteration grow by 1/clock, where P₀ is the average power of the steady state with as many requests as
the iteration has tokens (prompts: of the hungriest); time on the host does not. The exponent is that rule's, and w and
P₀ are the power curve's: nothing is fitted to runs under a limit. Held against these:

- Training of six small networks on V100, A40 and P100 (Zeus, NSDI 2023), 290 epochs under limits that bind, from half
  of the board's on: times err by 4 % (median), 14 % (p90), 6 % (mean; 13 % without notice of the limit, 14 % for times
  proportional to P₀/L). Just at half the A40 is 13 % slower than this says. Limits below half are refused.
- Prefill of MiniMax-M2.5 on RTX 3090 (llmgarage.ai, February 2026): at 0.86 and 0.71 of the board's limit 2 % off, at
  0.57 25 % too fast. One decoding request lost 1, 3 and 6 % there; by the curve it asks for 0.6 and loses 0, 0 and 3 %.

Where a load asks for less than the limit, the limit changes nothing: so measured for decode of small batches, 137 to
300 W on an H200 under every limit (arXiv:2605.11999). Memory clocks do not fall with the limit, so that decode of large
batches should lose less than this says; no published run shows how much.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshplan.catalogs.constants.power import PowerConstants
from meshplan.planner.cluster.power import peak_bytes_per_j, power_share
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.host.front_end import NO_FRONT_END
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.power.work import request_work
from meshplan.planner.serving.estimator.steady_state import steady_state
from meshplan.planner.serving.estimator.step_cost import Slowdown

# Power over waiting power grows with this power of the clock.
CLOCK_EXPONENT = 3.0
# 90th percentile of |log(measured/predicted)| of times under limits: see above.
SLOWDOWN_ERROR_P90 = 0.133
# Lowest limit, as a share of the board's own, and vendor of the boards, that the law was held against.
LEAST_CAP_SHARE, CAPPED_VENDOR = 0.5, "nvidia"


def capped_clock(constants: PowerConstants, asked_share: FloatArray, cap_share: float) -> FloatArray:
    """Clock under a limit over the clock without; powers are shares of the board's own limit.

    >>> capped_clock(PowerConstants(waiting_share=0.3), np.array([0.5, 0.9]), 0.6).round(3).tolist()
    [1.0, 0.794]
    """
    waiting = constants.waiting_share
    asked = np.maximum(asked_share, cap_share)
    return np.asarray(((cap_share - waiting) / (asked - waiting)) ** (1.0 / CLOCK_EXPONENT))


def capped(worker: Worker, cap_w: float, power: PowerConstants) -> Worker:
    """The worker with device times as under a power limit.

    Args:
        worker: without the limit.
        cap_w: limit of each device, W; it has effect where the board's own limit is known.
        power: constants of the devices' power by load.
    """
    limit = worker.machine.device.tdp_w
    if limit is None:
        return worker
    verified = 1 if worker.speculation is None else worker.speculation.verified_tokens
    requests, asked = _asked_share(worker, power)
    clock = capped_clock(power, asked, cap_w / limit)
    slowdown = Slowdown(
        tokens=requests * verified / worker.concurrent_batches, factor=np.maximum.accumulate(1.0 / clock)
    )
    return replace(worker, slowdown=slowdown)


def _asked_share(worker: Worker, power: PowerConstants) -> tuple[FloatArray, FloatArray]:
    """[N] Running requests; [N] power over the board's limit that the worker asks for with them, without another.

    A limit acts within an iteration: that devices wait for a front end between two of them spares no clock.
    """
    contexts = worker.contexts
    steady = steady_state(
        replace(worker, front_end=NO_FRONT_END).step_cost(),
        role=worker.role,
        prompt=contexts.prompt,
        output=contexts.most - contexts.least,
        cached=0.0,
        budget=worker.limits.max_batched_tokens,
        most=worker.limits.max_num_seqs,
    )
    requests = steady.num_seqs.astype(np.float64)
    use = request_work(worker, requests, padded=True).times(steady.rate_per_s)
    return requests, power_share(power, use, peak_bytes_per_j(worker.machine.device))
