"""One engine instance: :class:`~meshplan.planner.serving.simulation.worker.Worker`, compiled.

The rules and their numbers are there; a change of one is made here too, and
``tests/planner/serving/simulation/test_compiled.py`` holds both to the same bits.
"""

from __future__ import annotations

import math
from typing import Any

from meshplan.planner.serving.estimator.step_cost import OVERLAP_POWER
from meshplan.planner.serving.simulation.compiled.admission import admit, arrive, become_ready, due, is_waiting
from meshplan.planner.serving.simulation.compiled.attention_ranks import (
    begin,
    emptiest,
    enter_rank,
    fullest_pairs,
    fullest_tokens,
    leave_rank,
    prefill_on,
    rank_room,
)
from meshplan.planner.serving.simulation.compiled.batch import (
    blocks_at,
    forget_end,
    given,
    hold_prompt,
    join,
    release_prompt,
    remove,
    steps_that_fit,
    steps_to_finish,
    steps_to_reach,
    youngest_decoding,
)
from meshplan.planner.serving.simulation.compiled.handover import first_decoded, forget_with_kv, gap, take_with_kv
from meshplan.planner.serving.simulation.compiled.heaps import pop, push_timed
from meshplan.planner.serving.simulation.compiled.jit import machine_code
from meshplan.planner.serving.simulation.compiled.memory import (
    DECODE,
    DECODE_CONTEXT,
    DECODE_FIXED,
    DECODE_ONLY,
    DENSE,
    EXPERTS,
    FINISHING,
    NONE,
    OUTPUTS,
    PREFILL,
    PREFILL_DONE,
    PREFILL_LENGTH,
    PREFILL_RANK,
    READY,
    Memory,
)


@machine_code
def submit(m: Memory, worker: Any, number: int) -> None:
    """Queue a request by the time at which it comes (``queued_s``), after those of the same time."""
    request = m.requests[number]
    request.following = NONE
    if worker.is_caching:
        request.found_tokens = request.cached_tokens
    if worker.head == NONE:
        worker.head = worker.tail = number
    elif request.queued_s >= m.requests[worker.tail].queued_s:
        m.requests[worker.tail].following = number
        worker.tail = number
    elif request.queued_s < m.requests[worker.head].queued_s:
        request.following = worker.head
        worker.head = number
    else:
        before = worker.head
        while m.requests[m.requests[before].following].queued_s <= request.queued_s:
            before = m.requests[before].following
        request.following = m.requests[before].following
        m.requests[before].following = number
    worker.next_arrival = m.requests[worker.head].queued_s
    worker.wake_s = max(worker.clock, worker.next_arrival) if is_idle(worker) else worker.clock


@machine_code
def is_idle(worker: Any) -> bool:
    """Nothing runs and nothing has arrived."""
    return not (worker.num_decoding > 0 or worker.num_prefilling > 0 or worker.num_ready > 0 or is_waiting(worker))


@machine_code
def waits_for_slots(worker: Any) -> bool:
    """Every slot is that of a request whose KV cache is on its way."""
    return worker.num_sending >= worker.slots and worker.num_decoding == 0 and worker.num_prefilling == 0


@machine_code
def has_room(m: Memory) -> bool:
    """Whether the records of one more iteration fit."""
    ledger, most = m.ledger[0], m.pauses.shape[2]
    return ledger.num_records < len(m.records) and ledger.num_gaps + 3 * most < len(m.gaps)


@machine_code
def run(m: Memory, worker: Any, until_s: float, lazily: bool) -> bool:
    """Start every iteration that begins before ``until_s``; False where records need more room first."""
    while True:
        if not has_room(m):
            return False
        if worker.next_arrival <= worker.clock:
            _accept(m, worker)
        if is_idle(worker):
            worker.wake_s = worker.next_arrival
            if worker.next_arrival >= until_s:
                return True
            worker.clock = worker.next_arrival
            continue
        if worker.clock >= until_s or waits_for_slots(worker):
            worker.wake_s = math.inf if waits_for_slots(worker) else worker.clock
            return True
        if is_waiting(worker):
            admit(m, worker, worker.num_decoding == 0 and worker.num_prefilling == 0 and worker.num_ready == 0)
        n = worker.num_decoding
        if n > 0 and worker.context + n * (worker.speed + worker.block) > worker.room:
            _make_room(m, worker)
        if worker.num_ready > 0 and worker.role == DECODE_ONLY:
            take_with_kv(m, worker)
        started = (worker.num_prefilling > 0 or worker.num_ready > 0) and _prefill(m, worker)
        if not started and not _decode(m, worker, until_s, lazily):
            return True
        if worker.has_left and worker.pauses:
            worker.has_left = 0
            worker.wake_s = worker.clock
            return True


