"""Which deployment serves the load within every SLO at the best objective: bound, simulate, cut.

*Notation.* A candidate c is a worker (node type, layout, formats, limits), how many of them, for prefill and decode
pools a pair of those, and a method and depth of drafts or none, and devices whole or cut by MIG, where the question
leaves that open. s̲(c) is its score
in closed form, s(c) its score in the simulation; smaller is better.

*Objective.* min s(c) over candidates whose simulated latencies meet every SLO at its percentile.

*Bound.* Closed forms leave out queueing, block waste and uneven arrival, so s̲(c) ≤ s(c) up to sampling noise;
candidates that violate an SLO in closed form violate it in the simulation. Candidates are simulated in the order of s̲;
once the incumbent's s is at most the next s̲, no candidate left can beat it. When the number of simulations or the time
runs out first, the smallest s̲ left is the bound and the gap is reported.

What is proven and what is sampled: enumeration and bound are exact under the estimator; latencies at a percentile are
sampled, and decided with a stated confidence (:mod:`meshplan.planner.serving.search.trials`). Where the highest rate is
asked for, the search compares deployments by shorter runs; the rate of its answer is lowered until longer runs keep the
SLOs (it is *settled*), and the bound, which knows only the search's rates, makes the stated gap cover what that costs.
The plan is called optimal only where that gap, sampling included, is within :data:`HEADROOM_TOLERANCE`: near saturation
a rate can be neither shown to hold nor to fail by runs of bearable length, and a deployment as good may be left.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshplan.catalogs.constants.machines.device_shares import DeviceShare
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Solution, Status, relative_gap, status_of
from meshplan.planner.core.text import counted
from meshplan.planner.serving.problem.config import Pool, Role, ServingConfig, Speculation, pins_text
from meshplan.planner.serving.problem.problem import ServingObjective, ServingProblem
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.search.branch import (
    SAME,
    TIE,
    Branch,
    Simulated,
    score_judged,
    simulate_candidate,
)
from meshplan.planner.serving.search.candidates import candidate_of, config_label, full_counts
from meshplan.planner.serving.search.families import Family
from meshplan.planner.serving.search.layouts import PlacedWorker
from meshplan.planner.serving.search.scores import INFINITE
from meshplan.planner.serving.search.slo_judgement import HighestRate
from meshplan.planner.serving.search.trials import Effort
from meshplan.planner.serving.search.workers import PricedWorker, priced_workers

# Relative distance between the rate that a plan's deployment is said to bear and one that it does not bear clearly; and
# the largest stated gap of a plan that is called optimal.
HEADROOM_TOLERANCE = 0.05
# Kinds of each node type that stand together with those of two or more other types: the fastest per device.
MOST_OF_A_TYPE = 8
# Deployments whose highest rate is settled at most, once one is: the best of the search, others should that lower it.
MOST_SETTLED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """The record of a search.

    Args:
        simulated: every simulated candidate, best first; those that meet all SLOs before the others.
        num_candidates: deployments in closed form.
        rejected: reason → number of workers or deployments rejected for it.
        num_refused: of the deployments, those that a limit or a bound refuses before a simulation.
        mixed: priced mixed workers with the drafts of the best candidate, for the Pareto front.
        is_complete: nothing was left out that a bound does not rule out.
    """

    simulated: tuple[Simulated, ...]
    num_candidates: int
    rejected: Counter[str]
    mixed: tuple[PricedWorker, ...]
    is_complete: bool = True
    num_refused: int = 0


def search_serving(
    problem: ServingProblem,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Solution[Simulated], ServingReport]:
    """Find the best deployment; see the module's text."""
    start_wall, start_cpu = time.perf_counter(), time.process_time()
    rejected: Counter[str] = Counter()
    budget = budget or Budget(memory_limit_bytes=None)
    branch: Branch | None = None
    with budget.keeping():
        mixed, found = _space(problem, rejected, budget.check)
        branch = Branch(problem, found, seed=seed, budget=budget, on_progress=on_progress)
    if branch is None:
        budget.nothing_found("deployment that meets every SLO")
    before = INFINITE
    while True:
        simulated, bound = branch.run()
        simulated.sort(key=lambda one: (one.score, one.judged.num_misses, one.candidate.score))
        _simplest_first(simulated, bound)
        before = min(before, simulated[0].score if simulated else INFINITE)
        with budget.keeping():
            _settle(problem, simulated, seed, budget)
        _settled_first(problem, simulated)
        if not simulated or not problem.has_free_rate or not branch.resume(simulated[0].score):
            break
    rejected.update(branch.rejected)
    report = ServingReport(
        simulated=tuple(simulated),
        num_candidates=branch.num_members,
        rejected=rejected,
        mixed=mixed[_choice(simulated[0]) if simulated else (problem.speculation, None)],
        is_complete=branch.is_complete,
        num_refused=branch.num_refused,
    )
    best = simulated[0] if simulated and simulated[0].score < INFINITE else None
    if best is None and budget.stopped:
        budget.nothing_found("deployment that meets every SLO")
    objective = None if best is None else best.score
    status = Status.INFEASIBLE
    if objective is not None and best is not None:
        # By the search's own runs, which are those of the bound: settling lowers the best as it would the others.
        proven = status_of(before, bound, tolerance=TIE + SAME)
        # What is stated covers the sampling too: rates that were neither shown to hold nor to fail.
        bound = min(bound, objective * (1.0 - _sampling_error(problem, best)), branch.not_refuted)
        stated = status_of(objective, bound, tolerance=HEADROOM_TOLERANCE)
        status = proven if stated is Status.OPTIMAL else Status.FEASIBLE
    return Solution(
        status=status,
        assignment=best,
        objective=objective,
        bound=None if objective is None else bound,
        gap=None if objective is None else relative_gap(objective, bound),
        wall_s=time.perf_counter() - start_wall,
        cpu_s=time.process_time() - start_cpu,
        solver="closed-form bounds, event-skipping simulation",
        seed=seed,
        stopped=budget.stopped,
    ), report


