"""What no mapping can beat: a search inside the parts of a network, and one for each way to cross its slowest cut.

*Notation.* L(c) ≤ T(c, π) for every mapping π prices candidate c with rates that no mapping can beat
(:class:`~meshplan.planner.cluster.network.network_model.BestLinks`). Where a slow cut divides the network, a candidate
on more nodes than the largest part has crosses it in one of the ways w of
:mod:`~meshplan.planner.cluster.network.crossing`, and T(c, π) ≥ min over w of L_w(c).

*Method.* One degree search under L, of candidates that fit into a part; then one under each L_w of the others, cut off
at the best plan that is known: it keeps what may be better, and proves that nothing else is. Without a cut the first
search is of all candidates. All searches share one space: its templates do not depend on the links.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshplan.planner.cluster.network.crossing import CrossingLinks, Cut, Way, slow_cut
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.network.network_model import BestLinks, NetworkModel
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Solution
from meshplan.planner.training.estimator.priced import candidates_of, price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.degrees import DegreeSearch, whole_of
from meshplan.planner.training.search.report import ScoredConfig
from meshplan.planner.training.search.space import Space


class CrossingBounds:
    """Lower bounds of all candidates under any mapping.

    Args:
        problem: the question.
        network: its links.
        keep: candidates of each search whose own bound is kept; the worst of them bounds the others.
        usual_splits: see :class:`~meshplan.planner.training.search.degrees.DegreeSearch`.
    """

    def __init__(self, problem: TrainingProblem, network: Network, *, keep: int, usual_splits: bool) -> None:
        domain_size = problem.machine.domain_size
        self.keep, self.usual_splits = keep, usual_splits
        self.links = BestLinks(network=network, domain_size=domain_size)
        self.problem = _under(problem, self.links)
        cut = slow_cut(network, domain_size)
        most = 0 if cut is None else cut.most_nodes * domain_size
        self.cut: Cut | None = cut if most < problem.most_devices else None
        inside = self.problem if self.cut is None else _limited(self.problem, most=most)
        self.space = Space.of(whole_of(self.problem))
        self.inside = DegreeSearch(inside, keep=keep, space=self.space, usual_splits=usual_splits)
        self.across: list[DegreeSearch] = []

    def search_inside(self, budget: Budget, on_progress: OnProgress | None) -> Solution[ScoredConfig]:
        """Search the candidates that fit into a part."""
        return self.inside.run(budget, on_progress)

    def search_across(self, cutoff: float, budget: Budget, on_progress: OnProgress | None) -> list[ScoredConfig]:
        """Search those that cross the cut; the ones that may be better than ``cutoff``, with their bound as objective.

        Equals by their bound come in the order of the best price that a way gives them.
        """
        if self.cut is None:
            return []
        least = self.cut.most_nodes * self.cut.domain_size + 1
        for way in Way:
            model = CrossingLinks(cut=self.cut, way=way, best=self.links)
            problem = _limited(_under(self.problem, model), least=least)
            search = DegreeSearch(
                problem,
                keep=self.keep,
                space=self.space.under(whole_of(problem)),
                usual_splits=self.usual_splits,
                cutoff=cutoff,
            )
            self.across.append(search)
            search.run(budget, on_progress)
            self.inside.report.add(search.report)
        least_of = self._across()
        kept = sorted((scored for search in self.across for scored in search.best), key=lambda one: one.objective)
        found: dict[TrainingConfig, ScoredConfig] = {}
        for one in kept:
            found.setdefault(one.config, replace(one, objective=least_of[one.config]))
        return sorted(found.values(), key=lambda one: one.objective)

    def least(self) -> tuple[dict[TrainingConfig, float], float]:
        """The bound of each candidate that was kept, and that of all others."""
        own = {scored.config: scored.objective for scored in self.inside.best}
        rest = [_rest(self.inside), *(_rest(search) for search in self.across)]
        return {**own, **self._across()}, min(rest)

    def _across(self) -> dict[TrainingConfig, float]:
        """The bound of each candidate that some way kept: the least over all ways."""
        kept = [({scored.config: scored.objective for scored in search.best}, _rest(search)) for search in self.across]
        configs = {config for own, _ in kept for config in own}
        return {config: min(own.get(config, rest) for own, rest in kept) for config in configs}


class LeastSteps:
    """The least step of single configurations under any mapping.

    Args:
        problem: the question.
        network: its links.
    """

    def __init__(self, problem: TrainingProblem, network: Network) -> None:
        self.problem, self.domain_size = problem, problem.machine.domain_size
        self.best = BestLinks(network=network, domain_size=self.domain_size)
        self.cut = slow_cut(network, self.domain_size)

    def of(self, config: TrainingConfig) -> float:
        """No mapping takes less for a step, s: the least over the ways in which it can cross the slowest cut."""
        if self.cut is None or config.world_size <= self.cut.most_nodes * self.domain_size:
            return price(_under(self.problem, self.best), config).step_s
        degrees = candidates_of(self.problem, config).degrees
        ways = [CrossingLinks(cut=self.cut, way=way, best=self.best) for way in Way]
        possible: list[NetworkModel] = [model for model in ways if model.is_possible(degrees)[0]]
        return min(price(_under(self.problem, model), config).step_s for model in possible or [self.best])


def _rest(search: DegreeSearch) -> float:
    """No candidate that a search did not keep is better than that."""
    return min(search.incumbents.threshold, search.unseen)


def _under(problem: TrainingProblem, model: NetworkModel) -> TrainingProblem:
    return replace(problem, machine=replace(problem.machine, network_model=model))


def _limited(problem: TrainingProblem, *, least: int = 0, most: float = math.inf) -> TrainingProblem:
    limits = replace(
        problem.limits,
        min_devices=max(problem.limits.min_devices, least),
        max_devices=int(min(problem.limits.max_devices, most)),
    )
    return replace(problem, limits=limits)
