"""Peak memory of a rank by component, for every distinct stage: expected value and safe upper bound.

Weights, gradients and optimizer states: :mod:`.states`; activations of one layer: :mod:`.activations`. Full recompute
keeps the inputs of the layers and the working set of one; block recompute does so for the first layers of each chunk
only. A stage holds as many micro-batches as the schedule keeps in flight
(:mod:`~meshplan.planner.training.pipeline.closed_forms`). The last stage adds the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.activations import (
    EAGER_ATTENTION_BACKWARD_BYTES_PER_SCORE,
    LayerActivations,
)
from meshplan.planner.training.estimator.candidates import StageClass, as_one, classes_at_once, of_class
from meshplan.planner.training.estimator.exchange.offload import ACTIVATION_BUFFERS
from meshplan.planner.training.estimator.operators.products import activation_bytes
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS, nextn_layers, predicting_kinds
from meshplan.planner.training.estimator.states import StateModel
from meshplan.planner.training.pipeline.closed_forms import in_flight
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.switches import CHUNKED, NARROW, WHOLE

# A loss that reads the logits a part at a time, or is fused, holds them and their gradients in 16 bits; an eager one in
# fp32 holds the 16-bit logits, their fp32 copy, its softmax and part of the gradient besides (2 + 4 + 4 + 2 bytes).
FUSED_LOSS_SHARE = (2.0 + 2.0) / 12.0
# The same operators in 16 bits: logits, those of the shifted labels, their log-softmax and its gradient.
NARROW_LOSS_SHARE = (2.0 + 2.0 + 2.0 + 2.0) / 12.0
# A loss in place holds the 16-bit logits while they are copied to fp32, and from then on the copy alone, which becomes
# the softmax and then the gradient; of this copy an engine that keeps outputs has one for each of two buffers.
IN_PLACE_LOSS_SHARE, KEPT_OUTPUT_SHARE, OUTPUT_BUFFERS = (2.0 + 4.0) / 12.0, 4.0 / 12.0, 2
# Candidates whose recompute is worked out together: for each, all numbers of layers of a chunk.
ROWS_AT_ONCE = 2048
Components = Mapping[str, FloatArray]  # name → bytes, [n] each
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "fixed")


def total_bytes(components: Components) -> FloatArray:
    """All components together, [n]."""
    return sum(components.values(), np.zeros_like(components["weights"]))


def _fullest(moments: Sequence[Components]) -> Components:
    """The components of each candidate at the moment when it holds most."""
    fullest = np.argmax(np.stack([total_bytes(one) for one in moments]), axis=0)
    alike = {name: [np.broadcast_to(one[name], fullest.shape) for one in moments] for name in moments[0]}
    return {name: np.take_along_axis(np.stack(held), fullest[None], axis=0)[0] for name, held in alike.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one rank of a class of stages, bytes, [n] each.

    Args:
        stage: the class.
        components: name (of :data:`COMPONENTS`) → bytes.
        typical_bytes: expected peak.
        safe_bytes: upper bound of the peak.
        host_bytes: offloaded states in host memory, with transfer buffers.
        nvme_bytes: offloaded states on the NVMe devices of the host.
    """

    stage: StageClass
    components: Mapping[str, FloatArray]
    typical_bytes: FloatArray
    safe_bytes: FloatArray
    host_bytes: FloatArray
    nvme_bytes: FloatArray

    def of_each(self, classes: Sequence[StageClass]) -> list[StageMemory]:
        """The memory of each of the classes that are held as one here."""
        return [
            StageMemory(
                stage=stage,
                components={name: of_class(held, index) for name, held in self.components.items()},
                typical_bytes=of_class(self.typical_bytes, index),
                safe_bytes=of_class(self.safe_bytes, index),
                host_bytes=of_class(self.host_bytes, index),
                nvme_bytes=of_class(self.nvme_bytes, index),
            )
            for index, stage in enumerate(classes)
        ]

    def take(self, rows: BoolArray) -> StageMemory:
        """The same for some candidates."""
        return StageMemory(
            stage=self.stage,
            components={name: held[rows] for name, held in self.components.items()},
            typical_bytes=self.typical_bytes[rows],
            safe_bytes=self.safe_bytes[rows],
            host_bytes=self.host_bytes[rows],
            nvme_bytes=self.nvme_bytes[rows],
        )


