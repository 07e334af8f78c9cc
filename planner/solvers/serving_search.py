"""Which deployment serves the load at the best objective within every promise: bound, simulate, cut.

*Notation.* A candidate c is a worker (node type, layout, formats, limits), how many of them, and for prefill and decode
pools a pair of those. s̲(c) is its score in closed form, s(c) its score in the simulation; smaller is better.

*Objective.* min s(c) over candidates whose simulated latencies keep every promise at its percentile.

*Bound.* Closed forms leave out queueing, block waste and uneven arrival, so s̲(c) ≤ s(c) up to sampling noise;
candidates that break a promise in closed form break it in the simulation. Candidates are simulated in the order of s̲;
once the incumbent's s is at most the next s̲, no candidate left can beat it. When the number of simulations or the time
runs out first, the smallest s̲ left is the bound and the gap is reported.

What is proven and what is sampled: enumeration and bound are exact under the estimator; latencies at a percentile are
sampled with ``num_requests`` requests, and the plan carries their confidence interval.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshplan.planner.problems.serving import Arrival, Role
from meshplan.planner.problems.serving_question import ServingProblem
from meshplan.planner.simulation.deployment import Judged, judge, judge_highest_rate
from meshplan.planner.solvers.serving_candidates import (
    Candidate,
    PricedWorker,
    aggregated,
    disaggregated,
    priced_workers,
    rechunked,
    score_of,
)
from meshplan.planner.solvers.solution import OnProgress, Progress, Solution, Status, relative_gap, status_of

# Simulations after which the best so far is taken: a hundred cost about a second.
MAX_SIMULATED = 60
# Simulations that are made though the bound already proves the incumbent: the runners-up of the table.
MIN_SIMULATED = 6
# Sampling noise of a simulated throughput; a bound within it of the incumbent proves nothing better is to be found.
NOISE = 0.01


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """What the search saw.

    Args:
        simulated: every simulated candidate, best first; those that keep all promises before the others.
        num_candidates: deployments in closed form.
        rejected: reason → number of workers or deployments turned down for it.
        mixed: priced mixed workers, for the Pareto front.
        prefill: priced prefill workers.
        decode: priced decode workers.
    """

    simulated: tuple[Simulated, ...]
    num_candidates: int
    rejected: Counter[str]
    mixed: tuple[PricedWorker, ...]
    prefill: tuple[PricedWorker, ...]
    decode: tuple[PricedWorker, ...]


def search_serving(
    problem: ServingProblem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Solution[Simulated], ServingReport]:
    """Find the best deployment; see the module's text."""
    start_wall, start_cpu = time.perf_counter(), time.process_time()
    rejected: Counter[str] = Counter()
    mixed, prefill, decode = _workers(problem, rejected)
    candidates = [one for worker in mixed for one in aggregated(problem, worker)]
    candidates += disaggregated(problem, prefill, decode)
    candidates = _within_limits(problem, candidates, rejected)
    candidates.sort(key=lambda one: (one.score, one.config.num_devices, _complexity(one), one.tpot_s))
    deadline = None if time_limit_s is None else start_wall + time_limit_s
    simulated, bound = _branch(problem, candidates, seed, deadline, on_progress)
    simulated.sort(key=lambda one: (one.score, len(one.judged.broken), one.candidate.score))
    _simplest_first(simulated)
    report = ServingReport(
        simulated=tuple(simulated),
        num_candidates=len(candidates),
        rejected=rejected,
        mixed=tuple(mixed),
        prefill=tuple(prefill),
        decode=tuple(decode),
    )
    best = simulated[0] if simulated and simulated[0].score < float("inf") else None
    objective = None if best is None else best.score
    if objective is not None:  # equal within the noise of the best counts as equal
        bound = min(bound, objective)
    return Solution(
        status=Status.INFEASIBLE if objective is None else status_of(objective, bound, tolerance=NOISE),
        assignment=best,
        objective=objective,
        bound=None if objective is None else bound,
        gap=None if objective is None else relative_gap(objective, bound),
        wall_s=time.perf_counter() - start_wall,
        cpu_s=time.process_time() - start_cpu,
        solver="closed-form bounds, event-skipping simulation",
        seed=seed,
    ), report


