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

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import PipelineSplit
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.search.incumbents import Incumbents
from meshplan.planner.training.search.layers.least_recompute import flown_as
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.seen import Seen
from meshplan.planner.training.search.space import Space
from meshplan.planner.training.search.templates import recompute_modes

# Rows priced at once: small enough for the processor's cache and the memory limit, large enough to amortise NumPy.
CHUNK_ROWS = 16_384
# The same at least: fewer cost as much as these. And before there is an incumbent, when most may be in vain.
LEAST_ROWS = 1024
# Templates refined at once, at least and at most.
LEAST_REFINED, MOST_REFINED = 512, 8192
# Templates over some stages whose first bounds are kept in order from the beginning; the others are bounded again when
# these are refined: of its hundreds of thousands a search refines few.
KNOWN = 2048
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
    """The splits by what :func:`~.layers.least_recompute.fewest_in_flight` leaves of them."""
    alike: dict[tuple[int, bool, str, int], list[PipelineSplit]] = {}
    for split in splits:
        key = split.pipeline_parallel, split.vocabulary_parallel, *flown_as(split)
        alike.setdefault(key, []).append(split)
    return [Stages(splits=tuple(group)) for group in alike.values()]


@dataclass(slots=True, kw_only=True)
class _Unrefined:
    """Templates under the splits over some stages that are not refined yet, the best of them by their first bounds.

    Args:
        stages: the splits.
        window: templates that fit these stages, refined or not.
        bounds: first bounds of the best ones, ascending [n].
        rows: these [n].
        beyond: the least bound of the others, above those of these; infinite where there is none.
    """

    stages: Stages
    window: slice
    bounds: FloatArray = field(default_factory=lambda: np.zeros(0))
    rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    beyond: float = math.inf

    def know(self, bounds: FloatArray, *, least: float, count: int) -> None:
        """Keep the best ``count``, or more, of those whose bound is ``least`` or more; ``bounds`` are the window's."""
        rows = np.flatnonzero((bounds >= least) & np.isfinite(bounds))
        known, self.beyond = bounds[rows], math.inf
        if len(rows) > count:
            last = np.partition(known, count)[count]
            self.beyond = float(known[known > last].min(initial=math.inf))
            rows = rows[known <= last]
        rows = rows[np.argsort(bounds[rows], kind="stable")]
        self.bounds, self.rows = bounds[rows], self.window.start + rows

    @property
    def least(self) -> float:
        """No template that is left has a lower bound."""
        return float(self.bounds[0]) if len(self.bounds) else self.beyond

    def take(self, near: float, limit: float) -> IntArray | None:
        """Take out those up to ``near``, some at least and at most, none beyond ``limit``; None where more of them must
        be known for that.
        """
        count = int(np.searchsorted(self.bounds, near, side="right"))
        count = min(max(count, LEAST_REFINED), MOST_REFINED)
        if count >= len(self.bounds) and math.isfinite(self.beyond):
            return None
        most = min(float(self.bounds[min(count, len(self.bounds)) - 1]), limit)
        end = int(np.searchsorted(self.bounds, most, side="right"))
        taken, self.bounds, self.rows = self.rows[:end], self.bounds[end:], self.rows[end:]
        return np.sort(taken)


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

    @property
    def least(self) -> float:
        """The least bound of them; infinite where there is none."""
        return float(self.bounds[0]) if len(self.bounds) else math.inf

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
        seen: what another search has seen of the space, or of the one that it is a part of; it is left out.
    """

    def __init__(
        self,
        space: Space,
        objective: Objective,
        incumbents: Incumbents,
        *,
        other_layers: bool,
        seen: Seen | None = None,
    ) -> None:
        self.space, self.objective, self.incumbents = space, objective, incumbents
        self.problem = incumbents.problem
        self.other_layers, self._seen = other_layers, seen
        # Where every layer is recomputed anyway, its time counts from the first refined bound on.
        self._mode = Recompute.FULL if recompute_modes(self.problem) == [Recompute.FULL] else Recompute.NONE
        self._beyond: list[tuple[Stages, IntArray]] = []
        self._ordered = {id(split): _Ordered(split=split) for split in space.splits}
        self._queue: list[tuple[float, int, _Unrefined | _Ordered]] = []
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
            least, _, item = heapq.heappop(self._queue)
            if isinstance(item, _Unrefined):
                self._refine(item, least)
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
        self._push(ordered)
        return ordered.split, rows, again_s

    def rule_out_the_rest(self) -> None:
        """Count what is left as ruled out."""
        for ordered in self._ordered.values():
            self._rule_out(ordered.rows)
        for least, _, item in self._queue:
            if isinstance(item, _Unrefined):
                bounds = self._first_bounds(item.stages, item.window)
                self._rule_out(item.window.start + np.flatnonzero(bounds >= least), len(item.stages.splits))
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
        mode: Recompute | None = None,
        *,
        again_s: FloatArray | float = 0.0,
        other_layers: bool | None = None,
    ) -> FloatArray:
        """The least objective of templates under a split, [n].

        Args:
            split: the split.
            rows: the templates.
            mode: of candidates that recompute every layer with ``FULL``; None: of all that there are.
            again_s: what they recompute at least, over all stages of a micro-batch, s [n].
            other_layers: also under others of its layers; None: where these count.
        """
        others = self.other_layers if other_layers is None else other_layers
        mode = self._mode if mode is None else mode
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
                unrefined = _Unrefined(stages=stages, window=window)
                unrefined.know(self._first_bounds(stages, window), least=-math.inf, count=KNOWN)
                self._push(unrefined)
                soon.setdefault(min(p, 2), []).append(unrefined.rows[:LEAST_REFINED])
        for p, rows in soon.items():  # at once: a call for few costs as much as one for many
            self.space.memory.prepare(p, np.concatenate(rows))

    def _first_bounds(self, stages: Stages, window: slice) -> FloatArray:
        """The least objective of templates under any of some splits, [n]."""
        devices = self.space.templates.stage_devices[window] * stages.pipeline_parallel
        return self.objective.of(self.space.bounds.least_of_stages_s(stages.splits, window), devices)

    def _refine(self, unrefined: _Unrefined, least: float) -> None:
        """Put the best templates over some stages, from a bound of ``least`` on, in the order of each split."""
        stages, limit = unrefined.stages, self.incumbents.limit
        near = min(self.least * (1.0 + LOOK_AHEAD), limit)
        rows = unrefined.take(near, limit)
        if rows is None:
            unrefined.know(self._first_bounds(stages, unrefined.window), least=least, count=MOST_REFINED)
            rows = unrefined.take(near, limit)
        if rows is None:
            raise AssertionError("as many are known as are ever taken")
        self._push(unrefined)
        unseen = {id(split): self._unseen(split, rows) for split in stages.splits}
        again_s = np.full(len(rows), np.inf)
        asked = np.logical_or.reduce([*unseen.values()])
        again_s[asked] = self.space.memory.least_s(stages.splits[0], rows[asked])
        fits = np.isfinite(again_s)
        if not fits.all():
            self._rule_out(rows[~fits], len(stages.splits))
            self._beyond.append((stages, rows[asked & ~fits]))
        for split in stages.splits if fits.any() else ():
            self._refine_under(split, rows, again_s, fits & unseen[id(split)])
            self._rule_out(rows[fits & ~unseen[id(split)]])

    def _refine_under(self, split: PipelineSplit, rows: IntArray, again_s: FloatArray, chosen: BoolArray) -> None:
        """Put those of some templates that are ``chosen`` in the order of a split; ``again_s`` is their R."""
        if not chosen.any():
            return
        rows, again_s = (rows, again_s) if chosen.all() else (rows[chosen], again_s[chosen])
        refined = self.bounds_of(split, rows, again_s=again_s)
        hopeful = refined <= self.incumbents.limit
        self._rule_out(rows[~hopeful])
        ordered = self._ordered[id(split)]
        ordered.add(refined[hopeful], rows[hopeful], again_s[hopeful])
        self._push(ordered)

    def _unseen(self, split: PipelineSplit, rows: IntArray) -> BoolArray:
        """Templates whose candidates under a split are not all known as far as they may still be kept, [n]."""
        if self._seen is None:
            return np.ones(len(rows), dtype=bool)
        whole = rows if self.space.rows is None else self.space.rows[rows]
        return ~self._seen.up_to(split, whole, self.incumbents.limit)

    # --- the queue --------------------------------------------------------------------------------------------------

    def _push(self, item: _Unrefined | _Ordered) -> None:
        """Queue what is left of some templates."""
        if math.isfinite(item.least):
            self._pushed += 1
            heapq.heappush(self._queue, (item.least, self._pushed, item))

    @staticmethod
    def _is_outdated(entry: tuple[float, int, _Unrefined | _Ordered]) -> bool:
        """Whether templates of a split have changed since they were queued: they are queued anew then."""
        least, _, item = entry
        return isinstance(item, _Ordered) and item.least != least

    def _rule_out(self, rows: slice | IntArray, times: int = 1) -> None:
        if not isinstance(rows, slice) and not len(rows):
            return
        count = times * int(self.space.templates.num_variants[rows].sum())
        self.incumbents.report.considered += count
        self.incumbents.report.ruled_out += count
