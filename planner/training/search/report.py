"""What a search of degrees keeps and says: candidates as configurations, their order, and what was turned down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshplan.planner.training.estimator.candidates import Candidates, Recompute
from meshplan.planner.training.problem.problem import (
    CONTEXT_PARALLEL_STYLES,
    Phase,
    TrainingConfig,
    TrainingObjective,
    TrainingProblem,
)

# Names of the limits, in the order in which candidates are held against them.
LIMITS = ("device memory", "host memory", "step time", "cost of the run")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredConfig:
    """One priced candidate.

    Args:
        config: its choices.
        objective: f(T, n), smaller is better.
        step_s: T.
        safe_bytes: M.
    """

    config: TrainingConfig
    objective: float
    step_s: float
    safe_bytes: float


@dataclass(slots=True, kw_only=True)
class SearchReport:
    """What a search saw.

    Args:
        considered: legal candidates, priced or ruled out by the bound.
        priced: of those, completely priced.
        ruled_out: not priced because their bound is no better than the incumbents.
        refused: reason → candidates refused by a rule.
        over_limit: limit → candidates beyond it.
        nearest_miss: limit → the candidate that exceeds it least, and by how much (in the limit's unit).
        illegal: reason → single values that no candidate may take.
    """

    considered: int = 0
    priced: int = 0
    ruled_out: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    over_limit: Counter[str] = field(default_factory=Counter)
    nearest_miss: dict[str, tuple[float, TrainingConfig]] = field(default_factory=dict)
    illegal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def config_of(candidates: Candidates, row: int, problem: TrainingProblem) -> TrainingConfig:
    """One row of a batch as a configuration."""
    split, workload = candidates.split, problem.workload
    return TrainingConfig(
        tensor_parallel=int(candidates.tensor_parallel[row]),
        pipeline_parallel=split.pipeline_parallel,
        virtual_pipeline_stages=split.virtual_pipeline_stages,
        context_parallel=int(candidates.context_parallel[row]),
        data_parallel=int(candidates.data_parallel[row]),
        data_parallel_shard=int(candidates.data_parallel_shard[row]),
        expert_parallel=int(candidates.expert_parallel[row]),
        expert_tensor_parallel=int(candidates.expert_tensor_parallel[row]),
        sequence_parallel=bool(candidates.sequence_parallel[row]),
        zero_stage=int(candidates.zero_stage[row]),
        activation_recompute=Recompute(int(candidates.recompute[row])).name.lower(),
        recompute_num_layers=int(candidates.recompute_num_layers[row]),
        optimizer_offload=bool(candidates.optimizer_offload[row]),
        parameter_offload=bool(candidates.parameter_offload[row]),
        activation_offload=bool(candidates.activation_offload[row]),
        offload_to="nvme" if candidates.on_nvme[row] and candidates.offloads_states[row] else "host",
        context_parallel_style=CONTEXT_PARALLEL_STYLES[int(candidates.context_parallel_style[row])],
        context_parallel_heads=int(candidates.context_parallel_heads[row]),
        zero_hpz_partition_size=int(candidates.zero_hpz_partition_size[row]),
        outer_zero_stage=int(candidates.outer_zero_stage[row]),
        gathered_num_layers=int(candidates.gathered_num_layers[row]),
        vocabulary_parallel=split.vocabulary_parallel,
        pipeline_schedule=split.schedule,
        layers_per_chunk=split.layers_per_chunk,
        micro_batch_size=int(candidates.micro_batch_size[row]),
        num_microbatches=int(candidates.num_microbatches[row]),
        global_batch_size=workload.global_batch_size,
        sequence_length=workload.sequence_length,
        precision=workload.precision,
        expert_capacity_factor=workload.capacity_factor,
        quantised_weights=workload.phase is Phase.QLORA,
        **problem.expert_transport,
    )


def simplicity(config: TrainingConfig) -> tuple[int, ...]:
    """Order among equals: fewer devices, then fewer and smaller departures from plain data parallelism."""
    modes = ("none", "selective", "block", "full")
    return (
        config.world_size,
        len(config.offloaded),
        config.optimizer_offload,
        CONTEXT_PARALLEL_STYLES.index(config.context_parallel_style),
        config.context_parallel_heads,
        config.zero_hpz_partition_size,
        config.outer_zero_stage,
        config.gathered_num_layers,
        config.zero_stage,
        config.pipeline_parallel,
        config.virtual_pipeline_stages,
        config.tensor_parallel,
        config.context_parallel,
        config.expert_parallel,
        config.expert_tensor_parallel,
        modes.index(config.activation_recompute),
        config.recompute_num_layers,
        -config.data_parallel_shard,
        config.micro_batch_size,
    )


def order_of(scored: ScoredConfig, objective: TrainingObjective) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Best first, equals by simplicity. Devices + T/(1 + T) in one number has too few digits for a long T."""
    values: tuple[float, ...] = (scored.objective,)
    if objective is TrainingObjective.NUM_DEVICES:
        values = (scored.config.world_size, scored.step_s)
    return tuple(float(f"{value:.9e}") for value in values), simplicity(scored.config)
