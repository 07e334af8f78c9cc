"""Candidates whose layers may be split in a way that wins: kept with a bound while the usual splits are searched.

Candidates are noted with the quick bound of :class:`~.uneven.UnevenSplits`. When all usual splits are priced, those
that may still beat the best are looked at, the least bound first: the dynamic programme gives a sharper bound and the
splits that attain it, which the search prices. What is left open bounds the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit, joined, split_layers
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.uneven import UnevenSplits, may_be_uneven
from meshplan.planner.training.search.objective import Objective

# Gain below which no other split is looked for, part of the best objective: a third of what the estimator can tell
# apart (:data:`meshplan.planner.training.search.report.TIE_WIDTH`). The bound of what is left open says so.
WORTHWHILE = 0.01
# Splits priced after the usual ones, at most, and candidates of one pipeline that are looked at together.
MOST_PRICED, ROWS_AT_ONCE = 400, 512
# Splits tried, at most, where no usual split is within the limits.
MOST_TRIED = 40

# (candidates) → the legal ones among them and their smaller sharding groups; (candidates) → None, prices them.
Expand = Callable[[Candidates], Candidates]
Price = Callable[[Candidates], None]


class OpenSplits:
    """Bounds of the splits that are not priced.

    Args:
        problem: the question.
        objective: f(T, n).
        applies: False keeps to the usual splits; the bound says nothing of the others then.
    """

    def __init__(self, problem: TrainingProblem, objective: Objective, *, applies: bool = True) -> None:
        self.problem, self.objective = problem, objective
        self.applies = applies and may_be_uneven(problem)
        self._open: list[tuple[FloatArray, Candidates]] = []
        self.bound = math.inf

    def note(self, batch: Candidates, best: float) -> None:
        """Remember the candidates of a batch that another split of their layers may bring below ``best``."""
        if not self.applies or batch.split.pipeline_parallel == 1:
            return
        batch = batch.take(batch.recompute != Recompute.BLOCK)
        if not len(batch):
            return
        bound_s = UnevenSplits(self.problem, batch).quick_bound_s()
        least = self.objective.of(bound_s, batch.world_size)
        longest_s = self.problem.limits.max_step_s
        rows = (least < best) & (bound_s <= (math.inf if longest_s is None else longest_s))
        if rows.any():
            self._open.append((least[rows], batch.take(rows)))

    def close(self, best: Callable[[], float], expand: Expand, price: Price, *, budget: int = MOST_PRICED) -> None:
        """Price the splits that may win; afterwards ``bound`` is the least that any split can reach.

        Args:
            best: objective of the incumbent, as it is at the time.
            expand: legal candidates with every size of sharding group.
            price: prices candidates and keeps the best.
            budget: splits to price at most; with 0 the bound alone is taken.
        """
        if math.isinf(best()):
            budget = min(budget, MOST_TRIED)
        for noted, few in self._pipelines(best()):
            worthwhile = best() * (1.0 - WORTHWHILE)
            self.bound = min(self.bound, float(noted[noted >= worthwhile].min(initial=math.inf)))
            least, batch = self._sharpened(expand(few.take(noted < worthwhile)), worthwhile)
            rows = np.argsort(least, kind="stable")[: ROWS_AT_ONCE if budget > 0 else 0]
            self.bound = min(self.bound, float(np.delete(least, rows).min(initial=math.inf)))
            if len(rows):
                budget -= self._close(batch.take(rows), worthwhile, price, budget)
        self._open = []

    def _sharpened(self, batch: Candidates, worthwhile: float) -> tuple[FloatArray, Candidates]:
        """The candidates that may still beat ``worthwhile`` with what their sharding adds, and their bounds."""
        if not len(batch):
            return np.zeros(0), batch
        most_s = self.objective.step_s(worthwhile, batch.world_size)
        bound_s = UnevenSplits(self.problem, batch).sharp_bound_s(most_s)
        least = self.objective.of(bound_s, batch.world_size)
        rows = least < worthwhile
        self.bound = min(self.bound, float(least[~rows].min(initial=math.inf)))
        return least[rows], batch.take(rows)

    def _pipelines(self, best: float) -> list[tuple[FloatArray, Candidates]]:
        """The noted candidates that may still beat ``best``, one batch for each pipeline, the least bound first."""
        batches: dict[PipelineSplit, list[Candidates]] = {}
        bounds: dict[PipelineSplit, list[FloatArray]] = {}
        for least, batch in self._open:
            rows = least < best
            if rows.any():
                bounds.setdefault(batch.split, []).append(least[rows])
                batches.setdefault(batch.split, []).append(batch.take(rows))
        found = [(np.concatenate(bounds[split]), joined(own)) for split, own in batches.items()]
        return sorted(found, key=lambda item: float(item[0].min()))

    def _close(self, batch: Candidates, worthwhile: float, price: Price, budget: int) -> int:
        """Sharpen the bound of some candidates and price their best splits; how many were priced."""
        if not len(batch):
            return 0
        splits = UnevenSplits(self.problem, batch)
        bound_s, found = splits.solve(self.objective.step_s(worthwhile, batch.world_size))
        least = self.objective.of(bound_s, batch.world_size)
        rows = np.flatnonzero(least < worthwhile)
        self.bound = min(self.bound, float(least.min(initial=math.inf)))
        priced = 0
        for layers_per_chunk, takers in splits.worth_pricing(found, rows):
            if priced >= budget:
                break
            price(replace(batch.take(takers), split=self._split(batch.split, layers_per_chunk)))
            priced += 1
        return priced

    def _split(self, usual: PipelineSplit, layers_per_chunk: tuple[int, ...]) -> PipelineSplit:
        return split_layers(
            self.problem.shape,
            pipeline_parallel=usual.pipeline_parallel,
            virtual_pipeline_stages=usual.virtual_pipeline_stages,
            layers_per_chunk=layers_per_chunk,
            schedule=usual.schedule,
            vocabulary_parallel=usual.vocabulary_parallel,
        )
