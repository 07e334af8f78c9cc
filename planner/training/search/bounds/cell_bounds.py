"""The least step of every template under a pipeline split: what the degree search rules templates out with.

*Notation.* A template fixes the tokens of a micro-batch, so that τ_k, the time of one layer of kind k with its exposed
collectives, is the same under every split. Of the p stages stage i has n_ik layers of kind k and e_i of embedding, LM
head and loss; m micro-batches.

*Bound.* t_i = Σ_k n_ik·τ_k + e_i is what stage i needs at least for a micro-batch: sharded parameters, recompute and
offload only add to it. The slowest stage is busy for m of them, and β' as in
:func:`~meshplan.planner.training.pipeline.closed_forms.least_bubble` leaves

    T ≥ max(m·max_i t_i, (m + β'·(p − 1))·mean_i t_i) + fixed overhead

to which stage-to-stage messages are added. For every split of the layers at once the first term is left out:
the sum of all stages is the same under every split of the layers, its slowest stage is not. The optimizer is left out;
so is gradient reduction where links are equal, and on uneven links :mod:`.exchange_bounds` adds it. Candidates that
recompute every layer have the same bound with the τ_k of full recompute, those that recompute a block of r layers of
each chunk with the τ_k of a recomputed layer for these.

Assumes: on uneven links, whose rates depend on the whole layout, collectives of the layers cost nothing across nodes;
where the way to split sequences is searched for or pinned, its exchange costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.network.rank_layout import Degrees
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.assembly import CONTEXT_COMMUNICATION, LAUNCHES
from meshplan.planner.training.estimator.candidates import (
    Candidates,
    PipelineSplit,
    StageClass,
    layer_kinds,
    split_layers,
)
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.estimator.exchange.boundaries import message_bytes, messages_s
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel
from meshplan.planner.training.estimator.layer_time import LayerModel, LayerTimes
from meshplan.planner.training.estimator.operators.products import activation_bytes
from meshplan.planner.training.estimator.parameters import predicting_kinds
from meshplan.planner.training.pipeline.closed_forms import least_bubble
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.problem.schedules import NO_PIPELINE
from meshplan.planner.training.search.bounds.alike_layers import alike_layers
from meshplan.planner.training.search.bounds.distinct import distinct, occurring
from meshplan.planner.training.search.bounds.exchange_bounds import ExchangeBounds
from meshplan.planner.training.search.templates import TEMPLATE, Templates, candidates_with

# Keeps the bound below the estimate, whose sums run in another order.
ROUNDING = 1e-9
# Templates whose layers are priced at once; arrays of 128 KiB are mapped anew for every operation.
ROWS_AT_ONCE = 8192
_STYLE = "context_parallel_style"


class CellBounds:
    """Bounds of the templates of one question.

    Args:
        problem: the question.
        templates: its templates.
    """

    def __init__(self, problem: TrainingProblem, templates: Templates) -> None:
        self.problem = problem
        self._columns = templates.columns
        self._microbatches = problem.workload.global_batch_size // (
            templates.columns["micro_batch_size"] * templates.columns["data_parallel"]
        )
        self._tables: dict[Recompute, _Table] = {}
        self._whole_split = _one_stage_split(problem.shape)
        self._overhead_s = float(np.min(problem.calibration.time.step_overhead_s))
        self._whole_s: FloatArray | None = None
        self._index: tuple[dict[str, IntArray], IntArray, IntArray] | None = None
        self._exchange: ExchangeBounds | None = None
        if ExchangeBounds.applies(problem):
            whole = _unsharded(problem, self._columns, self._whole_split, Recompute.NONE)
            self._exchange = ExchangeBounds(problem, self._columns, whole)

    def pinned(self, problem: TrainingProblem, templates: Templates, rows: IntArray) -> CellBounds:
        """The bounds of some of the templates.

        Args:
            problem: the question with the pins that leave these.
            templates: these.
            rows: where they are among all.
        """
        other = object.__new__(CellBounds)
        other.problem = self.problem
        other._columns = templates.columns
        other._microbatches = self._microbatches[rows]
        other._tables = {mode: table.take(rows) for mode, table in self._tables.items()}
        other._whole_split = self._whole_split
        other._overhead_s = self._overhead_s
        other._whole_s = None if self._whole_s is None else self._whole_s[rows]
        other._index = None
        other._exchange = None if self._exchange is None else self._exchange.pinned(problem, rows)
        return other

    def under(self, problem: TrainingProblem) -> CellBounds:
        """The bounds of the same templates under other links between nodes, none of which are uniform."""
        other = object.__new__(CellBounds)
        other.__dict__.update(self.__dict__)
        other.problem = problem
        if self._exchange is not None:
            other._exchange = self._exchange.pinned(problem, np.arange(len(self._microbatches)))
        return other

    def least_of_stages_s(self, splits: Sequence[PipelineSplit], rows: slice | IntArray) -> FloatArray:
        """Lower bound of the step of every candidate of some templates under any of some splits, s [n].

        Without messages and data parallelism, and for any other split of the layers over the same stages, too.

        Args:
            splits: splits over the same stages.
            rows: the templates.
        """
        p, m = splits[0].pipeline_parallel, self._microbatches[rows]
        bubble = min(_bubble(split) for split in splits)
        busy = (m + bubble * (p - 1)) * (self._total_s(splits[0], rows, Recompute.NONE) / p)
        return np.asarray((busy + self._overhead_s) * (1.0 - ROUNDING))

    def least_s(
        self,
        split: PipelineSplit,
        rows: slice | IntArray,
        mode: Recompute = Recompute.NONE,
        *,
        again_s: FloatArray | float = 0.0,
        other_layers: bool = False,
    ) -> FloatArray:
        """Lower bound of the step of every candidate of some templates, s [n].

        Args:
            split: the pipeline split.
            rows: the templates.
            mode: ``NONE``: of all candidates; ``FULL``: of those that recompute every layer.
            again_s: what they recompute at least of a micro-batch, over all stages together, [n].
            other_layers: the bound holds for any other split of the layers over these stages and chunks, too.
        """
        total = self._total_s(split, rows, mode) + again_s
        slowest = None
        if not other_layers:
            table = self._table(mode, rows)
            slowest = np.maximum.reduce([self._stage_s(stage, table) for stage in split.classes])
        return self._least_s(split, rows, total, slowest, exchange=True)

    def of_candidates_s(self, batch: Candidates) -> FloatArray:
        """Lower bound of the step of candidates of the templates, each with what it recomputes, s [n]."""
        split, rows = batch.split, self.rows_of(batch)
        table, whole = self._table(Recompute.NONE, rows), batch.recompute == Recompute.FULL
        if whole.any():
            table[:, whole] = self._table(Recompute.FULL, rows[whole])
        in_block = np.flatnonzero(batch.recompute_num_layers)
        more = self._table(Recompute.BLOCK, rows[in_block])[:-2] - table[:-2, in_block]
        stages = []
        for stage in split.classes:
            seconds = self._stage_s(stage, table)
            seconds[in_block] += (stage.recomputed(batch.recompute_num_layers[in_block]) * more).sum(axis=0)
            stages.append(seconds)
        total = sum((stage.count * own for stage, own in zip(split.classes, stages, strict=True)), np.zeros(len(rows)))
        return self._least_s(split, rows, total, np.maximum.reduce(stages), exchange=False)

    def again_s(self, rows: IntArray) -> FloatArray:
        """Time that recompute of a layer of each kind adds to a micro-batch at least, s [kinds, n]."""
        return np.maximum(self._table(Recompute.BLOCK, rows)[:-2] - self._table(Recompute.NONE, rows)[:-2], 0.0)

    def rows_of(self, batch: Candidates) -> IntArray:
        """The template of each candidate, [n]."""
        if self._index is None:
            values, keys = {}, np.zeros(1, dtype=np.int64)
            for name in TEMPLATE:
                values[name], which = distinct(self._columns[name])
                keys = keys * len(values[name]) + which
            order = np.argsort(keys)
            self._index = values, keys[order], order
        values, keys, order = self._index
        asked = _keys(values, {name: getattr(batch, name) for name in TEMPLATE})
        return np.asarray(order[np.searchsorted(keys, asked)])

    def _stage_s(self, stage: StageClass, table: FloatArray) -> FloatArray:
        """What a stage needs at least for one micro-batch, s [n], by the seconds of :meth:`_table`."""
        predicted = self.problem.shape.num_nextn_predict_layers
        further = table[list(predicting_kinds(self.problem.shape))].sum(axis=0)
        return _stage_s(stage, table[:-2], table[-2], (1 + predicted) * table[-1] + predicted * further, table[-1])

    def _total_s(self, split: PipelineSplit, rows: slice | IntArray, mode: Recompute) -> FloatArray:
        """What all stages need at least for one micro-batch, whatever layers each of them holds, s [n]."""
        if mode is Recompute.NONE and not split.vocabulary_parallel:
            if self._whole_s is None:
                self._whole_s = self._in_one_stage_s(slice(0, len(self._microbatches)), mode)
            return np.asarray(self._whole_s[rows])
        if not split.vocabulary_parallel:
            return self._in_one_stage_s(rows, mode)
        table = self._table(mode, rows)
        return np.asarray(sum(stage.count * self._stage_s(stage, table) for stage in split.classes))

    def _in_one_stage_s(self, rows: slice | IntArray, mode: Recompute) -> FloatArray:
        """What a stage with all layers and both ends needs for one micro-batch, s [n]."""
        (stage,) = self._whole_split.classes
        return self._stage_s(stage, self._table(mode, rows))

    def _least_s(
        self,
        split: PipelineSplit,
        rows: slice | IntArray,
        total_s: FloatArray,
        slowest_s: FloatArray | None,
        *,
        exchange: bool,
    ) -> FloatArray:
        """T of the module docstring with messages, [n].

        Args:
            split: the pipeline split.
            rows: the templates.
            total_s: what all stages need for one micro-batch, Σ t_i.
            slowest_s: what the slowest one needs, max t_i; None to leave it out.
            exchange: with data parallelism, where links are uneven.
        """
        p, m = split.pipeline_parallel, self._microbatches[rows]
        passes = m + _bubble(split) * (p - 1)
        busy = passes * total_s / p
        if slowest_s is not None:
            busy = np.maximum(m * slowest_s, busy)
        if exchange and self._exchange is not None:
            busy = self._exchange.least_s(
                p, rows, pipeline_s=busy, mean_s=total_s / p, passes=passes, num_microbatches=m
            )
        return np.asarray((busy + self._overhead_s + self._messages_s(split, rows)) * (1.0 - ROUNDING))

    def _messages_s(self, split: PipelineSplit, rows: slice | IntArray) -> FloatArray | float:
        """Exposed messages between stages, s [n]: the estimator's, which depend on no other choice, without a tied
        embedding's gradient.
        """
        problem = self.problem
        if split.pipeline_parallel == 1:
            return 0.0
        tensor, context, data = (self._columns[f"{name}_parallel"][rows] for name in ("tensor", "context", "data"))
        tokens = self._columns["micro_batch_size"][rows] * problem.workload.decoder_length / context
        split_bytes = activation_bytes(problem.workload) * (tokens * problem.shape.hidden_size / tensor)
        payload_bytes = message_bytes(split_bytes, tensor, problem.calibration.recipe, problem.workload)
        stage_devices = tensor * context * data
        stages = np.full(len(tensor), split.pipeline_parallel)
        links = CommunicationModel(
            machine=problem.machine,
            calibration=problem.calibration,
            world_size=split.pipeline_parallel * stage_devices,
            degrees=Degrees(tensor=tensor, context=context, data=data, shard=np.ones_like(data), stages=stages),
        )
        return messages_s(links, split, payload_bytes, stage_devices, self._microbatches[rows])

    def _table(self, mode: Recompute, rows: slice | IntArray) -> FloatArray:
        """[kinds + 2, n] seconds of one layer of each kind, of the embedding and of the LM head with the loss."""
        if mode not in self._tables:
            self._tables[mode] = _Table.of(len(layer_kinds(self.problem.shape)[0]) + 2, len(self._microbatches))
        table = self._tables[mode]
        if len(lacking := table.lacking(rows)):
            first, which = alike_layers(self.problem, {name: column[lacking] for name, column in self._columns.items()})
            pieces = [lacking[first[i : i + ROWS_AT_ONCE]] for i in range(0, len(first), ROWS_AT_ONCE)]
            priced = np.concatenate([self._priced(piece, mode) for piece in pieces], axis=1)
            for line, seconds in zip(table.seconds, priced, strict=True):  # one by one: memory
                line[lacking] = seconds[which]
            table.is_known[lacking] = True
        return table.seconds[:, rows].copy()

    def _priced(self, rows: IntArray, mode: Recompute) -> FloatArray:
        problem = self.problem
        columns = {name: column[rows] for name, column in self._columns.items()}
        batch = _unsharded(problem, columns, self._whole_split, mode)
        machine = problem.machine
        if machine.network_model is not None:
            machine = replace(
                machine, network=None, network_model=None, scale_out_bytes_per_s=np.inf, scale_out_latency_s=0.0
            )
        common: dict[str, Any] = {"shape": problem.shape, "workload": problem.workload, "candidates": batch}
        compute = ComputeModel(**common, device=machine.device, calibration=problem.calibration)
        links = CommunicationModel(machine=machine, calibration=problem.calibration, world_size=batch.world_size)
        model = LayerModel(**common, calibration=problem.calibration, compute=compute, links=links)
        exchanges = _STYLE not in problem.fixed and _STYLE not in problem.search_over
        in_block = mode is Recompute.BLOCK
        layers = [_layer_s(model.times(kind, in_block=in_block), exchanges=exchanges) for kind in batch.split.kinds]
        return np.stack([*layers, compute.embedding().total_s, compute.head().total_s])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Seconds of layers and ends of the templates, priced when they are asked for.

    Args:
        seconds: see :meth:`CellBounds._table`, [kinds + 2, n].
        is_known: which templates are priced, [n].
    """

    seconds: FloatArray
    is_known: BoolArray

    @classmethod
    def of(cls, lines: int, count: int) -> _Table:
        """A table in which nothing is known."""
        return cls(seconds=np.empty((lines, count)), is_known=np.zeros(count, dtype=bool))

    def lacking(self, rows: slice | IntArray) -> IntArray:
        """Which of some templates are to be priced, each once; where rows are a slice, all that there are."""
        if isinstance(rows, slice):
            return np.flatnonzero(~self.is_known)
        known = self.is_known[rows]
        return rows[:0] if known.all() else occurring(rows[~known], len(self.is_known))

    def take(self, rows: IntArray) -> _Table:
        """The same of some templates; a copy of what is known, unless these are all."""
        if len(rows) == len(self.is_known):
            return self
        other = _Table.of(len(self.seconds), len(rows))
        known = np.flatnonzero(self.is_known[rows])
        other.seconds[:, known] = self.seconds[:, rows[known]]
        other.is_known[known] = True
        return other


