"""What deployments on all devices reach: the fastest kinds of workers, simulated, which say how far an SLO is to go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshplan.planner.core.budget import Budget
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.search.branch import judge_once
from meshplan.planner.serving.search.candidates import candidate_of, config_label, full_counts
from meshplan.planner.serving.search.families import Family
from meshplan.planner.serving.search.max_rate import DOWN, MAX_DOWN
from meshplan.planner.serving.search.slo_judgement import Judged
from meshplan.planner.serving.search.workers import PricedWorker, priced_workers

# Kinds of workers that are simulated with all devices to find how far an SLO must be relaxed: the fastest ones.
MOST_KINDS = 6


def reached(
    problem: ServingProblem, *, comes_in_bursts: bool, seed: int, budget: Budget
) -> Iterator[tuple[Judged, str]]:
    """Deployments on all devices that meet the SLOs, with their labels, until the budget is spent.

    Args:
        problem: with the SLOs that are kept.
        comes_in_bursts: the rate is free, and requests of a burst come at once at any.
        seed: for drawing the requests.
        budget: of the question.
    """
    workload = problem.workload
    if problem.has_free_load and not comes_in_bursts:  # latencies are least where hardly anything runs
        alone = replace(workload, arrival=Arrival.CLOSED_LOOP, concurrency=1, num_requests=16)
        problem = replace(problem, workload=alone)
    for family in _fastest(problem):
        if budget.stopped:
            return
        counts = full_counts(family, most=problem.workload.concurrency)
        if not family.fits(counts) or problem.rules.broken(problem.shape, candidate_of(family, counts).config):
            continue
        candidate = candidate_of(family, counts)
        if comes_in_bursts:  # as in the search, where hardly anything runs between bursts
            rarely = DOWN**MAX_DOWN * family.rate(counts)
            uneven = replace(workload, arrival=workload.open_arrival, request_rate_per_s=rarely)
            problem = replace(problem, workload=uneven)
        judged = judge_once(problem, candidate, seed=seed)
        if judged.is_met:
            yield judged, config_label(candidate.config)


def _fastest(problem: ServingProblem) -> list[Family]:
    """Families whose requests alone are answered soonest: by the time to the first token, and between tokens."""
    aggregated = problem.pinned.is_disaggregated is not True
    mixed = priced_workers(problem, Role.MIXED, Counter()) if aggregated else []
    half = MOST_KINDS // 2 if aggregated else MOST_KINDS
    soonest = [*sorted(mixed, key=_first_token)[:half], *sorted(mixed, key=_between_tokens)[:half]]
    found = [Family(problem=problem, kinds=(kind,)) for kind in {id(kind): kind for kind in soonest}.values()]
    if problem.pinned.is_disaggregated is not False and problem.workload.arrival is not Arrival.ALL_AT_ONCE:
        prefill = sorted(priced_workers(problem, Role.PREFILL, Counter()), key=_first_token)
        decode = sorted(priced_workers(problem, Role.DECODE, Counter()), key=_between_tokens)
        found += [Family(problem=problem, kinds=pair) for pair in zip(prefill[:half], decode[:half], strict=False)]
    return found


def _first_token(kind: PricedWorker) -> float:
    return kind.first_token_s


def _between_tokens(kind: PricedWorker) -> float:
    return float(kind.steady.tpot_s[0])
