"""From what each pipeline stage takes to a step: pipeline, messages, data-parallel communication, optimizer, waiting.

The stages may stand on unlike devices: nothing here asks for one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import of_class
from meshplan.planner.training.estimator.memory import StageMemory
from meshplan.planner.training.pipeline.closed_forms import staged_pipeline_s

# The parts of a step, by the names under which a plan lists them.
MATRIX_PRODUCTS = "matrix products"
EXPERTS = "experts"
ATTENTION = "attention"
MEMORY_BOUND = "memory-bound operators"
RECOMPUTE = "recompute"
ENDS = "embedding, LM head and loss"
LAUNCHES = "kernel-launch overhead"
ACTIVATION_OFFLOAD = "activation offload"
TENSOR_COMMUNICATION = "tensor-parallel communication"
CONTEXT_COMMUNICATION = "context-parallel communication"
EXPERT_COMMUNICATION = "expert-parallel communication"
DATA_COMMUNICATION = "data-parallel communication"
MESSAGES = "stage-to-stage messages"
BUBBLE = "pipeline bubble"
VOCABULARY = "vocabulary barriers"
OPTIMIZER = "optimizer step"
OVERHEAD = "step overhead"
WAITING = "waiting for longer documents"
# Those that pass over links, and those of layers that run in the precision of the workload.
EXCHANGES = (TENSOR_COMMUNICATION, CONTEXT_COMMUNICATION, EXPERT_COMMUNICATION, DATA_COMMUNICATION, MESSAGES)
PRODUCTS = (MATRIX_PRODUCTS, EXPERTS, RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """Time and memory of a batch of candidates. Arrays [n].

    Args:
        step_s: time of one optimizer step, s.
        breakdown_s: part of the step → s; sums to ``step_s``.
        stages: memory of each distinct stage; none where it was not asked for.
        gradient_reduce_s: gradient collectives of one step, overlapped or not, s.
        pipeline_s: part of ``step_s`` from the first forward to the last backward, without messages between stages.
    """

    step_s: FloatArray
    pipeline_s: FloatArray
    breakdown_s: Mapping[str, FloatArray]
    stages: tuple[StageMemory, ...]
    gradient_reduce_s: FloatArray

    @property
    def typical_bytes(self) -> FloatArray:
        """Expected peak of the worst rank."""
        return np.maximum.reduce([stage.typical_bytes for stage in self.stages])

    @property
    def safe_bytes(self) -> FloatArray:
        """Upper bound of the peak of the worst rank; feasibility is decided by it."""
        return np.maximum.reduce([stage.safe_bytes for stage in self.stages])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What one pipeline stage takes, s, [n] each.

    Args:
        parts: part of a micro-batch → time, forward + backward.
        seconds: their sum.
        forward_share: forward share of it.
        exposed_s: data-parallel communication per step that no micro-batch hides.
        reduce_s: gradient collectives per step, hidden or not.
        optimizer_s: optimizer step.
    """

    parts: Mapping[str, FloatArray]
    seconds: FloatArray
    forward_share: FloatArray
    exposed_s: FloatArray
    reduce_s: FloatArray
    optimizer_s: FloatArray

    def of_each(self, count: int) -> list[StageFigures]:
        """The figures of each of ``count`` classes of stages that are held as one here."""
        return [
            StageFigures(
                parts={name: of_class(seconds, index) for name, seconds in self.parts.items()},
                seconds=of_class(self.seconds, index),
                forward_share=of_class(self.forward_share, index),
                exposed_s=of_class(self.exposed_s, index),
                reduce_s=of_class(self.reduce_s, index),
                optimizer_s=of_class(self.optimizer_s, index),
            )
            for index in range(count)
        ]


