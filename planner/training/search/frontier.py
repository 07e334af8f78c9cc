"""Which templates are still to be priced under which split, best bound first, and what none of them can beat.

*Two bounds.* Splits of the layers over the same stages share a first bound of each template
(:meth:`~.bounds.cell_bounds.CellBounds.least_of_stages_s`: no messages, the least bubble of any of them). The templates
that are best by it, a portion at a time, are *refined*: what they must recompute to stay within memory
(:mod:`.bounds.memory_bounds`, once for all these splits), and messages, for each split. What cannot stay within memory
is set aside; it counts only where there is no plan at all, for what that lacks.

*Order.* Portions that are not refined and refined templates of each split wait in one queue, the least bound first: its
head bounds everything that is left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import PipelineSplit
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.search.incumbents import Incumbents
from meshplan.planner.training.search.layers.least_recompute import fewest_in_flight
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.space import Space

# Rows priced at once: small enough for the processor's cache and the memory limit, large enough to amortise NumPy.
CHUNK_ROWS = 16_384
# The same at least: fewer cost as much as these. And before there is an incumbent, when most may be in vain.
LEAST_ROWS = 1024
# Templates refined at once, at least and at most.
LEAST_REFINED, MOST_REFINED = 512, 8192
# Templates are refined and priced as far as their bound is within this relative distance of the next one in the queue.
LOOK_AHEAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Splits of the layers over the same stages, whose candidates need the same memory at least.

    Args:
        splits: the splits.
    """

    splits: tuple[PipelineSplit, ...]

    @property
    def pipeline_parallel(self) -> int:
        """Stages of each of the splits."""
        return self.splits[0].pipeline_parallel


def by_stages(splits: Sequence[PipelineSplit]) -> list[Stages]:
    """The splits by what :func:`fewest_in_flight` leaves of them."""
    alike: dict[tuple[int, int, str, bool], list[PipelineSplit]] = {}
    for split in splits:
        few = fewest_in_flight(split)
        key = few.pipeline_parallel, few.virtual_pipeline_stages, few.schedule, few.vocabulary_parallel
        alike.setdefault(key, []).append(split)
    return [Stages(splits=tuple(group)) for group in alike.values()]


@dataclass(slots=True, kw_only=True)
class _Ordered:
    """Refined templates of one split, the least bound first.

    Args:
        split: the split.
        bounds: least objective of each, ascending [n].
        rows: the templates [n].
        again_s: R of :mod:`.bounds.memory_bounds` [n].
    """

    split: PipelineSplit
    bounds: FloatArray = field(default_factory=lambda: np.zeros(0))
    rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    again_s: FloatArray = field(default_factory=lambda: np.zeros(0))

    def add(self, bounds: FloatArray, rows: IntArray, again_s: FloatArray) -> None:
        """Put more of them in order."""
        bounds = np.concatenate([self.bounds, bounds])
        order = np.argsort(bounds, kind="stable")
        self.bounds = bounds[order]
        self.rows = np.concatenate([self.rows, rows])[order]
        self.again_s = np.concatenate([self.again_s, again_s])[order]

    def take(self, count: int) -> tuple[IntArray, FloatArray]:
        """Take the first ``count`` out, with their R."""
        first = self.rows[:count], self.again_s[:count]
        self.bounds, self.rows, self.again_s = self.bounds[count:], self.rows[count:], self.again_s[count:]
        return first

    def cut(self, limit: float) -> IntArray:
        """Take those out whose bound is beyond a limit."""
        kept = int(np.searchsorted(self.bounds, limit, side="right"))
        out = self.rows[kept:]
        self.bounds, self.rows, self.again_s = self.bounds[:kept], self.rows[:kept], self.again_s[:kept]
        return out


