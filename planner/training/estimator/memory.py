"""Peak memory of a rank by component, for every distinct stage: expected value and safe upper bound.

Weights, gradients and optimizer states: :mod:`.states`.

Activations of one layer per token and device, in bytes of 16-bit tensors kept for the backward pass (generalises
Korthikanti et al., arXiv:2205.05198, eq. 1–5, to gated MLPs, grouped queries, latent attention and experts):

    norms and residuals 8h (÷t with sequence parallelism) · queries, keys, values and their output ÷t
    · MLP: input shared with the norm, each product's output and the activation's output ÷t
    · dropout masks 2h where the framework keeps them · scores 5·a·s ÷t without flash attention

An encoder–decoder keeps of a decoder layer's cross-attention its norm, queries and output, and keys and values of what
the encoder read; the encoder's output is kept once.

Full recompute keeps 2h per layer and the working set of one layer; block recompute does so for the first layers of each
chunk only; selective recompute drops the activations of the attention core, or of other modules (:mod:`.recompute`). A
stage holds as many micro-batches as the schedule keeps in flight
(:mod:`~meshplan.planner.training.pipeline.closed_forms`). The last stage adds the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.candidates import Candidates, LayerKind, StageClass
from meshplan.planner.training.estimator.compute import BLOCKS_OF_A_LAYER
from meshplan.planner.training.estimator.eager import EagerActivations
from meshplan.planner.training.estimator.exchange.context_parallel import ContextParallelModel
from meshplan.planner.training.estimator.exchange.recurrent import RecurrentExchange
from meshplan.planner.training.estimator.offload import ACTIVATION_BUFFERS
from meshplan.planner.training.estimator.operators.products import activation_bytes
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS, nextn_layers
from meshplan.planner.training.estimator.recompute import ModuleRecompute
from meshplan.planner.training.estimator.states import StateModel
from meshplan.planner.training.pipeline.closed_forms import in_flight
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import Phase, TrainingWorkload
from meshplan.planner.training.problem.switches import CHUNKED, NARROW, WHOLE

# 5·a·s bytes per token and layer: in 16 bits the softmax output, the output of its dropout and a 1-byte mask
# (arXiv:2205.05198, §4.1); in fp32 the softmax output and the mask.
PLAIN_ATTENTION_BYTES_PER_SCORE = 5.0
# Operator by operator: the softmax output in fp32 and its 16-bit copy; while its backward pass runs the gradients of
# both besides (assumed of transformers' attention of 2023).
EAGER_ATTENTION_BYTES_PER_SCORE = 6.0
EAGER_ATTENTION_BACKWARD_BYTES_PER_SCORE = 6.0
# A loss that reads the logits a part at a time, or is fused, holds them and their gradients in 16 bits; an eager one in
# fp32 holds the 16-bit logits, their fp32 copy, its softmax and part of the gradient besides (2 + 4 + 4 + 2 bytes).
FUSED_LOSS_SHARE = (2.0 + 2.0) / 12.0
# The same operators in 16 bits: logits, those of the shifted labels, their log-softmax and its gradient.
NARROW_LOSS_SHARE = (2.0 + 2.0 + 2.0 + 2.0) / 12.0
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


# A stream of residuals is read and written once before and once after each block: what is kept of it is written once.
STREAM_PASSES = 2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Activations of one layer of a kind and micro-batch, bytes, [n] each.

    Args:
        whole: without recompute.
        inputs: what recompute of the layer keeps.
        kept: of each candidate, as it recomputes all layers, modules of them, or none.
    """

    whole: FloatArray
    inputs: FloatArray
    kept: FloatArray

    def take(self, rows: BoolArray) -> _Layer:
        """The same for some candidates."""
        return _Layer(whole=self.whole[rows], inputs=self.inputs[rows], kept=self.kept[rows])


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Memory of a batch of candidates; what its stages share is worked out once.

    Args:
        shape: the model.
        workload: sequence length, phase.
        candidates: the batch.
        calibration: constants and the framework's recipe.
    """

    shape: ModelShape
    workload: TrainingWorkload
    candidates: Candidates
    calibration: Calibration
    _layers: dict[int, _Layer] = field(default_factory=dict, init=False, repr=False, compare=False)

    def take(self, rows: BoolArray) -> MemoryModel:
        """The model of some of the candidates; what is known of their layers is not worked out again."""
        if rows.all():
            return self
        other = replace(self, candidates=self.candidates.take(rows))
        other._layers.update((index, layer.take(rows)) for index, layer in self._layers.items())
        return other

    def stages(self) -> tuple[StageMemory, ...]:
        """Memory of every distinct stage."""
        return tuple(self.stage(stage) for stage in self.candidates.split.classes)

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
            nvme_bytes=np.where(self.candidates.on_nvme, self.states.off_device(stage), 0.0),
        )

    def moments(self, stage: StageClass) -> tuple[Components, ...]:
        """Components of one rank at each moment that may be its peak.

        The loss, with the activations and logits of the forward pass and the gradients of earlier micro-batches; where
        gradients are freed between steps the step of the optimizer, with them and what it takes but no activations; and
        the loading of a checkpoint, where every rank holds all of it.
        """
        constants, recipe = self.calibration.memory, self.calibration.recipe
        held = dict(self.states.on_device(stage))
        held["activations"] = self._activations(stage) * constants.activation_factor
        held["logits"] = self._logits(stage) * constants.logits_bytes_per_entry
        held["fixed"] = self._fixed_bytes(held["weights"])
        none = np.zeros(len(self.candidates))
        moments = [held]
        if recipe.frees_gradients and self.candidates.split.pipeline_parallel == 1:
            is_step = self.candidates.num_microbatches == 1
            before = {
                "gradients": np.where(is_step, 0.0, held["gradients"] + self.states.unsynchronised_bytes(stage)),
                "optimizer": held["optimizer"] - self.states.stepping_bytes(stage),
            }
            moments = [held | before, held | {"activations": none, "logits": none}]
        if recipe.loads_whole:
            moments.append(dict.fromkeys(held, none) | {"weights": self._while_loading(stage), "fixed": held["fixed"]})
        return tuple(moments)

    def _fixed_bytes(self, like: FloatArray) -> FloatArray:
        """What a process takes whatever it trains, [n]: more where it talks to others."""
        batch, constants = self.candidates, self.calibration.memory
        devices = batch.tensor_parallel * batch.context_parallel * batch.data_parallel * batch.split.pipeline_parallel
        fixed = constants.fixed_bytes + np.where(devices > 1, 1.0, 0.0) * constants.communication_bytes
        return np.broadcast_to(np.asarray(fixed, dtype=np.float64), np.shape(like))

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
        if batch.activation_offload.any():
            inputs = self._in_flight(stage) * self.offloaded_input_bytes(stage)
            held = held + np.where(batch.activation_offload, inputs, 0.0)
        return held

    # --- activations -----------------------------------------------------------------------------------------------

    @cached_property
    def _tokens(self) -> FloatArray:
        batch = self.candidates
        return batch.micro_batch_size * self.workload.decoder_length / batch.context_parallel

    @cached_property
    def of_encoder(self) -> MemoryModel | None:
        """The same of the layers of the encoder in front; None without one."""
        encoder = self.shape.encoder
        return None if encoder is None else replace(self, shape=encoder, workload=self.workload.of_encoder)

    def _of(self, kind: LayerKind) -> MemoryModel:
        """The model of the stack that a kind of layer belongs to."""
        return self.of_encoder or self if kind.is_encoder else self

    @cached_property
    def _sequence_shards(self) -> FloatArray:
        batch = self.candidates
        return np.where(batch.sequence_parallel, batch.tensor_parallel, 1).astype(np.float64)

    def _scores(self, read: int = 0) -> FloatArray:
        """Attention scores of one layer and micro-batch that are written to memory, [n]: 0 with flash attention.

        Args:
            read: tokens of an encoder that cross-attention scores besides.
        """
        if self.workload.practice.fuses_attention(self.calibration.recipe.flash_attention):
            return np.zeros(len(self.candidates))
        scores = self.shape.num_attention_heads * (self.workload.decoder_length + read)
        return scores * self._tokens / self.candidates.tensor_parallel

    def attention_core_bytes(self) -> FloatArray:
        """Activations of the attention core of one layer and micro-batch (dropped by selective recompute), [n]."""
        each = EAGER_ATTENTION_BYTES_PER_SCORE if self.workload.is_eager else PLAIN_ATTENTION_BYTES_PER_SCORE
        return each * self._scores()

    def layer_bytes(self, kind: LayerKind) -> FloatArray:
        """Activations of one layer and micro-batch without recompute, attention core included, [n]."""
        if kind.is_encoder and self.of_encoder is not None:
            return self.of_encoder.layer_bytes(kind)
        eager = EagerActivations(
            shape=self.shape,
            workload=self.workload,
            candidates=self.candidates,
            keeps_last_graph=self.calibration.recipe.keeps_last_graph,
        )
        extra = eager.bytes_per_token(kind, self._sequence_shards)
        return self._fused_layer_bytes(kind) + activation_bytes(self.workload) / BYTES_16_BIT * self._tokens * extra

    def _fused_layer_bytes(self, kind: LayerKind) -> FloatArray:
        """The same where memory-bound operators are fused, [n]."""
        shape, t = self.shape, self.candidates.tensor_parallel
        h = shape.hidden_size * kind.num_blocks / BLOCKS_OF_A_LAYER
        # Frozen matrices without adapters need no input for a weight gradient: the second norm's output and the MLP's
        # last input are dropped.
        masks = 2.0 * h if self.calibration.recipe.dropout_masks else 0.0
        hidden = (6.0 if self._has_frozen_mlp else 8.0) * h + masks
        heads = self._attention_bytes_per_token(kind) if kind.has_attention else 0.0
        if kind.form is not None:  # the streams of residuals that it keeps beside the one of a plain layer
            hidden += BYTES_16_BIT * kind.form.streamed_elements / STREAM_PASSES
        if kind.has_recurrent and shape.blocks is not None and shape.blocks.recurrent is not None:
            heads = heads + BYTES_16_BIT * shape.blocks.recurrent.kept_elements
        wide = activation_bytes(self.workload) / BYTES_16_BIT
        kept = hidden / self._sequence_shards + heads / t + self._mlp_bytes_per_token(kind)
        layer = wide * kept * self._tokens
        if kind.has_cross_attention and self.of_encoder is not None:
            layer = layer + wide * self._cross_attention_bytes(self.of_encoder)
        if not kind.has_attention:
            return layer
        layer = layer + self.attention_core_bytes()
        exchanged = self._context_parallel.kept_bytes()
        return layer if exchanged is None else layer + exchanged

    def _cross_attention_bytes(self, encoder: MemoryModel) -> FloatArray:
        """Queries, output, keys and values of one layer's cross-attention in one micro-batch, and its scores where
        they are written, in 16-bit activations, [n].
        """
        shape, t = self.shape, self.candidates.tensor_parallel
        elements = shape.num_attention_heads * self._tokens + shape.num_key_value_heads * encoder._tokens
        scores = self._scores(self.workload.sequence_length) - self._scores()
        return BYTES_16_BIT * 2.0 * shape.head_dim * elements / t + PLAIN_ATTENTION_BYTES_PER_SCORE * scores

    def _attention_bytes_per_token(self, kind: LayerKind) -> FloatArray | float:
        """Queries, keys, values, output and output gate of one attention block, over all tensor-parallel devices."""
        if (form := kind.form) is not None:
            width = form.attention_width + form.entry_elements
            copied = sum(matrix.outputs * matrix.count for matrix in form.matrices if not matrix.divides)
            return BYTES_16_BIT * (width + copied * self.candidates.tensor_parallel)
        shape, a = self.shape, self.shape.num_attention_heads
        if shape.latent is None:
            widths = (2.0 + 2.0 * shape.has_output_gate) * a + 2.0 * shape.num_key_value_heads
            return BYTES_16_BIT * widths * shape.head_dim
        query_key = shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim
        ranks = shape.latent.kv_lora_rank + (shape.latent.q_lora_rank or 0)
        split = a * (2.0 * query_key + 2.0 * shape.latent.v_head_dim)
        return BYTES_16_BIT * (split + ranks * self.candidates.tensor_parallel)

    @property
    def _modules(self) -> ModuleRecompute:
        return ModuleRecompute(shape=self.shape, workload=self.workload, candidates=self.candidates)

    def _kept_by_selective(self, kind: LayerKind, whole: FloatArray) -> FloatArray:
        """Activations of one layer and micro-batch under selective recompute, of ``whole`` without, [n]."""
        modules = self._modules
        core = self.attention_core_bytes() if kind.has_attention else 0.0
        kept = whole - core * modules.repeats_attention
        kept = kept * self.calibration.recipe.selective_kept_share
        if modules.is_usual:
            return kept
        wide = activation_bytes(self.workload) / BYTES_16_BIT
        return kept - wide * self._tokens * modules.dropped_bytes_per_token(kind, self._sequence_shards)

    def _exchange_buffer_bytes(self) -> FloatArray | float:
        """What the running layer holds twice while context-parallel ranks exchange it: attention or a recurrence."""
        attention = self._context_parallel.buffer_bytes()
        buffers = 0.0 if attention is None else attention
        if not self.shape.num_recurrent_layers or self.shape.blocks is None or self.shape.blocks.recurrent is None:
            return buffers
        recurrent = RecurrentExchange(
            mixer=self.shape.blocks.recurrent,
            sequence_length=self.workload.decoder_length,
            element_bytes=activation_bytes(self.workload),
            candidates=self.candidates,
        )
        return np.maximum(buffers, recurrent.buffer_bytes())

    @property
    def _context_parallel(self) -> ContextParallelModel:
        return ContextParallelModel(
            shape=self.shape,
            sequence_length=self.workload.decoder_length,
            element_bytes=activation_bytes(self.workload),
            candidates=self.candidates,
        )

    @property
    def _has_frozen_mlp(self) -> bool:
        """Whether the MLP's matrices keep no input: they are frozen and have no adapters."""
        return self.workload.phase is Phase.LORA and not self.workload.adapts_mlp

    def _mlp_bytes_per_token(self, kind: LayerKind) -> FloatArray:
        shape, t = self.shape, self.candidates.tensor_parallel
        if not kind.has_mlp:
            return np.zeros(len(self.candidates))
        tensors = shape.mlp_matrices - self._has_frozen_mlp
        if not kind.is_moe or shape.moe is None:
            return BYTES_16_BIT * tensors * shape.intermediate_size / t
        shared = BYTES_16_BIT * shape.mlp_matrices * shape.moe.shared_intermediate_size / t
        return self._modules.expert_bytes_per_token() + shared

    def _activations(self, stage: StageClass) -> FloatArray:
        batch, shape = self.candidates, self.shape
        kinds = self.candidates.split.kinds
        held: FloatArray = np.zeros(len(batch))
        largest = held
        in_block = stage.recomputed(batch.recompute_num_layers)
        for index, (own_layers, again) in enumerate(zip(stage.layers, in_block, strict=True)):
            count = own_layers + nextn_layers(shape, stage) * (kinds[index] == kinds[-1])
            if not np.any(count):
                continue
            layer = self._layer(index)
            held = held + count * layer.kept - again * (layer.whole - layer.inputs)
            working = layer.whole - np.where(again > 0, layer.inputs, layer.kept)
            largest = np.maximum(largest, working * np.greater(count, 0))
        if self.workload.is_eager:
            largest = largest + EAGER_ATTENTION_BACKWARD_BYTES_PER_SCORE * self._scores()
        flying = self._in_flight(stage)
        entering = activation_bytes(self.workload) * shape.hidden_size * self._tokens / self._sequence_shards
        if self.of_encoder is not None:  # what it embedded, and its output
            entering = entering + 2.0 * self.of_encoder.layer_input_bytes()
        embedded = entering * (stage.has_embedding or stage.vocabulary_share > 0.0)
        largest = largest + self._exchange_buffer_bytes()
        if batch.activation_offload.any():
            away = batch.activation_offload & (batch.recompute == Recompute.FULL)
            buffers = np.minimum(ACTIVATION_BUFFERS * self.layer_input_bytes(), flying * held)
            return np.where(away, buffers + flying * embedded, flying * (held + embedded)) + largest
        return flying * (held + embedded) + largest

    def _layer(self, index: int) -> _Layer:
        """Activations of a layer of one kind, whatever stage it is on."""
        if index not in self._layers:
            kind, recompute = self.candidates.split.kinds[index], self.candidates.recompute
            own = self._of(kind)
            whole, inputs = own.layer_bytes(kind), own.layer_input_bytes()
            kept = np.where(recompute == Recompute.FULL, inputs, whole)
            is_selective = recompute == Recompute.SELECTIVE
            if is_selective.any():  # keeps named operators' outputs, fused or not
                kept = np.where(is_selective, own._kept_by_selective(kind, own._fused_layer_bytes(kind)), kept)
            self._layers[index] = _Layer(whole=whole, inputs=inputs, kept=kept)
        return self._layers[index]

    def _in_flight(self, stage: StageClass) -> FloatArray:
        """Micro-batches whose activations the stage holds, [n]."""
        split = self.candidates.split
        held = in_flight(
            split.schedule,
            pipeline_parallel=split.pipeline_parallel,
            virtual_pipeline_stages=split.virtual_pipeline_stages,
            stage=stage.first_index,
            num_microbatches=self.candidates.num_microbatches,
        )
        if not split.vocabulary_parallel:
            return held
        # The barrier of the split head keeps one micro-batch more in flight (arXiv:2411.05288, Algorithm 2).
        return np.minimum(held + 1.0, self.candidates.num_microbatches)

    @property
    def safe_per_activation_byte(self) -> FloatArray:
        """What the safe bound grows by with each byte of activations."""
        constants = self.calibration.memory
        return np.asarray(constants.activation_factor) * constants.safe_activation_factor

    def least_recomputed(self, safe_bytes: Sequence[FloatArray], limit_bytes: float) -> IntArray:
        """Fewest layers of each chunk that must be recomputed for every stage to stay within a limit, [n].

        A stage that recomputes the first n layers of its chunks saves Σ_k r_k(n)·(A_k − I_k) for each micro-batch in
        flight and needs max_k (A_k − I_k) once (A_k, I_k: activations of a layer of kind k, and its input), so that
        memory falls with n and the first n that fits is the least.

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
            flying, excess = self._in_flight(stage), (safe - limit_bytes) / per_byte
            lacking = np.flatnonzero(excess > 0)
            for i in range(0, len(lacking), ROWS_AT_ONCE):
                rows = lacking[i : i + ROWS_AT_ONCE]
                own = dropped[:, rows]
                working = np.maximum.reduce([(table[:, [kind]] > 0) * own[kind] for kind in range(len(own))])
                enough = flying[rows] * (table @ own) - working >= excess[rows]
                first = 1 + enough.argmax(axis=0) if len(table) else 0
                fewest = np.where(enough.any(axis=0), first, max(batch.split.layers_per_chunk) + 1)
                least[rows] = np.maximum(least[rows], fewest)
        return least

    def layer_input_bytes(self) -> FloatArray:
        """Bytes that a recomputed layer keeps of one micro-batch, its input, [n]."""
        wide = activation_bytes(self.workload) * self.shape.hidden_size
        return wide * self._tokens / self._kept_input_shards()

    def _kept_input_shards(self) -> FloatArray:
        batch = self.candidates
        if self.calibration.recipe.full_recompute_keeps_input_sharded:
            return batch.tensor_parallel.astype(np.float64)
        return self._sequence_shards

    def _logits(self, stage: StageClass) -> FloatArray:
        """Logits of one micro-batch on a rank, in entries of an eager fp32 loss, [n]."""
        if stage.vocabulary_share:
            heads = stage.vocabulary_share
        elif stage.has_head:
            heads = 1.0 + self.shape.num_nextn_predict_layers
        else:
            return np.zeros(len(self.candidates))
        own = self.calibration.recipe.logits_share
        shares = {WHOLE: 1.0, CHUNKED: min(own, FUSED_LOSS_SHARE), NARROW: min(own, NARROW_LOSS_SHARE)}
        share = shares.get(self.workload.practice.loss, own)
        return heads * share * self._tokens * self.shape.vocab_size / self.candidates.tensor_parallel

    def offloaded_input_bytes(self, stage: StageClass) -> FloatArray:
        """Layer inputs that one micro-batch keeps on a stage under full recompute, [n]."""
        layers = sum(stage.layers) + nextn_layers(self.shape, stage)
        return layers * self.layer_input_bytes()
