"""From a question to a simulated plan: capacities, the cheapest fleet, and capacity margins until all SLOs are met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Progress, Solution, Status, bounded
from meshplan.planner.gpu_allocation.capacity import Offering, Replica, capacities, offerings, replicas
from meshplan.planner.gpu_allocation.nodes.problem import FleetAllocation, FleetProblem, Scenario, ScenarioPolicy
from meshplan.planner.gpu_allocation.nodes.solve import solve_fleet
from meshplan.planner.gpu_allocation.question import AllocationQuestion
from meshplan.planner.gpu_allocation.replay import NUM_RUNS, NUM_SCREENED, Replay, replay, with_headroom
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.metrics import QUANTILES

# A replica kind whose requests violate an SLO may be loaded to this share of what it was; the fleet is planned again.
TIGHTEN = 0.95
# TIGHTEN_MUCH is used instead where the SLO miss rate exceeds its allowance by more than FAR.
TIGHTEN_MUCH, FAR = 0.88, 0.03
MAX_ROUNDS = 40
# Below this share of a kind's capacity no further margin is tried: its SLOs are violated for another reason than load.
LEAST_FILL = 0.25
# Relative distance of two objectives that are the same sum in another order.
AS_GOOD = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A question as a fleet problem.

    Args:
        question: with everything looked up.
        replicas: every kind that was priced, on no offer yet.
        offerings: kinds of the problem, in its order.
        problem: for the solver.
        rejected: reason → number of layouts rejected for it.
    """

    question: AllocationQuestion
    replicas: tuple[Replica, ...]
    offerings: tuple[Offering, ...]
    problem: FleetProblem
    rejected: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What the search found.

    Args:
        compiled: the problem as it was solved last, with its capacity margins.
        solution: the fleet and its proof.
        replays: one per scenario; empty where the plan was not simulated.
        num_rounds: plans that were replayed.
        first_cost: objective before any capacity margin was added.
    """

    compiled: Compiled
    solution: Solution[FleetAllocation]
    replays: tuple[Replay, ...]
    num_rounds: int
    first_cost: float | None


def compile_question(question: AllocationQuestion) -> Compiled:
    """Price every kind on every bucket and put the problem together."""
    rejected: Counter[str] = Counter()
    found = replicas(question, rejected)
    return assemble(question, found, [service.slos for service in question.services], rejected)


def assemble(
    question: AllocationQuestion,
    found: Sequence[Replica],
    slos: Sequence[Sequence[Slo]],
    rejected: Counter[str] | None = None,
) -> Compiled:
    """The fleet problem for given SLOs, from kinds that are priced already."""
    buckets = [bucket for service in question.services for bucket in service.buckets]
    kept, table = offerings(found, question.offers, capacities(found, len(buckets), slos))
    spec = question.spec
    problem = FleetProblem(
        name=spec.name,
        offers=question.offers,
        kinds=tuple(one.kind for one in kept),
        buckets=tuple(bucket.range for bucket in buckets),
        scenarios=_scenarios(question),
        max_request_rate_per_s=tuple(tuple(row) for row in _table(table)),
        max_utilization=spec.constraints.max_utilization,
        min_spare_replicas=spec.constraints.min_spare_replicas,
        policy=spec.scenarios.policy if spec.scenarios else ScenarioPolicy.ROBUST,
        objective=spec.objective,
        max_power_w=spec.constraints.max_power_w,
        max_usd_per_hour=spec.constraints.max_usd_per_hour,
        start_usd=spec.switching.start_usd if spec.schedule is None else 0.0,
        stop_usd=spec.switching.stop_usd if spec.schedule is None else 0.0,
        switch_hours=spec.switching.hours,
        tied=_tied(question),
        quotas=question.quotas,
        routing_steps=spec.constraints.routing_steps,
    )
    return Compiled(
        question=question,
        replicas=tuple(found),
        offerings=tuple(kept),
        problem=problem,
        rejected=rejected or Counter(),
    )


def _tied(question: AllocationQuestion) -> tuple[tuple[int, ...], ...]:
    """Groups of all services, in the numbers of the question's buckets."""
    groups: list[tuple[int, ...]] = []
    first = 0
    for service in question.services:
        groups += [tuple(first + b for b in group) for group in service.tied]
        first += len(service.buckets)
    return tuple(groups)


def _table(table: FloatArray) -> list[list[float]]:
    rows: list[list[float]] = table.tolist()
    return rows


def _scenarios(question: AllocationQuestion) -> tuple[Scenario, ...]:
    rates = tuple(bucket.request_rate_per_s for service in question.services for bucket in service.buckets)
    spec = question.spec
    if spec.scenarios is not None:
        whole = sum(case.weight for case in spec.scenarios.cases)
        return tuple(
            Scenario(
                name=case.name,
                request_rate_per_s=tuple(case.rate_factor * rate for rate in rates),
                weight=case.weight / whole,
            )
            for case in spec.scenarios.cases
        )
    peak = 1.0 if spec.schedule is None else max(spec.schedule.hourly_rate_factor)
    return (
        Scenario(name="peak hour" if spec.schedule else "", request_rate_per_s=tuple(peak * rate for rate in rates)),
    )