class Frontier:
    """The templates of a space under its splits that are still to be priced.

    Args:
        space: what there is to search.
        objective: f(T, n).
        incumbents: what is found so far, and with it which bounds are of use; its report counts what is ruled out.
        other_layers: bounds hold for every other split of the layers, too.
    """

    def __init__(self, space: Space, objective: Objective, incumbents: Incumbents, *, other_layers: bool) -> None:
        self.space, self.objective, self.incumbents = space, objective, incumbents
        self.problem = incumbents.problem
        self.other_layers = other_layers
        self._beyond: list[tuple[Stages, IntArray]] = []
        self._ordered = {id(split): _Ordered(split=split) for split in space.splits}
        self._queue: list[tuple[float, int, Stages | _Ordered, slice]] = []
        self._pushed = 0
        self._open()

    @property
    def least(self) -> float:
        """No template that is left has a better objective; infinite where none is left."""
        while self._queue and self._is_outdated(self._queue[0]):
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else math.inf

    @property
    def is_open(self) -> bool:
        """Whether something that is left may still be kept."""
        return math.isfinite(self.least) and self.least <= self.incumbents.limit

    @property
    def num_open(self) -> int:
        """Entries of the queue."""
        return len(self._queue)

    def following(self) -> tuple[PipelineSplit, IntArray, FloatArray] | None:
        """The most promising templates of the most promising split, and their R; None where nothing is open any more.

        What the queue has before them is refined on the way.
        """
        while self.is_open:
            least, _, item, window = heapq.heappop(self._queue)
            if isinstance(item, Stages):
                self._refine(item, window, least)
            elif (found := self._first_of(item)) is not None:
                return found
        return None

    def _first_of(self, ordered: _Ordered) -> tuple[PipelineSplit, IntArray, FloatArray] | None:
        """Take the most promising templates of a split; None where none of them may be kept."""
        self._rule_out(ordered.cut(self.incumbents.limit))
        if not len(ordered.rows):
            return None
        near = int(np.searchsorted(ordered.bounds, self.least * (1.0 + LOOK_AHEAD), side="right"))
        sizes = np.cumsum(self.space.templates.num_variants[ordered.rows])
        fewest = int(np.searchsorted(sizes, LEAST_ROWS, side="right"))
        most = int(np.searchsorted(sizes, CHUNK_ROWS if self.incumbents.best else LEAST_ROWS, side="right"))
        rows, again_s = ordered.take(max(1, min(max(near, fewest), most)))
        self._push_ordered(ordered)
        return ordered.split, rows, again_s

    def rule_out_the_rest(self) -> None:
        """Count what is left as ruled out."""
        for ordered in self._ordered.values():
            self._rule_out(ordered.rows)
        for least, _, item, window in self._queue:
            if isinstance(item, Stages):
                bounds = self._first_bounds(item, window)
                self._rule_out(window.start + np.flatnonzero(bounds >= least), len(item.splits))
        self._queue = []

    def set_aside(self) -> Iterator[tuple[PipelineSplit, IntArray]]:
        """Templates none of whose candidates stays within memory, under each split; they no longer count."""
        for stages, rows in self._beyond:
            self._rule_out(rows, -len(stages.splits))
            for split in stages.splits:
                for i in range(0, len(rows), LEAST_ROWS):
                    yield split, rows[i : i + LEAST_ROWS]
        self._beyond = []

    def bounds_of(
        self,
        split: PipelineSplit,
        rows: slice | IntArray,
        mode: Recompute = Recompute.NONE,
        *,
        again_s: FloatArray | float = 0.0,
        other_layers: bool | None = None,
    ) -> FloatArray:
        """The least objective of templates under a split, [n].

        Args:
            split: the split.
            rows: the templates.
            mode: of candidates that recompute every layer with ``FULL``.
            again_s: what they recompute at least, over all stages of a micro-batch, s [n].
            other_layers: also under others of its layers; None: where these count.
        """
        others = self.other_layers if other_layers is None else other_layers
        least_s = self.space.bounds.least_s(split, rows, mode, again_s=again_s, other_layers=others)
        return self.objective.of(least_s, self.space.templates.stage_devices[rows] * split.pipeline_parallel)

    # --- what is not refined yet ------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Every number of stages with the templates that fit its share of the devices."""
        least, most = self.incumbents.device_range()
        soon: dict[int, list[IntArray]] = {}
        for stages in by_stages(self.space.splits):
            p, count = stages.pipeline_parallel, len(stages.splits)
            fits = self.space.templates.between(1, self.problem.limits.max_devices / p)
            window = self.space.templates.between(least / p, most / p)
            self._rule_out(fits, count)
            self._rule_out(window, -count)
            if window.stop > window.start:
                bounds = self._first_bounds(stages, window)
                self._push(float(np.min(bounds)), stages, window)
                first = np.argpartition(bounds, LEAST_REFINED)[:LEAST_REFINED] if len(bounds) > LEAST_REFINED else ...
                soon.setdefault(min(p, 2), []).append(np.arange(window.start, window.stop)[first])
        for p, rows in soon.items():  # at once: a call for few costs as much as one for many
            self.space.memory.prepare(p, np.concatenate(rows))

    def _first_bounds(self, stages: Stages, window: slice) -> FloatArray:
        """The least objective of templates under any of some splits, [n]."""
        devices = self.space.templates.stage_devices[window] * stages.pipeline_parallel
        return self.objective.of(self.space.bounds.least_of_stages_s(stages.splits, window), devices)

    def _refine(self, stages: Stages, window: slice, least: float) -> None:
        """Put the best templates of a window, from a bound of ``least`` on, in the order of each split."""
        bounds = self._first_bounds(stages, window)
        left = np.where(bounds >= least, bounds, np.inf)
        near = int(np.count_nonzero(left <= min(self.least * (1.0 + LOOK_AHEAD), self.incumbents.limit)))
        count = min(max(near, LEAST_REFINED), MOST_REFINED, len(left))
        most = min(float(np.partition(left, count - 1)[count - 1]), self.incumbents.limit)
        taken = (left <= most) & np.isfinite(left)
        rows = window.start + np.flatnonzero(taken)
        beyond = float(left[~taken].min(initial=math.inf))
        if math.isfinite(beyond):
            self._push(beyond, stages, window)
        again_s = self.space.memory.least_s(stages.splits[0], rows)
        fits = np.isfinite(again_s)
        if not fits.all():
            self._rule_out(rows[~fits], len(stages.splits))
            self._beyond.append((stages, rows[~fits]))
            rows, again_s = rows[fits], again_s[fits]
        for split in stages.splits if len(rows) else ():
            refined = self.bounds_of(split, rows, again_s=again_s)
            hopeful = refined <= self.incumbents.limit
            self._rule_out(rows[~hopeful])
            ordered = self._ordered[id(split)]
            ordered.add(refined[hopeful], rows[hopeful], again_s[hopeful])
            self._push_ordered(ordered)

    # --- the queue --------------------------------------------------------------------------------------------------

    def _push(self, least: float, item: Stages | _Ordered, window: slice) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (least, self._pushed, item, window))

    def _push_ordered(self, ordered: _Ordered) -> None:
        if len(ordered.bounds):
            self._push(float(ordered.bounds[0]), ordered, slice(0))

    @staticmethod
    def _is_outdated(entry: tuple[float, int, Stages | _Ordered, slice]) -> bool:
        """Whether templates of a split have changed since they were queued: they are queued anew then."""
        least, _, item, _ = entry
        return isinstance(item, _Ordered) and (not len(item.bounds) or item.bounds[0] != least)

    def _rule_out(self, rows: slice | IntArray, times: int = 1) -> None:
        count = times * int(self.space.templates.num_variants[rows].sum())
        self.incumbents.report.considered += count
        self.incumbents.report.ruled_out += count
