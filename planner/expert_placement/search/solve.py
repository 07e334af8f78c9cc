"""Answers ``kind: expert-placement``: a placement, its objective and a bound, for each of the four objectives.

====================  ==========================================  ========================================
objective             solver                                      bound
====================  ==========================================  ========================================
balance               ``balance/balance.py``                      ``balance/bounds.py``, or exact search
robust                ``balance/balance.py`` with several loads   smallest bound of the scenarios
small layers of both  ``balance/every_layout.py`` beside them     every layout
balance+affinity      ``locality/affinity.py``                    most frequent neighbours of each expert
migrate               ``locality/migration.py``                   bound of the balance without a budget
few moves, small      ``locality/every_move.py``                  every layout
least traffic, small  ``locality/chain_of_layouts.py``            a price on balance (Lagrange)
====================  ==========================================  ========================================
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Progress, Solution, Status, relative_gap, status_of
from meshplan.planner.expert_placement.problem.objectives import (
    LEAST_GAIN,
    Objective,
    RobustMeasure,
    balance_of_time,
    balancedness,
    cross_device_fraction,
    cross_node_fraction,
    device_traffic,
    duplicates_on_device,
    moved_experts,
)
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem, Placement
from meshplan.planner.expert_placement.search.balance.balance import Best, Effort, balance, default_work, normalised
from meshplan.planner.expert_placement.search.balance.bounds import time_bound
from meshplan.planner.expert_placement.search.balance.every_layout import best_layouts
from meshplan.planner.expert_placement.search.balance.nodes import (
    group_devices,
    place_groups,
    rename_devices_everywhere,
)
from meshplan.planner.expert_placement.search.locality.affinity import place_for_affinity, traffic_bound
from meshplan.planner.expert_placement.search.locality.chain_of_layouts import best_path
from meshplan.planner.expert_placement.search.locality.every_move import best_moves
from meshplan.planner.expert_placement.search.locality.migration import migrate
from meshplan.planner.expert_placement.search.locality.moves import MigrationCost, migration_cost

# Share of the effort for the most balanced placement where it is only the start of the search.
START_SHARE = 0.2
# Placements of several load cases with other weights on the cases, and how strongly the weights follow the outcome.
ROBUST_TRIALS = 8
ROBUST_STEP = 0.5
MEAN_SHARE = 0.2  # of the effort for one more placement, of the mean load, where the average counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """What one solver found: the map, a bound on the objective, and a name."""

    placement: IntArray | None
    bound: float
    solver: str


def solve(
    problem: ExpertPlacementProblem,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    on_progress: OnProgress | None = None,
) -> Solution[Placement]:
    """Place the experts.

    The search ends after a fixed amount of work, so the same problem and seed give the same placement anywhere; only a
    time limit that strikes first can change that.

    Args:
        problem: the question.
        seed: random seed.
        budget: once it is spent the search stops; None leaves it to the fixed amount of work (well below a second for
            58 layers of 256 experts on 64 devices).
        on_progress: called at the end.

    Raises:
        SolverError: no placement meets ``min_balancedness``, though the bound does not rule one out.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    budget = budget or Budget()
    work = default_work(len(problem.load_cases), problem.num_layers, problem.num_slots, problem.slots_per_device)
    effort = Effort(work=work, budget=budget)
    found = _with_nodes(problem, _SOLVERS[problem.objective](problem, effort, seed))
    objective = None if found.placement is None else objective_of(problem, found.placement)
    bound = found.bound
    if objective is not None:
        # Bound and objective are sums in different orders; where they meet, rounding must not make them cross.
        bound = (min if problem.objective is Objective.BALANCE_AFFINITY else max)(bound, objective)
    if on_progress is not None:
        on_progress(Progress(incumbent=objective, bound=bound, note=found.solver))
    return Solution(
        status=Status.INFEASIBLE if objective is None else status_of(objective, bound),
        assignment=None if found.placement is None else Placement(physical_to_logical_map=found.placement),
        objective=objective,
        bound=bound,
        gap=None if objective is None else relative_gap(objective, bound),
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        solver=found.solver,
        seed=seed,
        stopped=budget.stopped,
    )


