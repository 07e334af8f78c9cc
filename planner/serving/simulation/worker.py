"""One engine instance as a discrete-event simulation: all iterations of an unchanged decode batch are one event.

The rules (:mod:`meshplan.planner.serving.simulation.reference` applies the same ones iteration by iteration,
:mod:`meshplan.planner.serving.simulation.compiled` to the bit in machine code):

1. Iterations follow each other. A request that arrives during one waits for its end, for the scheduler's next poll
   (receive_interval), for admission_steps more iterations on average (⌊k(i + 1)⌋ − ⌊ki⌋ for the i-th arrival), and for
   other requests as :class:`~meshplan.planner.serving.problem.config.Admission` says. An idle worker admits at once.
   The order is by priority, then by arrival, and no request overtakes one that does not fit.
2. Every decoding request takes part in each iteration and gains ⌊s(D + 1)⌋ − ⌊sD⌋ tokens in the worker's D-th, with
   s = tokens_per_step: one, or the expected value of speculation.
3. KV cache is held in blocks. A request with g generated tokens holds input + g − 1 tokens. Before an iteration the
   youngest running request is preempted until what all will hold after it fits. A preempted request loses its KV cache,
   returns to the queue and is prefilled again with the tokens that it has (recomputation, arXiv:2309.06180, §4.5).
4. A request is admitted if a slot (max_num_seqs) is free and its whole prompt fits in addition to what the decoding
   requests will hold after the next iteration; a request that arrives with its KV cache needs room for ⌈s⌉ more tokens.
5. Chunked prefill (arXiv:2403.02310): with n decodes in w concurrent batches, each batch has a budget of
   max_batched_tokens − v·⌈n/w⌉ prompt tokens, v = verified_tokens. No prompt takes more than the budget of one batch,
   those of one attention data-parallel rank (:class:`~meshplan.planner.serving.simulation.admission.AttentionRanks`) no
   more than that of its batches. Started prompts go first. Without chunked prefill, iterations only prefill while there
   is something to prefill; prompts are taken whole within a rank's budget and cut only if they exceed all of it.
6. The iteration that ends a prefill yields the first token. A PREFILL worker releases the request then, its slot where
   the engine says so when its KV cache has been sent; at a DECODE worker it arrives with its KV cache and the first
   token, and decodes from the next iteration on.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import islice

from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import EngineLimits, Role
from meshplan.planner.serving.simulation.admission import AdmissionQueue, AttentionRanks
from meshplan.planner.serving.simulation.decode_batch import DecodeBatch, steps_to_reach
from meshplan.planner.serving.simulation.prefix_cache import empty_cache
from meshplan.planner.serving.simulation.request_state import RequestState, num_slots
from meshplan.planner.serving.simulation.run import MOST_RECORDS, Record

Leave = Callable[[int, float], None]


class Worker(DecodeBatch):
    """An engine instance that can be run up to any time.

    Args:
        cost: its iteration times.
        limits: limits of its scheduler.
        state: the requests, shared by the workers of a run.
        kv_capacity_tokens: capacity of its KV cache; only whole blocks of it are used.
        kv_block_tokens: tokens of a block.
        role: see :class:`Role`.
        on_leave: called with a request and the time at which the worker is done with it.
        pauses: :meth:`run` returns whenever a request leaves.
        holds_slots: a request that leaves to decode elsewhere keeps its slot until :meth:`sent`.
    """

    def __init__(
        self,
        cost: StepCost,
        limits: EngineLimits,
        state: RequestState,
        *,
        kv_capacity_tokens: int,
        kv_block_tokens: int,
        role: Role,
        on_leave: Leave | None = None,
        pauses: bool = False,
        holds_slots: bool = False,
    ) -> None:
        super().__init__(
            state,
            tokens_per_step=cost.tokens_per_step,
            kv_capacity_tokens=kv_capacity_tokens,
            kv_block_tokens=kv_block_tokens,
        )
        self.cost, self.role = cost, role
        self.on_leave, self.pauses, self.has_left = on_leave, pauses, False
        self.holds_slots, self.num_sending = holds_slots, 0
        self.is_chunked = limits.chunked_prefill
        answers = role is not Role.PREFILL
        cached = limits.prefix_caching
        self.prefixes = empty_cache(state, kv_capacity_tokens, holds_answers=answers) if cached else None
        self.budget = limits.max_batched_tokens
        self.concurrent_batches = cost.concurrent_batches
        self.slots = num_slots(cost, limits)
        self.ranks = AttentionRanks(cost.attention_ranks, cost.pipeline_parallel, self.slots)
        self.decode_s = [cost.decode_s(n) for n in range(min(self.slots, len(state)) + 1)]
        self.clock = self.wake_s = 0.0
        # Requests still to arrive, in order of time; requests that wait for a slot, as a heap of ranks.
        self.queue: list[int] = []
        self.queue_s: list[float] = []
        self.position = 0
        self.next_arrival = math.inf
        self.ready: list[int] = []
        self.waiting = AdmissionQueue(
            limits.admission,
            cost.admission_steps,
            budget=self.budget * self.concurrent_batches,
            concurrent_batches=self.concurrent_batches,
            length=[state.input_length[request] for request in state.by_rank],
        )
        self.num_iterations = 0
        self.prefilling: list[list[int]] = []
        self.arrived_with_kv: list[int] = []
        self.record = Record()
        self.num_preemptions = 0

    def submit(self, request: int, arrival_s: float) -> None:
        """Queue a request; it arrives no earlier than the last iteration began."""
        place = bisect_right(self.queue_s, arrival_s, lo=self.position)
        self.queue.insert(place, request)
        self.queue_s.insert(place, arrival_s)
        self.next_arrival = self.queue_s[self.position]
        if self.prefixes is not None:
            self.state.found_tokens[request] = self.prefixes.find(request)
        self.wake_s = self.clock if not self.is_idle else max(self.clock, self.next_arrival)

    def sent(self, now: float) -> None:
        """The KV cache of a request that has left is at its decode worker: its slot is free."""
        if self._waits_for_slots:
            self.clock = max(self.clock, now)
        self.num_sending -= 1
        if not self.is_idle:
            self.wake_s = self.clock

    @property
    def _waits_for_slots(self) -> bool:
        """Every slot is that of a request whose KV cache is on its way."""
        return self.num_sending >= self.slots and not (self.num_decoding or self.prefilling)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing has arrived."""
        return not (self.num_decoding or self.prefilling or self.ready or self.waiting)

    def run(self, until_s: float = math.inf, *, lazily: bool = False) -> None:
        """Start every iteration that begins before ``until_s``; ``wake_s`` is then the time of the next work.

        With ``lazily``, decode iterations that reach beyond ``until_s`` are not started: ``wake_s`` is their end, and a
        later run that is not lazy may still cut them short.
        """
        while True:
            if self.next_arrival <= self.clock:
                self._accept()
            if self.is_idle:
                self.wake_s = self.next_arrival
                if self.next_arrival >= until_s:
                    return
                self.clock = self.next_arrival
                continue
            if self.clock >= until_s or self._waits_for_slots:
                self.wake_s = math.inf if self._waits_for_slots else self.clock
                return
            if self.waiting:
                is_empty = not (self.num_decoding or self.prefilling or self.ready)
                for rank in self.waiting.admit(self.num_iterations, is_empty):
                    heapq.heappush(self.ready, rank)
            if self.num_decoding and self.context + self.num_decoding * (self.speed + self.block) > self.room:
                self._make_room()
            if self.ready and self.role is Role.DECODE:
                self._take_with_kv()
            if not ((self.prefilling or self.ready) and self._prefill(until_s)) and not self._decode(until_s, lazily):
                return
            if self.has_left and self.pauses:
                self.has_left = False
                self.wake_s = self.clock
                return

    def _accept(self) -> None:
        queue, queue_s, position, clock, rank = self.queue, self.queue_s, self.position, self.clock, self.state.rank
        while position < len(queue) and queue_s[position] <= clock:
            if self.waiting.is_open:
                heapq.heappush(self.ready, rank[queue[position]])
            else:
                self.waiting.arrive(rank[queue[position]])
            position += 1
        self.position = position
        self.next_arrival = queue_s[position] if position < len(queue) else math.inf

    def _make_room(self) -> None:
        """Preempt the youngest request until the next iteration's tokens fit; a single request always fits."""
        grown = self.given(self.steps + 1)
        while self.blocks(grown) + self.prompt_blocks > self.num_blocks:
            in_prefill = max((entry[0] for entry in self.prefilling), default=-1)
            youngest = max(self.decoding, default=-1)
            self.num_preemptions += 1
            if in_prefill > youngest:
                entry = next(entry for entry in self.prefilling if entry[0] == in_prefill)
                self.prefilling.remove(entry)
                self.release_prompt(entry[2])
            else:
                self._preempt(youngest)
            self._leave_rank(self.state.by_rank[max(in_prefill, youngest)])
            heapq.heappush(self.ready, max(in_prefill, youngest))

    def _preempt(self, rank: int) -> None:
        state = self.state
        request = state.by_rank[rank]
        target = state.target[request]
        self.finishing.remove(target * self.num_requests + request)
        heapq.heapify(self.finishing)
        state.generated[request] = state.output_length[request] - (target - self.grown)
        state.has_kv[request] = False
        if request in self.arrived_with_kv:
            self.arrived_with_kv.remove(request)
            state.last_token_s[request] = state.first_token_s[request]
        else:
            state.last_token_s[request] = self.record.last_token_s(state.joined_s[request], self.clock)
        self.remove(request)

    def _take_with_kv(self) -> None:
        """Admit requests that arrived with their KV cache."""
        state, grown = self.state, self.given(self.steps + 1)
        while self.ready and self.num_decoding + len(self.prefilling) < self.slots:
            request = state.by_rank[self.ready[0]]
            if not state.has_kv[request]:
                return
            held = state.input_length[request] + self.most_per_step
            blocks = self.blocks(grown) + self.prompt_blocks - (-held // self.block)
            if blocks > self.num_blocks:
                return
            heapq.heappop(self.ready)
            state.joined_s[request] = self.clock
            state.admitted_s[request] = min(state.admitted_s[request], self.clock)
            self._enter_rank(request, self.ranks.least_running())
            self.join(request, 1)
            self.arrived_with_kv.append(request)

    def _prefill(self, until_s: float) -> bool:
        """One iteration with prompts, or several alike; False if no prompt can continue or be admitted."""
        if len(self.prefilling) == 1 and self._continue_prompt(min(until_s, self.next_arrival)):
            return True
        n = self.num_decoding if self.is_chunked else 0
        batch_budget = self._batch_budget(n)
        if batch_budget <= 0:
            return False
        ranks, state, num_prompts, ended = self.ranks, self.state, 0, []
        ranks.begin(batch_budget)
        for entry in self.prefilling:
            done, rank = entry[1], state.attention_rank[state.by_rank[entry[0]]]
            chunk = min(entry[2] - done, ranks.room(rank))
            if not chunk:
                continue
            num_prompts += 1
            ranks.prefill(rank, chunk, done)
            entry[1] = done + chunk
            if entry[1] == entry[2]:
                ended.append(entry)
        ready, slots = self.ready, self.slots - self.num_decoding - self.num_sending
        while ready and len(self.prefilling) < slots:
            request = state.by_rank[ready[0]]
            length = state.input_length[request] + state.generated[request]
            if state.has_kv[request] or not self._fits(length):
                break
            done = min(state.found_tokens[request], length - 1)
            rank = ranks.emptiest(length - done, not self.is_chunked)
            if rank < 0:
                break
            chunk = min(length - done, ranks.room(rank))
            entry = [heapq.heappop(ready), done + chunk, length]
            state.admitted_s[request] = min(state.admitted_s[request], self.clock)
            num_prompts += 1
            ranks.prefill(rank, chunk, done)
            self._enter_rank(request, rank)
            self.prefilling.append(entry)
            self.hold_prompt(length)
            if done + chunk == length:
                ended.append(entry)
        if not num_prompts:
            return False
        self._end_prefill(n, num_prompts, ended)
        return True

    def _continue_prompt(self, until_s: float) -> bool:
        """Iterations before ``until_s`` in which one started prompt takes the whole budget and nothing else changes.

        Neither the prompt nor a decode ends in them. False: the next iteration is none of these.
        """
        entry, n, segments = self.prefilling[0], self.num_decoding, self.record.segments
        chunk, left = self._batch_budget(n), entry[2] - entry[1]
        is_apart = self.is_chunked and not (self.waiting or self.arrived_with_kv)
        if not 0 < chunk < left or not is_apart or (self.ready and self.concurrent_batches > 1):
            return False
        most = min((left - 1) // chunk, self.steps_to_finish() - 1) if n else (left - 1) // chunk
        context, grows, taken = self.context, n * self.speed, n * (self.speed + self.block)
        end, done, held = self.clock, entry[1], self.prompt_blocks * self.block
        for seconds in islice(self.cost.chunks_s(n, context, chunk, done), most):
            if end >= until_s or (n and context + taken > self.room):
                break
            start, end = end, end + seconds
            segments += (start, end, 1 if n else 0, n, context - n + held, 1, chunk, seconds, n)
            context += grows
            done += chunk
        steps = (done - entry[1]) // chunk
        if not steps:
            return False
        self.clock, self.context, entry[1] = end, context, done
        self.num_iterations += steps
        self.waiting.prefilled(self.num_iterations)
        if n:
            self.steps += steps
            self.grown = self.given(self.steps)
        return True

    def _batch_budget(self, num_decoding: int) -> int:
        """Prompt tokens of one batch beside the decodes (rule 5)."""
        return self.budget + (-num_decoding // self.concurrent_batches) * self.cost.verified_tokens

    def _enter_rank(self, request: int, rank: int) -> None:
        self.state.attention_rank[request] = rank
        self.ranks.running[rank] += 1

    def _leave_rank(self, request: int) -> None:
        self.ranks.running[self.state.attention_rank[request]] -= 1

    def _fits(self, length: int) -> bool:
        """Whether a prompt fits in addition to what the decodes will hold; a coarse test first, then the exact one."""
        n = self.num_decoding
        if self.context + n * (self.speed + self.block) + length + self.block <= self.room:
            return True
        after = self.blocks(self.given(self.steps + 1)) if n else 0
        return after + self.prompt_blocks - (-length // self.block) <= self.num_blocks

    def _end_prefill(self, n: int, num_prompts: int, ended: list[list[int]]) -> None:
        start, ranks = self.clock, self.ranks
        tokens, context = sum(ranks.tokens), self.context if n else 0
        seconds = self.cost.step_s(n, context, num_prompts, tokens, sum(ranks.pairs), ranks.fullest())
        end = self.clock = start + seconds
        self.num_iterations += 1
        self.waiting.prefilled(self.num_iterations)
        kv_tokens = self.context - self.num_decoding + self.prompt_blocks * self.block
        steps = 1 if n else 0
        gaps = self.num_decoding - len(self.arrived_with_kv)
        record = self.record
        record.segments += (start, end, steps, n, kv_tokens, len(self.prefilling), tokens, seconds, gaps if n else 0)
        if n:
            self._grow(1)
        elif gaps and not record.pauses:
            record.pauses.append([start, gaps])
        before = self.num_decoding
        for entry in ended:
            self.prefilling.remove(entry)
            self.release_prompt(entry[2])
            self._first_token(self.state.by_rank[entry[0]], end)
        if self.num_decoding > before and not self.is_chunked:
            record.pauses.append([end, self.num_decoding - before])
        if n:
            self._finish()

    def _first_token(self, request: int, end: float) -> None:
        """The token that ends a prefill: the first, or the next one of a preempted request."""
        state = self.state
        generated = state.generated[request] = state.generated[request] + 1
        state.joined_s[request] = end
        if state.first_token_s[request] == math.inf:
            state.first_token_s[request] = end
        elif state.last_token_s[request] < math.inf:
            self.record.gap(end - state.last_token_s[request])
        if generated >= state.output_length[request] or self.role is Role.PREFILL:
            self._leave(request, end)
        else:
            self.join(request, generated)

    def _leave(self, request: int, end: float) -> None:
        self.state.finish_s[request] = end
        self._leave_rank(request)
        self.has_left = True
        self.num_sending += self.holds_slots and self.state.output_length[request] > 1
        self.record.pack(MOST_RECORDS)
        if self.on_leave is not None:
            self.on_leave(request, end)

    def _decode(self, until_s: float, lazily: bool) -> bool:
        """Decode until the next event; False where a lazy run would reach beyond its end."""
        n, context, speed, start = self.num_decoding, self.context, self.speed, self.clock
        steps = 1 if self.arrived_with_kv else self.steps_to_finish()
        pauses = self.record.pauses
        is_paused = bool(pauses) and (len(pauses) > 1 or pauses[0][0] != start)
        if is_paused:
            steps = 1
        if context + n * (steps * speed + self.block) > self.room:
            steps = self.steps_that_fit(steps)
        if self.waiting:
            steps = int(min(steps, self.waiting.due(self.num_iterations) - self.num_iterations))
        slope = self.cost.decode_context_s[n]
        first = self.decode_s[n] + slope * context
        half = slope * n * speed / 2
        end = start + steps * (first + half * (steps - 1))
        arrival = self.next_arrival
        full = self.num_decoding + len(self.prefilling) >= self.slots
        if self.waiting.is_open and (full or (self.ready and not self.state.may_pass)):
            arrival = math.inf
        if end > until_s and lazily and until_s <= arrival:
            self.wake_s = end
            return False
        limit = min(until_s, arrival)
        if end > limit and steps > 1:
            steps = min(steps, steps_to_reach(limit - start, first, half))
            end = start + steps * (first + half * (steps - 1))
        kv_tokens = context - n + self.prompt_blocks * self.block
        gaps = 0 if is_paused else n - len(self.arrived_with_kv)
        self.record.segments += (start, end, steps, n, kv_tokens, len(self.prefilling), 0, first, gaps)
        if pauses:
            if is_paused:
                self.record.end_pauses(end)
            pauses.clear()
        self.clock = end
        self.num_iterations += steps
        self._grow(steps)
        self._finish()
        return True

    def _grow(self, steps: int) -> None:
        self.context += self.num_decoding * self.speed * steps
        self.steps += steps
        self.grown = self.steps if self.is_plain else self.given(self.steps)
        if self.arrived_with_kv:
            self._first_decoded()

    def _first_decoded(self) -> None:
        """First decode iteration of requests that arrived with their KV cache: a gap, or the first token seen."""
        first_token_s = self.state.first_token_s
        for request in self.arrived_with_kv:
            if first_token_s[request] == math.inf:
                first_token_s[request] = self.clock
            else:
                self.record.gap(self.clock - first_token_s[request])
        self.arrived_with_kv.clear()

    def _finish(self) -> None:
        """Release every request that has all its tokens."""
        finishing, num = self.finishing, self.num_requests
        beyond = (self.grown + 1) * num
        while finishing and finishing[0] < beyond:
            request = heapq.heappop(finishing) % num
            self.remove(request)
            self._leave(request, self.clock)
