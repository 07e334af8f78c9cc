"""What a server's front end (API server) does for the requests that decode: it bounds how many tokens reach clients.

A process of its own parses requests, renders templates, detokenizes, and sends each token as a message, while the
engine computes the next ones. It takes r for a request and s for a message; where n decoding requests gain k tokens
each in an iteration, are sent i iterations' tokens at once, and have answers of o tokens, of which decodes yield o − 1,
it works in that iteration, over f such processes,

    n · (s/i + r·k/(o − 1)) / f

*Source.* Two servers that waited for it: one process took 13.1 ms for requests of 221 tokens whose answers have some
200 (Llama-3.2-1B on two A100, vllm-project/vllm, pull request 17546, 76.5 requests/s; answers as long as in 12287,
which sends the same prompts), one 24.3 ms for 128 and 530 (Qwen3-1.7B on four H200, sgl-project/sglang, pull request
22548, 41.1 requests/s). Two equations: r = 6.2 ms and s = 34 µs.

*Assumptions.* All engines' are alike, on any host. Tokenizing is none of it (it has threads of its own). A backlog
shows in the time per token; servers that merge messages of a backlog let it grow less, and the first token wait.
"""

from __future__ import annotations

REQUEST_S = 6.2e-3
MESSAGE_S = 34e-6


def front_end_s(*, answer: float, gained: float, interval: int, processes: int, parses: bool = True) -> float:
    """Seconds for each decoding request of an iteration.

    Args:
        answer: o − 1, tokens that decodes yield of an answer; at least 1 counts.
        gained: k, tokens that a request gains in an iteration.
        interval: i, iterations whose tokens are sent at once.
        processes: f; 0 where no client waits for any.
        parses: requests reach them unparsed; else r is 0.

    >>> round(front_end_s(answer=199.0, gained=1.0, interval=1, processes=1) * 1e6)
    65
    >>> front_end_s(answer=199.0, gained=1.0, interval=1, processes=0)
    0.0
    """
    if not processes:
        return 0.0
    requests = gained / max(answer, gained) if parses else 0.0
    return (MESSAGE_S / interval + REQUEST_S * requests) / processes
