"""Pareto curves of two objectives: balance against traffic, balance against moved experts.

Each curve solves the same problem with several limits and keeps the points that no other point beats in both values.
Its ends are the best placement for either objective alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.errors import SolverError, SpecError
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.expert_placement.problem.objectives import (
    Objective,
    balancedness,
    cross_device_fraction,
    cross_node_fraction,
    moved_experts,
)
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.solve import solve

NUM_POINTS = 6
# Budgets of the migration curve, as parts of the moves to the best balance: most of the gain comes first.
BUDGET_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrafficPoint:
    """A placement on the curve of balance against traffic.

    Args:
        balancedness: balancedness of the placement.
        cross_device_fraction: share of transitions that change device.
        cross_node_fraction: share of transitions that change node.
        placement: [L, S] map.
    """

    balancedness: float
    cross_device_fraction: float
    cross_node_fraction: float
    placement: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MigrationPoint:
    """A placement on the curve of balance against moves.

    Args:
        balancedness: balancedness of the placement.
        moved_experts: from the present placement.
        placement: [L, S] map.
    """

    balancedness: float
    moved_experts: int
    placement: IntArray


def traffic_curve(
    problem: ExpertPlacementProblem, *, num_points: int = NUM_POINTS, seed: int = 0
) -> list[TrafficPoint]:
    """Balance against traffic, most traffic (and balance) last.

    Args:
        problem: with transitions; its objective and floor are not used.
        num_points: floors of balancedness, evenly spaced from what least traffic leaves to the best balance.
        seed: random seed of the solver.

    Raises:
        SpecError: the problem has no transitions.
    """
    transitions = problem.transitions
    if transitions is None:
        raise SpecError.at("transitions", "is missing; balance is traded against traffic")

    def point(placement: IntArray) -> TrafficPoint:
        devices = problem.num_devices
        return TrafficPoint(
            balancedness=balancedness(problem.load, placement, problem.device_speed),
            cross_device_fraction=cross_device_fraction(transitions, placement, devices),
            cross_node_fraction=cross_node_fraction(transitions, placement, devices, problem.devices_per_node),
            placement=placement,
        )

    def at_floor(floor: float) -> list[TrafficPoint]:
        try:
            solution = solve(
                replace(problem, objective=Objective.BALANCE_AFFINITY, min_balancedness=floor, current=None), seed=seed
            )
        except SolverError:  # no placement found between this floor and the bound; the curve lacks the point
            return []
        return [] if solution.assignment is None else [point(solution.assignment.physical_to_logical_map)]

    ends = at_floor(0.0)
    best = solve(replace(problem, objective=Objective.BALANCE, current=None, transitions=None), seed=seed)
    if best.assignment is not None:
        ends.append(point(best.assignment.physical_to_logical_map))
    low, high = min(end.balancedness for end in ends), max(end.balancedness for end in ends)
    points = [*ends]
    for floor in np.linspace(low, high, num_points)[1:]:
        points += at_floor(float(floor) - ROUNDING)
    order = sorted(points, key=lambda item: (item.cross_device_fraction, -item.balancedness))
    kept: list[TrafficPoint] = []
    for item in order:
        if not kept or item.balancedness > kept[-1].balancedness + ROUNDING:
            kept.append(item)
    return kept


def migration_curve(problem: ExpertPlacementProblem, *, seed: int = 0) -> list[MigrationPoint]:
    """Balance against moved experts, fewest moves first.

    Args:
        problem: with a present placement; its objective and budget are not used.
        seed: random seed of the solver.

    Raises:
        SpecError: the problem has no present placement.
    """
    current = problem.current
    if current is None:
        raise SpecError.at("current", "is missing; give the present physical_to_logical_map")

    def with_budget(budget: int | None) -> list[MigrationPoint]:
        migrating = replace(problem, objective=Objective.MIGRATE, max_moved_experts=budget, transitions=None)
        assignment = solve(migrating, seed=seed).assignment
        if assignment is None:  # a legal placement needs more moves
            return []
        placement = assignment.physical_to_logical_map
        moves = moved_experts(placement, current, problem.num_experts, problem.num_devices)
        reached = balancedness(problem.load, placement, problem.device_speed)
        return [MigrationPoint(balancedness=reached, moved_experts=moves, placement=placement)]

    points = with_budget(None)
    most = points[0].moved_experts
    for budget in sorted({round(share * most) for share in BUDGET_SHARES[:-1]}):
        points += with_budget(budget)
    kept: list[MigrationPoint] = []
    for item in sorted(points, key=lambda item: (item.moved_experts, -item.balancedness)):
        if not kept or item.balancedness > kept[-1].balancedness + ROUNDING:
            kept.append(item)
    return kept
