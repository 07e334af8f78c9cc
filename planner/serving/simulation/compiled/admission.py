"""Who waits for admission: :class:`~meshplan.planner.serving.simulation.admission.AdmissionQueue`, compiled."""

from __future__ import annotations

import math
from typing import Any

from meshplan.planner.serving.simulation.compiled.heaps import pop, push
from meshplan.planner.serving.simulation.compiled.jit import machine_code
from meshplan.planner.serving.simulation.compiled.memory import HELD, PREPARED, READY, UNSEEN, Memory


@machine_code
def next_multiple(last: int, interval: int, now: int) -> int:
    """The first iteration from ``now`` on that is a multiple of ``interval`` after ``last``."""
    return last - (last - now) // interval * interval


@machine_code
def is_waiting(worker: Any) -> bool:
    """Whether a request waits for admission."""
    return worker.num_unseen + worker.num_prepared + worker.num_held > 0


@machine_code
def arrive(m: Memory, worker: Any, rank: int) -> None:
    """A request has arrived; the lag of each is kept as its place in the order of arrival."""
    count = worker.num_arrived
    lag = int(worker.lag * (count + 1)) - int(worker.lag * count)
    m.queues[worker.number, UNSEEN, worker.num_unseen] = lag * len(m.requests) + rank
    worker.num_unseen += 1
    worker.num_arrived = count + 1


@machine_code
def become_ready(m: Memory, worker: Any, rank: int) -> None:
    """A request waits for a slot."""
    push(m.queues[worker.number, READY], worker.num_ready, rank)
    worker.num_ready += 1


@machine_code
def admit(m: Memory, worker: Any, is_empty: bool) -> None:
    """Admit requests to the next iteration; all of them if the worker is idle."""
    iteration, num = worker.num_iterations, len(m.requests)
    queues = m.queues[worker.number]
    if is_empty:
        worker.polled = worker.admitted = iteration
        for place in range(worker.num_held):
            become_ready(m, worker, queues[HELD, place])
        for place in range(worker.num_prepared):
            become_ready(m, worker, queues[PREPARED, place] % num)
        for place in range(worker.num_unseen):
            become_ready(m, worker, queues[UNSEEN, place] % num)
        worker.num_held = worker.num_prepared = worker.num_unseen = 0
        return
    if worker.num_unseen > 0 and iteration == next_multiple(worker.polled, worker.receive_interval, iteration):
        worker.polled = iteration
        for place in range(worker.num_unseen):
            # (iteration + lag)·n + rank; lag·n + rank is what the queue keeps
            push(queues[PREPARED], worker.num_prepared, iteration * num + queues[UNSEEN, place])
            worker.num_prepared += 1
        worker.num_unseen = 0
    if worker.num_prepared > 0 and queues[PREPARED, 0] // num <= iteration and worker.num_held == 0:
        worker.held_since = iteration
    while worker.num_prepared > 0 and queues[PREPARED, 0] // num <= iteration:
        queues[HELD, worker.num_held] = pop(queues[PREPARED], worker.num_prepared) % num
        worker.num_prepared -= 1
        worker.num_held += 1
    if worker.num_held > 0 and _is_over(m, worker, iteration):
        worker.admitted = iteration
        for place in range(worker.num_held):
            become_ready(m, worker, queues[HELD, place])
        worker.num_held = 0


@machine_code
def _waits_for_balance(worker: Any) -> bool:
    return worker.balance_wait_steps > 0 and worker.num_held < worker.concurrent_batches


@machine_code
def _is_over(m: Memory, worker: Any, iteration: int) -> bool:
    """The held requests have waited long enough, or are numerous enough."""
    if _waits_for_balance(worker):
        return iteration == next_multiple(worker.admitted, worker.balance_wait_steps, iteration)
    if iteration < worker.held_since + worker.batch_wait_steps:
        tokens = 0
        for place in range(worker.num_held):
            tokens += m.requests[m.requests[m.queues[worker.number, HELD, place]].by_rank].input_length
        return tokens >= worker.enough_tokens
    return True


@machine_code
def due(m: Memory, worker: Any) -> float:
    """The first later iteration that may admit a request, if none arrives until then."""
    found, iteration = math.inf, worker.num_iterations
    if worker.num_unseen > 0:
        found = float(next_multiple(worker.polled, worker.receive_interval, iteration + 1))
    if worker.num_prepared > 0:
        found = min(found, float(m.queues[worker.number, PREPARED, 0] // len(m.requests)))
    if worker.num_held > 0:
        if _waits_for_balance(worker):
            found = min(found, float(next_multiple(worker.admitted, worker.balance_wait_steps, iteration + 1)))
        else:
            found = min(found, float(worker.held_since + worker.batch_wait_steps))
    return found
