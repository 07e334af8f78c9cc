"""Branch and bound over deployments: which is simulated next, at which rate, and when the best is known.

Every deployment c has a bound s̲(c) on its score (smaller is better); a heap orders them by it. Under a given load one
simulation settles a deployment. Where the load is free, scores fall as 1/rate and the highest rate that meets every SLO
is unknown: a deployment then has a bracket of rates, [met, violated], with the bound s(violated), and each simulation
narrows it. The deployment with the smallest bound is always the next, and no bracket is narrowed further than needed:
the first rate tried is the one at which it would equal the incumbent, and a deployment that violates an SLO there is
dropped.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

from meshplan.planner.core.solution import OnProgress, Progress
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.search.candidates import INFINITE, Candidate, rechunked, score_of
from meshplan.planner.serving.search.slo_judgement import RATE_TOLERANCE, HighestRate, Judged, judge
from meshplan.planner.serving.search.trials import FEWEST

# Deployments that are simulated at most: a hundred simulations cost about two seconds.
MAX_SIMULATED = 60
# Deployments that are simulated though the bound already proves the incumbent: the runners-up of the table.
MIN_SIMULATED = 6
# Rates that differ by less are one rate.
SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated candidate.

    Args:
        candidate: with its figures by the closed form.
        judged: simulated latencies and rates, and violated SLOs.
        score: objective, smaller is better; infinite where an SLO is violated.
    """

    candidate: Candidate
    judged: Judged
    score: float


class Branch:
    """The search over deployments; see the module's text.

    Args:
        problem: the question.
        candidates: deployments with their bounds.
        seed: for drawing the requests.
        deadline: a time of ``time.perf_counter()``, s; None for none.
        on_progress: called after every simulation.
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
        # Measured relative uncertainty of the incumbent's score; a bound within it of the incumbent proves that nothing
        # better is to be found.
        self.error = 0.0
        # Least score of what was given up without being shown to violate an SLO at every better rate.
        self.not_refuted = INFINITE
        self.simulated: list[Simulated] = []

    def run(self) -> tuple[list[Simulated], float]:
        """Every deployment that was simulated, and the bound on all others."""
        unseen = INFINITE
        while self.left:
            bound, _, candidate, search = heapq.heappop(self.left)
            proven = self.incumbent <= bound * (1.0 + self.error)
            is_late = self.deadline is not None and time.perf_counter() > self.deadline
            if search is not None:
                if proven and not is_late and search.look_above():
                    self._note(bound, candidate, search)
                elif proven or is_late:
                    self._end(candidate, search.judged())
                    unseen = min(unseen, INFINITE if proven else bound)
                else:
                    self._narrow(bound, candidate, search)
            elif (self.num_started < MAX_SIMULATED and not is_late) and not (
                proven and self.num_started >= MIN_SIMULATED
            ):
                self.num_started += 1
                self._start(candidate, is_only_shown=proven)
            elif not proven:
                unseen = min(unseen, bound)
            if self.on_progress is not None:
                note = f"{len(self.simulated)} simulated"
                self.on_progress(Progress(incumbent=self.incumbent, bound=bound, note=note))
        return self.simulated, min(self.incumbent, unseen)

    def _put(self, bound: float, candidate: Candidate, search: HighestRate | None) -> None:
        heapq.heappush(self.left, (bound, next(self.order), candidate, search))

    def _start(self, candidate: Candidate, *, is_only_shown: bool) -> None:
        if _has_free_rate(self.problem):
            costs = [worker.cost for worker, _ in candidate.parts]
            rate = candidate.request_rate_per_s
            search = HighestRate(self.problem, candidate.config, high_per_s=rate, seed=self.seed, costs=costs)
            self._narrow(candidate.score, candidate, search)
        else:
            num = FEWEST if is_only_shown else None
            self._end(candidate, judge_once(self.problem, candidate, seed=self.seed, num_requests=num))

    def _narrow(self, bound: float, candidate: Candidate, search: HighestRate) -> None:
        """One more simulation of a deployment whose highest rate is searched for."""
        most = candidate.request_rate_per_s
        tokens_per_s = most * search.tokens_per_request
        at_most = score_of(self.problem, candidate, request_rate_per_s=most, tokens_per_s=tokens_per_s)
        equal = min(at_most / self.incumbent, 1.0) * most
        untried = search.met_per_s * (1.0 + SAME) < equal < search.violated_per_s or not search.num_runs
        search.narrow(equal if equal > 0.0 and untried else None)
        self._note(bound, candidate, search)

    def _note(self, bound: float, candidate: Candidate, search: HighestRate) -> None:
        """A deployment's bracket has changed: the incumbent, and what is left of the deployment."""
        most = candidate.request_rate_per_s
        at_most = score_of(
            self.problem, candidate, request_rate_per_s=most, tokens_per_s=most * search.tokens_per_request
        )
        if search.met_per_s:
            self._improve(at_most * most / search.met_per_s, RATE_TOLERANCE)
        if search.is_closed and not search.look_above():
            self._end(candidate, search.judged())
        else:
            self._put(max(bound, at_most * most / search.violated_per_s), candidate, search)

    def _improve(self, score: float, error: float) -> None:
        if score < self.incumbent:
            self.incumbent, self.error = score, error

    def _end(self, candidate: Candidate, judged: Judged) -> None:
        """Record a result. A violated SLO on the time between tokens adds candidates with smaller prefill chunks."""
        score = INFINITE if judged.violated else score_judged(self.problem, candidate, judged)
        self.simulated.append(Simulated(candidate=candidate, judged=judged, score=score))
        self._improve(score, judged.rate_error)
        if judged.refuted_per_s:
            tokens_per_s = judged.refuted_per_s * self.problem.workload.mean_lengths[1]
            at_refuted = score_of(
                self.problem, candidate, request_rate_per_s=judged.refuted_per_s, tokens_per_s=tokens_per_s
            )
            self.not_refuted = min(self.not_refuted, at_refuted)
        if any(slo.metric in ("tpot", "itl") for slo, _ in judged.violated):
            for smaller in rechunked(self.problem, candidate):
                self._put(smaller.score, smaller, None)


def simulate_candidate(problem: ServingProblem, candidate: Candidate, *, seed: int = 0) -> Simulated:
    """One candidate, whatever the others do."""
    simulated, _ = Branch(problem, [candidate], seed=seed).run()
    return simulated[0]


def judge_once(problem: ServingProblem, candidate: Candidate, *, seed: int, num_requests: int | None = None) -> Judged:
    """Simulate a candidate under the given load; if the load is free, at its maximum concurrency.

    ``num_requests``: of one run, where the candidate cannot win; None: as many as decide it.
    """
    costs = [worker.cost for worker, _ in candidate.parts]
    running = candidate.num_running if problem.has_free_load else None
    return judge(problem, candidate.config, num_running=running, num_requests=num_requests, seed=seed, costs=costs)


def score_judged(problem: ServingProblem, candidate: Candidate, judged: Judged) -> float:
    """The objective of a simulated candidate."""
    rate, tokens_per_s = judged.requests_per_s, judged.output_tokens_per_s
    return score_of(problem, candidate, request_rate_per_s=rate, tokens_per_s=tokens_per_s)


def _has_free_rate(problem: ServingProblem) -> bool:
    """The load is free and an SLO limits the wait of a request (TTFT or E2E); without one, concurrency is fixed."""
    return problem.has_free_load and problem.limit_s("ttft", "e2e") < INFINITE