def fullest_bytes(stages: Sequence[StageMemory]) -> FloatArray:
    """Safe memory of the fullest of some stages, [n]."""
    return np.maximum.reduce([stage.safe_bytes for stage in stages])


@dataclass(frozen=True, kw_only=True)
class MemoryModel(LayerActivations):
    """Memory of a batch of candidates; what its stages share is worked out once."""

    def stages(self, asked: Sequence[StageClass] | None = None) -> tuple[StageMemory, ...]:
        """Memory of every distinct stage, or of those that are asked for."""
        classes, found = self.candidates.split.classes if asked is None else asked, []
        at_once = classes_at_once(len(self.candidates))
        for begin in range(0, len(classes), at_once):
            few = classes[begin : begin + at_once]
            found += [self.stage(few[0])] if len(few) == 1 else self.stage(as_one(few)).of_each(few)
        return tuple(found)

    def stage(self, stage: StageClass) -> StageMemory:
        """Memory of one rank of ``stage``."""
        moments = self.moments(stage)
        components = moments[0] if len(moments) == 1 else _fullest(moments)
        typical = total_bytes(components)
        return StageMemory(
            stage=stage,
            components=components,
            typical_bytes=typical,
            safe_bytes=self.calibration.memory.safe_bytes(components),
            host_bytes=self._host_bytes(stage),
            nvme_bytes=self._nvme_bytes(stage),
        )

    def moments(self, stage: StageClass) -> tuple[Components, ...]:
        """Components of one rank at each moment that may be its peak.

        The loss, with the activations and logits of the forward pass; the backward pass of the layer that recomputes or
        exchanges most, when the logits are gone; the step of the optimizer, with what it takes but neither; and the
        loading of a checkpoint, where every rank holds all of it. Where gradients are freed between steps, the passes
        hold those of earlier micro-batches.
        """
        constants, recipe = self.calibration.memory, self.calibration.recipe
        states, none = self.states.on_device(stage), np.zeros(len(self.candidates))
        fixed = np.broadcast_to(self._fixed_bytes, np.shape(states["weights"]))
        idle = {"activations": none, "logits": none, "fixed": fixed}
        stepping = {**states, **idle}
        passes = stepping | {"optimizer": states["optimizer"] - self.states.stepping_bytes(stage)}
        if recipe.frees_gradients and self.candidates.split.pipeline_parallel == 1:
            earlier = states["gradients"] + self.states.unsynchronised_bytes(stage)
            passes["gradients"] = np.where(self.candidates.num_microbatches == 1, 0.0, earlier)
        kept, working = self._activations(stage)
        loss = passes | {
            "activations": kept * constants.activation_factor,
            "logits": self._logits(stage) * constants.logits_bytes_per_entry,
        }
        moments = [loss]
        if working.any():
            moments.append(passes | {"activations": (kept + working) * constants.activation_factor})
        if self.states.optimizer_step_bytes or recipe.frees_gradients:
            moments.append(stepping)
        if recipe.loads_whole:
            loading = dict.fromkeys(states, none) | {"weights": self._while_loading(stage)}
            moments.append({**idle, **loading})
        return tuple(moments)

    @cached_property
    def _fixed_bytes(self) -> FloatArray:
        """What a process takes whatever it trains, [n]: more where it talks to others."""
        batch, constants = self.candidates, self.calibration.memory
        devices = batch.tensor_parallel * batch.context_parallel * batch.data_parallel * batch.split.pipeline_parallel
        fixed = constants.fixed_bytes + np.where(devices > 1, 1.0, 0.0) * constants.communication_bytes
        return np.asarray(fixed, dtype=np.float64)

    def _while_loading(self, stage: StageClass) -> FloatArray:
        """All weights and a rank's shard of them, [n]; 0 where they are not sharded."""
        batch = self.candidates
        ranks = batch.data_parallel_shard * batch.context_parallel
        sharded = (batch.zero_stage >= ZERO_PARAMETERS) & (ranks > 1)
        parameters = self.states.dense_parameters(stage) + self.states.expert_parameters(stage)
        return np.where(sharded, parameters * self.calibration.recipe.weight_bytes * (1.0 + 1.0 / ranks), 0.0)

    @cached_property
    def states(self) -> StateModel:
        """Weights, gradients and optimizer states of the same ranks."""
        return StateModel(
            shape=self.shape, workload=self.workload, candidates=self.candidates, calibration=self.calibration
        )

    def _host_bytes(self, stage: StageClass) -> FloatArray:
        """Host memory of one rank, [n]: offloaded states, transfer buffers, offloaded activations."""
        batch = self.candidates
        held = self.states.on_host(stage)
        if batch.offloads_layers.any():
            held = held + np.where(batch.on_nvme, 0.0, self._in_flight(stage) * self.offloaded_layer_bytes(stage))
        if batch.activation_offload.any():
            inputs = self._in_flight(stage) * self.offloaded_input_bytes(stage)
            held = held + np.where(batch.activation_offload, inputs, 0.0)
        return held

    def _nvme_bytes(self, stage: StageClass) -> FloatArray:
        """What one rank keeps on the NVMe devices of its host, [n]: offloaded states, activations of layers."""
        batch = self.candidates
        away = self.states.off_device(stage)
        if batch.offloads_layers.any():
            away = away + self._in_flight(stage) * self.offloaded_layer_bytes(stage)
        return np.where(batch.on_nvme, away, 0.0)

    def _activations(self, stage: StageClass) -> tuple[FloatArray, FloatArray]:
        """What the micro-batches in flight keep, and what the backward pass of one layer needs besides, bytes, [n]."""
        batch, shape = self.candidates, self.shape
        held: FloatArray = np.zeros(len(batch))
        largest = held
        in_block = stage.recomputed(batch.recompute_num_layers)
        further = predicting_kinds(shape)
        for index, (own_layers, again) in enumerate(zip(stage.layers, in_block, strict=True)):
            count = own_layers + nextn_layers(shape, stage) * (index in further)
            if not np.any(count):
                continue
            layer = self._layer(index)
            held = held + count * layer.kept - again * (layer.whole - layer.inputs)
            working = layer.running - np.where(again > 0, layer.inputs, layer.kept)
            largest = np.maximum(largest, working * np.greater(count, 0))
        largest = largest + self._running_bytes()
        flying = self._in_flight(stage)
        entering = activation_bytes(self.workload) * shape.hidden_size * self._tokens / self._sequence_shards
        if self.of_encoder is not None:  # what it embedded, and its output
            entering = entering + 2.0 * self.of_encoder.layer_input_bytes()
        embedded = entering * (stage.has_embedding | (stage.vocabulary_share > 0.0))
        if batch.activation_offload.any():
            away = batch.activation_offload & (batch.recompute == Recompute.FULL)
            buffers = np.minimum(ACTIVATION_BUFFERS * self.layer_input_bytes(), flying * held)
            return np.where(away, buffers + flying * embedded, flying * (held + embedded)), largest
        if batch.offloads_layers.any():
            held = held - self._layers_away_bytes(stage)
        return flying * (held + embedded), largest

    def _running_bytes(self) -> FloatArray:
        """What the running layer holds, recomputed or not: exchanged shards, gradients of scores; bytes, [n]."""
        running = self._exchange_buffer_bytes() + np.zeros(len(self.candidates))
        if self.workload.is_eager:
            running = running + EAGER_ATTENTION_BACKWARD_BYTES_PER_SCORE * self._scores()
        return running

    def _in_flight(self, stage: StageClass) -> FloatArray:
        """Micro-batches whose activations the stage holds, [n]."""
        split = self.candidates.split
        together = self.workload.practice.in_a_flush(self.candidates.num_microbatches)
        if stage.in_flight:
            return np.minimum(float(stage.in_flight), together)
        held = in_flight(
            split.schedule,
            pipeline_parallel=split.pipeline_parallel,
            virtual_pipeline_stages=split.virtual_pipeline_stages,
            stage=stage.first_index,
            num_microbatches=together,
        )
        if not split.vocabulary_parallel:
            return held
        # The barrier of the split head keeps one micro-batch more in flight (arXiv:2411.05288, Algorithm 2).
        return np.minimum(held + 1.0, together)

    @property
    def safe_per_activation_byte(self) -> FloatArray:
        """What the safe bound grows by with each byte of activations."""
        constants = self.calibration.memory
        return np.asarray(constants.activation_factor) * constants.safe_activation_factor

    def least_recomputed(self, safe_bytes: Sequence[FloatArray], limit_bytes: float) -> IntArray:
        """Fewest layers of each chunk that must be recomputed for every stage to stay within a limit, [n].

        A stage that recomputes the first n layers of its chunks saves Σ_k r_k(n)·(A_k − I_k) for each micro-batch in
        flight and needs, beside the rest, the logits or once max_k (A_k − I_k), whichever is more (A_k, I_k:
        activations of a layer of kind k, and its input), so that memory falls with n and the first n that fits is the
        least. The step of the optimizer, which keeps none of it, is left to the exact price.

        Args:
            safe_bytes: safe memory of each stage class without recompute, [n] each.
            limit_bytes: device memory.

        Returns:
            n, 0 if no recompute is needed; one more than the longest chunk if no n is enough.
        """
        batch, per_byte = self.candidates, self.safe_per_activation_byte
        inputs = self.layer_input_bytes()
        dropped = np.stack([self.layer_bytes(kind) - inputs for kind in batch.split.kinds])
        least = np.zeros(len(batch), dtype=np.int64)
        for stage, safe in zip(batch.split.classes, safe_bytes, strict=True):
            table = np.array(stage.first_layers, dtype=np.float64)[1:]
            logits, running = self._safe_logits(stage) / per_byte, self._running_bytes()
            # What is lacking beside the logits and the running layer, in activation bytes.
            flying, excess = self._in_flight(stage), (safe - limit_bytes) / per_byte - np.maximum(logits, running)
            lacking = np.flatnonzero(safe > limit_bytes)
            for i in range(0, len(lacking), ROWS_AT_ONCE):
                rows = lacking[i : i + ROWS_AT_ONCE]
                own = dropped[:, rows]
                working = np.maximum.reduce([(table[:, [kind]] > 0) * own[kind] for kind in range(len(own))])
                beside = np.maximum(logits[rows], running[rows] + working)
                enough = flying[rows] * (table @ own) - beside >= excess[rows]
                first = 1 + enough.argmax(axis=0) if len(table) else 0
                fewest = np.where(enough.any(axis=0), first, max(batch.split.layers_per_chunk) + 1)
                least[rows] = np.maximum(least[rows], fewest)
        return least

    def _safe_logits(self, stage: StageClass) -> FloatArray:
        """What the safe bound counts for the logits of a stage, bytes, [n]."""
        constants = self.calibration.memory
        each = constants.logits_bytes_per_entry * constants.safe_activation_factor
        return self._logits(stage) * each

    def _logits(self, stage: StageClass) -> FloatArray:
        """Logits of one micro-batch on a rank, in entries of an eager fp32 loss, [n]."""
        heads = stage.vocabulary_share or stage.has_head * (1.0 + self.shape.num_nextn_predict_layers)
        own = self._loss_share
        shares = {WHOLE: 1.0, CHUNKED: np.minimum(own, FUSED_LOSS_SHARE), NARROW: np.minimum(own, NARROW_LOSS_SHARE)}
        share = shares.get(self.workload.practice.loss, own)
        return heads * share * self._tokens * self.shape.vocab_size / self.candidates.tensor_parallel

    @cached_property
    def _loss_share(self) -> FloatArray | float:
        """What the framework's own loss takes over an eager one in fp32, outputs of earlier micro-batches included.

        A step of one micro-batch has those of the step before.
        """
        recipe = self.calibration.recipe
        if not recipe.keeps_outputs:
            return recipe.logits_share
        kept = np.minimum(OUTPUT_BUFFERS, self.candidates.num_microbatches)
        return IN_PLACE_LOSS_SHARE + KEPT_OUTPUT_SHARE * kept

    def offloaded_input_bytes(self, stage: StageClass) -> FloatArray:
        """Layer inputs that one micro-batch keeps on a stage under full recompute, [n]."""
        layers = sum(stage.layers) + nextn_layers(self.shape, stage)
        return layers * self.layer_input_bytes()

    def offloaded_layer_bytes(self, stage: StageClass) -> FloatArray:
        """Activations of one micro-batch that the offloaded layers of a stage keep, [n]."""
        counts = stage.recomputed(self.candidates.activation_offload_num_layers)
        none = np.zeros(len(self.candidates))
        return sum((number * self._layer(kind).kept for kind, number in enumerate(counts)), none)

    def _layers_away_bytes(self, stage: StageClass) -> FloatArray:
        """The same beyond what stays on the device while it moves: two layers of the largest kind, [n]."""
        largest = [self._layer(kind).kept for kind, number in enumerate(stage.layers) if number]
        staged = ACTIVATION_BUFFERS * np.maximum.reduce(largest) if largest else 0.0
        return np.maximum(self.offloaded_layer_bytes(stage) - staged, 0.0)
