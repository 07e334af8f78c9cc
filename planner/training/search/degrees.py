"""The best parallel degrees: every legal candidate, priced or ruled out by a bound.

*Notation.* A candidate c uses n_c devices and takes T(c) seconds a step under the estimator; M(c) is the safe bound of
its worst rank.

*Objective.* min f(c): T for throughput; n·T for money; n, then T, for fewest devices; energy, which grows with n·T
(:mod:`~meshplan.planner.training.search.objective`).

*Constraints.* M(c) ≤ device memory; n_c ≤ max_devices; the rules of the model and of the framework; limits on money,
host memory and step time.

*Bound.* :class:`~meshplan.planner.training.search.bounds.cell_bounds.CellBounds` gives every template under every split
a step that none of its candidates can beat, with the recompute without which none of them stays within memory
(:mod:`~meshplan.planner.training.search.bounds.memory_bounds`). Templates are visited best bound first, a portion at a
time (:mod:`~meshplan.planner.training.search.frontier`); the smallest bound of what is left is the bound of the answer
whenever the search ends. It ends when that is no better than the K-th best incumbent, so that the incumbent is optimal
under the estimator and the gap is 0. A candidate beyond the memory rules out those of its template that need no less
(:func:`~meshplan.planner.training.search.memory_savers.leaders`).

*Candidates beyond the memory* are tried with a block of recomputed layers and with offload, where the limits allow it
(:mod:`~meshplan.planner.training.search.memory_savers`). The bound of the candidate itself holds for them too.

*Choices on request* (``search_over``) multiply the candidates, one copy for each value
(:mod:`~meshplan.planner.training.search.variants`); none of the values does less work, so that the bounds hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Unpack

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Progress, Solution, Status, relative_gap, status_of
from meshplan.planner.training.estimator.assembly import DATA_COMMUNICATION
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit, joined
from meshplan.planner.training.estimator.memory import MemoryModel, StageMemory, fullest_bytes
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.frontier import Frontier
from meshplan.planner.training.search.incumbents import Incumbents
from meshplan.planner.training.search.layers import mix
from meshplan.planner.training.search.layers.open_splits import MOST_PRICED, OpenSplits
from meshplan.planner.training.search.memory_savers import (
    blocks_beside_shares,
    layers_beside_shares,
    leaders,
    moves_layers,
    offloaded,
    takes_blocks,
    takes_blocks_only,
    with_all_states,
    with_blocks,
    with_least_layers,
    with_least_share,
)
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.options import SearchOptions
from meshplan.planner.training.search.report import TIE_WIDTH, ScoredConfig, SearchReport
from meshplan.planner.training.search.seen import PricedBatch, Seen
from meshplan.planner.training.search.space import Space
from meshplan.planner.training.search.templates import legal_candidates, template_candidates, tries_smaller_groups
from meshplan.planner.training.search.too_slow import longest_s, nothing_left_is_fast_enough
from meshplan.planner.training.search.variants import smaller_groups, variants, without_communication_s

# Candidates kept besides the best: what the table of alternatives is made of.
KEEP = 24
# Candidates whose memory is worked out together; of more, first that of the leaders, which may rule the others out.
MOST_AT_ONCE = 512
SOLVER_NAME = "enumeration with bounds"


def whole_of(problem: TrainingProblem) -> TrainingProblem:
    """The question with as many devices as its cluster joins at most."""
    return replace(problem, limits=replace(problem.limits, max_devices=problem.most_devices))


class DegreeSearch:
    """One search with its incumbents and its report; arguments beside the question are its
    :class:`~meshplan.planner.training.search.options.SearchOptions`.
    """

    def __init__(
        self,
        problem: TrainingProblem,
        *,
        keep: int = KEEP,
        space: Space | None = None,
        usual_splits: bool = False,
        incumbents: Incumbents | None = None,
        cutoff: float = math.inf,
        seen: Seen | None = None,
    ) -> None:
        self.problem = whole_of(problem)
        self.space = Space.of(self.problem) if space is None else space
        self.report = SearchReport(illegal=self._illegal())
        self.objective = Objective(problem)
        self.incumbents = incumbents or Incumbents(self.problem, self.objective, self.report, keep=keep, cutoff=cutoff)
        self.unseen = -math.inf
        self.open_splits = OpenSplits(problem, self.objective, applies=not usual_splits)
        self._is_closing = incumbents is not None
        for batch in () if seen is None else seen.batches:
            self.incumbents.take(batch)
        # Without a plan all is looked at again, for what the nearest lacks.
        self._seen = None if self.incumbents.found_nothing else seen

    def _illegal(self) -> Mapping[str, tuple[str, ...]]:
        """Degrees that no rule allows, and more devices than a network joins."""
        machine, illegal = self.problem.machine, self.space.templates.illegal
        if machine.joined_devices >= machine.num_devices:
            return illegal
        return {**illegal, machine.no_network: (f"more than {machine.joined_devices} devices",)}

    @property
    def best(self) -> list[ScoredConfig]:
        """The incumbents, best first."""
        return self.incumbents.best

    # --- search -----------------------------------------------------------------------------------------------------

    def run(self, budget: Budget | None = None, on_progress: OnProgress | None = None) -> Solution[ScoredConfig]:
        """Visit every candidate; Ctrl-C and the budget's limits keep the incumbent and its proven gap.

        Raises:
            SolverError: a limit was exceeded before any plan was found; nothing is proven then.
            KeyboardInterrupt: the same with Ctrl-C.
        """
        budget = budget or Budget()
        wall, cpu = time.perf_counter(), time.process_time()
        frontier, is_done = None, False
        with budget.keeping():
            frontier = self._frontier()
            while frontier.is_open and not self._is_too_slow(frontier):
                self._visit(frontier)
                if on_progress is not None:
                    on_progress(self._progress(frontier))
                budget.check()
            is_done = True
        with budget.keeping():
            if frontier is not None and is_done and self.incumbents.found_nothing and not self._is_too_slow(frontier):
                self._price_set_aside(frontier)
            self._close_splits(is_whole=is_done)
        bound = self._least_of_all() if frontier is None else frontier.least
        if frontier is not None and is_done:
            frontier.rule_out_the_rest()
            bound = math.inf
        elif math.isinf(self.incumbents.least_objective):
            budget.nothing_found("plan")
        self.unseen = min(bound, self.open_splits.bound)
        return self._solution("" if is_done else budget.stopped, wall, cpu)

    def _is_too_slow(self, frontier: Frontier) -> bool:
        """Nothing is found, and nothing left can be within the limit on a step's time (:mod:`.too_slow`)."""
        return not self.best and nothing_left_is_fast_enough(self.problem, self.report, frontier.least)

    def has_plan(self) -> bool:
        """Whether any usual split of the layers stays within the limits; ends with the first that does."""
        frontier = self._frontier()
        while frontier.is_open and not self.best:
            self._visit(frontier)
        return bool(self.best)

    def _frontier(self) -> Frontier:
        others = self.open_splits.applies
        return Frontier(self.space, self.objective, self.incumbents, other_layers=others, seen=self._seen)

    def _least_of_all(self) -> float:
        """A bound before any split was looked at."""
        steps_alone = Objective(replace(self.problem, run=None))  # interruptions only add to it
        return float(np.min(steps_alone.bound(np.arange(1.0, self.problem.limits.max_devices + 1.0))))

    def _progress(self, frontier: Frontier) -> Progress:
        incumbent = self.best[0].objective if self.best else None
        bound = min(frontier.least, incumbent or math.inf)
        note = f"degrees: {self.report.considered:,} candidates, {frontier.num_open} groups of templates open"
        return Progress(
            incumbent=incumbent, bound=bound if math.isfinite(bound) else None, note=note, unit=self.objective.unit
        )

    def _visit(self, frontier: Frontier) -> None:
        """Price the most promising templates of the most promising split."""
        if (found := frontier.following()) is not None:
            self._price(frontier, *found)
            self.incumbents.seen.visited(*found[:2], self.incumbents.limit)

    def _price_set_aside(self, frontier: Frontier) -> None:
        """Where there is no plan at all: hold against the limits what was never priced, for what the nearest lacks."""
        for split, rows in frontier.set_aside():
            self._price_templates(frontier, split, rows)

    def _rule_out(self, count: int) -> None:
        self.report.considered += count
        self.report.ruled_out += count

    def _price(self, frontier: Frontier, split: PipelineSplit, rows: IntArray, again_s: FloatArray) -> None:
        """Price the candidates of some templates; those that only another split of the layers can save are noted."""
        if self.open_splits.applies and split.pipeline_parallel > 1:
            own = frontier.bounds_of(split, rows, again_s=again_s, other_layers=False)
            may_win = own <= self.incumbents.limit
            if not may_win.all():
                asked = template_candidates(self.problem, self.space.templates, rows[~may_win], split)
                self._rule_out(len(asked))
                self._note_splits(self._legal(asked))
                rows = rows[may_win]
        if len(rows):
            self._price_templates(frontier, split, rows)

    def _price_templates(self, frontier: Frontier, split: PipelineSplit, rows: IntArray) -> None:
        everything = template_candidates(self.problem, self.space.templates, rows, split)
        whole = everything.recompute == Recompute.FULL
        if whole.any() and math.isfinite(self.incumbents.threshold):
            again = np.repeat(frontier.bounds_of(split, rows, Recompute.FULL), self.space.templates.num_variants[rows])
            hopeful = everything.take(~whole | (again <= self.incumbents.limit))
        else:
            hopeful = everything
        hopeful = self.incumbents.wanted(hopeful)
        self._rule_out(len(everything) - len(hopeful))
        for variant in variants(self.problem, hopeful):
            if variant is hopeful:
                self._price_legal(hopeful)
                continue
            still = variant.take(self.incumbents.may_be_kept(variant))
            self._rule_out(len(variant) - len(still))
            self._price_legal(still)

    def _price_legal(self, asked: Candidates) -> None:
        """Price the candidates that the rules allow, and what more they allow of those beyond the memory."""
        batch = self._legal(asked)
        self._note_splits(batch)
        memory, stages = self._that_may_fit(batch)
        batch = memory.candidates
        if not len(batch):
            return
        if not mix.is_pinned(self.problem):
            self._price_with_blocks(memory, stages)
        for mixed in mix.gathered_mixes(self.problem, batch, self.incumbents.may_replace):
            self._price_more(mixed)
        safe = fullest_bytes(stages)
        for moved in offloaded(self.problem, batch.take(safe > self.problem.limits.memory_bytes)):
            self._price_more(with_least_share(self.problem, moved, self._safe_bytes))
            self._price_beside_shares(moved)

    def _that_may_fit(self, batch: Candidates) -> tuple[MemoryModel, Sequence[StageMemory]]:
        """The memory of the candidates but those of which another one shows that they cannot stay within the limit."""
        memory = self._memory(batch)
        found = leaders(self.problem, batch)
        if found is None or not len(batch):
            return memory, memory.stages() if len(batch) else ()
        rows, group = found
        least, known = batch.take(rows), memory.stages() if len(batch) <= MOST_AT_ONCE else None
        safe = self._safe_bytes(least) if known is None else fullest_bytes(known)[rows]
        fits = safe <= self.problem.limits.memory_bytes
        if fits.all():
            return memory, memory.stages() if known is None else known
        self.incumbents.within("device memory", safe, self.problem.limits.memory_bytes, least)
        out = np.append(~fits, False)[group]
        self._rule_out(int(np.count_nonzero(out)))
        self.report.over_limit["device memory"] += int(np.count_nonzero(out)) - int(np.count_nonzero(~fits))
        left = memory.take(~out)
        if not len(left.candidates):
            return left, ()
        return left, left.stages() if known is None else [stage.take(~out) for stage in known]

    def _price_more(self, asked: Candidates) -> None:
        """Price variants of legal candidates, of which the rules may refuse some."""
        batch = self._legal(asked)
        if len(batch):
            self._note_splits(batch)
            memory = self._memory(batch)
            self._price_with_blocks(memory, memory.stages())

    def _note_splits(self, batch: Candidates) -> None:
        """Remember the candidates of which another split of the layers may win, or stay within memory."""
        if not self._is_closing and len(batch):
            self.open_splits.note(batch, self.incumbents.least_objective)

    def _price_with_blocks(self, memory: MemoryModel, stages: Sequence[StageMemory]) -> None:
        """Price a batch, and its candidates that a block of recomputed layers brings within memory."""
        batch = memory.candidates
        if takes_blocks(self.problem):
            blocks = with_blocks(self.problem, memory, stages)
            least_s = self.space.bounds.of_candidates_s(blocks)
            hopes = takes_blocks_only(self.problem) | self.incumbents.may_replace(blocks, least_s)
            hopeful = blocks.take(hopes)
            self._rule_out(len(blocks) - len(hopeful))
            if len(hopeful):
                self._price_within(hopeful, self._memory(hopeful).stages(), least_s[hopes])
        if moves_layers(self.problem):
            beyond = fullest_bytes(stages) > self.problem.limits.memory_bytes
            self._price_with_layers(batch.take(beyond & self._may_be_kept(batch)))
        if not takes_blocks_only(self.problem):
            self._price_within(batch, stages)

    def _price_with_layers(self, batch: Candidates) -> None:
        """Price candidates beyond the memory with no more layers' activations off the devices than must be."""
        for layers in with_least_layers(self.problem, batch, self._safe_bytes):
            if len(legal := self._legal(layers)):
                self._price_within(legal, self._memory(legal).stages())

    def _price_beside_shares(self, moved: Candidates) -> None:
        """Price offloaded candidates with every block of recomputed or offloaded layers, and the least share of the
        states moved.
        """
        for layers in chain(blocks_beside_shares(self.problem, moved), layers_beside_shares(self.problem, moved)):
            legal = self._legal(layers)
            hopeful = legal.take(self._may_be_kept(legal))
            self._rule_out(len(legal) - len(hopeful))
            if len(hopeful):
                part = with_least_share(self.problem, hopeful, self._safe_bytes)
                self._price_within(part, self._memory(part).stages())

    def _price_other_split(self, batch: Candidates) -> None:
        """Price candidates with other layers on their stages, which ask for other shares of the states."""
        moved = with_all_states(self.problem, batch)
        part = with_least_share(self.problem, moved, self._safe_bytes)
        memory = self._memory(part)
        self._price_with_blocks(memory, memory.stages())
        self._price_beside_shares(moved)

    def _safe_bytes(self, batch: Candidates) -> FloatArray:
        return fullest_bytes(self._memory(batch).stages())

    def _memory(self, batch: Candidates) -> MemoryModel:
        problem = self.problem
        return MemoryModel(
            shape=problem.shape, workload=problem.workload, candidates=batch, calibration=problem.calibration
        )

    def _price_within(
        self, batch: Candidates, stages: Sequence[StageMemory], least_s: FloatArray | None = None
    ) -> None:
        """Hold a batch against the limits by its memory, and by bounds of its steps; price and keep what is left."""
        self.report.considered += len(batch)
        self.report.priced += len(batch)
        if not len(batch):
            return
        incumbents = self.incumbents
        safe = fullest_bytes(stages)
        least_s = self.space.bounds.of_candidates_s(batch) if least_s is None else least_s
        keep = incumbents.within_memory(batch, stages, safe) & incumbents.may_replace(batch, least_s)
        batch, safe, least_s = batch.take(keep), safe[keep], least_s[keep]
        if not len(batch):
            return
        estimate, objective = self.objective.estimated(batch)
        step_s = estimate.step_s
        keep = incumbents.within_time_and_money(batch, step_s) & self._is_possible(batch)
        found = PricedBatch(candidates=batch, objective=objective, step_s=step_s, safe_bytes=safe)
        incumbents.take(found.take(keep))
        self._price_smaller_groups(batch, step_s, estimate.breakdown_s[DATA_COMMUNICATION], least_s)

    def _may_be_kept(self, batch: Candidates) -> BoolArray:
        """Candidates that the bound of their templates, with what they recompute, does not rule out, [n]."""
        if not len(batch) or math.isinf(self.incumbents.threshold):
            return np.ones(len(batch), dtype=bool)
        return self.incumbents.may_replace(batch, self.space.bounds.of_candidates_s(batch))

    def _price_smaller_groups(
        self, batch: Candidates, step_s: FloatArray, exposed_s: FloatArray, bound_s: FloatArray
    ) -> None:
        """Price candidates with smaller sharding groups, where these may win."""
        if self._is_closing or not tries_smaller_groups(self.problem):
            return
        least_s = np.maximum(without_communication_s(batch, step_s, exposed_s), bound_s)
        hopeful = np.isfinite(least_s) & self.incumbents.may_replace(batch, least_s)
        if hopeful.any():
            self._price_more(smaller_groups(batch.take(hopeful)))

    def _every_group(self, batch: Candidates) -> Candidates:
        """Legal candidates with every size of sharding group."""
        if tries_smaller_groups(self.problem):
            whole = batch.take(batch.data_parallel_shard == batch.data_parallel)
            batch = joined([batch, legal_candidates(self.problem, smaller_groups(whole), self.report.refused)])
        return batch.take(self._is_possible(batch))

    def _is_possible(self, batch: Candidates, *, any_sharding: bool = False) -> BoolArray:
        """Candidates that the network model speaks of, [n]; with ``any_sharding`` in groups of some size."""
        model = self.problem.machine.network_model
        if model is None:
            return np.ones(len(batch), dtype=bool)
        return model.is_possible(batch.degrees, any_sharding=any_sharding)

    def _legal(self, asked: Candidates) -> Candidates:
        """The candidates that the rules allow and that the network model may speak of."""
        legal = legal_candidates(self.problem, asked, self.report.refused)
        possible = self._is_possible(legal, any_sharding=True)
        return legal if possible.all() else legal.take(possible)

    def _close_splits(self, *, is_whole: bool) -> None:
        """Price other splits of the layers where they may win; of a search that was cut short take the bound alone."""
        self._is_closing = True
        self.open_splits.close(
            lambda: self.incumbents.least_objective,
            self._every_group,
            self._price_other_split,
            budget=MOST_PRICED if is_whole else 0,
        )

    def _solution(self, stopped: str, wall: float, cpu: float) -> Solution[ScoredConfig]:
        """The incumbent with its proof.

        Args:
            stopped: why it was not; empty where everything was.
            wall: when the search began.
            cpu: the same in processor time.
        """
        best = self.best[0] if self.best else None
        common: dict[str, Any] = {
            "assignment": best,
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "solver": SOLVER_NAME,
            "stopped": stopped,
        }
        if best is None:
            return Solution(status=Status.INFEASIBLE, objective=None, bound=None, gap=None, **common)
        bound = min(best.objective, self.unseen)
        return Solution(
            status=status_of(best.objective, bound, tolerance=TIE_WIDTH),
            objective=best.objective,
            bound=bound,
            gap=relative_gap(best.objective, bound),
            **common,
        )


def search_degrees(
    problem: TrainingProblem,
    *,
    budget: Budget | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[SearchOptions],
) -> tuple[Solution[ScoredConfig], DegreeSearch]:
    """Find the best configuration; see the module docstring.

    Args:
        problem: the question.
        budget: what it may spend.
        on_progress: called with incumbent and bound during the search.
        options: see :class:`~meshplan.planner.training.search.options.SearchOptions`.

    Returns:
        The solution, and the search with its incumbents (``best``) and its ``report``.
    """
    fastest = replace(problem, objective=TrainingObjective.THROUGHPUT)
    most_s = longest_s(problem)
    is_whole = not options.keys() & {"incumbents", "cutoff", "seen"}
    if (
        is_whole
        and most_s is not None
        and problem.objective is not TrainingObjective.THROUGHPUT
        and not DegreeSearch(fastest, keep=1, usual_splits=True, cutoff=most_s).has_plan()
    ):
        # That nothing is fast enough the bounds of steps prove; those of another objective look at every candidate.
        search = DegreeSearch(fastest, **options)
        solution = search.run(budget, on_progress)
        if solution.assignment is None:
            return solution, search
    search = DegreeSearch(problem, **options)
    return search.run(budget, on_progress), search