def objective_of(problem: ExpertPlacementProblem, placement: IntArray) -> float:
    """Value of a [L, S] map under the problem's objective."""
    if problem.objective is Objective.BALANCE_AFFINITY and problem.transitions is not None:
        return cross_device_fraction(problem.transitions, placement, problem.num_devices)
    return problem.over_cases(problem.case_balancedness(placement))


def answer(problem: ExpertPlacementProblem, solution: Solution[Placement]) -> dict[str, Any]:
    """The solution as plain JSON, every number recomputed from the placement.

    Keys: ``status``, ``bound``, and, unless infeasible, ``physical_to_logical_map``, ``balancedness`` (the smallest
    over the scenarios for ``robust``), ``gap``, ``duplicates_on_device``, ``replicas_per_expert_max``; where the
    problem has what they need, ``scenario_balancedness``, ``cross_device_fraction``, ``cross_node_fraction`` and
    ``moved_experts`` (with ``moved_bytes`` and ``migration_s`` where the sizes and links are known).
    """
    document: dict[str, Any] = {"status": solution.status.value, "bound": solution.bound}
    if solution.assignment is None:
        return document
    placement = solution.assignment.physical_to_logical_map
    cases = problem.case_balancedness(placement)
    counts = np.apply_along_axis(np.bincount, 1, placement, minlength=problem.num_experts)
    document |= {
        "physical_to_logical_map": placement.tolist(),
        "balancedness": float(cases.min()),
        "gap": solution.gap,
        "duplicates_on_device": duplicates_on_device(placement, problem.num_devices),
        "replicas_per_expert_max": int(counts.max()),
    }
    if problem.objective is Objective.ROBUST:
        document["scenario_balancedness"] = cases.tolist()
        document["mean_balancedness"] = float(cases.mean())
        if problem.scenario_names:
            document["scenario_names"] = list(problem.scenario_names)
    if problem.transitions is not None:
        document["cross_device_fraction"] = cross_device_fraction(problem.transitions, placement, problem.num_devices)
        document["cross_node_fraction"] = cross_node_fraction(
            problem.transitions, placement, problem.num_devices, problem.devices_per_node
        )
    if problem.current is not None:
        document |= _moves(problem, placement, problem.current)
    return document


def _moves(problem: ExpertPlacementProblem, placement: IntArray, current: IntArray) -> dict[str, Any]:
    """Moved experts; with their bytes and seconds where the problem knows the sizes and links."""
    if problem.expert_bytes is None:
        return {"moved_experts": moved_experts(placement, current, problem.num_experts, problem.num_devices)}
    cost = cost_of_moves(problem, placement, current, problem.expert_bytes)
    moves = {
        "moved_experts": cost.moved_experts,
        "moved_bytes": cost.moved_bytes,
        "moved_across_nodes_bytes": cost.across_nodes_bytes,
    }
    return moves if cost.seconds is None else moves | {"migration_s": cost.seconds, "migration_bound_s": cost.bound_s}


def cost_of_moves(
    problem: ExpertPlacementProblem, placement: IntArray, current: IntArray, expert_bytes: float
) -> MigrationCost:
    """The change from ``current`` on the problem's links."""
    return migration_cost(
        placement,
        current,
        num_experts=problem.num_experts,
        num_devices=problem.num_devices,
        devices_per_node=problem.devices_per_node,
        expert_bytes=expert_bytes,
        link_bandwidth_bytes_per_s=problem.link_bandwidth_bytes_per_s,
        network_bandwidth_bytes_per_s=problem.network_bandwidth_bytes_per_s,
    )


def most_balanced(problem: ExpertPlacementProblem, effort: Effort, seed: int) -> tuple[Best, float]:
    """The most balanced placement for the problem's load cases, and an upper bound on the worst case's balancedness."""
    speed = problem.device_speed
    cases = normalised(problem.load_cases, speed)
    bounds = np.stack([time_bound(case, problem.num_redundant_experts, speed) for case in cases])
    worst = bounds.max(axis=0)
    best = balance(cases, problem.num_redundant_experts, speed, worst, effort, seed)
    if len(cases) == 1:
        bounds = worst[None]  # the exact search may have raised it
    return best, float(balance_of_time(bounds).mean(axis=1).min())


