"""Reference implementation of the rules of :mod:`meshplan.planner.serving.simulation.worker`, iteration by iteration.

It is slow and as plain as possible; tests compare the event-driven simulation with it over random loads, limits and
costs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import EngineLimits, Role
from meshplan.planner.serving.problem.requests import Requests


@dataclass(slots=True, kw_only=True)
class ReferenceRequest:
    """One request and its progress.

    Args:
        index: position in the requests.
        priority: smaller goes first.
        arrival_s: time of arrival.
        prompt: prompt tokens.
        answer: tokens to generate.
        cached: prompt tokens that need no prefill.
        think_s: time from the completion that starts it, in a closed loop.
        generated: tokens generated so far.
        prefilled: tokens of the current prefill that are done; None outside of prefill.
        kv: tokens of KV cache held.
        context: tokens attended, at the expected number of tokens per step.
        has_kv: it arrived with its KV cache.
        attention_rank: attention data-parallel rank on which it lies while it runs.
        due: iterations that are prepared ahead of it; once polled, the first iteration that can include it.
        finish_s: time of the last token; infinite if it was rejected.
        token_s: times of its tokens, one entry per iteration that generated some.
    """

    index: int
    priority: int
    arrival_s: float
    prompt: int
    answer: int
    cached: int
    think_s: float = 0.0
    generated: int = 0
    prefilled: int | None = None
    kv: int = 0
    context: float = 0.0
    has_kv: bool = False
    attention_rank: int = 0
    due: int = 0
    finish_s: float = math.inf
    token_s: list[float] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """Sort key: smaller goes first."""
        return self.priority, self.index

    @property
    def length(self) -> int:
        """Tokens to prefill: the prompt, and what had been generated before the KV cache was lost."""
        return self.prompt + self.generated


@dataclass(slots=True, kw_only=True)
class ReferenceWorker:
    """One worker; see :func:`reference_run`.

    Args:
        cost: its iteration times.
        limits: limits of its scheduler.
        blocks: blocks of its KV cache.
        block: tokens of a block.
        role: see :class:`Role`.
        coming: requests still to arrive.
        backlog: requests of a closed loop that each wait for a completion.
        now: start of the next iteration.
        steps: decode iterations so far.
        iterations: so far, of any kind.
        arrived: arrivals so far.
        polled: iteration of the last poll for arrivals.
        admitted: iteration of the last admission.
        held_since: iteration since which requests are held back.
        unseen: requests that have arrived since the last poll.
        lagging: polled requests that the next iteration cannot include yet.
        kept: requests that it could include, held back to wait for others.
        waiting: admitted requests that wait for a slot and blocks.
        prefilling: requests in prefill, in order of admission.
        decoding: requests that decode.
        num_preemptions: preemptions so far.
    """

    cost: StepCost
    limits: EngineLimits
    blocks: int
    block: int
    role: Role
    coming: deque[ReferenceRequest]
    backlog: deque[ReferenceRequest]
    now: float = 0.0
    steps: int = 0
    iterations: int = 0
    arrived: int = 0
    polled: int = 0
    admitted: int = 0
    held_since: int = 0
    unseen: list[ReferenceRequest] = field(default_factory=list)
    lagging: list[ReferenceRequest] = field(default_factory=list)
    kept: list[ReferenceRequest] = field(default_factory=list)
    waiting: list[ReferenceRequest] = field(default_factory=list)
    prefilling: list[ReferenceRequest] = field(default_factory=list)
    decoding: list[ReferenceRequest] = field(default_factory=list)
    num_preemptions: int = 0

    def run(self) -> None:
        """Iterate until every request is done."""
        while self.coming or self.outside or self.waiting or self.prefilling or self.decoding:
            self.iterate()

    @property
    def outside(self) -> list[ReferenceRequest]:
        """Requests that have arrived but are not admitted."""
        return [*self.unseen, *self.lagging, *self.kept]

    @property
    def advance(self) -> int:
        """Whole tokens that each decoding request gains in the next iteration."""
        speed = self.cost.tokens_per_step
        return int(speed * (self.steps + 1)) - int(speed * self.steps)

    def held(self) -> int:
        """Blocks held after the next iteration if no request joins."""
        decoded = sum(-(-(request.kv + self.advance) // self.block) for request in self.decoding)
        return decoded + sum(-(-request.length // self.block) for request in self.prefilling)

    def iterate(self) -> None:
        """One iteration."""
        if not (self.outside or self.waiting or self.prefilling or self.decoding):
            self.now = max(self.now, self.coming[0].arrival_s)
        lag = self.cost.admission_steps
        while self.coming and self.coming[0].arrival_s <= self.now:
            request = self.coming.popleft()
            request.due = int(lag * (self.arrived + 1)) - int(lag * self.arrived)
            self.arrived += 1
            self.unseen.append(request)
            if request.has_kv:
                request.token_s.append(request.arrival_s)
        self.admit()
        self.iterations += 1
        self.waiting.sort(key=lambda request: request.key)
        while self.decoding and self.held() > self.blocks:
            self.preempt()
        most = math.ceil(self.cost.tokens_per_step)
        while self.waiting and self.waiting[0].has_kv and self.can_take(self.waiting[0].prompt + most):
            head = self.waiting.pop(0)
            head.attention_rank = min(range(self.ranks), key=self.running)
            self.join(head)
        chunks = self.chunks()
        pauses = bool(chunks) and not self.limits.chunked_prefill
        decoding = [] if pauses else list(self.decoding)
        self.now += self.cost.step_s(
            len(decoding),
            sum(request.context for request in decoding),
            len(chunks),
            sum(new for _, _, new in chunks),
            sum(pairs(done, new) for _, done, new in chunks),
            self.fullest(chunks),
        )
        if chunks:
            self.polled = self.iterations
        if decoding:
            self.decode(decoding)
        for request, done, new in chunks:
            request.prefilled = done + new
            if request.prefilled == request.length:
                self.end_prefill(request)

    def admit(self) -> None:
        """Rule 1: arrivals are admitted at once or by the rules of admission."""
        now, rules = self.iterations, self.limits.admission
        if not (self.waiting or self.prefilling or self.decoding):
            self.waiting, self.unseen, self.lagging, self.kept = self.outside, [], [], []
            self.polled = self.admitted = now
            return
        if (now - self.polled) % rules.receive_interval == 0:
            for request in self.unseen:
                request.due += now
            self.lagging, self.unseen = self.lagging + self.unseen, []
        was_kept = bool(self.kept)
        self.kept += [request for request in self.lagging if request.due <= now]
        self.lagging = [request for request in self.lagging if request.due > now]
        if self.kept and not was_kept:
            self.held_since = now
        enough = rules.batch_wait_share * self.limits.max_batched_tokens * self.cost.concurrent_batches
        is_over = now >= self.held_since + rules.batch_wait_steps or sum(item.prompt for item in self.kept) >= enough
        if rules.balance_wait_steps and len(self.kept) < self.cost.concurrent_batches:
            is_over = (now - self.admitted) % rules.balance_wait_steps == 0
        if self.kept and is_over:
            self.waiting, self.kept, self.admitted = self.waiting + self.kept, [], now

    def preempt(self) -> None:
        """Preempt the youngest running request."""
        youngest = max(self.decoding + self.prefilling, key=lambda request: request.key)
        self.num_preemptions += 1
        (self.decoding if youngest.prefilled is None else self.prefilling).remove(youngest)
        youngest.prefilled, youngest.kv, youngest.has_kv = None, 0, False
        self.waiting.append(youngest)
        self.waiting.sort(key=lambda request: request.key)

    @property
    def ranks(self) -> int:
        """Attention data-parallel ranks."""
        return self.cost.attention_ranks

    def running(self, rank: int) -> int:
        """Requests that lie on a rank."""
        return sum(request.attention_rank == rank for request in [*self.decoding, *self.prefilling])

    def fullest(self, chunks: list[tuple[ReferenceRequest, int, int]]) -> tuple[int, float]:
        """Tokens of the fullest batch, and pairs of the one with most."""
        tokens, attended = [0], [0.0]
        for rank in range(self.ranks):
            own = [(done, new) for request, done, new in chunks if request.attention_rank == rank]
            if own:
                spread = min(len(own), self.cost.pipeline_parallel)
                tokens.append(math.ceil(sum(new for _, new in own) / spread))
                attended.append(sum(pairs(done, new) for done, new in own) / spread)
        return max(tokens), max(attended)

    @property
    def slots(self) -> int:
        """Most requests that run at once."""
        decodes = max(self.limits.max_batched_tokens // self.cost.verified_tokens * self.cost.concurrent_batches, 1)
        return min(self.limits.max_num_seqs, self.cost.max_num_seqs, decodes)

    def can_take(self, tokens: int) -> bool:
        """Whether a slot and blocks are free."""
        has_slot = len(self.decoding) + len(self.prefilling) < self.slots
        return has_slot and self.held() - (-tokens // self.block) <= self.blocks

    def chunks(self) -> list[tuple[ReferenceRequest, int, int]]:
        """Prefill chunks of this iteration: (request, tokens done, new tokens). Takes requests from the queue."""
        cost, budget = self.cost, self.limits.max_batched_tokens
        if self.limits.chunked_prefill:
            budget -= math.ceil(len(self.decoding) / cost.concurrent_batches) * cost.verified_tokens
        left = [budget * cost.pipeline_parallel] * self.ranks
        chunks: list[tuple[ReferenceRequest, int, int]] = []
        for request in self.prefilling:
            assert request.prefilled is not None  # noqa: S101  (they are in prefill)
            new = min(request.length - request.prefilled, budget, left[request.attention_rank])
            if new > 0:
                chunks.append((request, request.prefilled, new))
                left[request.attention_rank] -= new
        while self.waiting and not self.waiting[0].has_kv and self.can_take(self.waiting[0].length):
            head = self.waiting[0]
            done = min(head.cached if self.limits.prefix_caching else 0, head.length - 1)
            taken = {request.attention_rank for request, _, _ in chunks}
            open_ranks = [
                rank
                for rank in range(self.ranks)
                if left[rank] > 0
                and self.running(rank) < math.ceil(self.slots / self.ranks)
                and (self.limits.chunked_prefill or rank not in taken or head.length - done <= min(budget, left[rank]))
            ]
            if not open_ranks:
                break
            rank = head.attention_rank = min(open_ranks, key=self.running)
            new = min(head.length - done, budget, left[rank])
            self.waiting.pop(0)
            self.prefilling.append(head)
            chunks.append((head, done, new))
            left[rank] -= new
        return chunks

    def decode(self, decoding: list[ReferenceRequest]) -> None:
        """Every decoding request gains its tokens."""
        advance = self.advance
        self.steps += 1
        for request in decoding:
            request.generated += advance
            request.kv += advance
            request.context += self.cost.tokens_per_step
            request.token_s.append(self.now)
            if request.generated >= request.answer:
                self.decoding.remove(request)
                self.leave(request)

    def end_prefill(self, request: ReferenceRequest) -> None:
        """A prefill ends and yields a token."""
        self.prefilling.remove(request)
        request.token_s.append(self.now)
        request.generated += 1
        if request.generated >= request.answer or self.role is Role.PREFILL:
            self.leave(request)
        else:
            self.join(request)

    def join(self, request: ReferenceRequest) -> None:
        """The request decodes from the next iteration on."""
        request.prefilled = None
        request.kv = request.prompt + request.generated - 1
        request.context = request.kv + 1
        self.decoding.append(request)

    def leave(self, request: ReferenceRequest) -> None:
        """The request is done; in a closed loop the next one arrives."""
        request.finish_s = self.now
        if self.backlog:
            following = self.backlog.popleft()
            following.arrival_s = self.now + following.think_s
            self.coming.append(following)
            self.coming = deque(sorted(self.coming, key=lambda coming: coming.arrival_s))


def pairs(done: int, new: int) -> float:
    """Attended pairs of a chunk."""
    return new * (done + (new + 1) / 2)


def reference_run(
    requests: Requests,
    cost: StepCost,
    limits: EngineLimits,
    *,
    kv_capacity_tokens: int,
    kv_block_tokens: int,
    role: Role = Role.MIXED,
) -> tuple[list[ReferenceRequest], int]:
    """Serve the requests iteration by iteration; returns them and the number of preemptions."""
    num, think_s = len(requests), requests.think_times_s()
    cached = requests.cached_tokens if requests.cached_tokens is not None else [0] * num
    priority = requests.priority if requests.priority is not None else [0] * num
    all_requests = [
        ReferenceRequest(
            index=i,
            priority=int(priority[i]),
            arrival_s=float(requests.arrival_s[i]),
            prompt=int(requests.input_length[i]),
            answer=int(requests.output_length[i]),
            cached=int(cached[i]),
            think_s=float(think_s[i]),
            generated=int(role is Role.DECODE),
            has_kv=role is Role.DECODE,
        )
        for i in range(num)
    ]
    blocks = kv_capacity_tokens // kv_block_tokens
    overshoot = math.ceil(cost.tokens_per_step)
    served = deque(
        request
        for request in all_requests
        if request.prompt + (request.answer - 2 + overshoot) * (request.answer > 1 and role is not Role.PREFILL)
        <= blocks * kv_block_tokens
    )
    in_flight = len(served) if requests.concurrency is None else min(requests.concurrency, len(served))
    coming = deque(served.popleft() for _ in range(in_flight))
    worker = ReferenceWorker(
        cost=cost,
        limits=limits,
        blocks=blocks,
        block=kv_block_tokens,
        role=role,
        coming=coming,
        backlog=served,
    )
    worker.run()
    return all_requests, worker.num_preemptions