def assembled(
    stages: Sequence[StageFigures],
    *,
    schedule: str,
    virtual_pipeline_stages: int,
    num_microbatches: IntArray,
    in_a_flush: IntArray | None = None,
    messages_s: FloatArray,
    overhead_s: FloatArray,
    memory: tuple[StageMemory, ...],
    vocabulary_s: FloatArray | None = None,
    waiting_s: FloatArray | None = None,
    unlike_chunks_s: FloatArray | None = None,
) -> TrainingEstimate:
    """The step of a pipeline from what its stages take, whether all stand on one type of device or not.

    Args:
        stages: in the order of the pipeline.
        schedule: pipeline schedule.
        virtual_pipeline_stages: chunks per stage.
        num_microbatches: m, [n].
        in_a_flush: of these, how many run before the pipeline is flushed, [n]; None for all.
        messages_s: exposed messages between stages, [n].
        overhead_s: of the step, [n] or one number.
        memory: of the distinct stages.
        vocabulary_s: what vocabulary parallelism adds, [n]; None without it.
        waiting_s: what ranks wait for longer documents, [n]; None where all sequences are alike.
        unlike_chunks_s: what the pipeline takes because chunks of a stage differ, [n]; None where they are alike. The
            closed form stays the least that it takes, so that what bounds the one bounds the other.
    """
    distinct = list({id(stage): stage for stage in stages}.values())
    slowest = np.maximum.reduce([one.seconds for one in distinct])
    together = num_microbatches if in_a_flush is None else in_a_flush
    pipeline = (num_microbatches / together) * _flush_s(stages, schedule, virtual_pipeline_stages, together)
    if unlike_chunks_s is not None:
        pipeline = np.maximum(pipeline, unlike_chunks_s)
    # The step ends with the stage that has the most left to do.
    data_parallel = np.maximum.reduce([one.exposed_s for one in distinct])
    optimizer = np.maximum.reduce([one.optimizer_s for one in distinct])
    breakdown = _breakdown(distinct, num_microbatches, slowest, pipeline)
    breakdown[MESSAGES] = messages_s
    vocabulary = np.zeros_like(slowest) if vocabulary_s is None else vocabulary_s
    if vocabulary_s is not None:
        breakdown[VOCABULARY] = vocabulary
    breakdown[DATA_COMMUNICATION] = breakdown[DATA_COMMUNICATION] + data_parallel
    breakdown[OPTIMIZER] = optimizer
    breakdown[OVERHEAD] = overhead_s + np.zeros_like(slowest)
    waiting = np.zeros_like(slowest) if waiting_s is None else waiting_s
    if waiting_s is not None:
        breakdown[WAITING] = waiting
    return TrainingEstimate(
        pipeline_s=pipeline,
        step_s=pipeline + messages_s + data_parallel + optimizer + overhead_s + vocabulary + waiting,
        breakdown_s=breakdown,
        stages=memory,
        gradient_reduce_s=np.maximum.reduce([one.reduce_s for one in distinct]),
    )


def _flush_s(
    stages: Sequence[StageFigures], schedule: str, virtual_pipeline_stages: int, num_microbatches: IntArray
) -> FloatArray:
    """Time of a pipeline from its first micro-batch until it is empty again, [n]."""
    shares = [one.forward_share for one in stages]
    return staged_pipeline_s(
        schedule,
        virtual_pipeline_stages=virtual_pipeline_stages,
        num_microbatches=num_microbatches,
        stages_s=np.stack([one.seconds for one in stages]),
        forward_share=shares[0] if all(share is shares[0] for share in shares) else np.stack(shares),
    )


def _breakdown(
    stages: Sequence[StageFigures], num_microbatches: IntArray, slowest: FloatArray, pipeline: FloatArray
) -> dict[str, FloatArray]:
    """Parts of the pipeline time: m times the work of the slowest stage, and the bubble."""
    names = dict.fromkeys(name for stage in stages for name in stage.parts)
    zero = np.zeros_like(slowest)
    parts: dict[str, FloatArray] = {}
    for name in names:
        chosen = zero
        for stage in stages:
            chosen = np.where(stage.seconds == slowest, stage.parts.get(name, zero), chosen)
        parts[name] = num_microbatches * chosen
    parts[BUBBLE] = pipeline - num_microbatches * slowest
    return parts
