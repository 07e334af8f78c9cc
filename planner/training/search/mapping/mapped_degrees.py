"""The search of degrees and mappings where links differ, with the notation of
:mod:`~meshplan.planner.training.search.joint`.

*Method.* The degree search runs under two fixed mappings (rank order, single-linkage order) and under L. The best
candidates of each are mapped, in the order of their L; then degrees are searched under the best mappings found and the
results mapped, until nothing changes. Searches under a mapping keep to the usual splits of the layers; the others are
searched once, under the best mapping. The best few are mapped once more with more steps.

*Bound.* The minimum of: the bounds of the mapped candidates; L of the other candidates that the search under L kept;
and the largest L kept, because all other candidates have a larger one. Across a slow cut L is the least over the ways
in which a candidate can cross it (:mod:`~meshplan.planner.training.search.bounds.crossing_bounds`), searched last, for
what may beat the best mapped candidate.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.errors import SolverError
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Progress, Solution, Status, relative_gap, status_of
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingLimits, TrainingProblem
from meshplan.planner.training.search.bounds.crossing_bounds import CrossingBounds, LeastSteps
from meshplan.planner.training.search.degrees import DegreeSearch, search_degrees, whole_of
from meshplan.planner.training.search.incumbents import TIE_RELATIVE
from meshplan.planner.training.search.mapping.placement import JointResult, Placement, placed_problem, usable_order
from meshplan.planner.training.search.mapping.rank_placement import FULL_STEPS, QUICK_STEPS, linked_order, place
from meshplan.planner.training.search.report import TIE_WIDTH, ScoredConfig, order_of

SOLVER_NAME = "enumeration with bounds + rank mapping"
# Candidates kept by the search under L; the worst of them bounds all others.
BOUND_KEEP = 256
# Candidates that are mapped again with more steps.
POLISHED = 3
# Most rounds of degree search under the best mappings and mapping of the best degrees.
MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A configuration with its mapping.

    Args:
        scored: objective and step under the mapping.
        placement: the mapping.
    """

    scored: ScoredConfig
    placement: Placement


def without_step_limits(limits: TrainingLimits) -> TrainingLimits:
    """The limits that no mapping changes: those on step time and on what follows from it are lifted."""
    return replace(limits, max_step_s=None, max_usd_per_run=None, max_run_s=None)


