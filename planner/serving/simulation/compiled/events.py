"""Workers behind a router: the events of :mod:`~meshplan.planner.serving.simulation.cluster`, compiled.

Of what happens at one time departures go first, then KV caches that were sent, arrivals by request, and iterations. A
worker has one time at which it works next, so that its events need no heap.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meshplan.planner.serving.simulation.compiled.handover import transfer
from meshplan.planner.serving.simulation.compiled.heaps import pop_timed, push_timed
from meshplan.planner.serving.simulation.compiled.jit import borrowed, machine_code
from meshplan.planner.serving.simulation.compiled.memory import (
    LEAST_CONNECTIONS,
    NONE,
    PREFILL,
    ROUND_ROBIN,
    Memory,
)
from meshplan.planner.serving.simulation.compiled.worker import is_idle, run, submit, waits_for_slots

# In place of a request: the worker runs because a KV cache of its own has arrived elsewhere.
SENT = -2


@machine_code
def queue_all(m: Memory) -> None:
    """All requests in the queue of the only worker; of a closed loop those that are in flight first."""
    m = borrowed(m)
    for number in m.order[: m.ledger[0].position]:
        m.requests[number].arrival_s = m.requests[number].queued_s = m.requests[number].planned_s
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
            if request == SENT:
                _sent(worker, ledger.until_s)
            elif request != NONE:
                submit(m, worker, request)
                if request == until_request and worker.number < ledger.first_decode:
                    return True
        arrival_s = _next_arrival_s(m)
        leaving_s = m.leaving_s[0] if ledger.num_leaving > 0 else math.inf
        sent_s = m.sending_s[0] if ledger.num_sending > 0 else math.inf
        number, wake_s = _first_awake(m)
        first_s = min(leaving_s, sent_s, arrival_s, wake_s)
        if first_s == math.inf:
            return True
        if leaving_s == first_s:
            _leave(m, first_s)
        elif sent_s == first_s:
            ledger.worker, ledger.until_s, ledger.lazily = m.sending[0] % len(m.workers), first_s, 0
            ledger.request = SENT
            pop_timed(m.sending_s, m.sending, ledger.num_sending)
            ledger.num_sending -= 1
        elif arrival_s == first_s:
            _arrive(m, first_s)
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
def _next_arrival_s(m: Memory) -> float:
    """When the next request arrives at a worker, by itself or because of others; infinity where none does."""
    ledger, arrival_s = m.ledger[0], math.inf
    if ledger.position < ledger.num_planned:
        arrival_s = m.requests[m.order[ledger.position]].planned_s
    return min(arrival_s, m.arriving_s[0]) if ledger.num_arriving > 0 else arrival_s


@machine_code
def _leave(m: Memory, now: float) -> None:
    """The request that leaves first is no load any more; it goes on to decode, or another one starts."""
    ledger, num = m.ledger[0], len(m.workers)
    worker, number = m.workers[m.leaving[0] % num], m.leaving[0] // num
    request = m.requests[number]
    pop_timed(m.leaving_s, m.leaving, ledger.num_leaving)
    ledger.num_leaving -= 1
    worker.num_requests -= 1
    worker.tokens -= request.input_length + worker.expected_output
    if worker.role == PREFILL and request.output_length > 1:
        request.finish_s = math.inf
        transfer(m, worker, number, now)
    elif ledger.is_closed and ledger.num_started < len(m.order):
        following = m.order[ledger.num_started]
        ledger.num_started += 1
        begins_s = now + m.requests[following].think_s
        push_timed(m.arriving_s, m.arriving, ledger.num_arriving, begins_s, 2 * following)
        ledger.num_arriving += 1


@machine_code
def _sent(worker: Any, now: float) -> None:
    """A KV cache of the worker has arrived: its slot is free."""
    if waits_for_slots(worker):
        worker.clock = max(worker.clock, now)
    worker.num_sending -= 1
    if not is_idle(worker):
        worker.wake_s = worker.clock


@machine_code
def _next_to_arrive(m: Memory, now: float) -> int:
    """Twice the request that arrives now, + 1 where it was prefilled elsewhere: of several the first request."""
    ledger = m.ledger[0]
    if ledger.position < ledger.num_planned:
        number = m.order[ledger.position]
        others = ledger.num_arriving > 0 and m.arriving_s[0] == now and m.arriving[0] < 2 * number
        if m.requests[number].planned_s == now and not others:
            ledger.position += 1
            return 2 * number
    found = m.arriving[0]
    pop_timed(m.arriving_s, m.arriving, ledger.num_arriving)
    ledger.num_arriving -= 1
    return found


@machine_code
def _arrive(m: Memory, now: float) -> None:
    """The next request is routed: its worker runs up to now, before it joins its queue."""
    ledger, found = m.ledger[0], _next_to_arrive(m, now)
    number, is_prefilled = found // 2, found % 2 == 1
    request = m.requests[number]
    request.queued_s = now
    if is_prefilled:
        request.generated = request.has_kv = 1
        if ledger.hides_first:
            request.first_token_s = math.inf
        first, last, routed = ledger.first_decode, len(m.workers), ledger.num_handed_over
        ledger.num_handed_over += 1
    else:
        request.arrival_s = now
        first, last, routed = 0, ledger.first_decode, ledger.num_routed
        ledger.num_routed += 1
    chosen = first + routed % (last - first) if ledger.router == ROUND_ROBIN else _choose(m, ledger, first, last)
    worker = m.workers[chosen]
    worker.num_requests += 1
    worker.num_sent += 1
    worker.tokens += request.input_length + worker.expected_output
    ledger.worker, ledger.until_s, ledger.lazily, ledger.request = chosen, now, 0, number


@machine_code
def _choose(m: Memory, ledger: Any, first: int, last: int) -> int:
    """The worker with least to do, of those from ``first`` to before ``last``."""
    chosen = first
    for other in range(first + 1, last):
        one, best = m.workers[other], m.workers[chosen]
        if ledger.router != LEAST_CONNECTIONS:
            if one.tokens < best.tokens:
                chosen = other
            continue
        mine, least = one.num_requests / one.weight, best.num_requests / best.weight
        if mine < least or (mine == least and (one.num_sent + 1) / one.weight < (best.num_sent + 1) / best.weight):
            chosen = other
    return chosen
