"""How many parameters a rank has: of layers, vocabulary, experts and adapters; trained, frozen, sharded, gathered.

Experts are split over expert- and expert-tensor-parallel ranks and sharded over their own replicas. What the counts
take in bytes, and where, is in :mod:`.states`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates, LayerKind, StageClass, layer_kinds
from meshplan.planner.training.problem.problem import TrainingWorkload

ZERO_OPTIMIZER, ZERO_GRADIENTS, ZERO_PARAMETERS = 1, 2, 3
LORA_MATRICES_PER_LAYER = 4  # adapters on the query, key, value and output projections


def nextn_layers(shape: ModelShape, stage: StageClass) -> int:
    """Multi-token-prediction layers of the stage: they are on the stage of the LM head."""
    return shape.num_nextn_predict_layers * stage.has_head


def predicting_kinds(shape: ModelShape) -> tuple[int, ...]:
    """The kinds of layers that make up one multi-token-prediction layer, by index."""
    kind_of = layer_kinds(shape)[1]
    return tuple(kind_of[layer - shape.num_hidden_layers] for layer in shape.predicting_layers)


def quantised_parameters(shape: ModelShape, stage: StageClass, tensor_parallel: FloatArray) -> FloatArray:
    """Parameters of a stage's linear layers on one rank, dense layers only, [n]."""
    layers = 1.0 * sum(stage.layers)
    return layers * (shape.attention_parameters + shape.dense_mlp_parameters) / np.asarray(tensor_parallel)


