"""Routing: which worker of a pool a request goes to."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.planner.serving.problem.config import Router
from meshplan.planner.serving.simulation.request_state import RequestState
from meshplan.planner.serving.simulation.worker import Worker

# A worker is overloaded if it has this many requests more than the least loaded, and this multiple of them: defaults
# of SGLang's router (--balance-abs-threshold, --balance-rel-threshold of its cache-aware policy).
OVERLOAD_REQUESTS = 64
OVERLOAD_RATIO = 1.5


class Pool:
    """Workers of a pool and the router's view of them.

    Args:
        workers: identical ones, or several kinds of one role.
        router: the rule.
        state: the requests of the run.
        first: number of the first worker among those of all pools.
        expected_output: output tokens that the router assumes for every request: the mean, as it cannot know them.
        weights: of each worker, for LEAST_CONNECTIONS; None for equal ones.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        router: Router,
        state: RequestState,
        *,
        first: int,
        expected_output: float,
        weights: Sequence[int] | None = None,
    ) -> None:
        self.weights = weights or [1] * len(workers)
        self.workers, self.router, self.state, self.first = workers, router, state, first
        self.expected_output = expected_output
        self.num_routed = 0
        self.num_requests, self.num_sent = [0] * len(workers), [0] * len(workers)
        self.tokens = [0.0] * len(workers)
        self.routed_to: dict[int, int] = {}

    def choose(self, request: int) -> int:
        """The worker for an arriving request, which counts as its load until :meth:`forget`."""
        if self.router is Router.ROUND_ROBIN:
            chosen = self.num_routed % len(self.workers)
        elif self.router is Router.LEAST_CONNECTIONS:
            chosen = self._least_connections()
        else:
            chosen = self.tokens.index(min(self.tokens))
            if self.router is Router.PREFIX_AWARE:
                chosen = self._holder(request, chosen)
        self.num_routed += 1
        self.num_requests[chosen] += 1
        self.num_sent[chosen] += 1
        self.tokens[chosen] += self._tokens(request)
        self.routed_to[request] = chosen
        return chosen

    def forget(self, request: int) -> None:
        """The request has left the pool."""
        chosen = self.routed_to.pop(request)
        self.num_requests[chosen] -= 1
        self.tokens[chosen] -= self._tokens(request)

    def _least_connections(self) -> int:
        """The worker with the fewest requests in flight for its weight; among equals, in turn by weight (``least_conn``
        of nginx, https://nginx.org/en/docs/http/ngx_http_upstream_module.html#least_conn).
        """
        return min(
            range(len(self.workers)),
            key=lambda i: (self.num_requests[i] / self.weights[i], (self.num_sent[i] + 1) / self.weights[i]),
        )

    def _tokens(self, request: int) -> float:
        return self.state.input_length[request] + self.expected_output

    def _holder(self, request: int, idlest: int) -> int:
        """The least loaded of the workers that hold most of the prompt, unless it is overloaded; else ``idlest``."""
        held = [0 if worker.prefixes is None else worker.prefixes.matched(request) for worker in self.workers]
        most = max(held)
        if not most:
            return idlest
        best = min((i for i, tokens in enumerate(held) if tokens == most), key=lambda i: self.tokens[i])
        least = min(self.num_requests)
        is_overloaded = self.num_requests[best] - least > OVERLOAD_REQUESTS
        return idlest if is_overloaded and self.num_requests[best] > OVERLOAD_RATIO * least else best