def _sampling_error(problem: ServingProblem, best: Simulated) -> float:
    """Relative uncertainty of a simulated rate that the objective depends on; 0 where the load is offered."""
    depends = problem.objective is not ServingObjective.NUM_DEVICES and best.judged.refuted_per_s is None
    return min(best.judged.rate_error, 1.0) if depends else 0.0


def _settle(problem: ServingProblem, simulated: list[Simulated], seed: int, budget: Budget) -> None:
    """Hold the best deployment against longer runs, as far as the search has not, and put what is then the best first.

    Under a given load only deployments that tie with the incumbent are left: one that fails goes to the end.

    Raises:
        OutOfBudgetError: no time is left; what was simulated is as good as the search's own runs.
    """
    if problem.has_free_rate:
        _settle_rates(problem, simulated, seed, budget)
        return
    while simulated and simulated[0].score < INFINITE and not simulated[0].judged.is_settled:
        budget.check()
        first = simulate_candidate(problem, simulated[0].candidate, seed=seed)
        simulated.pop(0)
        simulated.insert(0 if first.score < INFINITE else len(simulated), first)


def _settle_rates(problem: ServingProblem, simulated: list[Simulated], seed: int, budget: Budget) -> None:
    """The same for the highest rate of the best deployment, which may be lowered.

    Another deployment is settled too while its rate in the search promises more than a tie above the best settled one,
    or a tie with it though it is simpler, and while none is settled.
    """
    settled = [one for one in simulated if one.score < INFINITE and one.judged.is_settled]
    best = min(settled, key=lambda one: one.score, default=None)
    for tried in itertools.count():
        left = [one for one in simulated if one.score < INFINITE and not one.judged.is_settled]
        least = min((one.score for one in settled), default=INFINITE)
        rival = next((one for one in left if best is None or _comes_before(one, best, least)), None)
        if rival is None or (best is not None and tried >= MOST_SETTLED):
            break
        budget.check()
        judged = _search_of(problem, rival, seed, budget).settle().judged()
        simulated.remove(rival)
        if not judged.is_met:
            simulated.append(replace(rival, judged=judged, score=INFINITE))
            continue
        found = replace(rival, judged=judged, score=score_judged(problem, rival.candidate, judged))
        settled.append(found)
        is_best = best is None or _comes_before(found, best, least)
        simulated.insert(0 if is_best else 1, found)
        best = found if is_best else best


