"""Data parallelism in a step: collectives of parameters and gradients, and the optimizer, by ZeRO stage.

With ZeRO 0 to 2 (arXiv:1910.02054) gradient reduction overlaps with the backward of the last micro-batch and parameter
gathering with the forward of the first, up to the share ``data_parallel_window``; ZeRO-3 and FSDP gather and scatter in
every micro-batch (arXiv:2304.11277); with HSDP the sharding groups all-reduce their gradients once per step. In a
pipeline FSDP sums whole gradients and scatters them once per step; a backward pass leaves parameters gathered for the
forward pass that follows it, so that ZeRO-3 gathers once per micro-batch. A run may gather less often
(:data:`~meshplan.planner.training.problem.switches.GATHERS`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.catalogs.constants.training import Calibration, Constant
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates, StageClass
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE, CommunicationModel, Ring
from meshplan.planner.training.estimator.exchange.offload import fetch_s, host_link_bytes_per_s, host_optimizer_s
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.estimator.states import StateModel
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingWorkload
from meshplan.planner.training.problem.switches import EACH_MICRO_BATCH, ONCE_A_STEP

# Shares of a micro-batch: its backward can hide gradient reduction, its forward parameter gathers.
BACKWARD_SHARE = 2.0 / 3.0
FORWARD_SHARE = 1.0 / 3.0
# Memory traffic of Adam per parameter: gradient, two moments and master copy read, the last three and the 16-bit
# weight written (4 + 12 + 12 + 2).
ADAM_BYTES_PER_PARAMETER = 30.0


@dataclass(frozen=True, kw_only=True)
class DataParallelModel:
    """Data-parallel costs of a batch of candidates.

    Args:
        machine: the cluster.
        workload: precision and phase.
        candidates: the batch.
        calibration: constants and framework recipe.
        states: parameters and states of the same batch.
        links: prices collectives.
    """

    machine: Machine
    workload: TrainingWorkload
    candidates: Candidates
    calibration: Calibration
    states: StateModel
    links: CommunicationModel

    def fully_sharded_s(self, stage: StageClass, busy: FloatArray) -> FloatArray:
        """Exposed ZeRO-3 transfers of one micro-batch: two parameter gathers and a gradient scatter.

        The second gather is from the neighbours that hold a secondary copy, where there is one (hpZ,
        arXiv:2306.10209, §3.2), and leaves out the layers that stay gathered (FSDP2's ``reshard_after_forward=False``).
        ZeRO-2 as FSDP's SHARD_GRAD_OP scatters gradients each micro-batch too. Every layer is a unit with collectives
        of its own (arXiv:2304.11277, §3.3), each of which waits for its ring.
        """
        batch, recipe = self.candidates, self.calibration.recipe
        if not (batch.zero_stage >= ZERO_PARAMETERS).any():
            return np.zeros_like(busy)
        gather = self._shard.gather_s(self.states.gathered_dense_bytes(stage))
        width = self.states.gradient_reduce_bytes
        scatter = self._shard.gather_s(self.states.dense_parameters(stage) * width)
        experts = self.states.expert_parameters(stage)
        gather = gather + self._expert_shard.gather_s(experts * recipe.parameter_gather_bytes)
        scatter = scatter + self._expert_shard.gather_s(experts * width)
        if self.workload.phase.has_adapters:
            scatter = np.zeros_like(scatter)
        rings = sum(stage.layers) * self._shard.latency_s()
        gather = gather + rings
        scatter = scatter + rings * (not self.workload.phase.has_adapters)
        again = self._second_gather_s(stage)
        moved = (2.0 * gather if again is None else gather + np.where(self._hierarchical, again, gather)) + scatter
        gathers = self.workload.practice.gathers
        if gathers == EACH_MICRO_BATCH:
            moved = gather + scatter
        once = gather / batch.num_microbatches if gathers == ONCE_A_STEP else gather
        moved = np.where(self.states.accumulates_whole, once, moved)
        if batch.parameter_offload.any():
            moved = moved + np.where(batch.parameter_offload, self._fetch_s(stage), 0.0)
        hidden = self._fully_sharded_overlap * np.minimum(moved, busy)
        return np.where(batch.zero_stage >= ZERO_PARAMETERS, moved - hidden, 0.0)

    @property
    def _fully_sharded_overlap(self) -> Constant:
        """Share of the transfers that runs behind the work, as far as that is as long."""
        recipe = self.calibration.recipe
        if not recipe.overlaps_data_parallel:
            return 0.0
        return 1.0 - UNHIDDEN_SHARE if recipe.schedules_by_profile else self.calibration.time.fully_sharded_overlap

    @property
    def _hierarchical(self) -> BoolArray:
        """Rows whose second gather differs from the first."""
        return (self.candidates.zero_hpz_partition_size > 1) | (self.candidates.gathered_num_layers > 0)

    def _second_gather_s(self, stage: StageClass) -> FloatArray | None:
        """Time of the gathers before the backward pass, [n]; None where they equal those of the forward pass."""
        if not self._hierarchical.any():
            return None
        width = self.calibration.recipe.parameter_gather_bytes
        dense, experts = self.states.resharded_parameters(stage)
        size, expert_size = self.states.second_copy_ranks()
        shard, expert_shard = self._shard.stride, self._expert_shard.stride
        gathered = stage.first(self.candidates.gathered_num_layers).sum(axis=0)
        seconds = (sum(stage.layers) - gathered) * self.links.ring_latency_s(size, shard)
        seconds = seconds + self.links.gather_s(dense * width, size, shard)
        return seconds + self.links.gather_s(experts * width, expert_size, expert_shard)

    def _fetch_s(self, stage: StageClass) -> FloatArray:
        """Transfer time of offloaded parameters per micro-batch, [n]; with offloaded optimizer also of gradients."""
        batch = self.candidates
        passes = np.where(batch.recompute == Recompute.FULL, 3.0, 2.0)
        shard = self.states.shard_bytes(stage)
        fetched = fetch_s(shard, self.machine, self._ranks_on_host(), on_nvme=batch.on_nvme, passes=passes)
        gradients = self.states.owned_parameters(stage) * self.states.gradient_reduce_bytes
        leaving = gradients / host_link_bytes_per_s(self.machine.device)
        return fetched + np.where(batch.optimizer_offload, leaving, 0.0)

    def _ranks_on_host(self) -> FloatArray:
        return np.minimum(self.machine.devices_per_host, self.candidates.world_size)

    @cached_property
    def _shard(self) -> Ring:
        """The ranks that share one copy of the dense states."""
        batch = self.candidates
        return self.links.ring(batch.data_parallel_shard * batch.context_parallel, batch.tensor_parallel)

    @cached_property
    def _expert_shard(self) -> Ring:
        """The ranks that share one copy of an expert's states."""
        batch = self.candidates
        size = np.maximum(batch.expert_data_parallel * batch.data_parallel_shard // batch.data_parallel, 1)
        return self.links.ring(size, self._expert_stride)

    @cached_property
    def _everyone(self) -> Ring:
        """The ranks that train the same dense parameters."""
        batch = self.candidates
        return self.links.ring(batch.data_parallel * batch.context_parallel, batch.tensor_parallel)

    @cached_property
    def _expert_everyone(self) -> Ring:
        """The ranks that train the same experts."""
        return self.links.ring(self.candidates.expert_data_parallel, self._expert_stride)

    @property
    def _expert_stride(self) -> IntArray:
        return self.candidates.expert_parallel * self.candidates.expert_tensor_parallel

    @cached_property
    def _copies(self) -> Ring:
        """The ranks that hold the same shard of the states (HSDP)."""
        batch = self.candidates
        stride = batch.tensor_parallel * batch.context_parallel * batch.data_parallel_shard
        return self.links.ring(batch.data_parallel // batch.data_parallel_shard, stride)

    def _replica_reduce_s(self, reduced_bytes: FloatArray, shards: IntArray) -> FloatArray:
        """All-reduce between the copies where states are sharded in smaller groups (HSDP), each of its shard."""
        return self._copies.all_reduce_s(reduced_bytes / shards)

    def _gradient_and_parameter_s(self, stage: StageClass) -> tuple[FloatArray, FloatArray]:
        """Time of gradient reduction and of parameter gathering per step on a stage, overlap ignored, for ZeRO 0–2."""
        batch, recipe = self.candidates, self.calibration.recipe
        dense, experts = self.states.trained_parameters(stage)
        reduce_s = gather_s = np.zeros_like(dense)
        groups = [(dense, self._shard, self._everyone)]
        if self.states.shape.moe is not None:
            groups.append((experts, self._expert_shard, self._expert_everyone))
        for parameters, shard, everyone in groups:
            gradient_bytes = parameters * self.states.gradient_reduce_bytes
            whole = everyone.all_reduce_s(gradient_bytes)
            sharded = shard.gather_s(gradient_bytes) + self._replica_reduce_s(gradient_bytes, shard.size)
            reduce_s = reduce_s + np.where(batch.zero_stage == 0, whole, sharded)
            collect = shard.broadcasts_s if recipe.broadcasts_parameters else shard.gather_s
            gathered = collect(parameters * recipe.parameter_gather_bytes)
            gather_s = gather_s + np.where(batch.zero_stage == 0, 0.0, gathered)
        return reduce_s, gather_s

    def exposed_s(self, stage: StageClass, stage_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Exposed data-parallel time per step outside the micro-batches, and the time of all gradient reduction."""
        batch, constants = self.candidates, self.calibration.time
        reduce_s, gather_s = self._gradient_and_parameter_s(stage)
        window = constants.data_parallel_window if self.calibration.recipe.overlaps_data_parallel else 0.0

        def exposed(seconds: FloatArray, share: float) -> FloatArray:
            return np.maximum(seconds - window * share * stage_s, UNHIDDEN_SHARE * seconds)

        outside = exposed(reduce_s, BACKWARD_SHARE) + exposed(gather_s, FORWARD_SHARE)
        is_full = batch.zero_stage >= ZERO_PARAMETERS
        if is_full.any():
            # They gather and scatter in every micro-batch; with HSDP the groups still all-reduce once per step.
            once = np.where(self.states.accumulates_whole, reduce_s, self._copies_reduce_s(stage))
            copies = exposed(once, BACKWARD_SHARE)
            if batch.outer_zero_stage.any():
                reduced, gathered = self._outer_s(stage)
                outer = exposed(reduced, BACKWARD_SHARE) + exposed(gathered, FORWARD_SHARE)
                copies = np.where(batch.outer_zero_stage > 0, outer, copies)
            outside = np.where(is_full, copies, outside)
        # Collectives run bucket by bucket, and every bucket waits once for each rank of the ring. Adapters fit in one
        # bucket (at least 40 million parameters in Megatron-LM, DistributedDataParallelConfig.bucket_size).
        ranks = np.ones(len(batch)) if self.workload.phase.has_adapters else self._shard.size
        growth = constants.data_parallel_s_per_rank * (ranks - 1) * (batch.zero_stage >= 1)
        return outside + growth, reduce_s

    def _copies_reduce_s(self, stage: StageClass) -> FloatArray:
        """All-reduce of a stage's gradients between sharding groups (HSDP)."""
        width = self.states.gradient_reduce_bytes
        dense, experts = self.states.trained_parameters(stage)
        of_dense = self._replica_reduce_s(dense * width, self._shard.size)
        return of_dense + self._replica_reduce_s(experts * width, self._expert_shard.size)

    def _outer_s(self, stage: StageClass) -> tuple[FloatArray, FloatArray]:
        """Time of the reduce-scatter of gradients and of the gather of parameters between sharding groups, [n] each.

        Every group holds all parameters in shards; with optimizer states sharded over the groups too, a rank updates a
        part of its shard and gathers the rest from its peers (Megatron-FSDP, ``outer_dp_sharding_strategy`` optim).
        """
        recipe = self.calibration.recipe
        dense, experts = self.states.trained_parameters(stage)
        trained = dense / self._shard.size + experts / self._expert_shard.size
        reduced = self._copies.gather_s(trained * self.states.gradient_reduce_bytes)
        return reduced, self._copies.gather_s(trained * recipe.parameter_gather_bytes)

    def optimizer_s(self, stage: StageClass) -> FloatArray:
        """Time of a stage's optimizer step, on the device, or on the host where the states are offloaded."""
        batch = self.candidates
        if self.workload.phase.has_adapters:
            owned = self.states.lora_parameters(stage)
        else:
            sharded = batch.zero_stage >= 1
            owned = self.states.dense_parameters(stage) / np.where(sharded, self._shard.size, 1)
            owned = owned + self.states.expert_parameters(stage) / np.where(sharded, self._expert_shard.size, 1)
        owned = owned / self.states.outer_copies
        rate = self.machine.device.memory_bandwidth_bytes_per_s * self.calibration.time.optimizer_efficiency
        on_device = owned * ADAM_BYTES_PER_PARAMETER / rate
        if not batch.optimizer_offload.any():
            return on_device
        on_host = host_optimizer_s(
            owned,
            self.machine,
            self._ranks_on_host(),
            on_nvme=batch.on_nvme,
            gradient_bytes=self.states.gradient_reduce_bytes,
            weight_bytes=self.calibration.recipe.weight_bytes,
            adam_bytes=ADAM_BYTES_PER_PARAMETER,
            state_bytes=self.states.optimizer_bytes,
        )
        # Never faster than on the device, so that what fits without offload needs none.
        moved = batch.moved_optimizer
        return moved * np.maximum(on_host, on_device) + (1.0 - moved) * on_device
