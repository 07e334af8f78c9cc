"""Weights, gradients and optimizer states of a rank: bytes, and where they are kept.

States per parameter on a rank, with w, g, o the framework's bytes of a weight, a gradient and its optimizer states
(ZeRO, arXiv:1910.02054, §5) and d the ranks that share one copy:

    ZeRO 0: w + g + o      1: w + g + o/d      2: w + (g + o)/d      3: (w + g + o)/d  (+ gathered layers)

PyTorch's FSDP keeps shards of w and gathers copies of c bytes: ZeRO 2 is (w + g + o)/d + c. In a pipeline of several
micro-batches its backward passes leave the copies gathered and sum whole gradients of r bytes, which are scattered
after the last one: (w + o)/d + c + r for ZeRO 2 and 3 (PyTorch, torch/distributed/pipelining/stage.py).

How many parameters a rank has is counted in :mod:`.parameters`. Block-scaled precisions keep low-precision copies of
the weights in addition to w (:data:`.WEIGHT_COPY_BYTES`).

*Frozen 4-bit weights* (QLoRA, arXiv:2305.14314). NF4 has 4 bits per parameter and a constant for every 64 parameters;
double quantisation stores the constant in 8 bits, with a 32-bit one for every 256 constants (§3): 8/64 + 32/(64·256) =
0.127 bits. Only the linear layers of the transformer blocks are quantised. Every product first dequantises its matrix
to 16 bits, in forward, backward and recompute:

    bytes of a product of n×k weights, one way = n·k·(0.516 + 2)

GPTQ's weights are unpacked by separate operators where a product has many rows (AutoGPTQ, qlinear_cuda.py): a shift of
32-bit words, a conversion, a mask, zeros and scales in 16 bits, each through memory: n·k·22.5 bytes, once in a forward
pass, because the product keeps the result for its backward pass.

Adapters are on every linear layer (§4) unless a plan says otherwise, and bitsandbytes' products keep their inputs
(autograd/_functions.py, MatMul4Bit.forward). Where the vocabulary is trained beside adapters, PEFT keeps its original.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.catalogs.constants.training import FrameworkRecipe
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import BoolArray, FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.candidates import Candidates, StageClass
from meshplan.planner.training.estimator.exchange.offload import HOST_COPY_BYTES_PER_PARAMETER, NVME_BUFFER_BYTES
from meshplan.planner.training.estimator.parameters import (
    ZERO_GRADIENTS,
    ZERO_OPTIMIZER,
    ZERO_PARAMETERS,
    RankParameters,
    adapter_parameters,
    quantised_parameters,
)
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.precisions import WEIGHT_COPY_BYTES
from meshplan.planner.training.problem.problem import Phase, TrainingWorkload
from meshplan.planner.training.problem.switches import EACH_PASS, ONCE_A_STEP, OPTIMIZER_STATES

# Layers whose gathered parameters a fully sharded rank holds: the one in use and the prefetched one.
GATHERED_LAYERS = 2.0
_BITS, _BLOCK, _CONSTANT_BITS, _SECOND_BLOCK, _SECOND_BITS = 4.0, 64.0, 8.0, 256.0, 32.0
NF4_BYTES = (_BITS + _CONSTANT_BITS / _BLOCK + _SECOND_BITS / (_BLOCK * _SECOND_BLOCK)) / 8.0
# Read the quantised weight, write the dequantised one; reading that is part of the product.
DEQUANTISE_BYTES = NF4_BYTES + BYTES_16_BIT
# Read 0.5, write 4; read 4, write 2; then mask, zeros and scales read and write 2 each; GPTQ's torch path.
GPTQ_UNPACK_BYTES = 0.5 + 4 + 4 + 2 + 3 * 2 * BYTES_16_BIT
# Embeddings, LM head and norms of a quantised model (PEFT, prepare_model_for_kbit_training: cast to fp32 beside NF4,
# left in 16 bits beside GPTQ).
UNQUANTISED_BYTES = 4.0


def is_quantised(workload: TrainingWorkload) -> bool:
    """Whether the frozen weights of the blocks are in NF4."""
    return workload.phase is Phase.QLORA


def checkpoint_bytes(shape: ModelShape, workload: TrainingWorkload, recipe: FrameworkRecipe) -> float:
    """Bytes of a checkpoint of the whole job: weights and optimizer states of every trained parameter, once.

    N (w + o), with w and o the bytes of a weight and of its optimizer states.
    Gradients, random states and data positions are left out: they are not saved, or small.
    """
    trained = float(shape.num_parameters)
    if workload.phase.has_adapters:
        trained = adapter_parameters(shape, workload) * shape.num_hidden_layers
        if workload.trains_vocabulary:
            trained += shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return trained * (recipe.weight_bytes + optimizer_bytes(recipe, workload))


def optimizer_bytes(recipe: FrameworkRecipe, workload: TrainingWorkload) -> float:
    """Bytes of one parameter's optimizer states, master copy included: as the framework keeps them, unless chosen."""
    chosen = OPTIMIZER_STATES.get(workload.practice.optimizer)
    if chosen is None:
        return recipe.optimizer_bytes
    return chosen.moment_bytes + chosen.keeps_master * recipe.master_bytes