class MappedDegrees:
    """State of one search over degrees and mappings.

    Args:
        problem: the problem.
        network: its links.
        seed: seed of the mapping search.
        keep: candidates to return.
        mapped: candidates that are mapped.
        usual_splits: see :class:`~meshplan.planner.training.search.degrees.DegreeSearch`.
        budget: what it may spend.
    """

    def __init__(
        self,
        problem: TrainingProblem,
        network: Network,
        *,
        seed: int,
        keep: int,
        mapped: int,
        usual_splits: bool,
        budget: Budget,
    ) -> None:
        self.problem, self.network = problem, network
        self.seed, self.keep, self.mapped = seed, keep, mapped
        self.placed: dict[TrainingConfig, Placed] = {}
        self.too_slow: dict[TrainingConfig, Placed] = {}  # mapped, but beyond a limit on the step: a guide to others
        self.searched: set[tuple[int, ...]] = set()
        self.budget = budget
        self.usual_splits = usual_splits
        self.bounds = CrossingBounds(problem, network, keep=max(keep, BOUND_KEEP), usual_splits=usual_splits)
        self.search = self.bounds.inside
        self.least = LeastSteps(problem, network)

    def run(self, on_progress: OnProgress | None) -> JointResult:
        """The best configuration and its mapping, with what they prove."""
        wall, cpu = time.perf_counter(), time.process_time()
        bounding = self.bounds.search_inside(self.budget, on_progress)
        if bounding.assignment is None and self.bounds.cut is None:
            return JointResult(solution=bounding, search=self.search, best=(), placement=None)
        with self.budget.keeping():
            self._map_all(on_progress)
        if not self.placed:  # the first one is mapped even where nothing is left of the budget
            with self.budget.keeping():
                self._map([scored.config for scored in self.search.best[: self.mapped]], QUICK_STEPS)
        across: list[ScoredConfig] = []
        if not self.usual_splits or not self.placed:  # a comparison needs no proof that nothing across a cut is better
            across = self.bounds.search_across(self._incumbent(), self.budget, on_progress)
        with self.budget.keeping():
            self._map_across(across, on_progress)
            hopeful = [item.scored.config for item in self._ranked()[:POLISHED]]
            self._map([config for config in hopeful if self._may_win(config)], FULL_STEPS)
        ranked = self._ranked()
        if not ranked and self.budget.stopped:
            self.budget.nothing_found("plan")
        if not ranked:
            return self._nothing(bounding, on_progress)
        return self._result(ranked, wall, cpu)

    def _nothing(self, bounding: Solution[ScoredConfig], on_progress: OnProgress | None) -> JointResult:
        """No plan; across a cut the whole question is searched once more, for what it lacks."""
        if self.bounds.cut is not None:
            self.search = DegreeSearch(
                self.bounds.problem, keep=self.keep, space=self.bounds.space, usual_splits=self.usual_splits
            )
            bounding = self.search.run(self.budget, on_progress)
        none = replace(bounding, status=Status.INFEASIBLE, assignment=None, objective=None, gap=None)
        return JointResult(solution=none, search=self.search, best=(), placement=None)

    def _map_all(self, on_progress: OnProgress | None) -> None:
        """Map what may be best, and search again under the best mappings.

        The best under L comes first: where it fits into a part whose links are equal, its mapping attains L, so that a
        budget which ends here leaves no answer that is slower than that part by itself.
        """
        self._map([scored.config for scored in self.search.best[:1]], QUICK_STEPS)
        self._report(on_progress, "mapped")
        for order in dict.fromkeys((usable_order(self.network), linked_order(self.network))):
            self._map(self._best_under(order), QUICK_STEPS)
            self._report(on_progress, "mapped in a given order")
        self._map_promising(self.search.best, self.mapped - len(self.placed), on_progress)
        self._alternate(on_progress)
        if not self.usual_splits:  # other splits of the layers, under the best mapping alone: each search costs seconds
            for item in self._guides()[:1]:
                self._map(self._best_under(item.placement.order, usual_splits=False), QUICK_STEPS)

    def _map_across(self, across: list[ScoredConfig], on_progress: OnProgress | None) -> None:
        """Map candidates that cross the slowest cut and may be better than the best so far."""
        before = self._incumbent()
        self._map_promising(across, self.mapped, on_progress)
        if self._incumbent() < before:
            self._alternate(on_progress)

    def _map_promising(self, found: Sequence[ScoredConfig], most: int, on_progress: OnProgress | None) -> None:
        """Map candidates, best bound first, until one is as good as the bound of the next."""
        for scored in found[: max(most, 0)]:
            if self._incumbent() <= scored.objective:
                break
            if not self._may_win(scored.config):
                continue
            self._map([scored.config], QUICK_STEPS)
            self._report(on_progress, "mapped")

    def _may_win(self, config: TrainingConfig) -> bool:
        """Whether some mapping of a configuration over a slow cut may be better than the best so far."""
        if self.bounds.cut is None:
            return True
        return self.search.objective.of_config(config, self.least.of(config)) < self._incumbent() * (1.0 - TIE_RELATIVE)

    def _result(self, ranked: list[Placed], wall: float, cpu: float) -> JointResult:
        best = ranked[0]
        least, rest = self.bounds.least()
        bounds = [rest, *(value for config, value in least.items() if config not in self.placed)]
        bounds += [
            max(self.search.objective.of_config(config, item.placement.bound_s), least.get(config, rest))
            for config, item in self.placed.items()
        ]
        bound = min(best.scored.objective, *bounds)
        self.search.incumbents.best = [item.scored for item in ranked[: self.keep]]
        solution = Solution(
            status=status_of(best.scored.objective, bound, tolerance=TIE_WIDTH),
            assignment=best.scored,
            objective=best.scored.objective,
            bound=bound,
            gap=relative_gap(best.scored.objective, bound),
            wall_s=time.perf_counter() - wall,
            cpu_s=time.process_time() - cpu,
            solver=SOLVER_NAME,
            seed=self.seed,
            stopped=self.budget.stopped,
        )
        return JointResult(
            solution=solution, search=self.search, best=tuple(self.search.best), placement=best.placement
        )

    def _best_under(self, order: tuple[int, ...], *, usual_splits: bool = True) -> list[TrainingConfig]:
        """The best few degrees under one mapping, where it was not searched yet.

        What takes too long under this mapping may be in time under its own: the best without the limits on step time
        and cost are among them.
        """
        if usual_splits and order in self.searched:
            return []
        self.searched.add(order)
        placed, found = placed_problem(self.problem, order), []
        lifted = without_step_limits(placed.limits)
        questions = [placed] if lifted == placed.limits else [placed, replace(placed, limits=lifted)]
        for problem in questions:
            try:
                _, search = search_degrees(
                    problem,
                    keep=self.keep,
                    space=self.bounds.space.under(whole_of(problem)),
                    usual_splits=usual_splits,
                    budget=self.budget,
                )
            except SolverError:  # the budget was spent before anything was found under this order
                continue
            found += [scored.config for scored in search.best[: max(1, self.mapped // 4)]]
        return list(dict.fromkeys(found))

    def _alternate(self, on_progress: OnProgress | None) -> None:
        """Search degrees under the best mappings and map the results, until nothing changes."""
        for _ in range(MOST_ROUNDS):
            before = [item.scored.objective for item in self._ranked()[:1]]
            for item in self._guides()[:POLISHED]:
                self._map(self._best_under(item.placement.order), QUICK_STEPS)
                self._report(on_progress, "mapped again")
            if [item.scored.objective for item in self._ranked()[:1]] == before:
                return

    def _map(self, configs: Iterable[TrainingConfig], steps: int) -> None:
        for config in configs:
            if self.placed:
                self.budget.check()
            known = self.placed.get(config)
            if known is not None and known.placement.step_s <= known.placement.bound_s:
                continue
            start = None if known is None else known.placement.order
            found = place(self.problem, config, seed=self.seed, steps=steps, start=start, budget=self.budget)
            safe = price(self.bounds.problem, config).safe_bytes if known is None else known.scored.safe_bytes
            scored = ScoredConfig(
                config=config,
                objective=self.search.objective.of_config(config, found.step_s),
                step_s=found.step_s,
                safe_bytes=safe,
            )
            is_in_time = found.step_s <= self._most_step_s(config)
            (self.placed if is_in_time else self.too_slow)[config] = Placed(scored=scored, placement=found)

    def _most_step_s(self, config: TrainingConfig) -> float:
        """Longest step within the limits on step time and cost."""
        problem, limits = self.problem, self.problem.limits
        devices, steps = np.asarray(float(config.world_size)), problem.num_steps
        most = float("inf") if limits.max_step_s is None else limits.max_step_s
        if limits.max_usd_per_run is not None and problem.machine.usd_per_hour_per_device and steps:
            most = min(most, limits.max_usd_per_run / float(problem.run_usd(np.asarray(1.0), devices)))
        if limits.max_run_s is not None and problem.run is not None and steps:
            most = min(most, limits.max_run_s / steps / float(problem.stretch(devices)))
        return most

    def _ranked(self) -> list[Placed]:
        return sorted(self.placed.values(), key=lambda item: order_of(item.scored, self.search.problem.objective))

    def _guides(self) -> list[Placed]:
        """Whose mappings are worth a search: the best, or where none is within the limits the quickest beyond them."""
        return self._ranked() or sorted(self.too_slow.values(), key=lambda item: item.scored.step_s)

    def _incumbent(self) -> float:
        """Objective of the best mapped candidate; infinite while there is none."""
        return min((item.scored.objective for item in self.placed.values()), default=float("inf"))

    def _report(self, on_progress: OnProgress | None, note: str) -> None:
        ranked = self._ranked()
        if on_progress is not None and ranked:
            best = ranked[0].scored.objective
            on_progress(Progress(incumbent=best, bound=None, note=note, unit=self.search.objective.unit))
