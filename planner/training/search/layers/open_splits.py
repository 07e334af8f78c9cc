"""Candidates whose layers may be split in a way that wins: kept with a bound while the usual splits are searched.

Candidates are noted with the quick bound of :class:`~.uneven.UnevenSplits`. When all usual splits are priced, those
that may still beat the best, with the least recompute that brings any split within memory (:mod:`.least_recompute`),
are looked at: first those that differ in their chunks alone under one bound (:mod:`.any_chunks`), which closes most of
them, then each pipeline by itself, the least bound first. The dynamic programme gives a sharper bound and the splits
that attain it, which the search prices. Of those that are open when all have been looked at, every split is
(:mod:`.chunk_tree`), one candidate for all that take no less. What is left open bounds the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit, joined, split_layers
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.any_chunks import OpenPipeline, as_one, by_stages
from meshplan.planner.training.search.layers.by_counts import least_by_counts_s
from meshplan.planner.training.search.layers.chunk_tree import Closed, closed, may_be_closed
from meshplan.planner.training.search.layers.every_split import every_split_s
from meshplan.planner.training.search.layers.least_recompute import (
    fewest_in_flight,
    least_of_kinds_s,
    least_recompute_s,
)
from meshplan.planner.training.search.layers.uneven import UnevenSplits, may_be_uneven
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.report import TIE_WIDTH

# Gain below which no other split is looked for, part of the best objective: a third of what the estimator can tell
# apart (:data:`meshplan.planner.training.search.report.TIE_WIDTH`). The bound of what is left open says so.
WORTHWHILE = 0.01
# Splits priced after the usual ones, at most, and candidates of one pipeline that are looked at together.
MOST_PRICED, ROWS_AT_ONCE = 400, 512
# Candidates of one pipeline that wait for their bound, at most: a call for few costs as much as one for many.
MOST_WAITING = 16_384
# Keeps limits above their exact value, whose products run in another order.
ROUNDING = 1e-9
# Splits tried, at most, where no usual split is within the limits.
MOST_TRIED = 40
# Candidates of which every split is looked at, at most: a third of a second each at 16 stages of 2 chunks.
MOST_CLOSED = 16
# The same of which the layers of stages alone are looked at, some 0.02 s each.
MOST_COUNTED = 128
# Where the splits up to a limit are too many to tell, a look goes half as far from the known bound, so often at most: a
# bound on a part of the way is one, too.
MOST_AIMS = 4
# How near the best plan must be proven to count as optimal, a little less than what the estimator can tell apart.
TIED = 0.98 * TIE_WIDTH

# () → objective of the incumbent; (candidates) → the legal ones among them and their smaller sharding groups;
# (candidates) → None, prices them. (candidate, most s, A, those that take no less) → what no plan of these beats, s.
Best = Callable[[], float]
Expand = Callable[[Candidates], Candidates]
Price = Callable[[Candidates], None]
Look = Callable[[UnevenSplits, float, float, Candidates], FloatArray]


def worthwhile_of(best: Best) -> float:
    """Objective that another split must beat to be looked for."""
    return best() * (1.0 - WORTHWHILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    """Candidates of one pipeline, with both parts of their quick bound: of the mean and of the slowest stage, [n]."""

    batch: Candidates
    mean_s: FloatArray
    slowest_s: FloatArray
    passes: FloatArray


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
        self._waiting: dict[PipelineSplit, list[Candidates]] = {}
        self._open: list[_Noted] = []
        self._still_open: list[tuple[FloatArray, UnevenSplits]] = []  # objective at least, and the candidates
        self._left = MOST_PRICED  # of pipelines whose splits are all tried
        self.bound = math.inf

    def note(self, batch: Candidates, best: float) -> None:
        """Remember the candidates of a batch that another split of their layers may bring below ``best``."""
        if not self.applies or batch.split.pipeline_parallel == 1:
            return
        batch = batch.take(batch.recompute != Recompute.BLOCK)
        waiting = self._waiting.setdefault(batch.split, [])
        waiting.append(batch)
        if sum(map(len, waiting)) > MOST_WAITING:
            self._look(batch.split, best)

    def _look(self, split: PipelineSplit, best: float) -> None:
        """Keep the waiting candidates of a pipeline that another split of their layers may bring below ``best``."""
        batch = joined(self._waiting.pop(split))
        if not len(batch):
            return
        splits = UnevenSplits(self.problem, batch)
        mean_s, slowest_s = splits.quick_bounds_s()
        bound_s = np.maximum(mean_s, slowest_s)
        rows = self.objective.of(bound_s, batch.world_size) < best
        rows &= bound_s <= self.problem.longest_step_s(batch.world_size) * (1.0 + ROUNDING)
        if rows.any():
            self._open.append(
                _Noted(
                    batch=batch.take(rows),
                    mean_s=mean_s[rows],
                    slowest_s=slowest_s[rows],
                    passes=splits.passes()[rows],
                )
            )

    def close(self, best: Best, expand: Expand, price: Price, *, budget: int = MOST_PRICED) -> None:
        """Price the splits that may win; afterwards ``bound`` is the least that any split can reach.

        Args:
            best: objective of the incumbent, as it is at the time.
            expand: legal candidates with every size of sharding group.
            price: prices candidates and keeps the best.
            budget: splits to price at most; with 0 the bound alone is taken.
        """
        if math.isinf(best()):
            budget = min(budget, MOST_TRIED)
        for split in list(self._waiting):
            self._look(split, best())
        pipelines = self._pipelines(best())
        closed: list[OpenPipeline] = []
        if budget > 0 and math.isfinite(best()):
            pipelines, closed = self._close_together(pipelines, worthwhile_of(best), expand)
        for one in pipelines:
            budget -= self._close_pipeline(one, best, expand, price, budget)
        for one in closed:  # each by itself may have a higher bound
            rows = np.flatnonzero(one.least < self.bound)
            if len(rows):
                again = replace(one, least=np.full(len(rows), -math.inf), batch=one.batch.take(rows))
                budget -= self._close_pipeline(again, best, expand, price, budget)
        self._close_the_rest(best, price)
        self._open, self._still_open = [], []

    def _close_together(
        self, pipelines: Sequence[OpenPipeline], worthwhile: float, expand: Expand
    ) -> tuple[list[OpenPipeline], list[OpenPipeline]]:
        """What is left of the pipelines, and what a bound of those alike closes.

        What that leaves open is likely to win and comes first, as a better incumbent spares the others work.
        """
        alone: list[OpenPipeline] = []
        left: list[OpenPipeline] = []
        closed: list[OpenPipeline] = []
        for alike in by_stages(self.problem, pipelines):
            if len(alike) == 1:
                alone += alike
                continue
            self.bound = min(
                [self.bound, *(float(one.least[one.least >= worthwhile].min(initial=math.inf)) for one in alike)]
            )
            batches = [expand(one.batch.take(one.least < worthwhile)) for one in alike]
            splits, places = as_one(self.problem, batches)
            least = self._sharp_bound(splits, worthwhile)
            rows = np.flatnonzero(least < worthwhile)
            if len(rows):
                some = splits.take(rows)
                bound_s, _ = some.solve(self._most_s(worthwhile, some.batch))
                least[rows] = np.maximum(least[rows], self.objective.of(bound_s, some.batch.world_size))
            for batch, place in zip(batches, places, strict=True):
                own = OpenPipeline(least=least[place], batch=batch, is_expanded=True)
                left.append(own.take(np.flatnonzero(own.least < worthwhile)))
                closed.append(own.take(np.flatnonzero(own.least >= worthwhile)))
        left = sorted((one for one in left if len(one.batch)), key=lambda one: float(one.least.min()))
        return [*left, *alone], closed

    def _close_pipeline(self, one: OpenPipeline, best: Best, expand: Expand, price: Price, budget: int) -> int:
        """Sharpen the bounds of a pipeline's candidates, price the splits that attain them; how many were priced."""
        worthwhile, least = worthwhile_of(best), one.least
        self.bound = min(self.bound, float(least[least >= worthwhile].min(initial=math.inf)))
        if (least >= worthwhile).all():
            return 0
        batch = one.batch.take(least < worthwhile)
        least, splits = self._sharpened(batch if one.is_expanded else expand(batch), worthwhile)
        rows = np.argsort(least, kind="stable")[: ROWS_AT_ONCE if budget > 0 else 0]
        self.bound = min(self.bound, float(np.delete(least, rows).min(initial=math.inf)))
        return self._close(splits.take(rows), least[rows], best, price, budget) if len(rows) else 0

    def _sharpened(self, batch: Candidates, worthwhile: float) -> tuple[FloatArray, UnevenSplits]:
        """The candidates that may still beat ``worthwhile`` with what their sharding adds, and their bounds."""
        splits = UnevenSplits(self.problem, batch)
        least = self._sharp_bound(splits, worthwhile)
        rows = least < worthwhile
        self.bound = min(self.bound, float(least[~rows].min(initial=math.inf)))
        return least[rows], splits.take(np.flatnonzero(rows))

    def _sharp_bound(self, splits: UnevenSplits, worthwhile: float) -> FloatArray:
        """The bound of candidates with what their sharding adds and the least recompute that any split needs, [n]."""
        batch = splits.batch
        if not len(batch):
            return np.zeros(0)
        most_s = self._most_s(worthwhile, batch)
        mean_s, _ = splits.quick_bounds_s()
        stages, limit_bytes = splits.stages, self.problem.limits.memory_bytes
        again_s = least_of_kinds_s(stages.memory(), stages.again_s(), stages.kind_of, limit_bytes)
        within_s = mean_s + again_s * splits.passes()
        sharp_s = splits.sharp_bound_s(splits.outside_s(most_s))
        return self.objective.of(np.maximum(sharp_s, within_s), batch.world_size)

    def _within_memory(self) -> Iterator[tuple[FloatArray, Candidates]]:
        """The noted candidates and their bounds, with the least recompute that any split needs."""
        alike: dict[tuple[int, str], list[_Noted]] = {}
        for noted in self._open:
            split = fewest_in_flight(noted.batch.split)
            alike.setdefault((split.pipeline_parallel, split.schedule), []).append(noted)
        for group in alike.values():
            again_s = least_recompute_s(self.problem, joined([noted.batch for noted in group]))
            ends = np.cumsum([len(noted.batch) for noted in group])[:-1]
            for noted, own_s in zip(group, np.split(again_s, ends), strict=True):
                bound_s = np.maximum(noted.mean_s + own_s * noted.passes, noted.slowest_s)
                yield self.objective.of(bound_s, noted.batch.world_size), noted.batch

    def _pipelines(self, best: float) -> list[OpenPipeline]:
        """The noted candidates that may still beat ``best``, one batch for each pipeline, the least bound first."""
        batches: dict[PipelineSplit, list[Candidates]] = {}
        bounds: dict[PipelineSplit, list[FloatArray]] = {}
        for least, batch in self._within_memory():
            rows = least < best
            if rows.any():
                bounds.setdefault(batch.split, []).append(least[rows])
                batches.setdefault(batch.split, []).append(batch.take(rows))
        found = [OpenPipeline(least=np.concatenate(bounds[split]), batch=joined(own)) for split, own in batches.items()]
        return sorted(found, key=lambda one: float(one.least.min()))

    def _close(self, splits: UnevenSplits, known: FloatArray, best: Best, price: Price, budget: int) -> int:
        """Sharpen the ``known`` bound of some candidates and price their best splits; how many were priced."""
        batch = splits.batch
        bound_s, found = splits.solve(self._most_s(worthwhile_of(best), batch))
        least = np.maximum(self.objective.of(bound_s, batch.world_size), known)
        priced = 0
        rows = np.flatnonzero(least < worthwhile_of(best))
        for layers_per_chunk, takers in splits.worth_pricing(found, rows):
            if priced >= budget:
                break
            price(replace(batch.take(takers), split=self._split(batch.split, layers_per_chunk)))
            priced += 1
        rows = np.flatnonzero(least < worthwhile_of(best))
        if len(rows):
            least[rows] = self._try_all(splits.take(rows), least[rows], best, price)
        is_open = least < worthwhile_of(best)
        self.bound = min(self.bound, float(least[~is_open].min(initial=math.inf)))
        if is_open.any():
            self._still_open.append((least[is_open], splits.take(np.flatnonzero(is_open))))
        return priced

    def _try_all(self, splits: UnevenSplits, known: FloatArray, best: Best, price: Price) -> FloatArray:
        """Price every split that may win, the least bound first, where there are few; what is left of bounds, [n]."""
        batch = splits.batch
        found = every_split_s(splits, self._most_s(worthwhile_of(best), batch))
        if found is None:
            return known
        sizes, least_s = found
        least = np.maximum(self.objective.of(least_s, batch.world_size), known)
        for way in np.argsort(least.min(axis=1, initial=math.inf), kind="stable").tolist():
            takers = np.flatnonzero(least[way] < worthwhile_of(best))
            if not len(takers) or self._left <= 0:
                break
            price(replace(batch.take(takers), split=self._split(batch.split, tuple(sizes[way].tolist()))))
            least[way, takers] = math.inf
            self._left -= 1
        return np.asarray(least.min(axis=0, initial=math.inf))

    def _close_the_rest(self, best: Best, price: Price) -> None:
        """Raise the bounds of what is still open, the least first: by the layers of stages, then by every split.

        First as far as the best plan must be proven to count as optimal, which leaves fewer splits to look at, then as
        far as another is worthwhile. The least that a look does not raise is the bound of the answer: it ends there.
        """

        def by_counts(splits: UnevenSplits, most_s: float, outside_s: float, batch: Candidates) -> FloatArray:
            return np.full(len(batch), least_by_counts_s(splits, most_s, outside_s))

        def by_splits(splits: UnevenSplits, most_s: float, outside_s: float, batch: Candidates) -> FloatArray:
            return self._price_leaves(closed(splits, most_s, outside_s), batch, best, price)

        uncounted = [may_be_closed(splits) for _, splits in self._still_open]
        counted = looked = 0
        limits: tuple[Best, ...] = (lambda: best() * (1.0 - TIED), lambda: worthwhile_of(best))
        for limit in limits:
            if self._least_open() < limit():
                unseen = [may_be_closed(splits) for _, splits in self._still_open]
                counted += self._raise(limit, by_counts, uncounted, MOST_COUNTED - counted, ends=False)
                looked += self._raise(limit, by_splits, unseen, MOST_CLOSED - looked, ends=True)
            if self._least_open() < limit():
                break
        self.bound = min(self.bound, self._least_open())

    def _least_open(self) -> float:
        return min((float(least.min()) for least, _ in self._still_open), default=math.inf)

    def _raise(self, limit: Best, look: Look, waiting: Sequence[BoolArray], most: int, *, ends: bool) -> int:
        """Look at candidates that are still open below a limit, the least bound first; how many were looked at.

        Args:
            limit: objective beyond which bounds are of no use.
            look: raises the bound of a candidate and of all that take no less.
            waiting: of each entry that is still open, which candidates were not looked at, [n]; changed in place.
            most: looks.
            ends: no more looks once one does not raise the least bound.
        """
        for looks in range(most):
            heads = [
                float(least[own].min(initial=math.inf))
                for (least, _), own in zip(self._still_open, waiting, strict=True)
            ]
            if min(heads, default=math.inf) >= limit():
                return looks
            which = int(np.argmin(heads))
            (least, splits), own = self._still_open[which], waiting[which]
            row = int(np.argmin(np.where(own, least, np.inf)))
            aim = limit()
            for _ in range(MOST_AIMS):
                rows, bound_s = self._looked(splits, row, own, aim, look)
                if np.isfinite(bound_s).any():
                    break
                aim = (heads[which] + aim) / 2.0
            devices = splits.batch.world_size[rows]
            beyond = bound_s > self.problem.longest_step_s(devices)
            least[rows] = np.maximum(least[rows], np.where(beyond, np.inf, self.objective.of(bound_s, devices)))
            own[rows] = False
            if ends and least[row] <= heads[which]:
                return looks + 1
        return most

    def _looked(
        self, splits: UnevenSplits, row: int, own: BoolArray, aim: float, look: Look
    ) -> tuple[IntArray, FloatArray]:
        """A candidate and those of ``own`` that take no less; what a look no further than ``aim`` says of them, s."""
        most_s = self._most_s(aim, splits.batch)
        outside_s = splits.outside_s(most_s)
        rows = np.flatnonzero(own & splits.no_less_than(row, outside_s))
        if math.isinf(most_s[row]):  # no plan yet, or any step on so few devices is of use: every split is a look's
            return rows, np.full(len(rows), -math.inf)
        one = splits.take(np.array([row]))
        return rows, look(one, float(most_s[row]), float(outside_s[row]), splits.batch.take(rows))

    def _price_leaves(self, found: Closed, batch: Candidates, best: Best, price: Price) -> FloatArray:
        """Price the splits that may win; no other split of the candidates is faster than what is returned, s [n]."""
        for sizes, least_s in found.leaves:
            bound_s = np.full(len(batch), least_s)
            if self._left <= 0 or (self.objective.of(bound_s, batch.world_size) >= worthwhile_of(best)).all():
                return np.minimum(bound_s, found.beyond_s)
            price(replace(batch, split=self._split(batch.split, sizes)))
            self._left -= 1
        return np.full(len(batch), found.beyond_s)

    def _most_s(self, worthwhile: float, batch: Candidates) -> FloatArray:
        """Steps that are no shorter than this are of no use, or beyond a limit, [n]."""
        longest_s = self.problem.longest_step_s(batch.world_size) * (1.0 + ROUNDING)
        return np.minimum(self.objective.step_s(worthwhile, batch.world_size), longest_s)

    def _split(self, usual: PipelineSplit, layers_per_chunk: tuple[int, ...]) -> PipelineSplit:
        return split_layers(
            self.problem.shape,
            pipeline_parallel=usual.pipeline_parallel,
            virtual_pipeline_stages=usual.virtual_pipeline_stages,
            layers_per_chunk=layers_per_chunk,
            schedule=usual.schedule,
            vocabulary_parallel=usual.vocabulary_parallel,
        )