def _comes_before(one: Simulated, best: Simulated, least: float) -> bool:
    """Whether a deployment is better than the best by more than a tie, or simpler and ties with the least score."""
    is_simpler = _simplicity(one)[:-1] < _simplicity(best)[:-1]
    return one.score < best.score * (1.0 - TIE) or (is_simpler and one.score <= least * (1.0 + TIE))


def _settled_first(problem: ServingProblem, simulated: list[Simulated]) -> None:
    """Answer no highest rate that longer runs have not confirmed, though it ties with one that they have."""
    settled = (i for i, one in enumerate(simulated) if one.judged.is_settled and one.score < INFINITE)
    if problem.has_free_rate and (place := next(settled, 0)):
        simulated.insert(0, simulated.pop(place))


def _search_of(problem: ServingProblem, found: Simulated, seed: int, budget: Budget) -> HighestRate:
    """The search for the highest rate of a deployment as it ended, without its runs."""
    candidate = found.candidate
    costs = candidate.costs
    search = HighestRate(
        problem,
        candidate.config,
        high_per_s=candidate.request_rate_per_s,
        seed=seed,
        costs=costs,
        check=budget.check,
    )
    search.start_from(found.judged.requests_per_s, found.judged.worst_ratio)
    search.refuted = (found.judged.refuted_per_s or math.inf) / search.copies
    return search


def _simplest_first(simulated: list[Simulated], bound: float) -> None:
    """Among deployments that the bound cannot tell from the best, within the tie, put the simplest first.

    The chosen one is at most :data:`TIE` from the bound, unless none is.
    """
    best = simulated[0].score if simulated else INFINITE
    if best == INFINITE:
        return
    tied = [one for one in simulated if one.score <= max(best * (1.0 + SAME), bound / (1.0 - TIE))]
    simulated[: len(tied)] = sorted(tied, key=_simplicity)


def _simplicity(simulated: Simulated) -> tuple[float, ...]:
    """As :meth:`Family.simplicity`, then the end-to-end latency."""
    candidate = simulated.candidate
    latency = simulated.judged.metrics.latencies["e2e"].mean
    return (*candidate.family.simplicity(candidate.counts), latency)


# Drafts, and how devices are shared.
Choice = tuple[Speculation | None, DeviceShare | None]


def _choice(found: Simulated) -> Choice:
    config = found.candidate.config
    return config.speculation, config.pools[0].share


def _space(
    problem: ServingProblem, rejected: Counter[str], check: Callable[[], None]
) -> tuple[dict[Choice, tuple[PricedWorker, ...]], list[Family]]:
    """Mixed workers by choice, and every family with every choice of drafts and of instances.

    A layout that is rejected without drafts is with any, and is counted once. Prefill workers draft nothing. Devices
    that are cut serve alone: neither beside whole ones, nor as prefill or decode workers, whose caches no link joins.
    """
    mixed: dict[Choice, tuple[PricedWorker, ...]] = {}
    found: list[Family] = []
    for cut in problem.with_each_share:
        alone, families_of = _space_of(cut, rejected if not mixed else Counter(), check)
        mixed |= {(drafts, cut.share): kinds for drafts, kinds in alone.items()}
        found += families_of
    return mixed, found