def _simplest_first(simulated: list[Simulated]) -> None:
    """Among deployments that the sampling noise cannot tell apart, the simplest comes first."""
    best = simulated[0].score if simulated else float("inf")
    if best == float("inf"):
        return
    alike = [one for one in simulated if one.score <= best * (1.0 + NOISE)]
    simulated[: len(alike)] = sorted(alike, key=lambda one: (_complexity(one.candidate), one.score))


def _complexity(candidate: Candidate) -> tuple[int, int, int]:
    """Kinds of workers, stages, and devices of the largest worker, which is what one failure takes down."""
    layouts = [pool.layout for pool in candidate.config.pools]
    stages = max(layout.pipeline_parallel for layout in layouts)
    return len(layouts), stages, max(layout.num_devices for layout in layouts)


def _workers(
    problem: ServingProblem, rejected: Counter[str]
) -> tuple[list[PricedWorker], list[PricedWorker], list[PricedWorker]]:
    """Priced workers by role, as far as the mode is not pinned otherwise."""
    mode = problem.pinned.is_disaggregated
    mixed = [] if mode else priced_workers(problem, Role.MIXED, rejected)
    if mode is False or problem.workload.arrival is Arrival.ALL_AT_ONCE:
        return mixed, [], []
    return mixed, priced_workers(problem, Role.PREFILL, rejected), priced_workers(problem, Role.DECODE, rejected)


def _within_limits(problem: ServingProblem, candidates: Iterable[Candidate], rejected: Counter[str]) -> list[Candidate]:
    """Candidates that the engine takes as a whole, within money and power."""
    limits = problem.limits
    kept = []
    for one in candidates:
        broken = problem.rules.broken(problem.shape, one.config)
        if broken:
            rejected[f"{problem.rules.name}: {broken[0]}"] += 1
        elif limits.max_usd_per_hour is not None and (one.usd_per_hour or 0.0) > limits.max_usd_per_hour:
            rejected["cost per hour is above max_usd_per_hour"] += 1
        elif limits.max_power_w is not None and (one.power_w or 0.0) > limits.max_power_w:
            rejected["average power is above max_power_w"] += 1
        else:
            kept.append(one)
    return kept


def _branch(
    problem: ServingProblem,
    candidates: Sequence[Candidate],
    seed: int,
    deadline: float | None,
    on_progress: OnProgress | None,
) -> tuple[list[Simulated], float]:
    """Simulate in the order of the bounds until nothing left can beat the incumbent; the bound on all that is left.

    A mixed deployment whose gaps between tokens break a promise comes back with smaller chunks of prefill.
    """
    order = itertools.count()
    left = [(one.score, next(order), one) for one in candidates]
    heapq.heapify(left)
    simulated: list[Simulated] = []
    incumbent = float("inf")
    while left:
        candidate = heapq.heappop(left)[-1]
        proven = incumbent <= candidate.score * (1.0 + NOISE)
        spent = len(simulated) >= MAX_SIMULATED or (deadline is not None and time.perf_counter() > deadline)
        if (proven and len(simulated) >= MIN_SIMULATED) or spent:
            return simulated, incumbent if proven else candidate.score
        simulated.append(_simulated(problem, candidate, incumbent, seed))
        incumbent = min(incumbent, simulated[-1].score)
        if any(promise.metric in ("tpot", "itl") for promise, _ in simulated[-1].judged.broken):
            for smaller in rechunked(problem, candidate):
                heapq.heappush(left, (smaller.score, next(order), smaller))
        if on_progress is not None:
            on_progress(Progress(incumbent=incumbent, bound=candidate.score, note=f"{len(simulated)} simulated"))
    return simulated, incumbent


