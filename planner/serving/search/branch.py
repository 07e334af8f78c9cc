"""Which deployment is simulated next, at what rate, and when the best is known.

Every deployment c has a bound s̲(c) on its score (smaller is better), and a heap holds them by it. A load that is given
takes one simulation. Where the load is free, scores fall as 1/rate and the highest rate that keeps every promise is not
known: a deployment is a bracket of rates, [kept, broken], with the bound s(broken), and one simulation narrows it. So
the one that could be the best is looked at next, and none more closely than it needs: the first rate tried against an
incumbent is the one that would equal it, and a deployment that breaks a promise there is done with.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

from meshplan.planner.core.solution import OnProgress, Progress
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.search.candidates import Candidate, rechunked, score_of
from meshplan.planner.serving.search.deployment import HighestRate, Judged, judge

# Deployments that are simulated at most: a hundred simulations cost about two seconds.
MAX_SIMULATED = 60
# Deployments that are simulated though the bound already proves the incumbent: the runners-up of the table.
MIN_SIMULATED = 6
# Sampling noise of a simulated throughput; a bound within it of the incumbent proves nothing better is to be found.
NOISE = 0.01
# Rates that differ by less are one rate.
SAME = 1e-9
INFINITE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A candidate and what the simulation says of it.

    Args:
        candidate: with its closed form.
        judged: simulated latencies, rates and broken promises.
        score: objective, smaller is better; infinite where a promise is broken.
    """

    candidate: Candidate
    judged: Judged
    score: float


class Branch:
    """The search over deployments; see the module's text.

    Args:
        problem: the question.
        candidates: deployments with their bounds.
        seed: of the requests.
        deadline: of ``time.perf_counter()``; None for none.
        on_progress: told after every simulation.
    """

    def __init__(
        self,
        problem: ServingProblem,
        candidates: Iterable[Candidate],
        *,
        seed: int = 0,
        deadline: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.problem, self.seed, self.deadline, self.on_progress = problem, seed, deadline, on_progress
        self.order = itertools.count()
        self.left: list[tuple[float, int, Candidate, HighestRate | None]] = []
        for candidate in candidates:
            self._put(candidate.score, candidate, None)
        self.num_started = 0
        self.incumbent = INFINITE
        self.simulated: list[Simulated] = []

    def run(self) -> tuple[list[Simulated], float]:
        """Every deployment that was simulated, and the bound on all others."""
        unseen = INFINITE
        while self.left:
            bound, _, candidate, search = heapq.heappop(self.left)
            proven = self.incumbent <= bound * (1.0 + NOISE)
            is_late = self.deadline is not None and time.perf_counter() > self.deadline
            if search is not None:
                if proven or is_late:
                    self._end(candidate, search.judged())
                    unseen = min(unseen, INFINITE if proven else bound)
                else:
                    self._narrow(bound, candidate, search)
            elif (self.num_started < MAX_SIMULATED and not is_late) and not (
                proven and self.num_started >= MIN_SIMULATED
            ):
                self.num_started += 1
                self._start(candidate)
            elif not proven:
                unseen = min(unseen, bound)
            if self.on_progress is not None:
                note = f"{len(self.simulated)} simulated"
                self.on_progress(Progress(incumbent=self.incumbent, bound=bound, note=note))
        return self.simulated, min(self.incumbent, unseen)

    def _put(self, bound: float, candidate: Candidate, search: HighestRate | None) -> None:
        heapq.heappush(self.left, (bound, next(self.order), candidate, search))

    def _start(self, candidate: Candidate) -> None:
        if _has_free_rate(self.problem):
            costs = [worker.cost for worker, _ in candidate.parts]
            rate = candidate.request_rate_per_s
            search = HighestRate(self.problem, candidate.config, high_per_s=rate, seed=self.seed, costs=costs)
            self._narrow(candidate.score, candidate, search)
        else:
            self._end(candidate, judge_once(self.problem, candidate, seed=self.seed))

    def _narrow(self, bound: float, candidate: Candidate, search: HighestRate) -> None:
        """One more simulation of a deployment whose rate is looked for."""
        most = candidate.request_rate_per_s
        at_most = _score_at(self.problem, candidate, most, search.tokens_per_request)
        equal = min(at_most / self.incumbent, 1.0) * most
        untried = search.kept_per_s * (1.0 + SAME) < equal < search.broken_per_s or not search.has_tried
        search.narrow(equal if equal > 0.0 and untried else None)
        if search.kept_per_s:
            self.incumbent = min(self.incumbent, at_most * most / search.kept_per_s)
        if search.is_closed:
            self._end(candidate, search.judged())
        else:
            self._put(max(bound, at_most * most / search.broken_per_s), candidate, search)

    def _end(self, candidate: Candidate, judged: Judged) -> None:
        """Keep what is known; who breaks a promise on gaps between tokens comes back with smaller chunks of prefill."""
        score = INFINITE if judged.broken else score_judged(self.problem, candidate, judged)
        self.simulated.append(Simulated(candidate=candidate, judged=judged, score=score))
        self.incumbent = min(self.incumbent, score)
        if any(promise.metric in ("tpot", "itl") for promise, _ in judged.broken):
            for smaller in rechunked(self.problem, candidate):
                self._put(smaller.score, smaller, None)


def simulate_candidate(problem: ServingProblem, candidate: Candidate, *, seed: int = 0) -> Simulated:
    """One candidate, whatever others do."""
    simulated, _ = Branch(problem, [candidate], seed=seed).run()
    return simulated[0]


def judge_once(problem: ServingProblem, candidate: Candidate, *, seed: int) -> Judged:
    """A candidate under the load of the question; with as many requests in flight as it can take where that is free."""
    costs = [worker.cost for worker, _ in candidate.parts]
    running = candidate.num_running if problem.has_free_load else None
    return judge(problem, candidate.config, num_running=running, seed=seed, costs=costs)


def score_judged(problem: ServingProblem, candidate: Candidate, judged: Judged) -> float:
    """The objective of what was simulated."""
    return score_of(
        problem,
        num_devices=candidate.config.num_devices,
        tokens_per_s=judged.output_tokens_per_s,
        request_rate_per_s=judged.requests_per_s,
        usd_per_hour=candidate.usd_per_hour,
        power_w=candidate.power_w,
    )


def _has_free_rate(problem: ServingProblem) -> bool:
    """The load is free, and how long somebody waits for an answer matters: else requests are kept in flight."""
    return problem.has_free_load and min(problem.limit_s("ttft"), problem.limit_s("e2e")) < INFINITE


def _score_at(problem: ServingProblem, candidate: Candidate, rate_per_s: float, tokens_per_request: float) -> float:
    return score_of(
        problem,
        num_devices=candidate.config.num_devices,
        tokens_per_s=rate_per_s * tokens_per_request,
        request_rate_per_s=rate_per_s,
        usd_per_hour=candidate.usd_per_hour,
        power_w=candidate.power_w,
    )