def _bubble(split: PipelineSplit) -> float:
    """β', the least bubble of a split."""
    return least_bubble(
        split.schedule,
        pipeline_parallel=split.pipeline_parallel,
        virtual_pipeline_stages=split.virtual_pipeline_stages,
    )


def _keys(values: Mapping[str, IntArray], columns: Mapping[str, IntArray]) -> IntArray:
    """One number for each row of the columns of templates, [n]."""
    keys = np.zeros(len(columns[TEMPLATE[0]]), dtype=np.int64)
    for name in TEMPLATE:
        keys = keys * len(values[name]) + np.searchsorted(values[name], columns[name])
    return keys


def _one_stage_split(shape: ModelShape) -> PipelineSplit:
    """All layers on one stage."""
    return split_layers(
        shape,
        pipeline_parallel=1,
        virtual_pipeline_stages=1,
        layers_per_chunk=(shape.num_hidden_layers,),
        schedule=NO_PIPELINE,
    )


def _unsharded(
    problem: TrainingProblem, columns: Mapping[str, IntArray], split: PipelineSplit, mode: Recompute
) -> Candidates:
    """Templates as candidates that shard nothing."""
    rows = len(columns["data_parallel"])
    chosen = {
        "data_parallel_shard": np.ones(rows, dtype=np.int64),
        "zero_stage": np.zeros(rows, dtype=np.int64),
        "recompute": np.full(rows, int(mode)),
    }
    return candidates_with(problem, {**columns, **chosen}, split)