@machine_code
def _accept(m: Memory, worker: Any) -> None:
    while worker.head != NONE and m.requests[worker.head].queued_s <= worker.clock:
        request = m.requests[worker.head]
        if worker.is_open:
            become_ready(m, worker, request.rank)
        else:
            arrive(m, worker, request.rank)
        worker.head = request.following
    worker.next_arrival = math.inf if worker.head == NONE else m.requests[worker.head].queued_s


@machine_code
def _make_room(m: Memory, worker: Any) -> None:
    """Preempt the youngest request until the next iteration's tokens fit; a single request always fits."""
    grown = given(worker, worker.steps + 1)
    batch = m.batches[worker.number]
    while blocks_at(m, worker, grown) + worker.prompt_blocks > worker.num_blocks:
        in_prefill, place = -1, -1
        for other in range(worker.num_prefilling):
            if batch[PREFILL_RANK, other] > in_prefill:
                in_prefill, place = batch[PREFILL_RANK, other], other
        youngest = youngest_decoding(m, worker)
        worker.num_preemptions += 1
        if in_prefill > youngest:
            release_prompt(worker, batch[PREFILL_LENGTH, place])
            _end_entry(batch, worker, place)
        else:
            _preempt(m, worker, youngest)
        leave_rank(m, worker, m.requests[max(in_prefill, youngest)].by_rank)
        become_ready(m, worker, max(in_prefill, youngest))


@machine_code
def _end_entry(batch: Any, worker: Any, place: int) -> None:
    """Take a prompt from those in prefill."""
    last = worker.num_prefilling - 1
    for row in range(PREFILL_RANK, PREFILL_LENGTH + 1):
        for other in range(place, last):
            batch[row, other] = batch[row, other + 1]
    worker.num_prefilling = last


@machine_code
def _preempt(m: Memory, worker: Any, rank: int) -> None:
    number = m.requests[rank].by_rank
    request = m.requests[number]
    forget_end(m, worker, number)
    request.generated = request.output_length - (request.target - worker.grown)
    request.has_kv = 0
    if forget_with_kv(m, worker, number):
        request.last_token_s = request.first_token_s
    else:
        request.last_token_s = _last_token_s(m, worker, request.joined_s)
    remove(m, worker, number)


@machine_code
def _last_token_s(m: Memory, worker: Any, joined_s: float) -> float:
    """When a decoding request's last token came: at the last decode iteration, or when it joined since."""
    pauses = m.pauses[worker.number]
    for place in range(worker.num_pauses - 1, -1, -1):
        if pauses[0, place] == joined_s:
            pauses[1, place] -= 1
            return joined_s
    if worker.num_pauses == 0:
        return worker.clock
    pauses[1, 0] -= 1
    return pauses[0, 0]


