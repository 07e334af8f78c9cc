"""Time and memory of one optimizer step, for a batch of candidates.

    T_step = T_pipeline(m, stage times, schedule) + exposed stage-to-stage messages + exposed data-parallel
             communication + optimizer + fixed overhead (+ waiting where documents differ in length)

    stage time = Σ layers of the stage · layer time (+ embedding, + LM head and loss)

The time of a layer is in :mod:`.layer_time`. Every term keeps its name, so that a plan can list the parts of its step.

Assumes: expert load as in the workload; the same devices on all stages; the last micro-batch's backward hides gradient
reduction up to the share ``data_parallel_window``; the slowest stage sets the steady state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.assembly import (
    ACTIVATION_OFFLOAD,
    ATTENTION,
    DATA_COMMUNICATION,
    ENDS,
    MATRIX_PRODUCTS,
    StageFigures,
    TrainingEstimate,
    assembled,
)
from meshplan.planner.training.estimator.candidates import (
    Candidates,
    StageClass,
    as_one,
    attention_windows,
    chunk_classes,
    classes_at_once,
)
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.estimator.exchange.boundaries import (
    ends_meet,
    message_bytes,
    messages_s,
    tied_gradient_bytes,
)
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel
from meshplan.planner.training.estimator.exchange.data_parallel import FORWARD_SHARE, DataParallelModel
from meshplan.planner.training.estimator.exchange.offload import (
    activation_offload_s,
    away_bytes_per_s,
    layers_offload_s,
)
from meshplan.planner.training.estimator.exchange.vocabulary_parallel import vocabulary_parallel_s
from meshplan.planner.training.estimator.layer_time import LayerModel, LayerTimes, known_times
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.operators.attention import forward_time_share
from meshplan.planner.training.estimator.operators.products import activation_bytes
from meshplan.planner.training.estimator.parameters import nextn_layers, predicting_kinds
from meshplan.planner.training.pipeline.unlike_chunks import unlike_chunks_s
from meshplan.planner.training.pipeline.waiting import Layout, least_waiting_s, waiting_s
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingWorkload

# Forward share of a micro-batch with full recompute: forward, forward again and twice as much backward.
RECOMPUTED_FORWARD_SHARE = 1.0 / 4.0


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """Prices training steps.

    Args:
        shape: the model.
        machine: the cluster.
        workload: sequence length, precision, phase.
        candidates: the batch.
        calibration: constants and framework recipe.
    """

    shape: ModelShape
    machine: Machine
    workload: TrainingWorkload
    candidates: Candidates
    calibration: Calibration

    @cached_property
    def _compute(self) -> ComputeModel:
        return ComputeModel(
            shape=self.shape,
            device=self.machine.device,
            workload=self.workload,
            candidates=self.candidates,
            calibration=self.calibration,
        )

    @cached_property
    def _links(self) -> CommunicationModel:
        return CommunicationModel(
            machine=self.machine,
            calibration=self.calibration,
            world_size=self.candidates.world_size,
            degrees=self.candidates.degrees,
        )

    @cached_property
    def forward_share(self) -> FloatArray:
        """Forward share of a micro-batch; with full recompute the backward part includes a second forward."""
        return np.where(self.candidates.recompute == Recompute.FULL, RECOMPUTED_FORWARD_SHARE, FORWARD_SHARE)

    @cached_property
    def memory(self) -> MemoryModel:
        """Memory model of the same batch."""
        return MemoryModel(
            shape=self.shape, workload=self.workload, candidates=self.candidates, calibration=self.calibration
        )

    @property
    def _layer_model(self) -> LayerModel:
        return LayerModel(
            shape=self.shape,
            workload=self.workload,
            candidates=self.candidates,
            calibration=self.calibration,
            compute=self._compute,
            links=self._links,
        )

    @cached_property
    def _data_parallel(self) -> DataParallelModel:
        return DataParallelModel(
            machine=self.machine,
            workload=self.workload,
            candidates=self.candidates,
            calibration=self.calibration,
            states=self.memory.states,
            links=self._links,
        )

    # --- one stage, one step ----------------------------------------------------------------------------------------

    @cached_property
    def _layers(self) -> tuple[dict[int, LayerTimes], dict[int, LayerTimes]]:
        """Times of each kind of layer, outside and inside a recomputed block; a search asks for many sets of stages."""
        kinds, model = self.candidates.split.kinds, self._layer_model
        layers = {index: known_times(model, kind) for index, kind in enumerate(kinds)}
        if not self.candidates.recompute_num_layers.any():
            return layers, layers
        return layers, {index: known_times(model, kind, in_block=True) for index, kind in enumerate(kinds)}

    def take(self, rows: IntArray) -> TrainingModel:
        """The model of some of the candidates; what is known of their layers is not priced again."""
        other = replace(self, candidates=self.candidates.take(rows))
        if "_layers" in self.__dict__:
            layers, in_block = self._layers
            own = {index: times.take(rows) for index, times in layers.items()}
            again = own if in_block is layers else {index: times.take(rows) for index, times in in_block.items()}
            other.__dict__["_layers"] = own, again
        return other

    def with_block_of_one(self) -> TrainingModel:
        """The model of candidates without recompute, with that of the first layer of each chunk; the other layers take
        what they took.
        """
        ones = np.ones(len(self.candidates), dtype=np.int64)
        batch = replace(self.candidates, recompute=int(Recompute.BLOCK) * ones, recompute_num_layers=ones)
        other, (layers, _) = replace(self, candidates=batch), self._layers
        model = other._layer_model
        in_block = {index: known_times(model, kind, in_block=True) for index, kind in enumerate(batch.split.kinds)}
        other.__dict__["_layers"] = layers, in_block
        return other

    def _block_s(
        self, stage: StageClass, layers: Mapping[int, LayerTimes], in_block: Mapping[int, LayerTimes]
    ) -> FloatArray:
        """Time that block recompute adds to one micro-batch on a stage, [n]."""
        counts = stage.recomputed(self.candidates.recompute_num_layers)
        zero = np.zeros_like(layers[0].total_s)
        return sum((counts[i] * (in_block[i].total_s - layers[i].total_s) for i in layers), zero)

    def _forward_shares(self, stage_s: FloatArray, block_s: FloatArray) -> FloatArray:
        """Forward share of a micro-batch on a stage, [n]: with block recompute, a third of the time without it."""
        in_block = (self.candidates.recompute == Recompute.BLOCK) & (stage_s > 0.0)  # a chunk may be empty
        again = np.divide(block_s, stage_s, out=np.zeros_like(stage_s), where=in_block)
        return np.where(in_block, FORWARD_SHARE * (1.0 - again), self.forward_share)

    def _stage(
        self, stage: StageClass, layers: Mapping[int, LayerTimes], in_block: Mapping[int, LayerTimes]
    ) -> dict[str, FloatArray]:
        """Time of one micro-batch on a stage by part, ZeRO-3 transfers included."""
        parts: dict[str, FloatArray] = {}
        zero = np.zeros_like(next(iter(layers.values())).total_s)
        counts = stage.recomputed(self.candidates.recompute_num_layers)
        for index, count in enumerate(stage.layers):
            for name, seconds in layers[index].parts.items():
                parts[name] = parts.get(name, zero) + count * seconds
                if in_block is not layers:
                    parts[name] = parts[name] + counts[index] * (in_block[index].parts[name] - seconds)
        predicted = nextn_layers(self.shape, stage)
        if np.any(predicted):
            for index in predicting_kinds(self.shape):
                for name, seconds in layers[index].parts.items():
                    parts[name] = parts[name] + predicted * seconds
            joined = self._compute.joined_prediction().total_s
            parts[MATRIX_PRODUCTS] = parts[MATRIX_PRODUCTS] + predicted * joined
        ends = zero
        if np.any(stage.has_embedding):
            ends = ends + stage.has_embedding * self._compute.embedding().total_s
        if np.any(stage.has_head):
            ends = ends + (stage.has_head + predicted) * self._compute.head().total_s
        if stage.vocabulary_share:  # every stage looks up and adds a full tensor, mostly zeros
            head = self._compute.head(stage.vocabulary_share)
            ends = ends + self._compute.embedding().total_s + head.total_s
        parts[ENDS] = ends
        if (self.candidates.activation_offload | self.candidates.offloads_layers).any():
            parts[ACTIVATION_OFFLOAD] = self._activation_offload_s(stage, sum(parts.values(), -ends))
        busy = sum(parts.values(), zero)
        parts[DATA_COMMUNICATION] = self._data_parallel.fully_sharded_s(stage, busy)
        return parts

    def _activation_offload_s(self, stage: StageClass, layers_s: FloatArray) -> FloatArray:
        """What copies of activations add to one micro-batch on a stage whose layers take ``layers_s``, [n]."""
        batch, machine = self.candidates, self.machine
        ranks = np.minimum(machine.devices_per_host, batch.world_size)
        inputs = np.where(batch.activation_offload, self.memory.offloaded_input_bytes(stage), 0.0)
        hidden = layers_offload_s(
            inputs + self.memory.offloaded_layer_bytes(stage),
            layers_s,
            sum(stage.layers),
            self.forward_share,
            bytes_per_s=away_bytes_per_s(machine, ranks, on_nvme=batch.on_nvme & batch.offloads_layers),
        )
        if self.calibration.recipe.overlaps_activation_offload:
            return hidden
        return np.where(batch.activation_offload, activation_offload_s(inputs, machine.device), hidden)

    def neighbour_messages_s(self, busy_s: FloatArray | None = None) -> FloatArray:
        """Exposed stage-to-stage messages: activations forward, gradients backward, a tied embedding's gradient.

        What is sent is in :mod:`.exchange.boundaries`. The pipeline fills over every boundary once; then each further
        micro-batch waits for the stage with the slowest boundaries
        (:mod:`~meshplan.planner.cluster.network.network_model`). A schedule that hides messages leaves a share of
        :data:`~.exchange.collectives.UNHIDDEN_SHARE` exposed, and what takes longer than all the work that it could run
        behind.

        Args:
            busy_s: work of the slowest stage in a step, [n]; None: as much as there are messages, a lower bound.
        """
        batch = self.candidates
        if batch.split.pipeline_parallel == 1:
            return np.zeros(len(batch))
        elements = self._compute.tokens * self.shape.hidden_size / batch.tensor_parallel
        exposed = messages_s(
            self._links,
            batch.split,
            message_bytes(
                activation_bytes(self.workload) * elements,
                batch.tensor_parallel,
                self.calibration.recipe,
                self.workload,
            ),
            batch.stage_devices,
            batch.num_microbatches,
            busy_s=busy_s,
        )
        return exposed + self._tied_gradient_s()

    def _tied_gradient_s(self) -> FloatArray | float:
        """All-reduce of a tied embedding's gradient between first and last stage, once a step, [n]."""
        batch, split = self.candidates, self.candidates.split
        whole = tied_gradient_bytes(self.shape, self.workload, self.calibration.recipe)
        if not whole or ends_meet(split) or split.vocabulary_parallel:  # one copy, or none
            return 0.0
        return self._links.ends_s(whole / batch.tensor_parallel, split.pipeline_parallel * batch.stage_devices)

    @property
    def _documents_differ(self) -> bool:
        """Micro-batches differ in attention; without fused kernels all scores of a sequence are computed."""
        fuses = self.workload.practice.fuses_attention(self.calibration.recipe.flash_attention)
        return self.workload.documents is not None and fuses

    @property
    def _attention_again(self) -> float:
        """What full recompute repeats of fused attention, as a share of its time."""
        return forward_time_share(self.shape, self.machine.device, self.calibration)

    def attention_share(self, parts: Mapping[str, FloatArray], stage_s: FloatArray) -> FloatArray:
        """Share of a micro-batch's time on a stage that grows with causal pairs, [n]."""
        again = self._attention_again * (self.candidates.recompute == Recompute.FULL)
        return np.minimum(parts[ATTENTION] * (1.0 + again) / stage_s, 1.0)

    def _waiting_s(self, stages: Sequence[StageFigures], slowest: FloatArray) -> FloatArray:
        """What ranks and stages wait because micro-batches hold documents of different lengths, [n]."""
        documents = self.workload.documents
        if documents is None or not self._documents_differ:
            return np.zeros_like(slowest)
        shares = [self.attention_share(stage.parts, stage.seconds) for stage in stages]
        windows = attention_windows(self.shape)
        return waiting_s(documents, windows, self._layouts(), np.maximum.reduce(shares), slowest)

    def _least_waiting_s(self) -> FloatArray:
        """Waiting at least, however the layers are split, [n].

        Whatever else a stage does, waiting over its attention has a least value, and some stage has the mean attention.
        """
        documents, batch, split = self.workload.documents, self.candidates, self.candidates.split
        if documents is None or not self._documents_differ:
            return np.zeros(len(batch))
        layers, _ = self._layers
        counts = [sum(stage.count * stage.layers[kind] for stage in split.classes) for kind in layers]
        attention = sum((n * layers[kind].parts[ATTENTION] for kind, n in enumerate(counts)), np.zeros(len(batch)))
        return least_waiting_s(
            documents, attention_windows(self.shape), self._layouts(), attention / split.pipeline_parallel
        )

    def _layouts(self) -> list[Layout]:
        """What waiting depends on, of every candidate."""
        batch, split = self.candidates, self.candidates.split
        columns = (batch.data_parallel, batch.num_microbatches, batch.micro_batch_size)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Layout(split.schedule, split.pipeline_parallel, split.virtual_pipeline_stages, *row) for row in rows]

    def chunk_s(self, chunk: StageClass) -> tuple[FloatArray, FloatArray]:
        """Time of one micro-batch on a model chunk, forward + backward, and the forward share of it, [n]."""
        layers, in_block = self._layers
        seconds = sum(self._stage(chunk, layers, in_block).values(), np.zeros_like(layers[0].total_s))
        return seconds, self._forward_shares(seconds, self._block_s(chunk, layers, in_block))

    def _unlike_chunks_s(self, stages: Sequence[StageFigures]) -> FloatArray | None:
        """Time of interleaved 1F1B where chunks of a stage hold different layers, [n]; None where they are alike.

        Chunks are scaled to what their stage takes with ZeRO-3's transfers, which are no sum over layers. Embedding and
        LM head lie on their own chunks here; where all chunks are alike the stage's other ones share in them.

        Args:
            stages: figures of each stage.
        """
        split, p, v = self.candidates.split, len(stages), self.candidates.split.virtual_pipeline_stages
        if split.schedule != "interleaved":
            return None
        chunks = chunk_classes(self.shape, split)
        if all(chunk.layers == chunks[index % p].layers for index, chunk in enumerate(chunks)):
            return None
        each = {chunk: self.chunk_s(chunk) for chunk in dict.fromkeys(chunks)}
        seconds = np.stack([each[chunk][0] for chunk in chunks]).reshape(v, p, -1)
        share = np.stack([each[chunk][1] for chunk in chunks]).reshape(seconds.shape)
        whole = seconds.sum(axis=0)  # 0 on a stage of empty chunks
        scale = np.divide(
            np.stack([stage.seconds for stage in stages]), whole, out=np.ones_like(whole), where=whole > 0.0
        )
        seconds = seconds * scale
        return unlike_chunks_s(share * seconds, (1.0 - share) * seconds, self.candidates.num_microbatches)

    def slowest_stage_s(self) -> tuple[float, dict[int | None, float]]:
        """Of one candidate: a micro-batch on the slowest stage, s, and of that attention, by the layers' window."""
        layers, in_block = self._layers
        kinds, again = self.candidates.split.kinds, float(self.candidates.recompute[0] == Recompute.FULL)
        slowest: tuple[float, dict[int | None, float]] = (0.0, {})
        for stage in self.candidates.split.classes:
            seconds = float(sum(self._stage(stage, layers, in_block).values(), np.zeros(1))[0])
            if seconds <= slowest[0]:
                continue
            attention: dict[int | None, float] = {}
            for kind, count in enumerate(stage.layers):
                own = count * float(layers[kind].parts[ATTENTION][0]) * (1.0 + self._attention_again * again)
                if own:
                    attention[kinds[kind].window] = attention.get(kinds[kind].window, 0.0) + own
            slowest = (seconds, attention)
        return slowest

    def stages_s(self, stages: Sequence[StageClass]) -> list[FloatArray]:
        """Time of one micro-batch, forward + backward, on each of some stages, [n] each."""
        layers, in_block = self._layers
        zero = np.zeros_like(layers[0].total_s)
        return [sum(self._stage(stage, layers, in_block).values(), zero) for stage in stages]

    def around_s(self) -> FloatArray:
        """Messages between stages, fixed overhead and least waiting: of a step, whatever layers a stage holds, [n]."""
        overhead = np.asarray(self.calibration.time.step_overhead_s)
        return self.neighbour_messages_s() + overhead + self._least_waiting_s()

    def ending_s(self, stage: StageClass, stage_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Exposed gradient reduction, and optimizer, of a stage that takes ``stage_s`` for a micro-batch, [n] each."""
        states = self._data_parallel
        return states.exposed_s(stage, stage_s)[0], states.optimizer_s(stage)

    @cached_property
    def stage_figures(self) -> list[StageFigures]:
        """What the parts of a step take on each distinct stage of the pipeline."""
        return self.figures(self.candidates.split.classes)

    def figures(self, stages: Sequence[StageClass]) -> list[StageFigures]:
        """What the parts of a step take on each of some stages."""
        at_once = classes_at_once(len(self.candidates))
        found: list[StageFigures] = []
        for begin in range(0, len(stages), at_once):
            few = stages[begin : begin + at_once]
            found += [self._figures(few[0])] if len(few) == 1 else self._figures(as_one(few)).of_each(len(few))
        return found

    def _figures(self, stage: StageClass) -> StageFigures:
        """What the parts of a step take on a stage."""
        layers, in_block = self._layers
        parts = self._stage(stage, layers, in_block)
        seconds = sum(parts.values(), np.zeros_like(layers[0].total_s))
        shares = self.forward_share
        if in_block is not layers:
            shares = self._forward_shares(seconds, self._block_s(stage, layers, in_block))
        exposed, reduced = self._data_parallel.exposed_s(stage, seconds)
        return StageFigures(
            parts=parts,
            seconds=seconds,
            forward_share=shares,
            exposed_s=exposed,
            reduce_s=reduced,
            optimizer_s=self._data_parallel.optimizer_s(stage),
        )

    def estimate(self, *, with_memory: bool = True) -> TrainingEstimate:
        """Price the batch; without its memory where that is known already."""
        split, figures = self.candidates.split, self.stage_figures
        slowest = np.maximum.reduce([one.seconds for one in figures])
        hidden = activation_bytes(self.workload) * self._compute.tokens * self.shape.hidden_size
        vocabulary = vocabulary_parallel_s(self._links, self.candidates, hidden, self._compute.tokens, slowest)
        stages = [figures[index] for index in split.class_of_stage]
        return assembled(
            stages,
            schedule=split.schedule,
            virtual_pipeline_stages=split.virtual_pipeline_stages,
            num_microbatches=self.candidates.num_microbatches,
            in_a_flush=self.workload.practice.in_a_flush(self.candidates.num_microbatches),
            messages_s=self.neighbour_messages_s(self.candidates.num_microbatches * slowest),
            overhead_s=np.asarray(self.calibration.time.step_overhead_s),
            vocabulary_s=vocabulary if split.vocabulary_parallel else None,
            waiting_s=self._waiting_s(figures, slowest) if self._documents_differ else None,
            unlike_chunks_s=self._unlike_chunks_s(stages),
            memory=self.memory.stages() if with_memory else (),
        )


def estimate_training(
    shape: ModelShape,
    machine: Machine,
    workload: TrainingWorkload,
    candidates: Candidates,
    calibration: Calibration,
    *,
    with_memory: bool = True,
) -> TrainingEstimate:
    """Step time of a batch of candidates, and its memory if asked for; the module docstring has the equation."""
    model = TrainingModel(
        shape=shape, machine=machine, workload=workload, candidates=candidates, calibration=calibration
    )
    return model.estimate(with_memory=with_memory)