def _space_of(
    problem: ServingProblem, rejected: Counter[str], check: Callable[[], None]
) -> tuple[dict[Speculation | None, tuple[PricedWorker, ...]], list[Family]]:
    """The same of devices that are cut in one way, or not at all."""
    mode, splits = problem.pinned.is_disaggregated, problem.rules.disaggregates
    if mode and not splits:
        rejected[f"{problem.rules.name} has no flag for workers that prefill or decode only"] += 1
    # An answer of one token is done after its prefill.
    may_split = splits and mode is not False and problem.workload.mean_lengths[1] > 1.0
    may_split = may_split and problem.workload.arrival is not Arrival.ALL_AT_ONCE and problem.share is None
    mixed: dict[Speculation | None, tuple[PricedWorker, ...]] = {}
    prefill: list[PricedWorker] = []
    found: list[Family] = []
    for stated in problem.with_each_draft:
        seen = Counter[str]() if mixed else rejected
        alone = [] if mode else priced_workers(stated, Role.MIXED, seen, check)
        if may_split and not mixed:
            prefill = priced_workers(stated, Role.PREFILL, rejected, check)
        decode = priced_workers(stated, Role.DECODE, seen, check) if may_split else []
        mixed[stated.speculation] = tuple(alone)
        found += families(stated, alone, prefill, decode)
    return mixed, found


def families(
    problem: ServingProblem, mixed: list[PricedWorker], prefill: list[PricedWorker], decode: list[PricedWorker]
) -> Iterator[Family]:
    """Every family of a question, unordered."""
    for kind in mixed:
        yield Family(problem=problem, kinds=(kind,))
    for first in prefill:
        for second in decode:
            if first.placed.quantization.kv_cache == second.placed.quantization.kv_cache:
                yield Family(problem=problem, kinds=(first, second))
    if problem.workload.request_rate_per_s is None and problem.objective is not ServingObjective.MAX_REQUEST_RATE:
        return  # a ratio of a union lies between those of its parts
    if problem.workload.concurrency is not None or "num_workers" in problem.pinned.of(Role.MIXED):
        return
    yield from _unions(problem, mixed)


def _unions(problem: ServingProblem, mixed: list[PricedWorker]) -> Iterator[Family]:
    """Mixed kinds of different node types behind one router."""
    by_type: dict[str, list[PricedWorker]] = {}
    for kind in mixed:
        if kind.best_rate_per_s > 0.0:
            by_type.setdefault(kind.placed.node_type, []).append(kind)
    for kinds_of in by_type.values():
        kinds_of.sort(key=lambda kind: -kind.best_rate_per_s / kind.num_devices)
    for number in range(2, len(by_type) + 1):
        most = None if number == 2 else MOST_OF_A_TYPE  # noqa: PLR2004 - a pair of types
        for types in itertools.combinations(by_type.values(), number):
            for kinds in itertools.product(*(kinds_of[:most] for kinds_of in types)):
                if len({kind.placed.quantization.kv_cache for kind in kinds}) == 1:
                    yield Family(problem=problem, kinds=kinds)


def sustainable_rate(problem: ServingProblem, chosen: Simulated, *, seed: int = 0) -> float:
    """A rate up to which a deployment meets every SLO clearly, requests/s.

    So clearly that one run of enough stays shows it, within :data:`HEADROOM_TOLERANCE` of the highest such rate; at
    least the question's own where it meets that, and 0 where no rate is.
    """
    candidate = chosen.candidate
    supply = candidate.family.rate(candidate.counts)
    rate = problem.workload.request_rate_per_s or 0.0
    costs = candidate.costs
    search = HighestRate(
        problem,
        candidate.config,
        high_per_s=max(supply, rate),
        tolerance=HEADROOM_TOLERANCE,
        seed=seed,
        costs=costs,
    )
    search.effort = Effort.CLEAR
    is_met = chosen.judged.is_met
    if rate and is_met:
        search.start_from(rate, chosen.judged.worst_ratio)
    while not search.is_closed:
        search.narrow()
    return max(rate if is_met else 0.0, search.met_per_s)