def _solve_robust(problem: ExpertPlacementProblem, effort: Effort, seed: int) -> _Found:
    """Place for the worst case of each layer; then again with the cases that came out worst made heavier.

    The objective is the smallest over cases of a *mean* over layers, but each layer is placed for its own worst case.
    Where different cases are worst in different layers, weights on the cases win back what that gives away.
    """
    small = _by_every_layout(problem, effort)
    if small is not None and _is_proven(problem, small):
        return small
    speed = problem.device_speed
    cases = normalised(problem.load_cases, speed)
    bounds = np.stack([time_bound(case, problem.num_redundant_experts, speed) for case in cases])
    weight = np.ones(len(cases))
    chosen, reached = None, -1.0
    for trial in range(ROBUST_TRIALS):
        scaled = weight[:, None]
        found = balance(
            cases * scaled[..., None],
            problem.num_redundant_experts,
            speed,
            (bounds * scaled).max(axis=0),
            effort.part(2.0 / ROBUST_TRIALS),
            seed + trial,
        )
        placement = _flat(found.slots)
        balances = problem.case_balancedness(placement)
        if problem.over_cases(balances) > reached:
            chosen, reached = placement, problem.over_cases(balances)
        weight *= (balances.mean() / balances) ** ROBUST_STEP
        weight /= weight.max()
    if problem.robust_measure is RobustMeasure.AVERAGE:
        # A placement for the mean of the loads serves the average of the scenarios, not the worst of them.
        mean = cases.mean(axis=0)
        least = time_bound(mean, problem.num_redundant_experts, speed)
        found = balance(mean[None], problem.num_redundant_experts, speed, least, effort.part(MEAN_SHARE), seed)
        placement = _flat(found.slots)
        if problem.over_cases(problem.case_balancedness(placement)) > reached:
            chosen = placement
    bound = problem.over_cases(balance_of_time(bounds).mean(axis=1))
    usual = _Found(placement=chosen, bound=bound, solver="portfolio")
    if small is None:
        return usual
    better = usual if _reached(problem, usual) > _reached(problem, small) else small
    return replace(better, bound=min(usual.bound, small.bound), solver=f"{small.solver}, {usual.solver}")


def _by_every_layout(problem: ExpertPlacementProblem, effort: Effort) -> _Found | None:
    """The best layouts of small layers and what they prove; None where layers are not small, or there is no time."""
    budget = effort.budget or Budget()
    averages = problem.robust_measure is RobustMeasure.AVERAGE
    speed, spare = problem.device_speed, problem.num_redundant_experts
    cases = normalised(problem.load_cases, speed)
    best = best_layouts(cases, spare, speed, averages=averages, budget=budget)
    return None if best is None else _Found(placement=_flat(best.slots), bound=best.bound, solver="every layout")


def _is_proven(problem: ExpertPlacementProblem, found: _Found) -> bool:
    """Whether a placement meets its bound."""
    return status_of(_reached(problem, found), found.bound) is Status.OPTIMAL


def _reached(problem: ExpertPlacementProblem, found: _Found) -> float:
    return -math.inf if found.placement is None else objective_of(problem, found.placement)


def _solve_balance(problem: ExpertPlacementProblem, effort: Effort, seed: int) -> _Found:
    if problem.num_expert_groups > 1:
        load = normalised(problem.load, problem.device_speed)
        slots, times = place_groups(
            load,
            problem.num_redundant_experts,
            problem.num_devices,
            problem.num_nodes,
            problem.num_expert_groups,
            effort,
            seed,
        )
        return _Found(placement=_flat(slots), bound=float(balance_of_time(times).mean()), solver="groups, then nodes")
    speed = problem.device_speed
    if (speed != speed[0]).any():  # else the portfolio has an exact search of its own
        small = _by_every_layout(problem, effort)
        if small is not None and _is_proven(problem, small):
            return small
    best, bound = most_balanced(problem, effort, seed)
    return _Found(placement=_flat(best.slots), bound=bound, solver="portfolio")


