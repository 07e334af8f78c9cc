"""Degrees and rank mapping together, where the links between nodes differ.

*Notation.* T(c, π) is the step of configuration c under mapping π; L(c) ≤ T(c, π) for every π prices c with rates that
no mapping can beat (:class:`~meshplan.planner.cluster.network.network_model.BestLinks`).

*Objective.* min over c and π of f(T(c, π), n_c), with the objectives and limits of the degree search.

Method and bound where links differ: :mod:`.mapping.mapped_degrees`.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.degrees import KEEP, search_degrees
from meshplan.planner.training.search.mapping.placement import (
    RANK_ORDER,
    UNIFORM,
    JointResult,
    Placement,
    placed_problem,
    usable_order,
)
from meshplan.planner.training.search.ties import settle_ties

# Candidates that are mapped.
MAPPED = 32


def search_plans(
    problem: TrainingProblem,
    *,
    seed: int = 0,
    keep: int = KEEP,
    mapped: int = MAPPED,
    order: tuple[int, ...] | None = None,
    usual_splits: bool = False,
    budget: Budget | None = None,
    on_progress: OnProgress | None = None,
) -> JointResult:
    """The best configuration and its rank mapping.

    Args:
        problem: the problem.
        seed: seed of the mapping search.
        keep: candidates to return.
        mapped: candidates that are mapped.
        order: a given mapping; None to search for one.
        usual_splits: see :class:`~meshplan.planner.training.search.degrees.DegreeSearch`.
        budget: what it may spend.
        on_progress: called with incumbent and bound during the search.
    """
    network = problem.machine.network
    if network is None or (network.is_uniform and order is None):
        solution, search = search_degrees(problem, keep=keep, budget=budget, on_progress=on_progress)
        solution = settle_ties(search, solution, budget)
        placement = None if solution.assignment is None else place_config(problem, solution.assignment.config)
        return JointResult(solution=solution, search=search, best=tuple(search.best), placement=placement)
    if order is not None:
        fixed = placed_problem(problem, order)
        solution, search = search_degrees(fixed, keep=keep, budget=budget, on_progress=on_progress)
        solution = settle_ties(search, solution, budget)
        placement = None if solution.assignment is None else given(problem, solution.assignment.config, order)
        return JointResult(solution=solution, search=search, best=tuple(search.best), placement=placement)
    # start-up: in most questions links are equal
    from meshplan.planner.training.search.mapping.mapped_degrees import MappedDegrees

    spend = budget or Budget()
    joint = MappedDegrees(
        problem, network, seed=seed, keep=keep, mapped=mapped, usual_splits=usual_splits, budget=spend
    )
    return joint.run(on_progress)


def place_config(
    problem: TrainingProblem, config: TrainingConfig, *, order: tuple[int, ...] | None = None, seed: int = 0
) -> Placement | None:
    """Place one configuration on the problem's network; None where the machine has none, because its links are uniform.

    Args:
        problem: the problem.
        config: the configuration.
        order: a given mapping; None to search for one.
        seed: seed of the mapping search.
    """
    network = problem.machine.network
    if network is None:
        return None
    if order is not None:
        return given(problem, config, order)
    if network.is_uniform:
        step = price(problem, config).step_s
        return Placement(order=usable_order(network), step_s=step, bound_s=step, method=UNIFORM)
    # start-up: in most questions links are equal
    from meshplan.planner.training.search.mapping.rank_placement import place

    return place(problem, config, seed=seed)


def given(problem: TrainingProblem, config: TrainingConfig, order: tuple[int, ...]) -> Placement:
    """A configuration under a given mapping."""
    # start-up: most specs give no mapping
    from meshplan.planner.training.search.mapping.placement_model import PlacementModel

    model = PlacementModel(problem, config)
    step = float(model.steps_s(np.array([order], dtype=np.int64))[0])
    rank_order = order == usable_order(model.network)
    return Placement(
        order=order,
        step_s=step,
        bound_s=min(step, model.least_step_s()),
        method=RANK_ORDER if rank_order else "as given",
    )