def dequantised_bytes(shape: ModelShape) -> float:
    """Bytes of the largest matrix of a layer in 16 bits: the buffer of the product that is running."""
    heads = shape.num_attention_heads * shape.head_dim
    return BYTES_16_BIT * shape.hidden_size * max(shape.intermediate_size, heads)


def casts_itself(recipe: FrameworkRecipe, workload: TrainingWorkload, batch: Candidates) -> BoolArray:
    """Where PyTorch's autocast takes the place of FSDP's mixed precision, [n]: fp32 weights that nobody shards.

    Each product casts its weights and keeps the cast for the backward pass, unless the layer is recomputed or its
    products are compiled in fp8 (casts are made again: :mod:`.activations`); the stream of residuals stays in fp32
    (torchtitan, distributed/utils.py: maybe_enable_amp, where neither FSDP nor stages are).
    """
    has_fp32 = recipe.is_fsdp and recipe.weight_bytes > BYTES_16_BIT and not workload.phase.has_adapters
    alone = (batch.zero_stage == 0) & (batch.data_parallel == 1) & (batch.tensor_parallel == 1)
    return alone & (has_fp32 and workload.precision != "fp32" and batch.split.pipeline_parallel == 1)


def makes_fp8_inputs_again(recipe: FrameworkRecipe, workload: TrainingWorkload) -> bool:
    """Whether torch.compile makes inputs and casts of torchao's fp8 products again for the backward pass."""
    return recipe.is_fsdp and workload.precision == "fp8" and not (workload.is_eager or workload.phase.has_adapters)


