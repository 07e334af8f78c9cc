"""Routing: which worker of a pool a request goes to."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.planner.serving.problem.config import Router
from meshplan.planner.serving.simulation.prefix_cache import NO_PREFIX
from meshplan.planner.serving.simulation.request_state import RequestState
from meshplan.planner.serving.simulation.worker import Worker

# A worker is overloaded if it has this many requests more than the least loaded, and this multiple of them: defaults
# of SGLang's router (--balance-abs-threshold, --balance-rel-threshold of its cache-aware policy).
OVERLOAD_REQUESTS = 64
OVERLOAD_RATIO = 1.5


class Pool:
    """Workers of a pool and the router's view of them.

    Args:
        workers: identical ones.
        router: the rule.
        state: the requests of the run.
        first: number of the first worker among those of all pools.
        expected_output: output tokens that the router assumes for every request: the mean, as it cannot know them.
    """

    def __init__(
        self, workers: Sequence[Worker], router: Router, state: RequestState, *, first: int, expected_output: float
    ) -> None:
        self.workers, self.router, self.state, self.first = workers, router, state, first
        self.expected_output = expected_output
        self.num_routed = 0
        self.num_requests = [0] * len(workers)
        self.tokens = [0.0] * len(workers)
        self.routed_to: dict[int, int] = {}

    def choose(self, request: int) -> int:
        """The worker for an arriving request, which counts as its load until :meth:`forget`."""
        if self.router is Router.ROUND_ROBIN:
            chosen = self.num_routed % len(self.workers)
        else:
            chosen = self.tokens.index(min(self.tokens))
            if self.router is Router.PREFIX_AWARE:
                chosen = self._holder(request, chosen)
        self.num_routed += 1
        self.num_requests[chosen] += 1
        self.tokens[chosen] += self._tokens(request)
        self.routed_to[request] = chosen
        return chosen

    def forget(self, request: int) -> None:
        """The request has left the pool."""
        chosen = self.routed_to.pop(request)
        self.num_requests[chosen] -= 1
        self.tokens[chosen] -= self._tokens(request)

    def _tokens(self, request: int) -> float:
        return self.state.input_length[request] + self.expected_output

    def _holder(self, request: int, idlest: int) -> int:
        """The least loaded worker that holds the request's prefix, unless it is overloaded; else ``idlest``."""
        prefix = NO_PREFIX if self.state.prefix is None else self.state.prefix[request]
        holders = [
            i for i, worker in enumerate(self.workers) if worker.prefixes is not None and worker.prefixes.holds(prefix)
        ]
        if not holders:
            return idlest
        best = min(holders, key=lambda i: self.tokens[i])
        least = min(self.num_requests)
        is_overloaded = self.num_requests[best] - least > OVERLOAD_REQUESTS
        return idlest if is_overloaded and self.num_requests[best] > OVERLOAD_RATIO * least else best
