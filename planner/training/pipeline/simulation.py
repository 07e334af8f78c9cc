"""Simulation of a pipeline schedule, operation by operation: the reference for :mod:`.closed_forms`.

Every operation starts as early as its precedence (:mod:`.precedence`) and the messages between stages allow; the time
of a step is the longest path.

With a flush all stages start the optimizer together: the step takes until the last stage ends. Zero-bubble schedules
validate the optimizer step afterwards (arXiv:2401.10241, §4), so that each stage continues into the next step: the step
takes as long as the stage with the longest time from its first to its last operation.

Memory follows from the order alone: a stage holds a chunk's activations from F until the last operation that reads
them (B, or W where the backward is split).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.planner.training.pipeline.orders import BACKWARD, FORWARD, WEIGHT, Op, PipelineOrder
from meshplan.planner.training.pipeline.precedence import passes_in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """Times of one micro-batch on each chunk, s.

    Args:
        forward_s: F of each chunk.
        input_gradient_s: the part of the backward that earlier chunks wait for.
        weight_gradient_s: the rest of the backward; part of B if the schedule does not split it.
        message_s: message from one stage to another, per direction; it does not occupy the sender.
    """

    forward_s: Sequence[float]
    input_gradient_s: Sequence[float]
    weight_gradient_s: Sequence[float]
    message_s: float = 0.0

    def of(self, op: Op, *, contains_weights: bool) -> float:
        """Time of one operation."""
        if op.kind == FORWARD:
            return self.forward_s[op.chunk]
        if op.kind == WEIGHT:
            return self.weight_gradient_s[op.chunk]
        rest = self.weight_gradient_s[op.chunk] if contains_weights else 0.0
        return self.input_gradient_s[op.chunk] + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One operation with its start and end."""

    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated schedule.

    Args:
        stages: operations of each stage, in order.
        peak_in_flight: peak number of activations on each stage, in whole-stage micro-batches.
    """

    stages: tuple[tuple[Span, ...], ...]
    peak_in_flight: tuple[float, ...]

    @property
    def flushed_s(self) -> float:
        """Time of a step with a flush: until the last stage ends."""
        return max(spans[-1].end_s for spans in self.stages)

    @property
    def unflushed_s(self) -> float:
        """Time of a step without a flush: the longest time of a stage from its first to its last operation."""
        return max(spans[-1].end_s - spans[0].start_s for spans in self.stages)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Idle time of each stage until the flush."""
        end = self.flushed_s
        return tuple(end - sum(span.end_s - span.start_s for span in spans) for spans in self.stages)


def simulate(order: PipelineOrder, times: ChunkTimes) -> Simulated:
    """Start every operation as early as its stage's order and its inputs allow.

    Raises:
        ValueError: the order waits for itself.
    """
    end: dict[Op, float] = {}
    spans: list[list[Span]] = [[] for _ in order.stages]
    clock = [0.0] * len(order.stages)
    for stage, ops, inputs in passes_in_order(order):
        ready = [end[source] + _message_s(order, source, stage, times) for source in inputs]
        clock[stage] = max([clock[stage], *ready])
        for op in ops:
            start = clock[stage]
            clock[stage] = start + times.of(op, contains_weights=order.contains_weights(op))
            spans[stage].append(Span(op=op, start_s=start, end_s=clock[stage]))
        end.update(dict.fromkeys(ops, clock[stage]))
    return Simulated(stages=tuple(tuple(row) for row in spans), peak_in_flight=peak_in_flight(order))


def _message_s(order: PipelineOrder, source: Op, stage: int, times: ChunkTimes) -> float:
    return 0.0 if order.stage_of_chunk[source.chunk] == stage else times.message_s


def peak_in_flight(order: PipelineOrder) -> tuple[float, ...]:
    """Peak number of activations on each stage, in whole-stage micro-batches."""
    peaks = []
    for ops in order.stages:
        held = most = 0
        for op in ops:
            frees = op.kind == WEIGHT or (op.kind == BACKWARD and order.contains_weights(op))
            held += (op.kind == FORWARD) - frees
            most = max(most, held + frees)
        peaks.append(most * order.chunk_share)
    return tuple(peaks)
