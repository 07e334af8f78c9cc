"""What a server's front end (API server) does for requests: it bounds how many reach the engine and how many tokens
reach clients.

A process of its own parses requests, renders templates, detokenizes, and sends each token as a message, while the
engine computes the next ones. It takes r for a request and s for a message. Where i iterations' tokens are sent at
once, f processes serve n decoding requests in at least n·s/(i·f), so that an iteration takes no less; and requests
whose answers are k messages long leave them at most

    f / (r + k·s)

a second. Those that come faster wait before the engine: in a closed loop so long that the rate is that bound
(:func:`~meshplan.planner.serving.search.deployment.server`), under open arrivals first come, first served behind
requests and messages, of which engines send no more than they can answer requests. A burst is parsed before any of its
answers is sent, so that r a request is all that it waits for.

*Source.* Two servers that waited for it: one process took 13.1 ms for requests of 221 tokens whose answers have some
200 (Llama-3.2-1B on two A100, vllm-project/vllm, pull request 17546, 76.5 requests/s; answers as long as in 12287,
which sends the same prompts), one 24.3 ms for 128 and 530 (Qwen3-1.7B on four H200, sgl-project/sglang, pull request
22548, 41.1 requests/s). Two equations: r = 6.2 ms and s = 34 µs.

*Assumptions.* All engines' are alike, on any host. Tokenizing is none of it (it has threads of its own). The clients of
a closed loop begin at once: their first requests are parsed like a burst. Servers that merge messages of a backlog send
more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray

REQUEST_S = 6.2e-3
MESSAGE_S = 34e-6
# What is advised where API servers decide: tokens sent at once (with more, requests themselves are most of the work),
# and API servers of a worker.
AT_ONCE, MORE_API_SERVERS = 10, 4
LEAST_SPAN_S = 1e-6  # arrivals within less have no rate


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """The API servers of a worker, or of all workers of a deployment.

    Args:
        processes: f; 0 where no client waits for any.
        interval: i, iterations whose tokens are sent at once.
        parses: requests reach them unparsed; else r is 0.
        at_once: requests of a burst, at least; 0 where they come one by one.
    """

    processes: int = 0
    interval: int = 1
    parses: bool = True
    at_once: int = 0

    @property
    def each_s(self) -> float:
        """What they do for each decoding request of an iteration, s.

        >>> round(FrontEnd(processes=2, interval=1).each_s * 1e6)
        17
        """
        return MESSAGE_S / self.interval / self.processes if self.processes else 0.0

    def request_s(self, messages: float) -> float:
        """Time between two requests that they let pass at least, s; of a burst on average, whose first do not wait.

        Args:
            messages: k·i, iterations in which a request gains tokens.

        >>> round(FrontEnd(processes=1).request_s(200.0) * 1e3, 1)
        13.0
        """
        if not self.processes:
            return 0.0
        parsed_s = REQUEST_S / self.processes if self.parses else 0.0
        if self.at_once:
            return parsed_s * max(1.0 - self.processes / self.at_once, 0.0)
        return parsed_s + self.each_s * messages

    def waits_s(self, arrival_s: FloatArray, messages: float, *, answered_per_s: float) -> FloatArray:
        """How long requests wait for what came before them, s, [n]; dealt to the processes in turn.

        A process that works off what comes, in order: dⱼ = max(dⱼ₋₁ + s·mⱼ, aⱼ) + r, mⱼ the messages that are sent
        between two arrivals, k for each request that comes in the same time, of as many as engines answer.

        Args:
            arrival_s: [n] a, not falling.
            messages: as in :meth:`request_s`.
            answered_per_s: requests/s that the engines behind all processes answer at most.
        """
        waits = np.zeros(len(arrival_s))
        if not self.processes or not self.parses or len(arrival_s) == 0:
            return waits
        arrived_per_s = len(arrival_s) / max(float(arrival_s[-1] - arrival_s[0]), LEAST_SPAN_S)
        sent = min(arrived_per_s, answered_per_s) / self.processes * messages * MESSAGE_S / self.interval
        for process in range(min(self.processes, len(arrival_s))):
            own = arrival_s[process :: self.processes]
            work_s = np.cumsum(REQUEST_S + sent * np.diff(own, prepend=own[0]))
            waits[process :: self.processes] = (
                np.maximum.accumulate(own + REQUEST_S - work_s) + work_s - own - REQUEST_S
            )
        return waits


NO_FRONT_END = FrontEnd()