def search_allocation(
    compiled: Compiled, *, seed: int = 0, budget: Budget | None = None, on_progress: OnProgress | None = None
) -> Searched:
    """Plan, replay, add a capacity margin where an SLO is violated, and plan again until all are met.

    Args:
        compiled: the question.
        seed: random seed of the simulated requests.
        budget: once it is spent no further run is simulated, and the fleet of this round is the answer.
        on_progress: called after every round.
    """
    headroom: dict[int, float] = {}
    problem, first = compiled.problem, None
    best: Searched | None = None
    for rounds in range(1, MAX_ROUNDS + 1):
        solution = solve_simplest(replace(compiled, problem=problem))
        first = solution.objective if rounds == 1 else first
        current = replace(compiled, problem=problem)
        if solution.assignment is None or not compiled.question.spec.replay.enabled:
            done = Searched(compiled=current, solution=solution, replays=(), num_rounds=rounds - 1, first_cost=first)
            return best if best is not None and solution.assignment is None else done
        # New requests every round: a plan must not be judged by the requests that its margins were chosen by.
        replays = _replays(current, solution.assignment, (2 * seed * MAX_ROUNDS + rounds) * NUM_RUNS, budget)
        best = Searched(compiled=current, solution=solution, replays=replays, num_rounds=rounds, first_cost=first)
        if on_progress is not None:
            on_progress(Progress(incumbent=solution.objective, bound=first, note=f"replay {rounds}"))
        if budget is not None and budget.stopped:
            return replace(best, solution=replace(solution, status=Status.FEASIBLE, stopped=budget.stopped))
        tightened = _tightened(current, replays, headroom)
        if not tightened:
            return best
        headroom |= tightened
        problem = with_headroom(compiled.problem, headroom)
    if best is None:
        raise AssertionError("at least one round was made")
    return best


def solve_simplest(compiled: Compiled) -> Solution[FleetAllocation]:
    """The best fleet; among fleets as good one without pipeline stages, where there is one."""
    problem, found = compiled.problem, solve_fleet(compiled.problem)
    staged = [one.replica.layout.pipeline_parallel > 1 for one in compiled.offerings]
    if found.assignment is None or found.objective is None or found.bound is None:
        return found
    if not any(count for stage in found.assignment.replicas for g, count in enumerate(stage) if staged[g]):
        return found
    none = (0.0,) * len(problem.buckets)
    table = [none if staged[g] else row for g, row in enumerate(problem.max_request_rate_per_s)]
    other = solve_fleet(replace(problem, max_request_rate_per_s=tuple(table)))
    if other.objective is None or other.objective > found.objective * (1.0 + AS_GOOD):
        return found
    return bounded(other, min(found.bound, other.objective), found)


def _replays(compiled: Compiled, allocation: FleetAllocation, first: int, budget: Budget | None) -> tuple[Replay, ...]:
    """Simulated runs of every scenario, in up to three steps.

    A plan that clearly violates an SLO in :data:`NUM_SCREENED` runs is not simulated further. Otherwise all
    :data:`NUM_RUNS` are, and if they meet every SLO, as many runs with other seeds decide: after several failed rounds
    one may pass by chance.
    """
    screened = tuple(
        replay_scenario(compiled, allocation, s, range(first, first + NUM_SCREENED), budget)
        for s in range(len(compiled.problem.scenarios))
    )
    if any(kept.falls_short for one in screened for kept in one.kept) or (budget is not None and budget.stopped):
        return screened
    for start in (first, first + MAX_ROUNDS * NUM_RUNS):
        replays = tuple(
            replay_scenario(compiled, allocation, s, range(start, start + NUM_RUNS), budget)
            for s in range(len(compiled.problem.scenarios))
        )
        if not all(one.is_kept for one in replays):
            break
    return replays


def replay_scenario(
    compiled: Compiled, allocation: FleetAllocation, scenario: int, seeds: Sequence[int], budget: Budget | None = None
) -> Replay:
    """One scenario, with the number of requests and the burstiness that the spec asks for."""
    spec = compiled.question.spec.replay
    return replay(
        compiled.question,
        compiled.problem,
        compiled.offerings,
        allocation,
        scenario=scenario,
        num_requests=spec.num_requests,
        burstiness=spec.burstiness,
        seeds=seeds,
        budget=budget,
    )


def _tightened(compiled: Compiled, replays: Sequence[Replay], headroom: dict[int, float]) -> dict[int, float]:
    """Kind → larger capacity margin, for services with a violated SLO: the kinds that miss it, or else all of them."""
    more: dict[int, float] = {}
    for one in replays:
        broken: dict[int, float] = {}
        for kept in one.kept:
            if not kept.is_kept:
                share = QUANTILES.get(kept.slo.percentile, 1.0)
                broken[kept.service] = max(broken.get(kept.service, 0.0), share)
        for service, target in broken.items():
            mine = [g for g in one.by_kind if compiled.offerings[g].replica.service == service]
            short = [g for g in mine if one.by_kind[g] < target] or mine
            for g in short:
                step = TIGHTEN_MUCH if one.by_kind[g] < target - FAR else TIGHTEN
                fill = (1.0 - headroom.get(g, 0.0)) * step
                if fill >= LEAST_FILL:
                    more[g] = 1.0 - fill
    return more
