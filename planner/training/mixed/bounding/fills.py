"""How a pool may be filled: for every option, layer count and cell of the search, what it adds to the bounds.

A *cell* is an interval of τ, the time of the slowest stage, and one of *waiting*, the largest figure of any pool in use
of what its stages wait for at least: messages (:func:`own_messages_s`) and the end of a step. Arrays are
[cells, layers + 1]: entry (c, l) is the least that l layers on this pool add to a bound in cell c, over all of its
options, ∞ where none holds them; no layers add nothing.

A pool has at most ``P`` stages under an option. Consecutive stages have different numbers of micro-batches in flight,
so that p of them hold no more than Σ_{f=1..p} min(⌊τ/a⌋, layers that fit with f in flight).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE
from meshplan.planner.training.mixed.estimator import boundary_bytes, hop_s
from meshplan.planner.training.mixed.options import LAST, MIDDLE, PoolOptions
from meshplan.planner.training.mixed.stages import MixedProblem
from meshplan.planner.training.problem.schedules import SCHEDULES

SCHEDULE = "1f1b"
# Stages from which on one of them has two boundaries inside the pool.
THREE = 3
# An end of an interval belongs to it, whatever the rounding.
ROUNDING = 1.0 + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Parts of the search of one S. Arrays [cells].

    Args:
        begin_s: least τ.
        end_s: largest τ.
        least_waiting_s: least waiting.
        most_waiting_s: largest.
    """

    begin_s: FloatArray
    end_s: FloatArray
    least_waiting_s: FloatArray
    most_waiting_s: FloatArray

    @classmethod
    def of(cls, *columns: Sequence[float] | FloatArray) -> Cells:
        """Cells of four columns, in the order of the fields."""
        begin, end, least, most = (np.array(column, dtype=float) for column in columns)
        return cls(begin_s=begin, end_s=end, least_waiting_s=least, most_waiting_s=most)

    @classmethod
    def joined(cls, some: Sequence[Cells]) -> Cells:
        """All cells of several."""
        return cls.of(*(np.concatenate(column) for column in zip(*(one._columns for one in some), strict=True)))

    def taking(self, index: int) -> Cells:
        """One cell."""
        return Cells.of(*(column[index : index + 1] for column in self._columns))

    @property
    def _columns(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        return self.begin_s, self.end_s, self.least_waiting_s, self.most_waiting_s

    def __len__(self) -> int:
        return len(self.begin_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRows:
    """Options of one pool for one S. Arrays [rows].

    Args:
        rows: index into the pool's options.
        layer_s: a.
        head_s: what the LM head adds to the last stage.
        stages: P.
        fitting: layers that fit with f + 1 micro-batches in flight, [rows, most stages]; 0 beyond P.
        ending_s: least that a stage of l layers or more takes after its last micro-batch, [rows, L].
        inside_s: least round trip between two stages of the pool.
        crossing_s: least round trip to another pool; 0 where there is no other.
    """

    rows: IntArray
    layer_s: FloatArray
    head_s: FloatArray
    stages: IntArray
    fitting: FloatArray
    ending_s: FloatArray
    inside_s: FloatArray
    crossing_s: FloatArray

    def without_worse(self) -> PoolRows:
        """Without options that another one equals or betters in all that a bound looks at.

        Options with as many stages are compared; a bound may like more stages, and more of them may hold more.
        """
        figures = np.column_stack(
            [self.layer_s, self.head_s, self.inside_s, self.crossing_s, self.ending_s, -self.fitting]
        )
        keep = np.ones(len(self.rows), dtype=bool)
        for index in range(len(keep)):
            same = keep & (self.stages == self.stages[index])
            same[index] = False
            better = (figures <= figures[index]).all(axis=1)
            keep[index] = not (same & better).any()
        return self.taking(keep)

    def taking(self, rows: BoolArray | IntArray) -> PoolRows:
        """Some of the options."""
        return PoolRows(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One bound of a step, work·W − stages·P·τ + long·Σ_{t ≥ θ} t + a constant; see :mod:`.bounds`.

    Args:
        work: times W, the time of a micro-batch through all stages.
        stages: times τ less for every stage.
        long: times the time of stages that take θ or longer.
        threshold: θ as a share of τ.
    """

    work: float
    stages: float = 0.0
    long: float = 0.0
    threshold: float = 1.0


def pool_rows(
    problem: MixedProblem, options: PoolOptions | None, pool: int, others: Sequence[int], sequences: int
) -> PoolRows | None:
    """Options of an S under which a stage of one layer fits; None where there are none.

    Args:
        problem: the question.
        options: of the pool.
        pool: which.
        others: pools that may lie beside it.
        sequences: S.
    """
    if options is None:
        return None
    fits = options.most_layers(MIDDLE, 1.0, slice(None)) >= 1
    rows = np.flatnonzero((options.sequences == sequences) & fits)
    if not len(rows):
        return None
    layers = problem.any.shape.num_hidden_layers
    stages = np.minimum(options.most_stages[rows], layers)
    flying = np.minimum(np.arange(1, int(stages.max()) + 1), int(options.num_microbatches[rows[0]]))
    fitting = np.stack([options.most_layers(MIDDLE, float(one), rows) for one in flying], axis=1)
    fitting = np.minimum(fitting, layers) * (np.arange(len(flying)) < stages[:, None])
    devices = options.devices[rows].astype(float)
    whole = boundary_bytes(problem, sequences, 1)
    crossing = [_hops_s(problem, pool, other, whole, devices) for other in others if other != pool]
    return PoolRows(
        rows=rows,
        layer_s=options.layer_s[rows],
        head_s=options.ends_s[LAST, rows],
        stages=stages,
        fitting=fitting,
        ending_s=options.ending_s[rows],
        inside_s=_hops_s(problem, pool, pool, whole, devices),
        crossing_s=np.minimum.reduce(crossing) if crossing else np.zeros(len(rows)),
    ).without_worse()


def own_messages_s(own: PoolRows, stages: FloatArray, num_microbatches: int) -> FloatArray:
    """Least exposed messages of a plan with so many stages of a pool, s, [rows, …].

    Some stage waits with every micro-batch for half of what its two boundaries take. A pool beside another has one
    that crosses; of two stages or more, one has a boundary inside as well; of three or more, one has two of those.

    Args:
        own: options of the pool.
        stages: [rows, …].
        num_microbatches: m.
    """
    share = UNHIDDEN_SHARE if SCHEDULES[SCHEDULE].hides_neighbour_messages else 1.0
    waits = share * (num_microbatches - 1)
    across = own.crossing_s.reshape(-1, *[1] * (stages.ndim - 1))
    inside = own.inside_s.reshape(across.shape) * (stages > 1)
    beside = np.maximum(across + inside, 2.0 * inside * (stages >= THREE))
    return np.asarray(waits * beside / 2.0 + across + np.maximum(stages - 1.0, 0.0) * inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """What every option of a pool holds in each cell. Arrays [rows, cells, L + 1] unless said otherwise.

    Args:
        own: options of the pool.
        cells: where.
        seconds: of so many layers.
        stages: most stages of so many layers.
        most_of_stage: layers, [rows, cells].
        fits: whether a plan of the cell may have so many layers here, without and with the LM head, [2, …].
    """

    own: PoolRows
    cells: Cells
    seconds: FloatArray
    stages: IntArray
    most_of_stage: FloatArray
    fits: FloatArray

    @classmethod
    def of(cls, own: PoolRows, cells: Cells, num_layers: int, num_microbatches: int) -> Fill:
        """The fill of a pool.

        Args:
            own: options of the pool.
            cells: where.
            num_layers: L.
            num_microbatches: m.
        """
        layers = np.arange(num_layers + 1, dtype=float)
        end, layer_s = cells.end_s * ROUNDING, own.layer_s[:, None]
        held = np.minimum(np.floor(end / layer_s)[:, :, None], own.fitting[:, None, :])  # [rows, cells, stages]
        room = np.concatenate([np.zeros((*held.shape[:2], 1)), np.cumsum(held, axis=2)], axis=2)
        stages = np.minimum((held >= 1).sum(axis=2)[:, :, None], np.arange(num_layers + 1))
        first = held[:, :, 0]
        most = np.take_along_axis(room, stages, axis=2)
        needed = np.ceil(layers / np.maximum(first, 1.0)[:, :, None])
        messages = own_messages_s(own, np.arange(num_layers + 1.0)[None, :], num_microbatches)
        waiting = np.take_along_axis(messages[:, None, :], needed.astype(np.int64), axis=2)
        longest = np.ceil(layers / np.maximum(stages, 1)).astype(np.int64)  # layers of some stage, at least
        ending = np.concatenate([np.zeros((len(own.rows), 1)), own.ending_s], axis=1)
        waiting = waiting + np.take_along_axis(ending[:, None, :], longest, axis=2)
        allowed = (waiting <= cells.most_waiting_s[:, None] * ROUNDING) & (layers > 0) & (first >= 1)[:, :, None]
        head = np.floor((end - own.head_s[:, None]) / layer_s)
        lost = np.where(head >= 1, np.maximum(first - head, 0.0), np.inf)[:, :, None]
        return cls(
            own=own,
            cells=cells,
            seconds=own.layer_s[:, None, None] * layers,
            stages=stages,
            most_of_stage=first,
            fits=np.stack([allowed & (layers <= most), allowed & (layers <= most - lost)]),
        )

    def least(self, form: Form) -> tuple[FloatArray, IntArray]:
        """What layers on the pool add to a bound at least, without and with the LM head, and under which option.

        Returns:
            least: [2 (without, with the head), cells, L + 1], s.
            row: index into ``own`` of the option, of the same shape; 0 where there is none.
        """
        added = self.added(form)
        rows, found = added.argmin(axis=1), added.min(axis=1)
        found[0][:, 0] = 0.0
        return found, rows

    def added(self, form: Form) -> FloatArray:
        """What layers under each option add to a bound, without and with the LM head, s; ∞ where none holds them.

        Returns:
            [2, rows, cells, L + 1].
        """
        added = form.work * self.seconds
        if form.stages:
            added = added - form.stages * self.stages * self.cells.end_s[:, None]
        with_head = added + (form.work * self.own.head_s)[:, None, None]
        if form.long:
            threshold_s = form.threshold * self.cells.begin_s
            added = added + form.long * self._long_stages_s(threshold_s)
            with_head = with_head + form.long * self._long_with_head_s(threshold_s)
        return np.stack([np.where(self.fits[0], added, np.inf), np.where(self.fits[1], with_head, np.inf)])

    def _long_stages_s(self, threshold_s: FloatArray) -> FloatArray:
        """Least time of the stages that take no less than a threshold, [rows, cells, L + 1]."""
        return self._long_s(threshold_s, np.arange(self.seconds.shape[2], dtype=float), self.stages)

    def _long_with_head_s(self, threshold_s: FloatArray) -> FloatArray:
        """The same where one of the stages has the LM head: it is short, with as many layers as it can be, or long.

        A long one holds what the others cannot as short ones, or as much as it can: layers of long stages take their
        time wherever they are, so that more of them beside the head leave fewer long stages.
        """
        layers, others = np.arange(self.seconds.shape[2], dtype=float), np.maximum(self.stages - 1, 0)
        layer_s, head_s = self.own.layer_s[:, None], self.own.head_s[:, None]
        short = np.ceil((threshold_s - head_s) / layer_s * (2.0 - ROUNDING)) - 1.0
        most = np.floor((self.cells.end_s * ROUNDING - head_s) / layer_s)
        most = np.maximum(np.minimum(most, self.most_of_stage), 0.0)
        here = np.minimum(np.minimum(short, most)[:, :, None], layers)
        held = (here >= 1) & (layers - here <= others * self.most_of_stage[:, :, None])
        keeps = np.where(held, self._long_s(threshold_s, layers - here, others), np.inf)
        of_others = others * self._most_of_short(threshold_s)[:, :, None]
        full = np.minimum(most[:, :, None], np.maximum(layers - of_others, 1.0))
        filled = self._long_s(threshold_s, layers - full, others) + full * layer_s[:, :, None] + head_s[:, :, None]
        return np.minimum(keeps, filled)

    def _most_of_short(self, threshold_s: FloatArray) -> FloatArray:
        """Most layers of a stage that takes less than a threshold, [rows, cells]."""
        short = np.ceil(threshold_s / self.own.layer_s[:, None] * (2.0 - ROUNDING)) - 1.0
        return np.asarray(np.minimum(short, self.most_of_stage))

    def _long_s(self, threshold_s: FloatArray, layers: FloatArray, stages: IntArray) -> FloatArray:
        """Least time of the long ones of some stages that hold layers.

        Shorter stages hold at most h = ⌈θ/a⌉ − 1 layers each. What they cannot hold is on as few long ones as can be.
        """
        layer_s, short = self.own.layer_s[:, None], self._most_of_short(threshold_s)
        more = np.maximum(self.most_of_stage - short, 1.0)[:, :, None]
        left = layers - stages * short[:, :, None]
        few = np.maximum(stages - np.ceil(left / more), 0.0)
        return np.where(left > 0, layers * layer_s[:, :, None] - few * (short * layer_s)[:, :, None], 0.0)


def _hops_s(problem: MixedProblem, first: int, second: int, whole: float, devices: FloatArray) -> FloatArray:
    """Least round trip between a stage of so many devices and one of the second pool, [rows]."""
    near, far = zip(*(hop_s(problem, first, second, sent) for sent in (0.0, 1.0)), strict=True)
    outside = far[0] + whole / devices * (far[1] - far[0])
    if first != second:
        return outside
    inside = near[0] + whole / devices * (near[1] - near[0])
    if not problem.pools[first].machine.is_joined:
        return inside  # all of the pool's stages are in one node: nothing else joins its devices
    # Stages no smaller than a node have nothing but boundaries between nodes.
    return np.where(devices >= problem.pools[first].machine.domain_size, outside, np.minimum(inside, outside))
