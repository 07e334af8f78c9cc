"""KV caches from prefill to decode workers, compiled: the link, and what the second of a request's workers does."""

from __future__ import annotations

import math
from typing import Any

from meshplan.planner.serving.simulation.compiled.attention_ranks import enter_rank, least_running
from meshplan.planner.serving.simulation.compiled.batch import blocks_at, given, join
from meshplan.planner.serving.simulation.compiled.heaps import pop, push_timed
from meshplan.planner.serving.simulation.compiled.jit import machine_code
from meshplan.planner.serving.simulation.compiled.memory import READY, Memory


@machine_code
def take_with_kv(m: Memory, worker: Any) -> None:
    """Admit requests that arrived with their KV cache."""
    grown, ready = given(worker, worker.steps + 1), m.queues[worker.number, READY]
    while worker.num_ready > 0 and worker.num_decoding + worker.num_prefilling < worker.slots:
        number = m.requests[ready[0]].by_rank
        request = m.requests[number]
        if not request.has_kv:
            return
        held = request.input_length + worker.most_per_step
        if blocks_at(m, worker, grown) + worker.prompt_blocks - (-held // worker.block) > worker.num_blocks:
            return
        pop(ready, worker.num_ready)
        worker.num_ready -= 1
        request.joined_s = worker.clock
        request.admitted_s = min(request.admitted_s, worker.clock)
        enter_rank(m, worker, number, least_running(m, worker))
        join(m, worker, number, 1)
        m.with_kv[worker.number, worker.num_with_kv] = number
        worker.num_with_kv += 1


@machine_code
def first_decoded(m: Memory, worker: Any) -> None:
    """First decode iteration of requests that arrived with their KV cache: a gap, or the first token seen."""
    for place in range(worker.num_with_kv):
        request = m.requests[m.with_kv[worker.number, place]]
        if request.first_token_s == math.inf:
            request.first_token_s = worker.clock
        else:
            gap(m, worker, worker.clock - request.first_token_s, 1.0)
    worker.num_with_kv = 0


@machine_code
def forget_with_kv(m: Memory, worker: Any, number: int) -> bool:
    """Whether a request is one of those that came with their KV cache and have not decoded yet; it is then none."""
    for place in range(worker.num_with_kv):
        if m.with_kv[worker.number, place] == number:
            for other in range(place, worker.num_with_kv - 1):
                m.with_kv[worker.number, other] = m.with_kv[worker.number, other + 1]
            worker.num_with_kv -= 1
            return True
    return False


@machine_code
def gap(m: Memory, worker: Any, seconds: float, count: float) -> None:
    """Write down a gap between tokens that is longer than one iteration."""
    ledger = m.ledger[0]
    row = m.gaps[ledger.num_gaps]
    row[0], row[1], row[2] = worker.number, seconds, count
    ledger.num_gaps += 1


@machine_code
def transfer(m: Memory, worker: Any, number: int, now: float) -> None:
    """A prefilled request's KV cache goes over the link of its worker, after those before it."""
    ledger, tokens = m.ledger[0], m.requests[number].input_length
    sender = m.workers[0] if ledger.is_shared else worker
    start = max(now, sender.link_free_s)
    seconds = ledger.kv_bytes_per_token * tokens / ledger.bandwidth
    sender.link_free_s = start + seconds
    here_s = start + seconds + (ledger.latency_s + ledger.reads_prompt_s * tokens)
    push_timed(m.arriving_s, m.arriving, ledger.num_arriving, here_s, 2 * number + 1)
    ledger.num_arriving += 1
    if worker.holds_slots:
        sent_s = start + seconds + ledger.latency_s
        push_timed(m.sending_s, m.sending, ledger.num_sending, sent_s, number * len(m.workers) + worker.number)
        ledger.num_sending += 1
