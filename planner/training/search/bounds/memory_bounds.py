"""What must the candidates of a template recompute at least to stay within memory? Asked before they are made.

*Notation.* Of the candidates of a template under p stages, the *leader* shards most and its layers may be recomputed
one by one: no other needs less memory, whatever the split of the layers (:mod:`..memory_savers` has why). R is the time
of the least recompute that brings the leader within memory under any split of the layers over the stages, a linear
programme (:mod:`..layers.least_recompute`), infinite where all layers recomputed are still too much.

*Bound.* Recompute of a layer takes the same time in a block and in full. A candidate that fits and recomputes r of L
layers spends (L − r)·τ + r·τ' on a micro-batch, over all stages. With the τ and τ' of :mod:`.cell_bounds`, which are no
larger than its own, and τ' ≥ τ, that is L·τ + R or more. Schedules that run forwards ahead share one R, that of the
fewest micro-batches in flight: stage i keeps p − i, each of which takes the same memory whatever p is, so that three
stages say what all numbers of stages need.

*Where it says nothing*, R = 0: ZeRO-3 is possible, whose gathered layers depend on the split; the rules of the
framework are asked about stages alone, and those that want to know more count as met. Likewise where other choices
change what a candidate needs (offload, choices on request), or a checkpoint is loaded whole. Where a cheaper recompute
than that of whole layers is possible, or links are uneven, R is 0 or infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit, layer_kinds, split_layers
from meshplan.planner.training.estimator.parameters import ZERO_GRADIENTS, ZERO_OPTIMIZER, ZERO_PARAMETERS
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.bounds.cell_bounds import CellBounds
from meshplan.planner.training.search.bounds.distinct import occurring
from meshplan.planner.training.search.layers.least_recompute import (
    LEAST_IN_FLIGHT,
    ROWS_AT_ONCE,
    flown_as,
    least_of_kinds_s,
    least_recompute_s,
)
from meshplan.planner.training.search.layers.stage_bytes import StageBytes
from meshplan.planner.training.search.layers.stage_costs import SplitCosts
from meshplan.planner.training.search.memory_savers import takes_blocks
from meshplan.planner.training.search.templates import ZERO_STAGES, Templates, candidates_with, recompute_modes

# What a bound may be beyond its exact value, whose sums run in another order, and still not rule a template out.
LOOSE = 1e-6


class MemoryBounds:
    """R of the templates of one question.

    Args:
        problem: the question.
        columns: what each template chooses, [n].
        layers: bounds of the same templates, which know what recompute of a layer takes.
    """

    def __init__(self, problem: TrainingProblem, columns: Mapping[str, IntArray], layers: CellBounds) -> None:
        self.problem = problem
        self._columns, self._layers = columns, layers
        style = "context_parallel_style" in problem.fixed
        self._applies = not (
            problem.search_over or problem.moves_off_devices or style or problem.calibration.recipe.loads_whole
        )
        self._by_layer = takes_blocks(problem) and int(Recompute.SELECTIVE) not in recompute_modes(problem)
        self._refused: dict[tuple[int, int], bool] = {}
        self._stages: dict[int, int | None] = {}
        self._tables: dict[tuple[int, bool], _Table] = {}

    def pinned(
        self, problem: TrainingProblem, templates: Templates, rows: IntArray, layers: CellBounds
    ) -> MemoryBounds:
        """The same of some of the templates.

        Args:
            problem: the question with the pins that leave these.
            templates: these.
            rows: where they are among all.
            layers: bounds of these.
        """
        other = MemoryBounds(problem, templates.columns, layers)
        other._tables = {leader: table.take(rows) for leader, table in self._tables.items()}
        other._refused = self._refused
        if other._asked() == self._asked():
            other._stages = self._stages
        return other

    def under(self, problem: TrainingProblem) -> MemoryBounds:
        """The same under other links between nodes."""
        other = MemoryBounds(problem, self._columns, self._layers)
        other._tables, other._refused = self._tables, self._refused
        return other

    def least_s(self, split: PipelineSplit, rows: IntArray) -> FloatArray:
        """R of some templates, over the stages of one micro-batch together, s [n]; infinite where nothing fits.

        Args:
            split: any split of the layers over the stages, under the schedule in question.
            rows: the templates.
        """
        zero = self._most_sharded(split.pipeline_parallel) if self._applies else None
        if zero is None or not len(rows):
            return np.zeros(len(rows))
        schedule, _ = flown_as(split)
        if schedule != LEAST_IN_FLIGHT or split.vocabulary_parallel:
            again_s = least_recompute_s(self.problem, self.leaders(zero, rows, split), any_recompute=True)
        else:
            pieces = [rows[i : i + ROWS_AT_ONCE] for i in range(0, len(rows), ROWS_AT_ONCE)]
            again_s = np.concatenate([self._least_s(zero, split.pipeline_parallel, piece) for piece in pieces])
        if self._by_layer and self.problem.machine.network_model is None:
            return again_s
        return np.where(np.isfinite(again_s), 0.0, np.inf)

    def prepare(self, num_stages: int, rows: IntArray) -> None:
        """Work out what :meth:`least_s` will need of some templates; tables are the same from two stages on."""
        zero = self._most_sharded(num_stages) if self._applies and num_stages > 1 else None
        if zero is not None:
            self._table(zero, rows)
            if self._by_layer:
                self._layers.again_s(rows)

    def _least_s(self, zero: int, num_stages: int, rows: IntArray) -> FloatArray:
        """R under 1F1B; of most templates that are asked about, a look at the roomiest stage says that nothing fits."""
        table = self._table(zero, rows)
        again_s = np.full(len(rows), np.inf)
        may_fit = self._may_fit(table, num_stages, rows)
        if may_fit.any():
            again_s[may_fit] = self._of_stages_s(table, num_stages, rows[may_fit])
        return again_s

    def _may_fit(self, table: _Table, num_stages: int, rows: IntArray) -> BoolArray:
        """Whether p stages as roomy as the roomiest may hold all layers of each kind, [n]: if not, R is infinite.

        None has more room for layers than M − min b, and none needs less for a layer than what is left of it with one
        micro-batch in flight and recompute.
        """
        _, kind_of = layer_kinds(self.problem.shape)
        room = self.problem.limits.memory_bytes - table.base_bytes[:, rows].min(axis=0)
        may_fit = room >= 0.0
        left_bytes = np.maximum(table.layer_bytes[:, rows] - table.saved_bytes[:, rows], 0.0)
        for kind, left in enumerate(left_bytes):
            count = kind_of.count(kind)
            may_fit &= num_stages * np.minimum(room, count * left) >= (1.0 - LOOSE) * count * left
        return may_fit

    def _of_stages_s(self, table: _Table, num_stages: int, rows: IntArray) -> FloatArray:
        """R under 1F1B, where stage i keeps p − i micro-batches in flight, each of which takes the same memory."""
        batch, columns = self.problem.workload.global_batch_size, self._columns
        num_microbatches = batch // (columns["micro_batch_size"][rows] * columns["data_parallel"][rows])
        flying = np.minimum(num_microbatches, num_stages - np.arange(num_stages)[:, None])[:, None]
        first, between, last = table.base_bytes[:, rows]
        base = np.broadcast_to(between, (num_stages, len(rows))).copy()
        base[0], base[-1] = first + (flying[0, 0] - 1) * table.entering_bytes[rows], last
        memory = StageBytes(
            layer_bytes=table.layer_bytes[:, rows] + (flying - 1) * table.flying_bytes[:, rows],
            base_bytes=base,
            saved_bytes=flying * table.saved_bytes[:, rows],
        )
        _, kind_of = layer_kinds(self.problem.shape)
        again_s = self._layers.again_s(rows) if self._by_layer else np.zeros(table.layer_bytes[:, rows].shape)
        return least_of_kinds_s(memory, again_s, kind_of, self.problem.limits.memory_bytes)

    def _table(self, zero: int, rows: IntArray) -> _Table:
        """Memory of the leaders of some templates, under 1F1B over two stages or more."""
        leader, shape = (zero, self._by_layer), self.problem.shape
        if leader not in self._tables:
            self._tables[leader] = _Table.of(len(layer_kinds(shape)[0]), len(self._columns["data_parallel"]))
        table = self._tables[leader]
        known = table.is_known[rows]
        if known.all():
            return table
        lacking = occurring(rows[~known], len(table.is_known))
        split = split_layers(
            shape,
            pipeline_parallel=len(table.base_bytes),
            virtual_pipeline_stages=1,
            layers_per_chunk=(0, shape.num_hidden_layers, 0),
            schedule=LEAST_IN_FLIGHT,
        )
        for i in range(0, len(lacking), ROWS_AT_ONCE):
            piece = lacking[i : i + ROWS_AT_ONCE]
            leaders = self.leaders(zero, piece, split)
            costs = SplitCosts(self.problem, leaders)
            memory = costs.memory_of_any_recompute()
            further = np.maximum(np.minimum(leaders.num_microbatches, len(table.base_bytes)) - 1, 1)
            first, last = costs.embedding_bytes((0, len(table.base_bytes) - 1))
            entering = (first - last) / further
            table.entering_bytes[piece] = entering
            table.base_bytes[:, piece] = memory.base_bytes
            table.base_bytes[0, piece] -= entering * further
            table.layer_bytes[:, piece] = memory.layer_bytes[-1]
            table.flying_bytes[:, piece] = (memory.layer_bytes[0] - memory.layer_bytes[-1]) / further
            table.saved_bytes[:, piece] = memory.saved_bytes[-1]
            table.is_known[piece] = True
        return table

    def leaders(self, zero: int, rows: IntArray, split: PipelineSplit) -> Candidates:
        """The leaders of some templates under a split, with ZeRO stage ``zero``."""
        columns = {name: column[rows] for name, column in self._columns.items()}
        chosen = {
            "zero_stage": np.full(len(rows), zero),
            "data_parallel_shard": columns["data_parallel"]
            if zero >= ZERO_OPTIMIZER
            else np.ones(len(rows), dtype=int),
            "recompute": np.full(len(rows), int(Recompute.NONE if self._by_layer else Recompute.FULL)),
        }
        return candidates_with(self.problem, {**columns, **chosen}, split)

    def _most_sharded(self, num_stages: int) -> int | None:
        """ZeRO stage of the leader under so many pipeline stages; None where there is no leader."""
        if num_stages not in self._stages:
            possible = (zero for zero in sorted(self._asked(), reverse=True) if not self._refuses(zero, num_stages))
            most = next(possible, ZERO_PARAMETERS)
            # Fully sharded frameworks sum whole gradients in a pipeline, and keep gathered what ZeRO-2 has sharded.
            keeps_whole = self.problem.calibration.recipe.is_fsdp and most >= ZERO_GRADIENTS
            self._stages[num_stages] = None if most >= ZERO_PARAMETERS or keeps_whole else most
        return self._stages[num_stages]

    def _refuses(self, zero: int, num_stages: int) -> bool:
        """Whether a rule refuses a ZeRO stage under so many pipeline stages, whatever else is chosen."""
        if (zero, num_stages) not in self._refused:
            choices = {"zero_stage": zero, "pipeline_parallel": num_stages}
            self._refused[zero, num_stages] = self.problem.rules.refuses(choices, self.problem.shape)
        return self._refused[zero, num_stages]

    def _asked(self) -> tuple[int, ...]:
        pinned = self.problem.fixed.get("zero_stage")
        return ZERO_STAGES if pinned is None else (int(pinned),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Safe memory of the leaders of the templates under 1F1B, taken from three stages, bytes; known where asked for.

    Args:
        base_bytes: of the first stage, one between and the last, without layers and with one micro-batch in flight,
            [3, n].
        entering_bytes: what each further one adds to the first stage, which embeds it, [n].
        layer_bytes: of a layer of each kind with one micro-batch in flight, [kinds, n].
        flying_bytes: what each further one adds, [kinds, n].
        saved_bytes: most that recompute saves of each of them, [kinds, n].
        is_known: which templates are worked out, [n].
    """

    base_bytes: FloatArray
    entering_bytes: FloatArray
    layer_bytes: FloatArray
    flying_bytes: FloatArray
    saved_bytes: FloatArray
    is_known: BoolArray

    @classmethod
    def of(cls, kinds: int, count: int) -> _Table:
        """A table in which nothing is known."""
        base, layer, flying, saved = (np.empty((lines, count)) for lines in (3, kinds, kinds, kinds))
        return cls(
            base_bytes=base,
            entering_bytes=np.empty(count),
            layer_bytes=layer,
            flying_bytes=flying,
            saved_bytes=saved,
            is_known=np.zeros(count, dtype=bool),
        )

    def take(self, rows: IntArray) -> _Table:
        """The same of some templates; a copy of what is known, unless these are all."""
        if len(rows) == len(self.is_known):
            return self
        other = _Table.of(len(self.layer_bytes), len(rows))
        known = np.flatnonzero(self.is_known[rows])
        for one in fields(self):
            getattr(other, one.name)[..., known] = getattr(self, one.name)[..., rows[known]]
        return other
