"""Deployments that are refused without a simulation: above a limit on money or power, or too slow for certain.

A closed loop of far more requests than a deployment begins at once makes them wait so long that no schedule keeps the
SLOs; :func:`overload` says how long at least.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.candidates import Candidate
from meshplan.planner.serving.search.slo_judgement import MOST_SIMULATED_WORKERS
from meshplan.planner.serving.search.trials import DECISIVE, FEWEST
from meshplan.planner.serving.simulation.arrivals import default_num_requests
from meshplan.planner.serving.simulation.early_stopping import needed_beyond


def refused(problem: ServingProblem, candidate: Candidate) -> str | None:
    """Why a deployment is not simulated: a limit on money or power that it exceeds, or a wait that is certain."""
    limits = problem.limits
    if limits.max_usd_per_hour is not None and (candidate.usd_per_hour or 0.0) > limits.max_usd_per_hour:
        return "cost per hour is above max_usd_per_hour"
    if limits.max_power_w is not None and (candidate.power_w or 0.0) > limits.max_power_w:
        return "average power is above max_power_w"
    late = overload(candidate)
    return None if late is None else f"{late.key} cannot hold with so many requests in flight (least wait)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A closed loop so far beyond capacity that an SLO is violated whatever is simulated.

    Args:
        key: of the SLO, or of two that cannot hold together.
        text: what takes how long at least, in words.
        limit_s: what the SLO allows.
        least_s: what it is certain to be at least.
    """

    key: str
    text: str
    limit_s: float
    least_s: float


def overload(candidate: Candidate) -> Overload | None:
    """The SLO of a closed loop that is certain to be violated :data:`DECISIVE`-fold, by the most; None where none is.

    C requests are in flight until the run of N ends. Two bounds, whatever the scheduler mixes into an iteration:

    *The first C* come at once. Workers whose least times for a prompt are p_i finish at most Σ (t/p_i + 1) prompts in
    a time t, so that C − Σ (t/p_i + 1) of the N times to first tokens are longer than t, in any order and with any
    router.

    *Those that follow* are begun in the order in which they came, at most R at once (``max_num_seqs``). Each finds c =
    C − 1 before it, but for one a worker that an even share leaves over, of which c − R have to end before it is begun,
    and no more than R of these may be half done: with X requests/s at most it waits (c − 2R)/X. Of workers that do
    both this is time before the first token. Behind prefill workers it may lie between tokens as well: where the stay
    is longer than TTFT and TPOT allow together, one of both is too long for every one of the N − C, and no two
    percentiles leave so many out. Of identical workers, whose router loads them evenly, and where no client thinks.
    """
    problem = candidate.family.problem
    workload = problem.workload
    if workload.arrival is not Arrival.CLOSED_LOOP or workload.concurrency is None:
        return None
    # Of many workers four are simulated, with their share of the load.
    parts = max(candidate.config.num_workers / MOST_SIMULATED_WORKERS, 1.0)
    num = parts * max(default_num_requests(workload) / (1.0 if workload.num_requests else parts), FEWEST)
    in_flight = min(workload.concurrency, num)
    following_s, following = _least_following_s(candidate), num - in_flight
    waits_first = not candidate.config.is_disaggregated
    found = []
    for slo in problem.slos:
        least_s = _least_of_first_s(candidate, slo, in_flight, num) if slo.metric in ("ttft", "e2e") else 0.0
        if slo.metric == "e2e" or (slo.metric == "ttft" and waits_first):
            if slo.percentile == "mean":
                least_s = max(least_s, following_s * following / num)
                if slo.metric == "e2e":  # Little's law alone: all C stay until the last one is sent
                    least_s = max(least_s, in_flight / _most_per_s(candidate) * following / num)
            elif following >= needed_beyond(slo.percentile, math.ceil(num)):
                least_s = max(least_s, following_s)
        text = f"the {slo.percentile} of {slo.metric.upper()} is"
        found.append(Overload(key=slo.key, text=text, limit_s=slo.limit_s, least_s=least_s))
    for first, each in itertools.product(problem.slos, problem.slos):
        if (first.metric, each.metric) != ("ttft", "tpot") or "mean" in (first.percentile, each.percentile):
            continue
        if following > sum(needed_beyond(slo.percentile, math.ceil(num)) for slo in (first, each)):
            limit_s = first.limit_s + max(workload.output_length - 1.0, 0.0) * each.limit_s
            text = "a whole stay, of which both limit their part, is"
            key = f"{first.key} with {each.key}"
            found.append(Overload(key=key, text=text, limit_s=limit_s, least_s=following_s))
    certain = [one for one in found if one.least_s > DECISIVE * one.limit_s]
    return max(certain, key=lambda one: one.least_s / one.limit_s, default=None)


def _least_of_first_s(candidate: Candidate, slo: Slo, in_flight: float, num: float) -> float:
    """The first bound of :func:`overload`: t at which as many are longer as the percentile needs, s.

    For a mean the most of t times the share of those that are longer, which is where half of them are.
    """
    kinds = [(kind, count) for kind, count in candidate.parts if kind.placed.role is not Role.DECODE]
    most_per_s = sum(count / kind.least_prompt_s for kind, count in kinds)
    waiting = in_flight - sum(count for _, count in kinds)
    if slo.percentile == "mean":
        return max(waiting, 0.0) ** 2 / (4.0 * most_per_s * num)
    return (waiting - needed_beyond(slo.percentile, math.ceil(num))) / most_per_s


def _least_following_s(candidate: Candidate) -> float:
    """The second bound of :func:`overload`, s; 0 where it does not hold."""
    workload, parts = candidate.family.problem.workload, candidate.parts
    several = len(parts) > 1 and not candidate.config.is_disaggregated
    if several or workload.think_s or workload.num_prefixes is not None:
        return 0.0
    begun = sum(pool.num_workers * (1.0 + 2.0 * pool.limits.max_num_seqs) for pool in candidate.config.pools)
    return max((workload.concurrency or 0) - begun, 0.0) / _most_per_s(candidate)


def _most_per_s(candidate: Candidate) -> float:
    """X: no more requests/s are finished, whatever the SLOs."""
    each = [count * float(kind.most_rate_per_s.max()) for kind, count in candidate.parts]
    return min(each) if candidate.config.is_disaggregated else sum(each)