def _simulated(problem: ServingProblem, candidate: Candidate, incumbent: float, seed: int) -> Simulated:
    """A candidate under the load of the question; where that is free, under the most that keeps every promise."""
    costs = [worker.cost for worker, _ in candidate.parts]
    if not problem.has_free_load:
        judged = judge(problem, candidate.config, seed=seed, costs=costs)
    elif problem.limit_s("ttft") == problem.limit_s("e2e") == float("inf"):
        # Nobody waits for an answer: requests are kept in flight, and the queue has no say.
        judged = judge(problem, candidate.config, num_running=candidate.num_running, seed=seed, costs=costs)
    else:
        judged = _fullest(problem, candidate, incumbent, seed)
    score = float("inf") if judged.broken else _score(problem, candidate, judged)
    return Simulated(candidate=candidate, judged=judged, score=score)


def _fullest(problem: ServingProblem, candidate: Candidate, incumbent: float, seed: int) -> Judged:
    """The highest Poisson rate that keeps every promise, up to the closed form's.

    Scores fall as 1/rate, so a candidate that breaks a promise at the rate where it would equal the incumbent is left
    there.
    """
    most, costs = candidate.request_rate_per_s, [worker.cost for worker, _ in candidate.parts]
    if incumbent < float("inf"):
        equal = min(candidate.score / incumbent, 1.0) * most
        judged = judge(problem, candidate.config, request_rate_per_s=equal, seed=seed, costs=costs)
        if judged.broken:
            return judged
    return judge_highest_rate(problem, candidate.config, high_per_s=most, seed=seed, costs=costs)


def sustainable_rate(problem: ServingProblem, candidate: Candidate, *, seed: int = 0) -> float:
    """The highest Poisson rate at which a deployment keeps every promise, requests/s; at least the question's own."""
    supply = min(worker.best_rate_per_s * count for worker, count in candidate.parts)
    rate = problem.workload.request_rate_per_s or 0.0
    costs = [worker.cost for worker, _ in candidate.parts]
    judged = judge_highest_rate(problem, candidate.config, high_per_s=max(supply, rate), seed=seed, costs=costs)
    return rate if judged.broken else max(rate, judged.requests_per_s)


def _score(problem: ServingProblem, candidate: Candidate, judged: Judged) -> float:
    return score_of(
        problem,
        num_devices=candidate.config.num_devices,
        tokens_per_s=judged.output_tokens_per_s,
        request_rate_per_s=judged.requests_per_s,
        usd_per_hour=candidate.usd_per_hour,
        power_w=candidate.power_w,
    )


def estimate_pinned(problem: ServingProblem, *, seed: int = 0) -> tuple[Simulated, ServingReport]:
    """One configuration, promises aside: pinned choices, every other degree 1, the smallest that fits the device.

    Raises:
        ValueError: nothing fits; the message says what was turned down most.
    """
    rejected: Counter[str] = Counter()
    unpromised = replace(problem, promises=())
    if problem.pinned.is_disaggregated:
        prefill, decode = (priced_workers(unpromised, role, rejected)[:1] for role in (Role.PREFILL, Role.DECODE))
        mixed: list[PricedWorker] = []
        candidates = disaggregated(unpromised, prefill, decode)
    else:
        mixed, prefill, decode = priced_workers(unpromised, Role.MIXED, rejected)[:1], [], []
        candidates = [one for worker in mixed for one in aggregated(unpromised, worker)]
    if not candidates:
        reason = rejected.most_common(1)[0][0] if rejected else "the pinned degrees need more devices than there are"
        raise ValueError(f"this configuration cannot run: {reason}")
    chosen = min(candidates, key=lambda one: one.config.num_devices)
    simulated = _simulated(problem, chosen, float("inf"), seed)
    score = _score(problem, chosen, simulated.judged)
    report = ServingReport(
        simulated=(replace(simulated, score=score),),
        num_candidates=1,
        rejected=rejected,
        mixed=tuple(mixed),
        prefill=tuple(prefill),
        decode=tuple(decode),
    )
    return report.simulated[0], report