def _layer_s(times: LayerTimes, *, exchanges: bool) -> FloatArray:
    """Time of a layer; without the exchange of split sequences where that may be done in another way."""
    if exchanges:
        return times.total_s
    device = times.total_s - times.parts[LAUNCHES]
    host_squared = times.total_s**2 - device**2
    left = device - times.parts[CONTEXT_COMMUNICATION]
    return np.asarray(np.sqrt(left**2 + host_squared))


def _stage_s(
    stage: StageClass, layers: FloatArray, embedding: FloatArray, heads: FloatArray, head: FloatArray
) -> FloatArray:
    """What a stage needs at least for one micro-batch, s [n].

    Args:
        stage: the stage.
        layers: [kinds, n] seconds of a layer.
        embedding: [n] seconds of the embedding.
        heads: [n] seconds of the LM head and the loss, with the layers that predict further tokens and a head for each.
        head: [n] seconds of the LM head and the loss alone.
    """
    seconds = np.asarray(stage.layers, dtype=np.float64) @ layers
    if stage.has_embedding or stage.vocabulary_share:
        seconds = seconds + embedding
    if stage.has_head:
        seconds = seconds + heads
    if stage.vocabulary_share:
        seconds = seconds + stage.vocabulary_share * head
    return np.asarray(seconds)