@dataclass(frozen=True, kw_only=True)
class StateModel(RankParameters):
    """States of the ranks of a batch of candidates, from their parameters; arguments as for them."""

    @cached_property
    def accumulates_whole(self) -> BoolArray:
        """Whether a rank sums whole gradients over micro-batches though it owns shards, [n].

        FSDP does so in a pipeline, and where parameters are gathered once a step.
        """
        batch = self.candidates
        waits = batch.split.pipeline_parallel > 1 or self.workload.practice.gathers == ONCE_A_STEP
        sums_whole = self.calibration.recipe.is_fsdp and waits
        return sums_whole & (batch.zero_stage >= ZERO_GRADIENTS) & (batch.num_microbatches > 1)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of one gradient as it is kept."""
        return self.workload.gradient_bytes or self.calibration.recipe.gradient_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of one parameter's optimizer states, master copy included."""
        return optimizer_bytes(self.calibration.recipe, self.workload)

    @property
    def optimizer_step_bytes(self) -> float:
        """Bytes of one owned parameter that the optimizer's step takes besides."""
        chosen = OPTIMIZER_STATES.get(self.workload.practice.optimizer)
        if chosen is None or chosen.step_bytes is None:
            return self.calibration.recipe.optimizer_step_bytes
        return chosen.step_bytes

    def stepping_bytes(self, stage: StageClass) -> FloatArray:
        """Bytes of one rank that the optimizer's step takes besides its states, [n]; of an offloaded one, none."""
        taken = self.owned_parameters(stage) * self.optimizer_step_bytes
        return np.where(self.candidates.optimizer_offload, 0.0, taken)

    def unsynchronised_bytes(self, stage: StageClass) -> FloatArray:
        """Bytes of gradients beyond a rank's shard while FSDP does not synchronise micro-batches (``no_sync``), [n].

        A flat parameter of FSDP1 mixes frozen with trained ones, and its gradient is of all of them: as much as if
        nothing were frozen (torch/distributed/fsdp/fully_sharded_data_parallel.py, ``use_orig_params``).
        """
        batch, recipe = self.candidates, self.calibration.recipe
        mixes = self.workload.phase.has_adapters
        shares = self._shares(stage)
        beyond = sum(
            ((held if mixes else trained) - trained / ranks for held, trained, ranks in shares), np.zeros(len(batch))
        )
        shards = batch.data_parallel_shard * batch.context_parallel > 1
        sums_whole = (recipe.is_fsdp and recipe.accumulates_whole) & shards
        waits = sums_whole & (batch.zero_stage >= ZERO_GRADIENTS) & (batch.num_microbatches > 1)
        return np.where(waits, beyond * self.gradient_bytes, 0.0)

    @property
    def gradient_reduce_bytes(self) -> float:
        """Bytes of one gradient on the wire."""
        return self.workload.gradient_bytes or self.calibration.recipe.gradient_reduce_bytes

    # --- bytes -----------------------------------------------------------------------------------------------------

    def on_device(self, stage: StageClass) -> Mapping[str, FloatArray]:
        """Bytes of weights, gradients and optimizer states on one rank's device, by name, [n] each."""
        recipe, batch, zero = self.calibration.recipe, self.candidates, self.candidates.zero_stage
        # An offloaded optimizer steps on the host.
        stays = 1.0 - batch.moved_optimizer
        stepping = stays * self.optimizer_step_bytes
        extra = self.calibration.memory.extra_bytes_per_parameter + stepping
        weights: FloatArray = np.zeros(len(batch))
        gradients = optimizer = weights
        copies = WEIGHT_COPY_BYTES.get(self.workload.precision, 0.0)
        recomputes = (batch.recompute == Recompute.FULL) | makes_fp8_inputs_again(recipe, self.workload)
        casts = np.where(casts_itself(recipe, self.workload, batch) & ~recomputes, BYTES_16_BIT, 0.0)
        on_device = stays * self.optimizer_bytes
        outer = self.outer_copies
        has_shards = zero >= (ZERO_GRADIENTS if recipe.is_fsdp else ZERO_PARAMETERS)
        has_gradient_shards = (zero >= ZERO_GRADIENTS) & (not recipe.reduces_after_backward)
        whole = self.accumulates_whole
        for parameters, trained, ranks in self._shares(stage):
            resident = self._weight_bytes(parameters, trained) + parameters * (copies + casts)
            weights = weights + resident / np.where(has_shards, ranks, 1)
            sharded = trained * self.gradient_bytes / np.where(has_gradient_shards, ranks, 1)
            sharded = sharded * (not self.workload.practice.optimizer_in_backward)
            gradients = gradients + np.where(whole, trained * self.gradient_reduce_bytes, sharded)
            states = on_device + extra
            optimizer = optimizer + trained * states / np.where(zero >= ZERO_OPTIMIZER, ranks * outer, 1)
        is_full = zero >= ZERO_PARAMETERS
        gathered = np.where(is_full, self._gathered_bytes(stage), 0.0) if is_full.any() else np.zeros(len(batch))
        keeps = self.workload.practice.gathers != EACH_PASS
        stays_gathered = has_shards & (whole | (zero < ZERO_PARAMETERS) | keeps)
        if stays_gathered.any():
            parameters = self.dense_parameters(stage) + self.expert_parameters(stage)
            gathered = np.where(stays_gathered, parameters * recipe.parameter_gather_bytes, gathered)
        if is_quantised(self.workload):
            weights = self._quantised_bytes(stage)
        if batch.parameter_offload.any():
            in_use = dequantised_bytes(self.shape) if is_quantised(self.workload) else 0.0
            weights = np.where(batch.parameter_offload, in_use, weights)
            gradients = np.where(batch.parameter_offload & batch.optimizer_offload, 0.0, gradients)
        return {"weights": weights + gathered, "gradients": gradients, "optimizer": optimizer}

    def _quantised_bytes(self, stage: StageClass) -> FloatArray:
        """Frozen 4-bit weights, unquantised weights, adapters and one dequantised matrix, [n]."""
        batch = self.candidates
        packed = quantised_parameters(self.shape, stage, batch.tensor_parallel)
        upcast = self.calibration.recipe.upcasts_unquantised and self.workload.frozen_weights == "nf4"
        unpacked = self.dense_parameters(stage) + self._originals(stage) - packed
        wide = unpacked * (UNQUANTISED_BYTES if upcast else BYTES_16_BIT)
        adapters = self.lora_parameters(stage) * self.calibration.recipe.weight_bytes
        ranks = np.where(batch.zero_stage >= ZERO_PARAMETERS, batch.data_parallel_shard * batch.context_parallel, 1)
        return (packed * NF4_BYTES + wide + adapters) / ranks + dequantised_bytes(self.shape)

    def shard_bytes(self, stage: StageClass) -> FloatArray:
        """A rank's shard of the parameters under ZeRO-3, [n]."""
        if is_quantised(self.workload):
            return self._quantised_bytes(stage)
        return sum(
            (self._weight_bytes(parameters, trained) / ranks for parameters, trained, ranks in self._shares(stage)),
            np.zeros(1),
        )

    def _weight_bytes(self, parameters: FloatArray, trained: FloatArray) -> FloatArray:
        """Bytes of resident parameters, [n]: frozen ones stay in 16 bits where trained ones are kept in 32.

        Source: accelerate 1.15.0, utils/fsdp_utils.py, fsdp2_prepare_model (parameters that require gradients alone are
        cast to fp32).
        """
        each = self.calibration.recipe.weight_bytes
        frozen = np.maximum(parameters - trained, 0.0)
        return (parameters - frozen) * each + frozen * min(each, BYTES_16_BIT)

    def off_device(self, stage: StageClass) -> FloatArray:
        """Offloaded optimizer states and parameters of one rank, [n]."""
        batch = self.candidates
        if not batch.offloads_states.any():
            return np.zeros(len(batch))
        optimizer = self.owned_parameters(stage) * self.optimizer_bytes
        parameters = self.shard_bytes(stage)
        return batch.moved_optimizer * optimizer + np.where(batch.parameter_offload, parameters, 0.0)

    def on_host(self, stage: StageClass) -> FloatArray:
        """Host memory for one rank's offloaded states, [n]: the states or their NVMe buffers, and transfer buffers."""
        batch = self.candidates
        if not batch.offloads_states.any():
            return np.zeros(len(batch))
        buffers = np.where(batch.parameter_offload, NVME_BUFFER_BYTES, 0.0)
        held = np.where(batch.on_nvme, buffers, self.off_device(stage))
        copies = self.owned_parameters(stage) * HOST_COPY_BYTES_PER_PARAMETER
        return held + batch.moved_optimizer * copies

    # --- gathered parameters, secondary copies -----------------------------------------------------------------------

    def _gathered_bytes(self, stage: StageClass) -> FloatArray:
        """Gathered parameters and unreduced gradients of the layers in use under ZeRO-3, [n]."""
        layers = np.maximum(sum(stage.layers), 1)
        recipe = self.calibration.recipe
        apart, root = self._outside_layers(stage)
        largest = (self.dense_parameters(stage) + self.expert_parameters(stage) - apart) / layers
        if is_quantised(self.workload):
            gathered = GATHERED_LAYERS * self.gathered_dense_bytes(stage) / layers
            return np.where(self.candidates.data_parallel_shard * self.candidates.context_parallel > 1, gathered, 0.0)
        reduced = self.gradient_reduce_bytes * (not self.workload.phase.has_adapters)
        in_use = (GATHERED_LAYERS * largest + root) * recipe.parameter_gather_bytes + largest * reduced
        in_use = np.where(self.candidates.data_parallel_shard * self.candidates.context_parallel > 1, in_use, 0.0)
        second = self._second_copy_bytes(stage)
        return in_use if second is None else second + in_use

    def gathered_dense_bytes(self, stage: StageClass) -> FloatArray:
        """Bytes to gather for a stage's parameters outside the routed experts, [n]."""
        dense, each = self.dense_parameters(stage), self.calibration.recipe.parameter_gather_bytes
        if not is_quantised(self.workload):
            return dense * each
        packed = quantised_parameters(self.shape, stage, self.candidates.tensor_parallel)
        return (dense - packed) * each + packed * NF4_BYTES

    def _second_copy_bytes(self, stage: StageClass) -> FloatArray | None:
        """16-bit parameters of a fully sharded rank beyond the layers in use, [n]; None where there are none.

        Its part of the secondary copy, if that is shared by fewer ranks than the first, and the layers that stay
        gathered.
        """
        batch, width = self.candidates, self.calibration.recipe.parameter_gather_bytes
        if not ((batch.zero_hpz_partition_size > 1) | (batch.gathered_num_layers > 0)).any():
            return None
        kept = sum(self._kept_parameters(stage))
        size, expert_size = self.second_copy_ranks()
        ranks, expert_ranks = batch.data_parallel_shard * batch.context_parallel, self._expert_shard
        second = np.where(size < ranks, self.dense_parameters(stage) / size, 0.0)
        second = second + np.where(expert_size < expert_ranks, self.expert_parameters(stage) / expert_size, 0.0)
        return width * (kept + second)
