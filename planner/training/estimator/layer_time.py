"""Time of one layer and micro-batch: compute, recompute, exposed communication and kernel-launch overhead.

layer time = √(device time² + host time²)             kernel launches and device work overlap; the slower dominates
device time = compute (+ recompute) + exposed tensor-, context- and expert-parallel communication
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshplan.catalogs.constants.training import Calibration, Constant
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.assembly import (
    ATTENTION,
    CONTEXT_COMMUNICATION,
    EXPERT_COMMUNICATION,
    EXPERTS,
    LAUNCHES,
    MATRIX_PRODUCTS,
    MEMORY_BOUND,
    RECOMPUTE,
    TENSOR_COMMUNICATION,
)
from meshplan.planner.training.estimator.candidates import Candidates, LayerKind
from meshplan.planner.training.estimator.compute import BLOCKS_OF_A_LAYER, ComputeModel
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel
from meshplan.planner.training.estimator.exchange.context_parallel import ContextParallelModel
from meshplan.planner.training.estimator.exchange.recurrent import RecurrentExchange
from meshplan.planner.training.estimator.exchange.token_copies import TokenCopies
from meshplan.planner.training.estimator.operators.adapters import AdapterModel
from meshplan.planner.training.estimator.operators.products import LOW_PRECISION, Cost, activation_bytes
from meshplan.planner.training.estimator.operators.recurrent import launches_ratio
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.estimator.recompute import ModuleRecompute
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.expert_load import arriving_load
from meshplan.planner.training.problem.problem import TrainingWorkload
from meshplan.planner.training.problem.switches import Launches

# Share of the bytes of a 16-bit all-reduce if its gather half is in fp8.
FP8_GATHER_SHARE = 0.75
# Memory traffic, in tensor sizes, of a gather and a scatter that restack their tensor (torch.cat of torch.chunk in
# torch/distributed/_functional_collectives.py): each reads and writes it once.
COPIES_RESTACKED = 4.0
# The same where matrix products and collectives are pipelined: the gathered pieces are used in place, the scattered
# ones stacked and then summed (fused_matmul_reduce_scatter in torch/distributed/_symmetric_memory).
COPIES_OVERLAPPED = 2.0

# Kernel launches of an eager layer with adapters, over those without. Counted for a Llama layer in PyTorch: two norms
# of 6, seven products, rotary embedding 10, attention 2, activation 2, two additions: 35. An adapter adds dropout,
# cast, two products, scale and addition (PEFT, tuners/lora/layer.py): 6 on each of the four attention matrices.
ADAPTED_LAUNCHES = (35.0 + 4 * 6) / 35.0
# Part of a device's processors that carry tokens while a shared expert runs beside them: DeepEP's 20
# (NVIDIA-NeMo/Automodel, components/moe/experts.py, dispatcher_num_sms) of an H100's 132.
DISPATCHER_SHARE = 20.0 / 132.0
# Share of a layer's kernel launches that are its forward pass: a product's backward is two products.
FORWARD_LAUNCHES = 1.0 / 3.0

# Batches whose layers are remembered, and candidates of each at most: 10 MB. A search prices the same candidates under
# other chunks of the same stages, and again in its alternatives.
MOST_KNOWN, MOST_KNOWN_ROWS = 2048, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Time of one layer and micro-batch: by part, and in total with kernel launches."""

    parts: Mapping[str, FloatArray]
    total_s: FloatArray

    def take(self, rows: IntArray) -> LayerTimes:
        """The same of some candidates."""
        size = self.total_s.shape
        parts = {name: np.broadcast_to(seconds, size)[rows] for name, seconds in self.parts.items()}
        return LayerTimes(parts=parts, total_s=self.total_s[rows])


class _Known:
    """Times of the layers of some batches, of one model on one machine."""

    latest: _Known

    def __init__(self, *about: object) -> None:
        self.about = about
        self.times: dict[tuple[Any, ...], LayerTimes] = {}

    @classmethod
    def of(cls, *about: object) -> _Known:
        """What is known of these; what is known of others is dropped, as a machine may be large."""
        found = cls.latest
        if len(about) != len(found.about) or any(one is not own for one, own in zip(about, found.about, strict=True)):
            found = cls.latest = cls(*about)
        return found


_Known.latest = _Known()


