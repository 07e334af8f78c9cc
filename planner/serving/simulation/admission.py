"""Requests that have arrived at a worker, but have not been admitted by its scheduler yet.

There are three causes: the scheduler polls for arrivals only now and then; iterations are prepared ahead, so that the
first that can include a request is some later one; and prompts may have to wait for others. See
:class:`~meshplan.planner.serving.problem.config.Admission`, and rule 1 of
:mod:`meshplan.planner.serving.simulation.worker`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from meshplan.planner.serving.problem.config import Admission


def next_multiple(last: int, interval: int, now: int) -> int:
    """The first iteration from ``now`` on that is a multiple of ``interval`` after ``last``.

    >>> [next_multiple(3, 10, now) for now in (3, 4, 13, 14)]
    [3, 13, 13, 23]
    """
    return last - (last - now) // interval * interval


class AdmissionQueue:
    """Requests that have arrived at one worker and wait for admission.

    Args:
        rules: when prompts are admitted.
        lag: mean number of iterations that are prepared ahead.
        budget: prompt tokens of one iteration over all concurrent batches.
        concurrent_batches: pipeline stages × attention data-parallel ranks.
        length: rank → prompt tokens of a request.
    """

    def __init__(
        self, rules: Admission, lag: float, *, budget: int, concurrent_batches: int, length: Sequence[int]
    ) -> None:
        self.rules, self.lag, self.length = rules, lag, length
        self.is_open = rules.is_immediate and not lag
        self.enough_tokens, self.enough_prompts = rules.batch_wait_share * budget, concurrent_batches
        self.num_arrived = 0
        self.polled = self.admitted = 0  # iterations of the last poll and of the last admission
        self.unseen: list[tuple[int, int]] = []  # (lag, rank)
        self.prepared: list[tuple[int, int]] = []  # heap of (first iteration that can include it, rank)
        self.held: list[int] = []
        self.held_since = 0

    def __bool__(self) -> bool:
        return bool(self.unseen or self.prepared or self.held)

    def arrive(self, rank: int) -> None:
        """A request has arrived. On average, ``lag`` iterations start before one can include it."""
        count = self.num_arrived
        self.unseen.append((int(self.lag * (count + 1)) - int(self.lag * count), rank))
        self.num_arrived = count + 1

    def prefilled(self, iteration: int) -> None:
        """The last iteration had prompts: a poll follows."""
        self.polled = iteration

    def admit(self, iteration: int, is_empty: bool) -> list[int]:
        """Ranks of the requests admitted to ``iteration``; all of them if the worker is idle."""
        rules = self.rules
        if is_empty:
            self.polled = self.admitted = iteration
            ranks = [*self.held, *(rank for _, rank in (*self.prepared, *self.unseen))]
            self.unseen, self.prepared, self.held = [], [], []
            return ranks
        if self.unseen and iteration == next_multiple(self.polled, rules.receive_interval, iteration):
            self.polled = iteration
            for lag, rank in self.unseen:
                heapq.heappush(self.prepared, (iteration + lag, rank))
            self.unseen = []
        if self.prepared and self.prepared[0][0] <= iteration and not self.held:
            self.held_since = iteration
        while self.prepared and self.prepared[0][0] <= iteration:
            self.held.append(heapq.heappop(self.prepared)[1])
        if self.held and self._is_over(iteration):
            self.admitted = iteration
            ranks, self.held = self.held, []
            return ranks
        return []

    @property
    def _waits_for_balance(self) -> bool:
        return self.rules.balance_wait_steps > 0 and len(self.held) < self.enough_prompts

    def _is_over(self, iteration: int) -> bool:
        """The held requests have waited long enough, or are numerous enough."""
        rules = self.rules
        if self._waits_for_balance:
            return iteration == next_multiple(self.admitted, rules.balance_wait_steps, iteration)
        if iteration < self.held_since + rules.batch_wait_steps:
            return sum(self.length[rank] for rank in self.held) >= self.enough_tokens
        return True

    def due(self, iteration: int) -> float:
        """The first iteration after ``iteration`` that may admit a request, if none arrives until then."""
        found = math.inf
        if self.unseen:
            found = next_multiple(self.polled, self.rules.receive_interval, iteration + 1)
        if self.prepared:
            found = min(found, self.prepared[0][0])
        if self.held and self._waits_for_balance:
            found = min(found, next_multiple(self.admitted, self.rules.balance_wait_steps, iteration + 1))
        elif self.held:
            found = min(found, self.held_since + self.rules.batch_wait_steps)
        return found


class AttentionRanks:
    """Which attention data-parallel rank of a worker a request lies on, and the fullest rank of an iteration.

    A request lies on one rank, with its KV cache, from its admission until it leaves or is preempted. It is given to
    the rank with fewest requests, the first of several, among those that have a slot and tokens of the iteration's
    budget left. A burst is dealt evenly, and where all slots are taken a successor lies where a request has ended.
    Expert layers need the tokens of all ranks, so that an iteration takes as long as the rank with most.

    What the engines do: vLLM takes the rank of least 4·waiting + running, of counts that are up to 100 ms old and its
    own arrivals since (vllm/v1/engine/core_client.py, DPLBAsyncMPClient), and other ranks run empty batches or are
    padded (docs/serving/data_parallel_deployment.md, v1/worker/dp_utils.py). TensorRT-LLM balances active requests
    (_torch/pyexecutor/request_utils.py, schedule_attention_dp_requests). SGLang deals in turn whatever the load
    (srt/managers/data_parallel_controller.py, round_robin): the same for a burst, less even than here for what follows.

    Args:
        num: ranks.
        stages: micro-batches over which a rank spreads its prompts.
        slots: requests that run in the whole worker.
    """

    def __init__(self, num: int, stages: int, slots: int) -> None:
        self.num, self.stages = num, stages
        self.most_running = -(-slots // num)
        self.running = [0] * num
        self.budget = 0
        self.prompts, self.tokens, self.pairs = [0] * num, [0] * num, [0.0] * num

    def begin(self, batch_budget: int) -> None:
        """An iteration begins, in which each micro-batch may prefill so many tokens."""
        self.budget = batch_budget
        self.prompts, self.tokens, self.pairs = [0] * self.num, [0] * self.num, [0.0] * self.num

    def room(self, rank: int) -> int:
        """Tokens of one prompt that a rank may still prefill in this iteration."""
        return min(self.budget, self.budget * self.stages - self.tokens[rank])

    def emptiest(self, wanted: int, is_whole: bool) -> int:
        """Rank for a prompt of ``wanted`` new tokens in this iteration, −1 if there is none.

        Args:
            wanted: tokens.
            is_whole: prompts are not cut, unless a rank has no other.
        """
        found, fewest = -1, self.most_running
        for rank, running in enumerate(self.running):
            if running < fewest:
                room = self.room(rank)
                if room > 0 and (not is_whole or room >= wanted or not self.tokens[rank]):
                    found, fewest = rank, running
        return found

    def least_running(self) -> int:
        """Rank for a request that arrives with its KV cache."""
        return self.running.index(min(self.running))

    def prefill(self, rank: int, chunk: int, done: int) -> None:
        """A rank prefills a chunk of a prompt of which ``done`` tokens are cached."""
        self.prompts[rank] += 1
        self.tokens[rank] += chunk
        self.pairs[rank] += chunk * (done + (chunk + 1) / 2)

    def fullest(self) -> tuple[int, float]:
        """Prompt tokens of the fullest micro-batch, and attended pairs of the one with most: layers wait for both."""
        if self.num == 1:
            spread = min(self.prompts[0], self.stages)
            return -(-self.tokens[0] // spread), self.pairs[0] / spread
        tokens, pairs = 0, 0.0
        for count, held, attended in zip(self.prompts, self.tokens, self.pairs, strict=True):
            if count:
                spread = min(count, self.stages)
                tokens, pairs = max(tokens, -(-held // spread)), max(pairs, attended / spread)
        return tokens, pairs
