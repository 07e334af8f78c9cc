"""Workers behind a router: the events of :mod:`~meshplan.planner.serving.simulation.cluster`, compiled.

Departures go before arrivals, arrivals before iterations that begin at the same time. A worker has one time at which it
works next, so that its events need no heap.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meshplan.planner.serving.simulation.compiled.heaps import pop_timed
from meshplan.planner.serving.simulation.compiled.jit import borrowed, machine_code
from meshplan.planner.serving.simulation.compiled.memory import LEAST_CONNECTIONS, NONE, ROUND_ROBIN, Memory
from meshplan.planner.serving.simulation.compiled.worker import run, submit


@machine_code
def queue_all(m: Memory) -> None:
    """All requests in the queue of the only worker; of a closed loop those that are in flight first."""
    m = borrowed(m)
    for number in m.order[: m.ledger[0].position]:
        m.requests[number].arrival_s = m.requests[number].planned_s
        submit(m, m.workers[0], number)


@machine_code
def run_alone(m: Memory, until_s: float) -> bool:
    """The only worker until a time; False where records need more room first."""
    m = borrowed(m)
    return run(m, m.workers[0], until_s, False)


@machine_code
def run_together(m: Memory, until_request: int) -> bool:
    """Handle events until that request has arrived, or none is left (−1); False where records need more room first."""
    m = borrowed(m)
    ledger = m.ledger[0]
    while True:
        if ledger.worker != NONE:
            worker, request = m.workers[ledger.worker], ledger.request
            if not run(m, worker, ledger.until_s, ledger.lazily != 0):
                return False
            ledger.worker = NONE
            if request != NONE:
                submit(m, worker, request)
                if request == until_request:
                    return True
        arrival_s = math.inf
        if ledger.position < len(m.order):
            arrival_s = m.requests[m.order[ledger.position]].planned_s
        leaving_s = m.leaving_s[0] if ledger.num_leaving > 0 else math.inf
        number, wake_s = _first_awake(m)
        if leaving_s == math.inf and arrival_s == math.inf and wake_s == math.inf:
            return True
        if leaving_s <= arrival_s and leaving_s <= wake_s:
            _leave(m)
        elif arrival_s <= wake_s:
            _arrive(m, arrival_s)
        else:
            ledger.worker, ledger.until_s, ledger.lazily = number, np.nextafter(wake_s, math.inf), 1
            ledger.request = NONE


@machine_code
def _first_awake(m: Memory) -> tuple[int, float]:
    number, wake_s = 0, m.workers[0].wake_s
    for other in range(1, len(m.workers)):
        if m.workers[other].wake_s < wake_s:
            number, wake_s = other, m.workers[other].wake_s
    return number, wake_s


@machine_code
def _leave(m: Memory) -> None:
    """The request that leaves first is no load any more."""
    ledger, num = m.ledger[0], len(m.workers)
    worker, request = m.workers[m.leaving[0] % num], m.requests[m.leaving[0] // num]
    pop_timed(m.leaving_s, m.leaving, ledger.num_leaving)
    ledger.num_leaving -= 1
    worker.num_requests -= 1
    worker.tokens -= request.input_length + ledger.expected_output


@machine_code
def _arrive(m: Memory, now: float) -> None:
    """The next request is routed: its worker runs up to now, before it joins its queue."""
    ledger = m.ledger[0]
    number = m.order[ledger.position]
    ledger.position += 1
    request = m.requests[number]
    request.arrival_s = now
    chosen = _choose(m, ledger)
    worker = m.workers[chosen]
    ledger.num_routed += 1
    worker.num_requests += 1
    worker.num_sent += 1
    worker.tokens += request.input_length + ledger.expected_output
    ledger.worker, ledger.until_s, ledger.lazily, ledger.request = chosen, now, 0, number


@machine_code
def _choose(m: Memory, ledger: Any) -> int:
    if ledger.router == ROUND_ROBIN:
        return ledger.num_routed % len(m.workers)
    chosen = 0
    for other in range(1, len(m.workers)):
        one, best = m.workers[other], m.workers[chosen]
        if ledger.router != LEAST_CONNECTIONS:
            if one.tokens < best.tokens:
                chosen = other
            continue
        mine, least = one.num_requests / one.weight, best.num_requests / best.weight
        if mine < least or (mine == least and (one.num_sent + 1) / one.weight < (best.num_sent + 1) / best.weight):
            chosen = other
    return chosen
