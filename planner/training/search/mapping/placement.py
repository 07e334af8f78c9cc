"""The mapping of one configuration: which node holds which ranks, what its step takes; the question under a mapping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.network.network_model import NetworkModel, OneOrder
from meshplan.planner.training.problem.problem import TrainingProblem

if TYPE_CHECKING:
    from meshplan.planner.core.solution import Solution
    from meshplan.planner.training.search.degrees import DegreeSearch
    from meshplan.planner.training.search.report import ScoredConfig

EXHAUSTIVE, ANNEALING, RANK_ORDER = "all mappings", "annealing", "rank order"
CONSTRUCTED = "nodes in the order of their links"
UNIFORM = "rank order (uniform links)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A mapping of one configuration.

    Args:
        order: node of each slot, then the spare nodes.
        step_s: optimizer step under the mapping.
        bound_s: lower bound of the step under any mapping.
        method: search method that found it.
    """

    order: tuple[int, ...]
    step_s: float
    bound_s: float
    method: str


def usable_order(network: Network) -> tuple[int, ...]:
    """Rank order: usable nodes by number."""
    return tuple(network.usable)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointResult:
    """Result of the joint search.

    Args:
        solution: the best configuration with its proof.
        search: the degree search, with what it considered and rejected.
        best: the best candidates, best first.
        placement: mapping of the best one; None on a uniform network.
    """

    solution: Solution[ScoredConfig]
    search: DegreeSearch
    best: tuple[ScoredConfig, ...]
    placement: Placement | None


def placed_problem(problem: TrainingProblem, order: tuple[int, ...]) -> TrainingProblem:
    """The problem with its network priced under a mapping: slot i on node ``order[i]``."""
    return under_links(problem, _one_order(problem, order))


def _one_order(problem: TrainingProblem, order: tuple[int, ...]) -> OneOrder:
    network = problem.machine.network
    if network is None:
        raise ValueError("a mapping needs a network")
    return OneOrder(network=network, order=order, domain_size=problem.machine.domain_size)


def under_links(problem: TrainingProblem, network_model: NetworkModel) -> TrainingProblem:
    """The problem with its links between nodes priced in another way."""
    return replace(problem, machine=replace(problem.machine, network_model=network_model))