def estimate_pinned(
    problem: ServingProblem, *, own: ServingConfig | None = None, seed: int = 0
) -> tuple[Simulated, ServingReport]:
    """One configuration, whether or not it meets the SLOs: pinned choices, every other degree 1, the fewest devices.

    Args:
        problem: the question, with its pins.
        own: a deployment whose workers are taken where a question leaves kinds of them to choose from: node types,
            formats, power limits; None for the first.
        seed: for drawing the requests.

    Raises:
        ValueError: nothing fits; the message gives the most frequent reason.
    """
    rejected: Counter[str] = Counter()
    without_slos = replace(problem, slos=())
    mixed: list[PricedWorker] = []
    if problem.pinned.is_disaggregated:
        pair = [_one_kind(without_slos, role, own, rejected) for role in (Role.PREFILL, Role.DECODE)]
        found = list(families(without_slos, [], *pair))
    else:
        mixed = _one_kind(without_slos, Role.MIXED, own, rejected)
        found = list(families(without_slos, mixed, [], []))
    candidates = [candidate_of(family, counts) for family in found for counts in family.first()]
    if not candidates:
        raise ValueError(_why_none(without_slos, found, rejected))
    chosen = min(candidates, key=lambda one: one.config.num_devices)
    simulated = simulate_candidate(problem, chosen, seed=seed)
    # Its bound without SLOs: of more requests it finishes no more, however many are sent.
    judged = simulated.judged.finishing(chosen.family.rate(chosen.counts))
    simulated = replace(simulated, judged=judged)
    score = score_judged(problem, chosen, judged)
    report = ServingReport(
        simulated=(replace(simulated, score=score),),
        num_candidates=1,
        rejected=rejected,
        mixed=tuple(mixed),
    )
    return report.simulated[0], report


def _why_none(problem: ServingProblem, found: Sequence[Family], rejected: Counter[str]) -> str:
    """Why no configuration is priced: workers that fit are too slow for the rate, or none fits.

    Of too slow ones the fastest that the question leaves open is named by its pins.
    """
    asked = problem.workload.request_rate_per_s
    if not found or asked is None:
        reason = rejected.most_common(1)[0][0] if rejected else "the pinned degrees need more devices than there are"
        return f"this configuration cannot run: {reason}"
    first = candidate_of(found[0], full_counts(found[0]))
    text = (
        f"{config_label(first.config)} on {counted(first.config.num_devices, 'device')}, the first that is left open, "
        f"finishes at most {found[0].rate(first.counts):.3g} of the {asked:g} requests/s"
    )
    kinds = [] if problem.pinned.is_disaggregated else priced_workers(problem, Role.MIXED, Counter())
    able = [(family, full_counts(family)) for family in families(problem, kinds, [], [])]
    able = [one for one in able if one[0].fits(one[1]) and one[0].rate(one[1]) >= asked]
    if not able:
        return f"{text}: lower workload.request_rate_per_s, or pin other choices"
    best = max(able, key=lambda one: one[0].rate(one[1]))
    return f"{text}: pin one that does, such as {pins_text(candidate_of(*best).config)}, or let meshplan plan choose"


def _one_kind(
    problem: ServingProblem, role: Role, own: ServingConfig | None, rejected: Counter[str]
) -> list[PricedWorker]:
    """The first kind of worker of a role, or the one that a deployment has; empty where none fits."""
    kinds = priced_workers(problem, role, rejected)
    if own is not None:
        (pool,) = (pool for pool in own.pools if pool.role is role)
        kinds = sorted(
            (kind for kind in kinds if _is_of(kind.placed, pool)),
            key=lambda kind: (kind.placed.weight_tiers != pool.weight_tiers, kind.placed.ffn != pool.ffn),
        )
    return kinds[:1]


def _is_of(placed: PlacedWorker, pool: Pool) -> bool:
    """Whether a worker is one of a pool's: weights beyond its devices may lie elsewhere under another load."""
    mine = (placed.node_type, placed.quantization, placed.power_cap_w)
    return mine == (pool.node_type, pool.quantization, pool.power_cap_w)