@machine_code
def _prefill(m: Memory, worker: Any) -> bool:
    """One iteration with prompts; False if no prompt can continue or be admitted."""
    n = worker.num_decoding if worker.is_chunked else 0
    batch_budget = worker.budget + (-n // worker.concurrent_batches) * worker.verified
    if batch_budget <= 0:
        return False
    begin(m, worker)
    batch, num_prompts, tokens = m.batches[worker.number], 0, 0
    for place in range(worker.num_prefilling):
        done = batch[PREFILL_DONE, place]
        rank = m.requests[m.requests[batch[PREFILL_RANK, place]].by_rank].attention_rank
        chunk = min(batch[PREFILL_LENGTH, place] - done, rank_room(m, worker, batch_budget, rank))
        if chunk == 0:
            continue
        num_prompts += 1
        tokens += chunk
        prefill_on(m, worker, rank, chunk, done)
        batch[PREFILL_DONE, place] = done + chunk
    ready, slots = m.queues[worker.number, READY], worker.slots - worker.num_decoding - worker.num_sending
    while worker.num_ready > 0 and worker.num_prefilling < slots:
        number = m.requests[ready[0]].by_rank
        request = m.requests[number]
        length = request.input_length + request.generated
        if request.has_kv or not _fits(m, worker, length):
            break
        done = min(request.found_tokens, length - 1)
        rank = emptiest(m, worker, batch_budget, length - done)
        if rank == NONE:
            break
        chunk = min(length - done, rank_room(m, worker, batch_budget, rank))
        place = worker.num_prefilling
        batch[PREFILL_RANK, place] = pop(ready, worker.num_ready)
        worker.num_ready -= 1
        batch[PREFILL_DONE, place], batch[PREFILL_LENGTH, place] = done + chunk, length
        worker.num_prefilling = place + 1
        request.admitted_s = min(request.admitted_s, worker.clock)
        num_prompts += 1
        tokens += chunk
        prefill_on(m, worker, rank, chunk, done)
        enter_rank(m, worker, number, rank)
        hold_prompt(worker, length)
    if num_prompts == 0:
        return False
    _end_prefill(m, worker, n, num_prompts, tokens)
    return True


@machine_code
def _fits(m: Memory, worker: Any, length: int) -> bool:
    """Whether a prompt fits in addition to what the decodes will hold; a coarse test first, then the exact one."""
    n = worker.num_decoding
    if worker.context + n * (worker.speed + worker.block) + length + worker.block <= worker.room:
        return True
    after = blocks_at(m, worker, given(worker, worker.steps + 1)) if n > 0 else 0
    return after + worker.prompt_blocks - (-length // worker.block) <= worker.num_blocks


@machine_code
def _step_s(m: Memory, worker: Any, n: int, num_prompts: int, prompt_tokens: int) -> float:
    """:meth:`~meshplan.planner.serving.estimator.step_cost.StepCost.step_s` of an iteration with prompts."""
    tables, context = m.tables[worker.number], worker.context
    batch = -(-n // worker.concurrent_batches) * worker.verified + fullest_tokens(m, worker)
    together = -(-(n * worker.verified + prompt_tokens) // worker.pipeline)
    outputs = -(-(n + num_prompts) // worker.concurrent_batches)
    seconds = tables[DENSE, batch] + tables[EXPERTS, together] + tables[OUTPUTS, outputs]
    seconds += worker.prefill_fixed_s + worker.prefill_pair_s * fullest_pairs(m, worker)
    if n > 0:
        seconds += tables[DECODE_FIXED, n] + tables[DECODE_CONTEXT, n] * context
        if worker.front_end_s > 0.0:
            seconds = _beside_prompts_s(
                seconds, tables[DECODE, n] + tables[DECODE_CONTEXT, n] * context, n * worker.front_end_s
            )
    least = worker.prefill_least_s
    if least == 0.0 or batch <= worker.graphed:
        return seconds
    if worker.launches_ahead and n > 0:
        least = max(least - (tables[DECODE, n] + tables[DECODE_CONTEXT, n] * context), 0.0)
    return math.pow(math.pow(seconds, OVERLAP_POWER) + math.pow(least, OVERLAP_POWER), 1.0 / OVERLAP_POWER)


@machine_code
def _beside_prompts_s(seconds: float, decodes: float, streamed: float) -> float:
    """An iteration with prompts in which the front end works for ``streamed``: beside all of it, not decodes alone."""
    streamed = math.pow(streamed, OVERLAP_POWER)
    alone = math.pow(max(math.pow(decodes, OVERLAP_POWER) - streamed, 0.0), 1.0 / OVERLAP_POWER)
    return math.pow(math.pow(seconds - decodes + alone, OVERLAP_POWER) + streamed, 1.0 / OVERLAP_POWER)


@machine_code
def _record(
    m: Memory, worker: Any, start: float, steps: int, n: int, kv: float, tokens: int, first: float, gaps: int
) -> None:
    """Write down iterations that begin at ``start`` and end now."""
    ledger = m.ledger[0]
    row = m.records[ledger.num_records]
    row[0], row[1], row[2], row[3], row[4] = start, worker.clock, steps, n, kv
    row[5], row[6], row[7], row[8], row[9] = worker.num_prefilling, tokens, first, gaps, worker.number
    ledger.num_records += 1


@machine_code
def _pause(m: Memory, worker: Any, since_s: float, count: int) -> None:
    """Requests wait for the prefill of others from now on."""
    m.pauses[worker.number, 0, worker.num_pauses] = since_s
    m.pauses[worker.number, 1, worker.num_pauses] = count
    worker.num_pauses += 1


@machine_code
def _end_prefill(m: Memory, worker: Any, n: int, num_prompts: int, tokens: int) -> None:
    start = worker.clock
    seconds = _step_s(m, worker, n, num_prompts, tokens)
    end = worker.clock = start + seconds
    worker.num_iterations += 1
    worker.polled = worker.num_iterations
    gaps = worker.num_decoding - worker.num_with_kv
    kv = worker.context - worker.num_decoding + worker.prompt_blocks * worker.block
    _record(m, worker, start, 1 if n > 0 else 0, n, kv, tokens, seconds, gaps if n > 0 else 0)
    if n > 0:
        _grow(m, worker, 1)
    elif gaps > 0 and worker.num_pauses == 0:
        _pause(m, worker, start, gaps)
    before, batch, place = worker.num_decoding, m.batches[worker.number], 0
    while place < worker.num_prefilling:
        if batch[PREFILL_DONE, place] < batch[PREFILL_LENGTH, place]:
            place += 1
            continue
        release_prompt(worker, batch[PREFILL_LENGTH, place])
        number = m.requests[batch[PREFILL_RANK, place]].by_rank
        _end_entry(batch, worker, place)
        _first_token(m, worker, number, end)
    if worker.num_decoding > before and not worker.is_chunked:
        _pause(m, worker, end, worker.num_decoding - before)
    if n > 0:
        _finish(m, worker)


@machine_code
def _first_token(m: Memory, worker: Any, number: int, end: float) -> None:
    """The token that ends a prefill: the first, or the next one of a preempted request."""
    request = m.requests[number]
    request.generated += 1
    request.joined_s = end
    if request.first_token_s == math.inf:
        request.first_token_s = end
    elif request.last_token_s < math.inf:
        gap(m, worker, end - request.last_token_s, 1.0)
    if request.generated >= request.output_length or worker.role == PREFILL:
        _leave(m, worker, number, end)
    else:
        join(m, worker, number, request.generated)


@machine_code
def _leave(m: Memory, worker: Any, number: int, end: float) -> None:
    m.requests[number].finish_s = end
    leave_rank(m, worker, number)
    worker.has_left = 1
    if worker.holds_slots and m.requests[number].output_length > 1:
        worker.num_sending += 1
    ledger = m.ledger[0]
    if worker.pauses:
        push_timed(m.leaving_s, m.leaving, ledger.num_leaving, end, number * len(m.workers) + worker.number)
        ledger.num_leaving += 1
    elif ledger.is_closed and ledger.num_started < len(m.order):  # its successor
        following = m.order[ledger.num_started]
        ledger.num_started += 1
        m.requests[following].arrival_s = m.requests[following].queued_s = end + m.requests[following].think_s
        submit(m, worker, following)


@machine_code
def _decode(m: Memory, worker: Any, until_s: float, lazily: bool) -> bool:
    """Decode until the next event; False where a lazy run would reach beyond its end."""
    n, context, speed, start = worker.num_decoding, worker.context, worker.speed, worker.clock
    steps = 1 if worker.num_with_kv > 0 else steps_to_finish(m, worker)
    pauses = m.pauses[worker.number]
    is_paused = worker.num_pauses > 0 and (worker.num_pauses > 1 or pauses[0, 0] != start)
    if is_paused:
        steps = 1
    if context + n * (steps * speed + worker.block) > worker.room:
        steps = steps_that_fit(m, worker, steps)
    if is_waiting(worker):
        steps = int(min(float(steps), due(m, worker) - worker.num_iterations))
    slope = m.tables[worker.number, DECODE_CONTEXT, n]
    first = m.tables[worker.number, DECODE, n] + slope * context
    half = slope * n * speed / 2
    end = start + steps * (first + half * (steps - 1))
    arrival = worker.next_arrival
    full = n + worker.num_prefilling >= worker.slots
    if worker.is_open and (full or (worker.num_ready > 0 and not m.ledger[0].may_pass)):
        arrival = math.inf
    if end > until_s and lazily and until_s <= arrival:
        worker.wake_s = end
        return False
    limit = min(until_s, arrival)
    if end > limit and steps > 1:
        steps = min(steps, steps_to_reach(limit - start, first, half))
        end = start + steps * (first + half * (steps - 1))
    worker.clock = end
    kv = context - n + worker.prompt_blocks * worker.block
    _record(m, worker, start, steps, n, kv, 0, first, 0 if is_paused else n - worker.num_with_kv)
    if is_paused:
        for place in range(worker.num_pauses):
            gap(m, worker, end - pauses[0, place], pauses[1, place])
    worker.num_pauses = 0
    worker.num_iterations += steps
    _grow(m, worker, steps)
    _finish(m, worker)
    return True


@machine_code
def _grow(m: Memory, worker: Any, steps: int) -> None:
    worker.context += worker.num_decoding * worker.speed * steps
    worker.steps += steps
    worker.grown = worker.steps if worker.is_plain else given(worker, worker.steps)
    if worker.num_with_kv > 0:
        first_decoded(m, worker)


@machine_code
def _finish(m: Memory, worker: Any) -> None:
    """Release every request that has all its tokens."""
    heap, num = m.batches[worker.number, FINISHING], len(m.requests)
    beyond = (worker.grown + 1) * num
    while worker.num_decoding > 0 and heap[0] < beyond:
        number = pop(heap, worker.num_decoding) % num
        remove(m, worker, number)
        _leave(m, worker, number, worker.clock)
