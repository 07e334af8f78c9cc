"""One configuration, completely priced: the batch of one that a plan, a comparison or a validation row looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.planner.cluster.power import DeviceWork
from meshplan.planner.training.estimator.candidates import Candidates, split_layers
from meshplan.planner.training.estimator.energy import model_flops, recompute_flops_share, step_work
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.problem.choices import COLUMNS
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Memory of one rank of the first of some stages with equal layers: it keeps the most micro-batches in flight.

    Args:
        first_stage: lowest index of such a stage.
        num_stages: how many stages have these layers.
        num_layers: layers on each.
        components: name → typical bytes.
        typical_bytes: expected peak.
        safe_bytes: bound that a run must not exceed.
        host_bytes: what the rank keeps in its host's memory.
        nvme_bytes: states that it keeps on its host's NVMe devices.
    """

    first_stage: int
    num_stages: int
    num_layers: int
    components: Mapping[str, float]
    typical_bytes: float
    safe_bytes: float
    host_bytes: float = 0.0
    nvme_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What one configuration would take.

    Args:
        config: the choices.
        step_s: seconds of an optimizer step.
        breakdown_s: name → seconds; sums to ``step_s``.
        stages: memory of every distinct stage, by first stage.
        gradient_reduce_s: gradient collectives of a step, hidden or not.
        model_flops: FLOPs of a step without recompute, of the job.
        recompute_flops_share: forward FLOPs of layers that are recomputed whole, over model FLOPs.
        work: of the mean device in a step, s at its peak rates.
    """

    config: TrainingConfig
    step_s: float
    breakdown_s: Mapping[str, float]
    stages: tuple[StageBytes, ...]
    gradient_reduce_s: float
    model_flops: float
    recompute_flops_share: float
    work: DeviceWork

    @property
    def worst_stage(self) -> StageBytes:
        """The stage whose ranks need the most memory."""
        return max(self.stages, key=lambda stage: stage.safe_bytes)

    @property
    def safe_bytes(self) -> float:
        """Safe bound of the worst rank."""
        return self.worst_stage.safe_bytes

    @property
    def typical_bytes(self) -> float:
        """Expected peak of the worst rank."""
        return max(stage.typical_bytes for stage in self.stages)


def candidates_of(problem: TrainingProblem, config: TrainingConfig) -> Candidates:
    """A batch of one."""
    split = split_layers(
        problem.shape,
        pipeline_parallel=config.pipeline_parallel,
        virtual_pipeline_stages=config.virtual_pipeline_stages,
        layers_per_chunk=config.layers_per_chunk,
        schedule=config.pipeline_schedule,
        vocabulary_parallel=config.vocabulary_parallel,
    )
    columns = {one.column: np.array([one.encode(getattr(config, one.name))], dtype=one.dtype) for one in COLUMNS}
    return Candidates(split=split, **columns)


def training_model(problem: TrainingProblem, batch: Candidates) -> TrainingModel:
    """The estimator of a batch of candidates of a problem."""
    return TrainingModel(
        shape=problem.shape,
        machine=problem.machine,
        workload=problem.workload,
        candidates=batch,
        calibration=problem.calibration,
    )


def price(problem: TrainingProblem, config: TrainingConfig) -> Priced:
    """Time and memory of one configuration, by name."""
    batch = candidates_of(problem, config)
    model = training_model(problem, batch)
    estimate = model.estimate()
    stages = tuple(
        StageBytes(
            first_stage=memory.stage.first_index,
            num_stages=memory.stage.count,
            num_layers=sum(memory.stage.layers),
            components={name: float(values[0]) for name, values in memory.components.items()},
            typical_bytes=float(memory.typical_bytes[0]),
            safe_bytes=float(memory.safe_bytes[0]),
            host_bytes=float(memory.host_bytes[0]),
            nvme_bytes=float(memory.nvme_bytes[0]),
        )
        for memory in estimate.stages
    )
    return Priced(
        config=config,
        step_s=float(estimate.step_s[0]),
        breakdown_s={name: float(seconds[0]) for name, seconds in estimate.breakdown_s.items()},
        stages=tuple(sorted(stages, key=lambda stage: stage.first_stage)),
        gradient_reduce_s=float(estimate.gradient_reduce_s[0]),
        model_flops=model_flops(problem),
        recompute_flops_share=float(recompute_flops_share(batch)[0]),
        work=step_work(problem, model).sum(),
    )