def _solve_affinity(problem: ExpertPlacementProblem, effort: Effort, seed: int) -> _Found:
    """Least traffic at the floor of balancedness: paths through every layout of small layers, where these prove it;
    else the better of those and the search, under the larger bound.

    Raises:
        SolverError: no placement was found that reaches the floor, though none is proven impossible.
    """
    best, most_balance = most_balanced(problem, effort.part(START_SHARE), seed)
    transitions = problem.transitions
    if transitions is None:
        message = "objective balance+affinity without transitions"
        raise SolverError(message)
    bound = traffic_bound(transitions, problem.slots_per_device)
    floor = problem.min_balancedness - LEAST_GAIN  # the best balancedness itself is a floor that can be met
    if floor > most_balance:
        return _Found(placement=None, bound=bound, solver="bound on balancedness")
    load = normalised(problem.load, problem.device_speed)
    spare, budget = problem.num_redundant_experts, effort.budget or Budget()
    small = best_path(load, transitions, spare, problem.device_speed, floor, budget)
    path = None
    if small is not None:
        slots = None if small.slots is None else _flat(small.slots)
        path = _Found(placement=slots, bound=max(bound, small.bound), solver="paths through every layout")
        if slots is None or _is_proven(problem, path):
            return path
    slots, solver = place_for_affinity(
        best.slots, best.counts, load, transitions, problem.device_speed, floor, effort, seed
    )
    if path is not None and path.placement is not None:
        if slots is None or _reached(problem, path) <= objective_of(problem, _flat(slots)):
            return path
        bound, solver = path.bound, f"{path.solver}, {solver}"
    if slots is None:
        reached = balancedness(problem.load, _flat(best.slots), problem.device_speed)
        message = (
            f"no placement with balancedness >= {problem.min_balancedness} found: the best one reaches {reached:.6f}, "
            f"and none can exceed {most_balance:.6f}; lower min_balancedness or add redundant experts"
        )
        raise SolverError(message)
    return _Found(placement=_flat(slots), bound=bound, solver=solver)


def _solve_migration(problem: ExpertPlacementProblem, effort: Effort, seed: int) -> _Found:
    best, bound = most_balanced(problem, effort.part(START_SHARE), seed)
    current = problem.current
    if current is None:
        message = "objective migrate without a current placement"
        raise SolverError(message)
    unlimited = problem.num_layers * problem.num_slots
    budget = unlimited if problem.max_moved_experts is None else problem.max_moved_experts
    load = normalised(problem.load, problem.device_speed)
    present = current.reshape(best.slots.shape)
    exact = best_moves(present, load, problem.device_speed, budget, effort.budget or Budget())
    if exact is not None:
        bound = balancedness(problem.load, _flat(exact), problem.device_speed)
        return _Found(placement=_flat(exact), bound=bound, solver="every layout, then a knapsack")
    slots = migrate(present, best.slots, load, problem.device_speed, budget)
    return _Found(placement=None if slots is None else _flat(slots), bound=bound, solver="repairs and a knapsack")


def _with_nodes(problem: ExpertPlacementProblem, found: _Found) -> _Found:
    """The same placement, devices renamed in the same way in all layers so that much traffic stays inside nodes.

    Unchanged where names matter: a present placement, unequal speeds, groups of experts, or a single node.
    """
    transitions, speed = problem.transitions, problem.device_speed
    fixed = problem.objective is Objective.MIGRATE or problem.num_expert_groups > 1 or bool((speed != speed[0]).any())
    if found.placement is None or transitions is None or fixed or problem.num_nodes == 1:
        return found
    placement = found.placement
    order = group_devices(device_traffic(transitions, placement, problem.num_devices), problem.devices_per_node)
    by_device = placement.reshape(problem.num_layers, problem.num_devices, -1)
    return replace(found, placement=_flat(rename_devices_everywhere(by_device, order)))


_SOLVERS = {
    Objective.BALANCE: _solve_balance,
    Objective.ROBUST: _solve_robust,
    Objective.BALANCE_AFFINITY: _solve_affinity,
    Objective.MIGRATE: _solve_migration,
}


def _flat(slots: IntArray) -> IntArray:
    """[L, S] map from [L, G, s] slots."""
    return np.ascontiguousarray(slots.reshape(slots.shape[0], -1))
