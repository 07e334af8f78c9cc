"""Activations that one layer keeps for the backward pass, per micro-batch and device.

Per token, in bytes of 16-bit tensors (generalises Korthikanti et al., arXiv:2205.05198, eq. 1–5, to gated MLPs, grouped
queries, latent attention and experts):

    norms and residuals 8h, and 2h a norm behind a block (÷t with sequence parallelism) · queries, keys, values and
    their output ÷t, queries and keys once more where they are normalised
    · MLP: input shared with the norm, each product's output and the activation's output ÷t
    · dropout masks 2h where the framework keeps them · scores 5·a·s ÷t without flash attention

An encoder–decoder keeps of a decoder layer's cross-attention its norm, queries and output, and keys and values of what
the encoder read; the encoder's output is kept once.

Full recompute keeps 2h per layer; selective recompute drops the activations of the attention core, or of other modules
(:mod:`.recompute`).

Where torch.compile fuses the operators around torchao's fp8 products, a product keeps neither its 16-bit input nor the
narrow one: a norm's output (2h) and the gated activation's (2w) are made again from what they were made of, which is
kept anyway. An allocator's snapshot on an H100 shows it (TorchTitan 0.2.2, torch 2.11, torchao 0.18, Llama of eight
layers: the tensors that live at the peak, in bf16 and in fp8). Outputs of attention are kept in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import BoolArray, FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.candidates import Candidates, LayerKind
from meshplan.planner.training.estimator.compute import BLOCKS_OF_A_LAYER
from meshplan.planner.training.estimator.eager import EagerActivations
from meshplan.planner.training.estimator.exchange.context_parallel import ContextParallelModel
from meshplan.planner.training.estimator.exchange.recurrent import RecurrentExchange
from meshplan.planner.training.estimator.operators.attention import window_is_mask
from meshplan.planner.training.estimator.operators.products import activation_bytes
from meshplan.planner.training.estimator.recompute import ModuleRecompute
from meshplan.planner.training.estimator.states import casts_itself, makes_fp8_inputs_again
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import Phase, TrainingWorkload

# 5·a·s bytes per token and layer: in 16 bits the softmax output, the output of its dropout and a 1-byte mask
# (arXiv:2205.05198, §4.1); in fp32 the softmax output and the mask.
PLAIN_ATTENTION_BYTES_PER_SCORE = 5.0
# Operator by operator: the softmax output in fp32 and its 16-bit copy; while its backward pass runs the gradients of
# both besides (assumed of transformers' attention of 2023).
EAGER_ATTENTION_BYTES_PER_SCORE = 6.0
EAGER_ATTENTION_BACKWARD_BYTES_PER_SCORE = 6.0
# A stream of residuals is read and written once before and once after each block: what is kept of it is written once.
STREAM_PASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Activations of one layer of a kind and micro-batch, bytes, [n] each.

    Args:
        whole: without recompute.
        inputs: what recompute of the layer keeps.
        kept: of each candidate, as it recomputes all layers, modules of them, or none.
        running: what is kept of the layer, or repeated at once, while its backward pass runs.
    """

    whole: FloatArray
    inputs: FloatArray
    kept: FloatArray
    running: FloatArray

    def take(self, rows: BoolArray) -> _Layer:
        """The same for some candidates."""
        return _Layer(
            whole=self.whole[rows], inputs=self.inputs[rows], kept=self.kept[rows], running=self.running[rows]
        )


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """What the layers of a batch of candidates keep; that of each kind of layer is worked out once.

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

    def take(self, rows: BoolArray) -> Self:
        """The model of some of the candidates; what is known of their layers is not worked out again."""
        if rows.all():
            return self
        other = replace(self, candidates=self.candidates.take(rows))
        other._layers.update((index, layer.take(rows)) for index, layer in self._layers.items())
        return other

    @cached_property
    def _tokens(self) -> FloatArray:
        batch = self.candidates
        return batch.micro_batch_size * self.workload.decoder_length / batch.context_parallel

    @cached_property
    def of_encoder(self) -> LayerActivations | None:
        """The same of the layers of the encoder in front; None without one."""
        encoder = self.shape.encoder
        return None if encoder is None else replace(self, shape=encoder, workload=self.workload.of_encoder)

    def _of(self, kind: LayerKind) -> LayerActivations:
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

    def _mask_bytes(self, kind: LayerKind) -> FloatArray | float:
        """The mask that a layer's attention keeps for its backward pass, one for all heads, [n]."""
        length = self.workload.decoder_length
        is_kept = window_is_mask(self.calibration.recipe, kind.window, length) and not self._scores().any()
        return activation_bytes(self.workload) * length * self._tokens if is_kept else 0.0

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
        extra = eager.bytes_per_token(kind, self._sequence_shards) - self._made_again_bytes_per_token(kind)
        return self._fused_layer_bytes(kind) + activation_bytes(self.workload) / BYTES_16_BIT * self._tokens * extra

    def _made_again_bytes_per_token(self, kind: LayerKind) -> FloatArray:
        """Inputs of fp8 products that torch.compile makes again from what the layer keeps anyway, [n].

        Not looked at, and so not counted: inputs that tensor-parallel devices gather, and experts.
        """
        batch = self.candidates
        if not makes_fp8_inputs_again(self.calibration.recipe, self.workload):
            return np.zeros(len(batch))
        made = kind.num_blocks * self.shape.hidden_size
        if kind.has_mlp and not kind.is_moe:
            made += self.shape.intermediate_size
        return np.where(batch.tensor_parallel == 1, BYTES_16_BIT * made, 0.0)

    def _fused_layer_bytes(self, kind: LayerKind) -> FloatArray:
        """The same where memory-bound operators are fused, [n]."""
        shape, t = self.shape, self.candidates.tensor_parallel
        h = shape.hidden_size * kind.num_blocks / BLOCKS_OF_A_LAYER
        # Frozen matrices without adapters need no input for a weight gradient: the second norm's output and the MLP's
        # last input are dropped.
        masks = 2.0 * h if self.calibration.recipe.dropout_masks else 0.0
        hidden = (6.0 if self._has_frozen_mlp else 8.0) * h + masks + self._stream_bytes() * kind.num_blocks
        hidden = hidden + BYTES_16_BIT * (shape.norms_per_block - 1.0) * shape.hidden_size * kind.num_blocks
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
        layer = layer + self.attention_core_bytes() + self._mask_bytes(kind)
        exchanged = self._context_parallel.kept_bytes()
        return layer if exchanged is None else layer + exchanged

    def _cross_attention_bytes(self, encoder: LayerActivations) -> FloatArray:
        """Queries, output, keys and values of one layer's cross-attention in one micro-batch, and its scores where
        they are written, in 16-bit activations, [n].
        """
        shape, t = self.shape, self.candidates.tensor_parallel
        elements = shape.num_attention_heads * self._tokens + shape.num_key_value_heads * encoder._tokens
        scores = self._scores(self.workload.sequence_length) - self._scores()
        return BYTES_16_BIT * 2.0 * shape.head_dim * elements / t + PLAIN_ATTENTION_BYTES_PER_SCORE * scores

    def _attention_bytes_per_token(self, kind: LayerKind) -> FloatArray | float:
        """Queries, keys, values, output and output gate of one attention block, over all tensor-parallel devices.

        A norm of queries and keys keeps its input beside them.
        """
        if (form := kind.form) is not None:
            width = form.attention_width + form.entry_elements
            copied = sum(matrix.outputs * matrix.count for matrix in form.matrices if not matrix.divides)
            return BYTES_16_BIT * (width + copied * self.candidates.tensor_parallel)
        shape, a = self.shape, self.shape.num_attention_heads
        if shape.latent is None:
            widths = (2.0 + 2.0 * shape.has_output_gate) * a + 2.0 * shape.num_key_value_heads
            return BYTES_16_BIT * (widths * shape.head_dim + shape.normed_elements)
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

    def _layer(self, index: int) -> _Layer:
        """Activations of a layer of one kind, whatever stage it is on."""
        if index not in self._layers:
            kind, recompute = self.candidates.split.kinds[index], self.candidates.recompute
            own = self._of(kind)
            whole, inputs = own.layer_bytes(kind), own.layer_input_bytes()
            is_full, running = recompute == Recompute.FULL, whole
            if self.calibration.recipe.recomputes_halves and kind.num_blocks > 1:
                halves = (replace(kind, has_mlp=False), replace(kind, has_attention=False, has_recurrent=False))
                inputs, once = len(halves) * inputs, inputs
                largest = np.maximum.reduce([own.layer_bytes(half) for half in halves])
                running = np.where(is_full, inputs - once + largest, whole)
            kept = np.where(is_full, inputs, whole)
            is_selective = recompute == Recompute.SELECTIVE
            if is_selective.any():  # keeps named operators' outputs, fused or not
                kept = np.where(is_selective, own._kept_by_selective(kind, own._fused_layer_bytes(kind)), kept)
            self._layers[index] = _Layer(whole=whole, inputs=inputs, kept=kept, running=running)
        return self._layers[index]

    def layer_input_bytes(self) -> FloatArray:
        """Bytes that a recomputed layer keeps of one micro-batch, its input, [n]."""
        wide = activation_bytes(self.workload) * self.shape.hidden_size + self._stream_bytes()
        return wide * self._tokens / self._kept_input_shards()

    def _stream_bytes(self) -> FloatArray:
        """What the stream of residuals takes of one token beyond 16 bits, where it is kept in fp32, [n]."""
        wide = casts_itself(self.calibration.recipe, self.workload, self.candidates)
        return np.where(wide, BYTES_16_BIT * self.shape.hidden_size, 0.0)

    def _kept_input_shards(self) -> FloatArray:
        batch = self.candidates
        if self.calibration.recipe.full_recompute_keeps_input_sharded:
            return batch.tensor_parallel.astype(np.float64)
        return self._sequence_shards
