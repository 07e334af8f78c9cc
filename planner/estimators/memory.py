"""How many bytes a rank holds at its peak: every component, every distinct stage, typical and safe.

States per parameter on a rank, with w, g, o the framework's bytes of a weight, a gradient and its optimizer states
(ZeRO, arXiv:1910.02054, §5) and d the ranks that share one copy:

    ZeRO 0: w + g + o      1: w + g + o/d      2: w + (g + o)/d      3: (w + g + o)/d  (+ the layers gathered at a time)

Experts are split over expert- and expert-tensor-parallel ranks and shared over their own replicas. Block-scaled
precisions keep low-precision copies of the weights beside w (:data:`.WEIGHT_COPY_BYTES`).

Activations of one layer per token and device, in bytes of 16-bit tensors kept for the backward pass (generalises
Korthikanti et al., arXiv:2205.05198, eq. 1–5, to gated MLPs, grouped queries, latent attention and experts):

    norms and residuals 8h (÷t with sequence parallelism) · queries, keys, values and their output ÷t
    · MLP: input shared with the norm, each product's output and the activation's output ÷t
    · dropout masks 2h where the framework keeps them · scores 5·a·s ÷t without flash attention

full recompute keeps 2h a layer and one layer's working set, recompute of a block the same of the first layers of each
chunk alone; selective recompute drops what the attention core keeps.
A stage holds as many micro-batches as the schedule keeps in flight (:mod:`.pipeline`). The last stage adds the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.calibration import Calibration
from meshplan.catalogs.model_shapes import ModelShape
from meshplan.planner.estimators.candidates import (
    Candidates,
    FloatArray,
    IntArray,
    LayerKind,
    Recompute,
    StageClass,
)
from meshplan.planner.estimators.compute import activation_bytes
from meshplan.planner.estimators.context_parallel import ContextParallelModel
from meshplan.planner.estimators.expert_load import arriving_load
from meshplan.planner.estimators.offload import (
    ACTIVATION_BUFFERS,
    HOST_COPY_BYTES_PER_PARAMETER,
    NVME_BUFFER_BYTES,
)
from meshplan.planner.estimators.pipeline import in_flight
from meshplan.planner.estimators.quantised_weights import (
    NF4_BYTES,
    UNQUANTISED_BYTES,
    dequantised_bytes,
    is_quantised,
    quantised_parameters,
)
from meshplan.planner.problems.precisions import WEIGHT_COPY_BYTES
from meshplan.planner.problems.training import Phase, TrainingWorkload

BYTES_16_BIT = 2.0
ZERO_OPTIMIZER, ZERO_GRADIENTS, ZERO_PARAMETERS = 1, 2, 3
# Layers whose parameters a fully sharded rank holds gathered at once: the one in use and the one fetched ahead.
GATHERED_LAYERS = 2.0
# 5·a·s bytes a token and layer: in 16 bits the softmax output, what dropout makes of it and a 1-byte mask
# (arXiv:2205.05198, §4.1); in fp32 the softmax output and the mask.
PLAIN_ATTENTION_BYTES_PER_SCORE = 5.0
LORA_MATRICES_PER_LAYER = 4  # adapters on the query, key, value and output projections
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one rank of one class of stages, [n] each.

    Args:
        stage: the class.
        components: name (of :data:`COMPONENTS`) → bytes.
        typical_bytes: expected peak.
        safe_bytes: bound that a run must not exceed.
        host_bytes: what the rank keeps in its host's memory, with the copies that go to and fro.
        nvme_bytes: states that it keeps on its host's NVMe devices.
    """

    stage: StageClass
    components: Mapping[str, FloatArray]
    typical_bytes: FloatArray
    safe_bytes: FloatArray
    host_bytes: FloatArray
    nvme_bytes: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Prices the memory of a batch of candidates.

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

    def stages(self) -> tuple[StageMemory, ...]:
        """Memory of every distinct stage."""
        return tuple(self.stage(stage) for stage in self.candidates.split.classes)

    def stage(self, stage: StageClass) -> StageMemory:
        """Memory of one rank of ``stage``."""
        constants = self.calibration.memory
        components = dict(self._states(stage))
        components["activations"] = self._activations(stage) * constants.activation_factor
        components["logits"] = self._logits(stage) * constants.logits_bytes_per_entry
        components["fixed"] = np.broadcast_to(
            np.asarray(constants.fixed_bytes, dtype=np.float64), components["weights"].shape
        )
        typical = sum(components.values(), np.zeros_like(components["weights"]))
        variable = typical - components["fixed"]
        safe = components["fixed"] + constants.safe_fixed_bytes + variable * constants.safe_factor
        return StageMemory(
            stage=stage,
            components=components,
            typical_bytes=typical,
            safe_bytes=safe,
            host_bytes=self._host_bytes(stage),
            nvme_bytes=np.where(self.candidates.on_nvme, self._offloaded_state_bytes(stage), 0.0),
        )

    # --- states ---------------------------------------------------------------------------------------------------

    def dense_parameters(self, stage: StageClass) -> FloatArray:
        """Parameters of one rank outside the routed experts, [n]."""
        shape, t = self.shape, self.candidates.tensor_parallel
        kinds = self.candidates.split.kinds
        split, whole = 0.0, 0.0
        for kind, dealt in zip(kinds, stage.layers, strict=True):
            count = dealt + self._nextn_layers(stage) * (kind == kinds[-1])
            mlp = shape.shared_expert_parameters if kind.is_moe else shape.dense_mlp_parameters
            split += count * (shape.attention_parameters + mlp)
            whole += count * (shape.norm_parameters_per_layer + (shape.router_parameters if kind.is_moe else 0))
        if stage.has_embedding:
            split += shape.embedding_parameters
        if stage.vocabulary_share:
            tied = shape.tie_word_embeddings
            vocabulary = shape.embedding_parameters + (0 if tied else shape.lm_head_parameters)
            split += stage.vocabulary_share * vocabulary
        if stage.has_head:
            copies_tied = shape.tie_word_embeddings and self.candidates.split.pipeline_parallel > 1
            split += shape.vocab_size * shape.hidden_size if copies_tied else shape.lm_head_parameters
            # A multi-token-prediction layer also projects 2h to h and has three norms of its own.
            split += shape.num_nextn_predict_layers * 2 * shape.hidden_size**2
            whole += shape.num_nextn_predict_layers * 3 * shape.norm_parameters
        return split / t + whole

    def expert_parameters(self, stage: StageClass) -> FloatArray:
        """Parameters of the routed experts on one rank, [n]."""
        moe, batch = self.shape.moe, self.candidates
        kinds = self.candidates.split.kinds
        layers = sum(count for kind, count in zip(kinds, stage.layers, strict=True) if kind.is_moe)
        layers += self._nextn_layers(stage) * kinds[-1].is_moe
        if moe is None or layers == 0:
            return np.zeros(len(batch))
        total = layers * moe.num_experts * float(self.shape.expert_parameters)
        return total / (batch.expert_parallel * batch.expert_tensor_parallel)

    def _nextn_layers(self, stage: StageClass) -> int:
        """Multi-token-prediction layers of the stage: they lie beside the LM head and are of the last kind."""
        return self.shape.num_nextn_predict_layers * stage.has_head

    def lora_parameters(self, stage: StageClass) -> FloatArray:
        """Adapter parameters of one rank: rank·(inputs + outputs) of each adapted matrix, [n]."""
        shape = self.shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        widths = LORA_MATRICES_PER_LAYER * shape.hidden_size + 2 * queries + 2 * keys
        layers = float(sum(stage.layers))
        if self.workload.phase is Phase.QLORA:  # on every linear layer
            widths += shape.mlp_matrices * (shape.hidden_size + shape.intermediate_size)
        return layers * self.workload.lora_rank * widths / self.candidates.tensor_parallel

    def _states(self, stage: StageClass) -> Mapping[str, FloatArray]:
        recipe, batch, zero = self.calibration.recipe, self.candidates, self.candidates.zero_stage
        extra = self.calibration.memory.extra_bytes_per_parameter
        weights: FloatArray = np.zeros(len(batch))
        gradients = optimizer = weights
        copies = WEIGHT_COPY_BYTES.get(self.workload.precision, 0.0)
        on_device = np.where(batch.optimizer_offload, 0.0, recipe.optimizer_bytes)
        outer = self.outer_copies()
        for parameters, trained, ranks in self._shares(stage):
            resident = parameters / np.where(zero >= ZERO_PARAMETERS, ranks, 1)
            weights = weights + resident * (recipe.weight_bytes + copies)
            gradients = gradients + trained * recipe.gradient_bytes / np.where(zero >= ZERO_GRADIENTS, ranks, 1)
            states = on_device + extra
            optimizer = optimizer + trained * states / np.where(zero >= ZERO_OPTIMIZER, ranks * outer, 1)
        gathered = np.where(zero >= ZERO_PARAMETERS, self._gathered_bytes(stage), 0.0)
        if is_quantised(self.workload):
            weights = self._quantised_bytes(stage)
        if batch.parameter_offload.any():
            in_use = dequantised_bytes(self.shape) if is_quantised(self.workload) else 0.0
            weights = np.where(batch.parameter_offload, in_use, weights)
            gradients = np.where(batch.parameter_offload & batch.optimizer_offload, 0.0, gradients)
        return {"weights": weights + gathered, "gradients": gradients, "optimizer": optimizer}

    def _quantised_bytes(self, stage: StageClass) -> FloatArray:
        """Frozen weights in four bits, what stays wide, the adapters and one dequantised matrix, [n]."""
        batch = self.candidates
        packed = quantised_parameters(self.shape, stage, batch.tensor_parallel)
        wide = (self.dense_parameters(stage) - packed) * UNQUANTISED_BYTES
        adapters = self.lora_parameters(stage) * self.calibration.recipe.weight_bytes
        ranks = np.where(batch.zero_stage >= ZERO_PARAMETERS, batch.data_parallel_shard * batch.context_parallel, 1)
        return (packed * NF4_BYTES + wide + adapters) / ranks + dequantised_bytes(self.shape)

    def _shares(self, stage: StageClass) -> tuple[tuple[FloatArray, FloatArray, FloatArray], ...]:
        """(Resident, trained, ranks that share one copy) of a rank's parameters; adapters sit on the dense part."""
        batch = self.candidates
        lora = self.workload.phase.has_adapters
        dense, experts = self.dense_parameters(stage), self.expert_parameters(stage)
        return (
            (dense, self.lora_parameters(stage) if lora else dense, batch.data_parallel_shard * batch.context_parallel),
            (experts, 0.0 * experts if lora else experts, self._expert_shard()),
        )

    def owned_parameters(self, stage: StageClass) -> FloatArray:
        """Trained parameters whose optimizer states one rank keeps, [n]."""
        sharded = self.candidates.zero_stage >= ZERO_OPTIMIZER
        owned = sum(
            (trained / np.where(sharded, ranks, 1) for _, trained, ranks in self._shares(stage)),
            np.zeros(len(self.candidates)),
        )
        return owned / self.outer_copies()

    def shard_bytes(self, stage: StageClass) -> FloatArray:
        """A rank's own part of the parameters where they are sharded (ZeRO-3), [n]."""
        if is_quantised(self.workload):
            return self._quantised_bytes(stage)
        each = self.calibration.recipe.weight_bytes
        return sum((parameters * each / ranks for parameters, _, ranks in self._shares(stage)), np.zeros(1))

    def _offloaded_state_bytes(self, stage: StageClass) -> FloatArray:
        """Optimizer states and parameters of one rank that lie off its device, [n]."""
        batch = self.candidates
        if not batch.offloads_states.any():
            return np.zeros(len(batch))
        optimizer = self.owned_parameters(stage) * self.calibration.recipe.optimizer_bytes
        parameters = self.shard_bytes(stage)
        return np.where(batch.optimizer_offload, optimizer, 0.0) + np.where(batch.parameter_offload, parameters, 0.0)

    def _host_bytes(self, stage: StageClass) -> FloatArray:
        """What one rank keeps in its host's memory, [n]: offloaded states or their buffers, copies, activations."""
        batch = self.candidates
        held = np.zeros(len(batch))
        if batch.offloads_states.any():
            buffers = np.where(batch.parameter_offload, NVME_BUFFER_BYTES, 0.0)
            held = np.where(batch.on_nvme, buffers, self._offloaded_state_bytes(stage))
            copies = self.owned_parameters(stage) * HOST_COPY_BYTES_PER_PARAMETER
            held = held + np.where(batch.optimizer_offload, copies, 0.0)
        if batch.activation_offload.any():
            inputs = self._in_flight(stage) * self.offloaded_input_bytes(stage)
            held = held + np.where(batch.activation_offload, inputs, 0.0)
        return held

    def offloaded_input_bytes(self, stage: StageClass) -> FloatArray:
        """Inputs of a stage's layers that one micro-batch keeps under full recompute, [n]."""
        layers = sum(stage.layers) + self._nextn_layers(stage)
        return layers * self._layer_input_bytes()

    def _expert_shard(self) -> FloatArray:
        """Ranks that share one copy of the sharded states of an expert, [n]."""
        batch = self.candidates
        shards = batch.data_parallel_shard / batch.data_parallel
        return np.maximum(batch.expert_data_parallel * shards, 1.0)

    def _gathered_bytes(self, stage: StageClass) -> FloatArray:
        """Gathered parameters and unreduced gradients of the layers in use under ZeRO-3, [n]."""
        layers = max(sum(stage.layers), 1)
        recipe = self.calibration.recipe
        largest = (self.dense_parameters(stage) + self.expert_parameters(stage)) / layers
        if is_quantised(self.workload):
            return GATHERED_LAYERS * self.gathered_dense_bytes(stage) / layers
        second = self._second_copy_bytes(stage)
        if second is not None:
            return (
                second
                + GATHERED_LAYERS * largest * recipe.parameter_gather_bytes
                + largest * (recipe.gradient_reduce_bytes)
            )
        return GATHERED_LAYERS * largest * recipe.parameter_gather_bytes + largest * recipe.gradient_reduce_bytes

    def outer_copies(self) -> FloatArray:
        """Groups over which optimizer states are sharded beyond the ranks that share one copy, [n]; 1 usually."""
        batch = self.candidates
        return np.where(batch.outer_zero_stage > 0, batch.data_parallel // batch.data_parallel_shard, 1)

    def second_copy_ranks(self) -> tuple[IntArray, IntArray]:
        """Ranks that the backward pass gathers from, dense states and experts, [n] each.

        P neighbours of the ranks that share one copy lie on P·t devices; of a set of experts spread over e·w devices
        these have P·t/(e·w) copies, or one rank keeps its own.
        """
        batch = self.candidates
        ranks = batch.data_parallel_shard * batch.context_parallel
        expert_ranks = self._expert_shard().astype(np.int64)
        block = batch.zero_hpz_partition_size * batch.tensor_parallel
        experts = np.maximum(block // (batch.expert_parallel * batch.expert_tensor_parallel), 1)
        asked = batch.zero_hpz_partition_size > 1
        return (
            np.where(asked, np.minimum(batch.zero_hpz_partition_size, ranks), ranks),
            np.where(asked, np.minimum(experts, expert_ranks), expert_ranks),
        )

    def resharded_parameters(self, stage: StageClass) -> tuple[FloatArray, FloatArray]:
        """Parameters of one rank, dense and experts, that are gathered again before the backward pass, [n] each."""
        dense, experts = self._kept_parameters(stage)
        return self.dense_parameters(stage) - dense, self.expert_parameters(stage) - experts

    def _kept_parameters(self, stage: StageClass) -> tuple[FloatArray, FloatArray]:
        """Parameters of one rank, dense and experts, of the layers that stay gathered, [n] each."""
        shape, moe, batch = self.shape, self.shape.moe, self.candidates
        dense: FloatArray = np.zeros(len(batch))
        experts = dense
        counts = stage.first(batch.gathered_num_layers)
        for kind, count in zip(batch.split.kinds, counts, strict=True):
            mlp = shape.shared_expert_parameters if kind.is_moe else shape.dense_mlp_parameters
            whole = shape.norm_parameters_per_layer + (shape.router_parameters if kind.is_moe else 0)
            dense = dense + count * ((shape.attention_parameters + mlp) / batch.tensor_parallel + whole)
            if kind.is_moe and moe is not None:
                spread = batch.expert_parallel * batch.expert_tensor_parallel
                experts = experts + count * (moe.num_experts * float(shape.expert_parameters) / spread)
        return dense, experts

    def _second_copy_bytes(self, stage: StageClass) -> FloatArray | None:
        """16-bit parameters beyond the layers in use that a fully sharded rank holds, [n]; None where it holds none.

        Its part of the second copy, where fewer ranks share that than share the first, and the layers that stay
        gathered.
        """
        batch, width = self.candidates, self.calibration.recipe.parameter_gather_bytes
        if not ((batch.zero_hpz_partition_size > 1) | (batch.gathered_num_layers > 0)).any():
            return None
        kept = sum(self._kept_parameters(stage))
        size, expert_size = self.second_copy_ranks()
        ranks, expert_ranks = batch.data_parallel_shard * batch.context_parallel, self._expert_shard()
        second = np.where(size < ranks, self.dense_parameters(stage) / size, 0.0)
        second = second + np.where(expert_size < expert_ranks, self.expert_parameters(stage) / expert_size, 0.0)
        return width * (kept + second)

    def gathered_dense_bytes(self, stage: StageClass) -> FloatArray:
        """What a stage's parameters outside the routed experts weigh on the wire, [n]."""
        dense, each = self.dense_parameters(stage), self.calibration.recipe.parameter_gather_bytes
        if not is_quantised(self.workload):
            return dense * each
        packed = quantised_parameters(self.shape, stage, self.candidates.tensor_parallel)
        return (dense - packed) * each + packed * NF4_BYTES

    # --- activations -----------------------------------------------------------------------------------------------

    @property
    def _tokens(self) -> FloatArray:
        batch = self.candidates
        return batch.micro_batch_size * self.workload.sequence_length / batch.context_parallel

    @property
    def _sequence_shards(self) -> FloatArray:
        batch = self.candidates
        return np.where(batch.sequence_parallel, batch.tensor_parallel, 1).astype(np.float64)

    def attention_core_bytes(self) -> FloatArray:
        """What the attention core alone keeps of one layer and micro-batch (dropped by selective recompute), [n]."""
        if self.calibration.recipe.flash_attention:
            return np.zeros(len(self.candidates))
        scores = self.shape.num_attention_heads * self.workload.sequence_length
        return PLAIN_ATTENTION_BYTES_PER_SCORE * scores * self._tokens / self.candidates.tensor_parallel

    def layer_bytes(self, kind: LayerKind) -> FloatArray:
        """What one layer keeps of one micro-batch without recompute, scores included, [n]."""
        shape, t = self.shape, self.candidates.tensor_parallel
        h, a = shape.hidden_size, shape.num_attention_heads
        # Frozen matrices need no input for a weight gradient: LoRA drops the second norm's output and the MLP's last
        # input.
        hidden = (6.0 if self._frozen else 8.0) * h + (2.0 * h if self.calibration.recipe.dropout_masks else 0.0)
        heads: FloatArray | float
        if shape.latent is None:
            heads = BYTES_16_BIT * (2.0 * a + 2.0 * shape.num_key_value_heads) * shape.head_dim
        else:
            query_key = shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim
            ranks = shape.latent.kv_lora_rank + (shape.latent.q_lora_rank or 0)
            heads = BYTES_16_BIT * (a * (2.0 * query_key + 2.0 * shape.latent.v_head_dim) + ranks * t)
        wide = activation_bytes(self.workload) / BYTES_16_BIT
        kept = hidden / self._sequence_shards + heads / t + self._mlp_bytes_per_token(kind)
        layer = wide * kept * self._tokens + self.attention_core_bytes()
        exchanged = self._context_parallel.kept_bytes()
        return layer if exchanged is None else layer + exchanged

    @property
    def _context_parallel(self) -> ContextParallelModel:
        return ContextParallelModel(
            shape=self.shape,
            sequence_length=self.workload.sequence_length,
            element_bytes=activation_bytes(self.workload),
            candidates=self.candidates,
        )

    @property
    def _frozen(self) -> bool:
        """Matrices without adapters keep no input."""
        return self.workload.phase is Phase.LORA

    def _mlp_bytes_per_token(self, kind: LayerKind) -> FloatArray:
        shape, batch, t = self.shape, self.candidates, self.candidates.tensor_parallel
        tensors = shape.mlp_matrices - self._frozen
        if not kind.is_moe or shape.moe is None:
            return BYTES_16_BIT * tensors * shape.intermediate_size / t
        moe = shape.moe
        routed = moe.num_experts_per_token * batch.expert_tensor_parallel / t
        routed = routed * arriving_load(self.workload, moe, batch.expert_parallel)
        width = moe.expert_intermediate_size / batch.expert_tensor_parallel
        experts = routed * (2.0 * BYTES_16_BIT * shape.hidden_size + BYTES_16_BIT * shape.mlp_matrices * width)
        return experts + BYTES_16_BIT * shape.mlp_matrices * moe.shared_intermediate_size / t

    def _activations(self, stage: StageClass) -> FloatArray:
        batch, shape = self.candidates, self.shape
        kinds = self.candidates.split.kinds
        inputs = self._layer_input_bytes()
        held: FloatArray = np.zeros(len(batch))
        largest = held
        in_block = stage.recomputed(batch.recompute_num_layers)
        for kind, dealt, again in zip(kinds, stage.layers, in_block, strict=True):
            count = dealt + self._nextn_layers(stage) * (kind == kinds[-1])
            if count == 0:
                continue
            whole = self.layer_bytes(kind)
            selective = (whole - self.attention_core_bytes()) * self.calibration.recipe.selective_kept_share
            kept = np.select(
                [batch.recompute == Recompute.FULL, batch.recompute == Recompute.SELECTIVE],
                [inputs, selective],
                default=whole,
            )
            held = held + count * kept - again * (whole - inputs)
            largest = np.maximum(largest, whole - np.where(again > 0, inputs, kept))
        flying = self._in_flight(stage)
        entering = activation_bytes(self.workload) * shape.hidden_size * self._tokens / self._sequence_shards
        embedded = entering * (stage.has_embedding or stage.vocabulary_share > 0.0)
        buffers = self._context_parallel.buffer_bytes()
        if buffers is not None:
            largest = largest + buffers
        if batch.activation_offload.any():
            away = batch.activation_offload & (batch.recompute == Recompute.FULL)
            buffers = np.minimum(ACTIVATION_BUFFERS * inputs, flying * held)
            return np.where(away, buffers + flying * embedded, flying * (held + embedded)) + largest
        return flying * (held + embedded) + largest

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
        # The barrier of the split head keeps every micro-batch for one more (arXiv:2411.05288, Algorithm 2).
        return np.minimum(held + 1.0, self.candidates.num_microbatches)

    def least_recomputed(self, safe_bytes: Sequence[FloatArray], limit_bytes: float) -> IntArray:
        """Fewest layers of each chunk that must be recomputed for every stage to stay within a limit, [n].

        A stage that recomputes the first n layers of its chunks drops Σ_k r_k(n)·(A_k − I_k) of each micro-batch in
        flight and keeps max_k (A_k − I_k) once (A_k, I_k what a layer of kind k and its input keep), so that memory
        falls with n and the first n that fits is the least.

        Args:
            safe_bytes: of each stage class without recompute, [n] each.
            limit_bytes: device memory.

        Returns:
            n from 0 (fits without); one more than the longest chunk where none is enough.
        """
        batch, constants = self.candidates, self.calibration.memory
        per_byte = np.asarray(constants.activation_factor) * constants.safe_factor
        inputs = self._layer_input_bytes()
        dropped = np.stack([self.layer_bytes(kind) - inputs for kind in batch.split.kinds])
        least = np.zeros(len(batch), dtype=np.int64)
        for stage, safe in zip(batch.split.classes, safe_bytes, strict=True):
            table = np.array(stage.first_layers, dtype=np.float64)
            flying, excess = self._in_flight(stage), (safe - limit_bytes) / per_byte
            found, open_rows = np.zeros(len(batch), dtype=np.int64), excess > 0
            for n, layers in enumerate(table[1:], start=1):
                working = np.max(dropped * (layers > 0)[:, None], axis=0)
                enough = open_rows & (flying * (layers @ dropped) - working >= excess)
                found[enough] = n
                open_rows &= ~enough
                if not open_rows.any():
                    break
            found[open_rows] = max(batch.split.layers_per_chunk) + 1
            least = np.maximum(least, found)
        return least

    def _layer_input_bytes(self) -> FloatArray:
        """What a recomputed layer keeps of one micro-batch, [n]."""
        wide = activation_bytes(self.workload) * self.shape.hidden_size
        return wide * self._tokens / self._kept_input_shards()

    def _kept_input_shards(self) -> FloatArray:
        batch = self.candidates
        if self.calibration.recipe.full_recompute_keeps_input_sharded:
            return batch.tensor_parallel.astype(np.float64)
        return self._sequence_shards

    def _logits(self, stage: StageClass) -> FloatArray:
        if stage.vocabulary_share:
            return stage.vocabulary_share * self._tokens * self.shape.vocab_size / self.candidates.tensor_parallel
        if not stage.has_head:
            return np.zeros(len(self.candidates))
        predicted_tokens = 1 + self.shape.num_nextn_predict_layers
        return predicted_tokens * self._tokens * self.shape.vocab_size / self.candidates.tensor_parallel