def adapter_parameters(shape: ModelShape, workload: TrainingWorkload) -> float:
    """Parameters of one layer's adapters, over all ranks: rank·(inputs + outputs) of each adapted matrix."""
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    widths = LORA_MATRICES_PER_LAYER * shape.hidden_size + 2 * queries + 2 * keys
    if workload.adapts_mlp:
        widths += shape.mlp_matrices * (shape.hidden_size + shape.intermediate_size)
    return float(workload.lora_rank * widths)


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters of the ranks of a batch of candidates.

    Args:
        shape: the model.
        workload: phase, adapters.
        candidates: the batch.
        calibration: the framework's recipe.
    """

    shape: ModelShape
    workload: TrainingWorkload
    candidates: Candidates
    calibration: Calibration

    def _layer_parameters(self, kind: LayerKind) -> tuple[int, int]:
        """Parameters of one layer outside its routed experts: split over tensor-parallel ranks, and replicated."""
        shape = self.shape if self.shape.encoder is None or not kind.is_encoder else self.shape.encoder
        attention = shape.attention_parameters if kind.form is None else kind.form.parameters
        if kind.form is None and not kind.has_indexer:
            attention -= shape.indexer_parameters
        mixers = kind.has_attention * attention + kind.has_recurrent * shape.recurrent_parameters
        mixers += shape.cross_attention_parameters
        mlp = shape.shared_expert_parameters if kind.is_moe else kind.has_mlp * shape.dense_mlp_parameters
        whole = shape.norm_parameters_per_layer + (shape.router_parameters if kind.is_moe else 0)
        return mixers + mlp, whole

    @cached_property
    def _of_kinds(self) -> tuple[tuple[int, int], ...]:
        """:meth:`_layer_parameters` of each kind of layer."""
        return tuple(self._layer_parameters(kind) for kind in self.candidates.split.kinds)

    def dense_parameters(self, stage: StageClass) -> FloatArray:
        """Parameters of one rank outside the routed experts, [n]."""
        shape, t = self.shape, self.candidates.tensor_parallel
        split, whole = 0.0, 0.0
        further = predicting_kinds(shape)
        for index, (own_layers, (layer_split, layer_whole)) in enumerate(
            zip(stage.layers, self._of_kinds, strict=True)
        ):
            count = own_layers + nextn_layers(shape, stage) * (index in further)
            split += count * layer_split
            whole += count * layer_whole
        split += self._vocabulary_parameters(stage)
        # A multi-token-prediction layer also has a 2h-to-h projection and three more norms.
        split += nextn_layers(shape, stage) * 2 * shape.hidden_size**2
        whole += nextn_layers(shape, stage) * 3 * shape.norm_parameters
        return split / t + whole

    def _vocabulary_parameters(self, stage: StageClass) -> float:
        """Parameters of the embedding and the LM head on a stage, before tensor parallelism splits them."""
        shape, tied = self.shape, self.shape.tie_word_embeddings
        if stage.vocabulary_share:
            return stage.vocabulary_share * (shape.embedding_parameters + (0 if tied else shape.lm_head_parameters))
        copies_tied = tied and self.candidates.split.pipeline_parallel > 1
        head = shape.vocab_size * shape.hidden_size if copies_tied else shape.lm_head_parameters
        return stage.has_embedding * float(shape.embedding_parameters) + stage.has_head * head

    def expert_parameters(self, stage: StageClass) -> FloatArray:
        """Parameters of the routed experts on one rank, [n]."""
        moe, batch = self.shape.moe, self.candidates
        kinds = self.candidates.split.kinds
        layers = sum(count for kind, count in zip(kinds, stage.layers, strict=True) if kind.is_moe)
        layers += nextn_layers(self.shape, stage) * any(kinds[index].is_moe for index in predicting_kinds(self.shape))
        if moe is None or not np.any(layers):
            return np.zeros(len(batch))
        total = layers * moe.num_experts * float(self.shape.expert_parameters)
        return total / (batch.expert_parallel * batch.expert_tensor_parallel)

    def lora_parameters(self, stage: StageClass) -> FloatArray:
        """Trained parameters of one rank beside frozen ones, [n].

        Adapters, and the embedding and the LM head where these are trained whole.
        """
        adapters = 1.0 * sum(stage.layers) * adapter_parameters(self.shape, self.workload)
        whole = self._vocabulary_parameters(stage) if self.workload.trains_vocabulary else 0.0
        return (adapters + whole) / self.candidates.tensor_parallel

    def trained_parameters(self, stage: StageClass) -> tuple[FloatArray, FloatArray]:
        """Trained parameters of one rank, dense and experts, [n] each; adapters count as dense."""
        return self._trained(stage, self.dense_parameters(stage), self.expert_parameters(stage))

    def _trained(self, stage: StageClass, dense: FloatArray, experts: FloatArray) -> tuple[FloatArray, FloatArray]:
        if self.workload.phase.has_adapters:
            return self.lora_parameters(stage), 0.0 * experts
        return dense, experts

    def _originals(self, stage: StageClass) -> FloatArray | float:
        """Parameters of one rank that lie frozen beside the trained copy of their module, [n].

        Source: peft 0.6, utils/other.py, ModulesToSaveWrapper (``original_module`` stays, a deep copy is trained).
        """
        if not self.workload.trains_vocabulary:
            return 0.0
        return self._vocabulary_parameters(stage) / self.candidates.tensor_parallel

    # --- shards -------------------------------------------------------------------------------------------------------

    def _shares(self, stage: StageClass) -> tuple[tuple[FloatArray, FloatArray, FloatArray], ...]:
        """(Resident parameters, trained parameters, ranks that share a copy) of the dense part and of any experts."""
        dense, experts = self.dense_parameters(stage), self.expert_parameters(stage)
        trained, trained_experts = self._trained(stage, dense, experts)
        of_dense = dense + self._originals(stage), trained, self._dense_shard
        return (of_dense,) if self.shape.moe is None else (of_dense, (experts, trained_experts, self._expert_shard))

    @cached_property
    def _dense_shard(self) -> IntArray:
        """Ranks that share one copy of the sharded states of the dense part, [n]."""
        return self.candidates.data_parallel_shard * self.candidates.context_parallel

    def owned_parameters(self, stage: StageClass) -> FloatArray:
        """Trained parameters whose optimizer states one rank keeps, [n]."""
        sharded = self.candidates.zero_stage >= ZERO_OPTIMIZER
        owned = sum(
            (trained / np.where(sharded, ranks, 1) for _, trained, ranks in self._shares(stage)),
            np.zeros(len(self.candidates)),
        )
        return owned / self.outer_copies

    @cached_property
    def _expert_shard(self) -> FloatArray:
        """Ranks that share one copy of the sharded states of an expert, [n]."""
        batch = self.candidates
        shards = batch.data_parallel_shard / batch.data_parallel
        return np.maximum(batch.expert_data_parallel * shards, 1.0)

    @cached_property
    def outer_copies(self) -> IntArray | int:
        """Sharding groups over which optimizer states are sharded once more, [n]; usually 1."""
        batch = self.candidates
        if not batch.outer_zero_stage.any():
            return 1
        return np.where(batch.outer_zero_stage > 0, batch.data_parallel // batch.data_parallel_shard, 1)

    # --- gathered -----------------------------------------------------------------------------------------------------

    def _outside_layers(self, stage: StageClass) -> tuple[FloatArray | float, FloatArray | float]:
        """Parameters of one rank that FSDP has in units that are no layers, and those of them that stay gathered, [n].

        The root unit is not resharded after the forward pass (torch/distributed/fsdp/_fully_shard/_fully_shard.py,
        ``reshard_after_forward``): what no layer has, the embedding and the LM head. Where the embedding is a unit of
        its own, the head is left (torchtitan, parallelize_llama, ``[model.norm, model.output]``).
        """
        recipe, shape = self.calibration.recipe, self.shape
        if not recipe.is_fsdp or stage.vocabulary_share:
            return 0.0, 0.0
        apart = kept = self._vocabulary_parameters(stage)
        if recipe.shards_embedding and not shape.tie_word_embeddings:
            kept = apart - stage.has_embedding * float(shape.embedding_parameters)
        t = self.candidates.tensor_parallel
        return apart / t, kept / t

    def second_copy_ranks(self) -> tuple[IntArray, IntArray]:
        """Ranks that the backward pass gathers from, dense states and experts, [n] each.

        A partition of P ranks covers P·t devices; these hold P·t/(e·w) copies of a set of experts that is spread over
        e·w devices, or less than one, in which case each rank keeps its own.
        """
        batch = self.candidates
        ranks = batch.data_parallel_shard * batch.context_parallel
        expert_ranks = self._expert_shard.astype(np.int64)
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
            split, whole = self._layer_parameters(kind)
            dense = dense + count * (split / batch.tensor_parallel + whole)
            if kind.is_moe and moe is not None:
                spread = batch.expert_parallel * batch.expert_tensor_parallel
                experts = experts + count * (moe.num_experts * float(shape.expert_parameters) / spread)
        return dense, experts
