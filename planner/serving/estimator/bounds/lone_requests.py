"""What requests take at least, each alone on an idle worker, and what follows for the percentile that an SLO limits.

Where requests differ in length, the q-th part of their latencies is at least the q-th part of what they take alone:
order statistics keep a bound that holds for each. So a limit on a median says nothing of prompts longer than half of
all, and one on a 99th percentile is held against long prompts, not against the mean.

Requests are counted in cells of a grid over new prompt tokens and answers, each priced at its lower edge, so that
nothing is overstated. Edges lie at the percentiles of SLOs and between. Prompt tokens that a cache may hold count as
found, and attention to them as free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.problem.requests import DEFAULT_NUM_REQUESTS, Requests, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo

# Shares of requests at which the grid has edges; those of SLOs are among them.
EDGES = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoneRequests:
    """The requests of a workload, in cells.

    Args:
        prompts: [P] new prompt tokens at the lower edges, rising.
        cached: tokens that a cache holds before them.
        place: [C] edge of each cell among ``prompts``.
        answers: [C] tokens of answers at the cell's lower edge.
        shares: [C] share of the requests, in sum 1.
        num: requests.
    """

    prompts: FloatArray
    cached: float = 0.0
    place: IntArray
    answers: FloatArray
    shares: FloatArray
    num: int

    def alone(self, price: Callable[[float, float], float]) -> Alone:
        """What they take at least.

        Args:
            price: time to the first token of a prompt by its tokens and by those of them that are cached, s.
        """
        each = np.array([price(float(tokens) + self.cached, self.cached) for tokens in self.prompts])
        return Alone(requests=self, first_s=each[self.place])

    def least_s(self, percentile: str, seconds: FloatArray) -> float:
        """The least that a percentile, or the mean, of latencies is that are at least ``seconds``, [C]."""
        if percentile == "mean":
            return float(seconds @ self.shares)
        order = np.argsort(seconds)
        reached = np.cumsum(self.shares[order])
        # Percentiles are interpolated between two requests, so that one request fewer lies surely below.
        below = max(SHARES[percentile] - 1.0 / self.num, 0.0)
        return float(seconds[order][min(int(np.searchsorted(reached, below)), len(order) - 1)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alone:
    """Least latencies of requests that are alone on a worker.

    Args:
        requests: in cells.
        first_s: [C] times to the first token.
    """

    requests: LoneRequests
    first_s: FloatArray

    def after_s(self, slo: Slo, between_s: float = 0.0) -> float:
        """The least that an SLO's percentile is of first tokens and what follows at so long between tokens."""
        steps = np.maximum(self.requests.answers - 1.0, 0.0)
        return self.requests.least_s(slo.percentile, self.first_s + steps * between_s)

    def left_s(self, slos: Iterable[Slo]) -> float:
        """What the tightest SLO on the first token or the whole stay leaves beside the first token; ∞ without one."""
        limits = (slo for slo in slos if slo.metric in ("ttft", "e2e"))
        return min((slo.limit_s - self.after_s(slo) for slo in limits), default=math.inf)

    def most_between_s(self, slos: Iterable[Slo], *, before: float = 0.0) -> float:
        """The longest mean time between tokens with which the SLOs on the whole stay may hold; below 0 if none does.

        Args:
            slos: of all metrics.
            before: iterations that a request waits besides.
        """
        steps = np.maximum(self.requests.answers - 1.0, 0.0) + before
        return min((self._most_between_s(slo, steps) for slo in slos if slo.metric == "e2e"), default=math.inf)

    def _most_between_s(self, slo: Slo, steps: FloatArray) -> float:
        left = slo.limit_s - self.first_s
        if slo.percentile == "mean":
            mean, most = float(steps @ self.requests.shares), float(left @ self.requests.shares)
            return most / mean if mean else math.copysign(math.inf, most)
        each = np.where(steps > 0.0, left / np.where(steps > 0.0, steps, 1.0), np.copysign(math.inf, left))
        return -self.requests.least_s(slo.percentile, -each)


def lone_requests(workload: ServingWorkload) -> LoneRequests:
    """The requests of a workload; of one that states nominal lengths a single one of mean length."""
    if workload.trace is not None:
        return _of_trace(workload.trace, min(workload.num_requests or len(workload.trace), len(workload.trace)))
    if workload.input_lengths is not None or workload.output_lengths is not None:
        return _of_distributions(workload)
    prompt, answer = workload.mean_lengths
    return LoneRequests(
        prompts=np.array([prompt * (1.0 - workload.prefix_hit_rate)]),
        cached=prompt * workload.prefix_hit_rate,
        place=np.zeros(1, dtype=np.int64),
        answers=np.array([answer]),
        shares=np.ones(1),
        num=workload.num_requests or 1,
    )


def _of_distributions(workload: ServingWorkload) -> LoneRequests:
    """Requests whose prompts and answers are drawn by themselves: the shares of cells are products."""
    inputs, outputs = workload.input_lengths, workload.output_lengths
    prompts = np.full(len(EDGES), workload.shortest_prompt) if inputs is None else inputs.at(EDGES)
    answers = np.full(len(EDGES), workload.length_ratio * workload.output_length)
    answers = answers if outputs is None else outputs.at(EDGES).astype(np.float64)
    shared = prompts * workload.prefix_hit_rate if workload.prefix_tokens is None else workload.prefix_tokens
    place, of_answer = np.divmod(np.arange(len(EDGES) ** 2), len(EDGES))
    each = np.diff([*EDGES, 1.0])
    return LoneRequests(
        prompts=np.maximum(prompts - shared, 1.0),
        place=place,
        answers=answers[of_answer],
        shares=each[place] * each[of_answer],
        num=workload.num_requests or DEFAULT_NUM_REQUESTS,
    )


# Every worker of a question is held against the same requests.
@lru_cache(maxsize=4)
def _of_trace(trace: Requests, num: int) -> LoneRequests:
    cached = 0 if trace.cached_tokens is None else trace.cached_tokens[:num]
    new, answers = np.maximum(trace.input_length[:num] - cached, 1), trace.output_length[:num]
    prompts, of_prompts = _edges(new)
    outputs, of_answers = _edges(answers)
    cells, counts = np.unique(of_prompts * len(outputs) + of_answers, return_counts=True)
    return LoneRequests(
        prompts=prompts,
        place=cells // len(outputs),
        answers=outputs[cells % len(outputs)],
        shares=counts / num,
        num=num,
    )


def _edges(values: IntArray) -> tuple[FloatArray, IntArray]:
    """Lower edges of the cells of some lengths, rising, and [n] which one each length lies above."""
    edges = np.unique(np.quantile(values, EDGES, method="lower"))
    return edges.astype(np.float64), np.searchsorted(edges, values, side="right") - 1