def known_times(model: LayerModel, kind: LayerKind, *, in_block: bool = False) -> LayerTimes:
    """:meth:`LayerModel.times`, remembered: a layer takes what it takes whatever chunks and stages hold the others.

    Args:
        model: prices the layers of a batch.
        kind: of layer.
        in_block: as one of the layers that block recompute recomputes.
    """
    batch = model.candidates
    if len(batch) > MOST_KNOWN_ROWS:
        return model.times(kind, in_block=in_block)
    known = _Known.of(model.shape, model.workload, model.calibration, model.links.machine).times
    key = (batch.split.pipeline_parallel, kind, in_block, *batch.columns_as_bytes())
    found = known.get(key)
    if found is None:
        found = model.times(kind, in_block=in_block)
        if len(known) < MOST_KNOWN and found.total_s.size <= MOST_KNOWN_ROWS:  # constants may be many at once, too
            known[key] = found
    return found


@dataclass(frozen=True, kw_only=True)
class LayerModel:
    """Times of the layers of a batch of candidates.

    What layers share that differ in their MLP alone, or in what is recomputed, is priced once.

    Args:
        shape: the model.
        workload: sequence length, precision, phase.
        candidates: the batch.
        calibration: constants and framework recipe.
        compute: prices the arithmetic of the same batch.
        links: prices collectives.
    """

    shape: ModelShape
    workload: TrainingWorkload
    candidates: Candidates
    calibration: Calibration
    compute: ComputeModel
    links: CommunicationModel

    def times(self, kind: LayerKind, *, in_block: bool = False) -> LayerTimes:
        """Time of one layer of a kind; ``in_block``: as one of the layers that block recompute recomputes."""
        if kind.is_encoder and self.shape.encoder is not None:
            compute = self.compute.of_encoder
            of_encoder = replace(self, shape=compute.shape, workload=compute.workload, compute=compute)
            return of_encoder.times(kind, in_block=in_block)
        compute, batch = self.compute, self.candidates
        attention, products = self._mixers_of(kind)
        zero = np.zeros_like(products.forward_s)
        experts = shared = Cost(forward_s=zero, backward_s=zero)
        if kind.is_moe and self.shape.moe is not None:
            experts = compute.experts(self.shape.moe)
            if self.shape.moe.latent_size is not None:
                products = products + compute.latent_experts(self.shape.moe)
            if self.shape.moe.shared_intermediate_size:
                shared = compute.mlp(self.shape.moe.shared_intermediate_size)
                products = products + shared
        elif kind.has_mlp:
            products = products + compute.mlp(self.shape.intermediate_size)
        elementwise = compute.elementwise(kind)
        if self.workload.phase.has_adapters:
            adapters = AdapterModel(compute=compute)
            products, elementwise = products + adapters.products(kind), elementwise + adapters.traffic(kind)
        again = (batch.recompute == (Recompute.BLOCK if in_block else Recompute.FULL)).astype(np.float64)
        whole, recipe = again, self.calibration.recipe
        selective = batch.recompute == Recompute.SELECTIVE
        modules = self._modules
        fused = self.workload.practice.fuses_attention(recipe.flash_attention) or not modules.repeats_attention
        core_again = np.maximum(again, selective) if modules.repeats_fused_attention or not fused else again
        again = again + selective * (1.0 - recipe.selective_kept_share)
        modules_s = zero if modules.is_usual else selective * modules.again_s(kind, compute)
        parts = {
            MATRIX_PRODUCTS: products.total_s,
            ATTENTION: attention.total_s,
            EXPERTS: experts.total_s,
            MEMORY_BOUND: elementwise.total_s,
            RECOMPUTE: again * (products.forward_s + experts.forward_s + elementwise.forward_s)
            - whole * self._left_out_s(kind)
            + core_again * attention.forward_s
            + modules_s,
            TENSOR_COMMUNICATION: self._tensor_parallel_s(kind, again),
            CONTEXT_COMMUNICATION: self._context_parallel_s(kind, attention, core_again),
            EXPERT_COMMUNICATION: self._expert_parallel_s(kind, again + modules.repeats_experts, shared),
        }
        device = sum(parts.values(), zero)
        total = np.sqrt(device**2 + self._host_s(kind, again) ** 2)
        return LayerTimes(parts={**parts, LAUNCHES: total - device}, total_s=total)

    @cached_property
    def _mixers(self) -> dict[LayerKind, tuple[Cost, Cost]]:
        return {}

    def _mixers_of(self, kind: LayerKind) -> tuple[Cost, Cost]:
        """What mixes the tokens of a layer, and the products around it, whatever its MLP is."""
        alike = replace(kind, is_moe=False, has_mlp=False)
        if alike not in self._mixers:
            self._mixers[alike] = self.compute.attention_core(alike), self.compute.mixer_products(alike)
        return self._mixers[alike]

    def _left_out_s(self, kind: LayerKind) -> FloatArray:
        """Time of what a whole recomputed layer does not compute again, because the backward pass reads none of it.

        Adapters of the last matrix read its input after its product, so that nothing is left out.
        """
        if not self.calibration.recipe.recomputes_only_needed or self.workload.adapts_mlp:
            return np.zeros(len(self.candidates))
        return self.compute.closing_product(kind).forward_s

    @property
    def _modules(self) -> ModuleRecompute:
        return ModuleRecompute(shape=self.shape, workload=self.workload, candidates=self.candidates)

    def _host_s(self, kind: LayerKind, again: FloatArray) -> FloatArray:
        """Host time of one layer, forward and backward: launches and hooks of sharded parameters.

        A layer of a dense transformer is two blocks that take half each, a recurrent mixer by its launches
        (:mod:`.operators.recurrent`). What a layer with experts takes more than a dense one, its experts do.

        Args:
            kind: of layer.
            again: how often the forward is repeated, [n].
        """
        constants, practice = self.calibration.time, self.workload.practice
        waits = kind.is_moe and not (self.workload.drops_tokens or practice.expert_group_size)
        blocks = float(kind.num_blocks)
        if kind.has_recurrent and self.shape.blocks is not None and self.shape.blocks.recurrent is not None:
            blocks += launches_ratio(self.shape.blocks.recurrent) - 1.0
        host: Constant = constants.host_s_per_layer * (blocks / BLOCKS_OF_A_LAYER)
        if waits:
            host = host + constants.host_s_per_moe_layer - constants.host_s_per_layer
        if self.workload.is_eager and self.workload.phase.has_adapters:
            host = host * ADAPTED_LAUNCHES
        left = {Launches.EAGER: 1.0, Launches.PARTLY_GRAPHED: constants.graphed_host_share, Launches.GRAPHED: 0.0}
        hooks = self.calibration.recipe.hooks_s_per_layer * (kind.num_blocks / BLOCKS_OF_A_LAYER)
        host = host * left[practice.launches] + hooks * (self.candidates.zero_stage >= ZERO_PARAMETERS)
        return np.asarray(host * (1.0 + FORWARD_LAUNCHES * again))

    def _tensor_parallel_s(self, kind: LayerKind, recompute_full: FloatArray) -> FloatArray:
        """Exposed time of a layer's tensor-parallel collectives.

        Two all-reduces (or gather + scatter pairs with sequence parallelism, same volume) of T·h elements forward
        and two backward (Megatron-LM, arXiv:1909.08053, §3); full recompute repeats the forward ones. Where gathers
        carry fp8, half of an all-reduce moves one byte instead of two; where the framework restacks split sequences,
        a gather and a scatter copy the tensor in memory too. A layer of one block has half of them; one with
        cross-attention half more, and the gradient of the encoder's output is reduced once.
        """
        batch, recipe, each = self.candidates, self.calibration.recipe, self._all_reduce_s
        passes = 4.0 + 2.0 * recompute_full
        if recipe.gathers_fp8 and self.workload.precision in LOW_PRECISION and not self.workload.scales_rows:
            passes = passes * FP8_GATHER_SHARE
        asked = self.workload.overlaps_tensor_parallel
        overlaps = recipe.overlaps_tensor_parallel if asked is None else asked
        if overlaps:
            each = each * (1.0 - self.calibration.time.tensor_parallel_overlap)
        if recipe.restacks_sequences:
            copied = (COPIES_OVERLAPPED if overlaps else COPIES_RESTACKED) * self._hidden_bytes
            copies = self.compute.memory_op(copied, backward_ratio=0.0).forward_s
            each = each + np.where(batch.sequence_parallel & (batch.tensor_parallel > 1), copies, 0.0)
        exposed = passes * each * (kind.num_blocks / BLOCKS_OF_A_LAYER)
        return exposed + self._read_gradient_s() if kind.has_cross_attention else exposed

    @cached_property
    def _hidden_bytes(self) -> FloatArray:
        """Of the hidden states of a device's tokens, [n]."""
        return activation_bytes(self.workload) * self.compute.tokens * self.shape.hidden_size

    @cached_property
    def _all_reduce_s(self) -> FloatArray:
        """One all-reduce of them over the tensor-parallel ranks, s [n]."""
        size = self.candidates.tensor_parallel
        return self.links.all_reduce_s(self._hidden_bytes, size, np.ones_like(size))

    def _read_gradient_s(self) -> FloatArray:
        """All-reduce of the gradient of what the encoder read, whose keys and values are split over the ranks."""
        batch, read = self.candidates, self.compute.of_encoder.tokens
        volume = activation_bytes(self.workload) * read * self.shape.hidden_size
        return self.links.all_reduce_s(volume, batch.tensor_parallel, np.ones_like(batch.tensor_parallel))

    def _context_parallel_s(self, kind: LayerKind, attention: Cost, again: FloatArray) -> FloatArray:
        """Exposed context-parallel exchange of a layer; ``again``: how often the forward of attention is repeated."""
        recurrent = None if self.shape.blocks is None else self.shape.blocks.recurrent
        exposed = np.zeros(len(self.candidates))
        if kind.has_recurrent and recurrent is not None:
            heads = RecurrentExchange(
                mixer=recurrent,
                sequence_length=self.workload.decoder_length,
                element_bytes=activation_bytes(self.workload),
                candidates=self.candidates,
            )
            exposed = heads.exposed_s(self.links, again)
        if not kind.has_attention:
            return exposed
        model = ContextParallelModel(
            shape=self.shape,
            sequence_length=self.workload.decoder_length,
            element_bytes=activation_bytes(self.workload),
            candidates=self.candidates,
        )
        overlap = self.calibration.time.context_parallel_overlap
        return exposed + model.exposed_s(self.links, attention.total_s, again, overlap)

    def _expert_parallel_s(self, kind: LayerKind, recompute_full: FloatArray, shared: Cost) -> FloatArray:
        """Exposed time of dispatching tokens to experts and combining their outputs.

        Two all-to-alls forward and two backward of T/t·k·h elements from each device, times the busiest rank's load
        (:func:`.arriving_load`); expert tensor parallelism adds a gather and a scatter of what arrived. A fused
        dispatcher sends less (:mod:`~.exchange.token_copies`). A ``shared`` expert in a stream of its own starts with
        the first all-to-all of a pass and hides it while it runs, on the processors that the dispatcher leaves it.
        """
        moe, batch, links = self.shape.moe, self.candidates, self.links
        if moe is None or not kind.is_moe:
            return np.zeros(len(batch))
        routed = self.compute.tokens / batch.tensor_parallel * moe.num_experts_per_token
        # In dispatch the most loaded rank is the bottleneck as receiver, in combine as sender; both take the time of
        # that rank's share.
        routed = routed * arriving_load(self.workload, moe, batch.expert_parallel)
        sent = activation_bytes(self.workload) * routed * self.shape.expert_hidden_size
        practice = self.workload.practice
        copies = TokenCopies.of(moe, in_turn=practice.experts_in_turn) if practice.fused_dispatch else None
        each = links.all_to_all_s(sent, batch.expert_parallel, batch.expert_tensor_parallel, copies=copies)
        inside = links.gather_s(
            sent * batch.expert_tensor_parallel, batch.expert_tensor_parallel, np.ones_like(batch.tensor_parallel)
        )
        constants = self.calibration.time
        far = links.crosses(batch.expert_parallel, batch.expert_tensor_parallel)
        hidden = np.where(far, constants.expert_parallel_overlap, constants.expert_parallel_overlap_inside)
        hidden = hidden * practice.overlaps_experts
        # Tokens are sent to their experts again; what comes back is what nothing reads (``_left_out_s``).
        ways = 1.0 if self.calibration.recipe.recomputes_only_needed else 2.0
        passes = 4.0 + ways * recompute_full
        exposed = passes * (each + inside) * (1.0 - hidden)
        if not practice.overlaps_shared_experts:
            return exposed
        first = (each + inside) * (1.0 - hidden)
        behind = (1.0 + recompute_full) * np.minimum(first, shared.forward_s) + np.minimum(first, shared.backward_s)
        return exposed - (1.0 - DISPATCHER_SHARE) * behind
