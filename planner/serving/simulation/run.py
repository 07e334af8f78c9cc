"""The record of a simulation: when each request was served, and the iterations of every worker."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

# Fields of Segments, in order.
NUM_COLUMNS = 9
# Numbers kept as Python objects before they are packed: some megabytes.
MOST_RECORDS = 100_000


class Record:
    """What a worker writes down as it runs, which :class:`WorkerRun` has as arrays.

    ``segments`` are the fields of :class:`Segments` in a row, one segment
    after the other: a list is quick to append to, an array (``packed``) is small. ``pauses`` are decoding requests that
    wait for prompts: [time of their last tokens, how many].
    """

    def __init__(self) -> None:
        self.segments: list[float] = []
        self.packed = array("d")
        self.gap_s, self.gap_count = array("d"), array("d")
        self.pauses: list[list[float]] = []

    def pack(self, least: int = 0) -> None:
        """Move the segments to a compact array, if they are more numbers than that."""
        if len(self.segments) > least:
            self.packed += array("d", self.segments)
            self.segments.clear()

    def gap(self, seconds: float) -> None:
        """A token came so long after the one before."""
        self.gap_s.append(seconds)
        self.gap_count.append(1)

    def end_pauses(self, end: float) -> None:
        """Requests that waited get their next tokens."""
        self.gap_s.extend(end - last_s for last_s, _ in self.pauses)
        self.gap_count.extend(count for _, count in self.pauses)

    def last_token_s(self, joined_s: float, now: float) -> float:
        """When the last token of a request came that waits no more: at the last decode iteration, or when it joined."""
        for group in reversed(self.pauses):
            if group[0] == joined_s:
                group[1] -= 1
                return joined_s
        if not self.pauses:
            return now
        self.pauses[0][1] -= 1
        return self.pauses[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Runs of iterations of one worker in which only the context length changes; arrays of one length.

    Args:
        start_s: start of the first iteration.
        end_s: end of the last iteration.
        steps: decode iterations; 0 for an iteration that only prefilled.
        num_decoding: requests that decode in each.
        kv_tokens: tokens of KV cache held at the start, by decodes and by prompts in prefill.
        num_prefilling: prompts in prefill, including those that wait for token budget.
        prompt_tokens: prompt tokens of the iteration.
        first_step_s: duration of the first iteration; durations grow linearly within a segment.
        num_gaps: requests for which each iteration is one gap between tokens; 0 where the gaps are listed in
            :class:`WorkerRun`, because the requests had been waiting for the prefill of others.
    """

    start_s: FloatArray
    end_s: FloatArray
    steps: FloatArray
    num_decoding: FloatArray
    kv_tokens: FloatArray
    num_prefilling: FloatArray
    prompt_tokens: FloatArray
    first_step_s: FloatArray
    num_gaps: FloatArray

    @classmethod
    def from_records(cls, records: array[float]) -> Segments:
        """From a worker's flat list of NUM_COLUMNS numbers per segment."""
        table = np.frombuffer(records, dtype=float).reshape(-1, NUM_COLUMNS) if records else np.zeros((0, NUM_COLUMNS))
        names = cls.__dataclass_fields__
        return cls(**{name: table[:, j] for j, name in enumerate(names)})

    def __len__(self) -> int:
        return len(self.start_s)

    def __getitem__(self, chosen: BoolArray) -> Segments:
        return Segments(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    @property
    def last_step_s(self) -> FloatArray:
        """Duration of the last decode iteration of each segment: durations grow linearly, so 2·mean − first."""
        steps = np.maximum(self.steps, 1.0)
        return 2.0 * (self.end_s - self.start_s) / steps - self.first_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRun:
    """The iterations of one worker.

    Args:
        segments: in order of time.
        gap_s: [m] gaps between tokens that are longer than one iteration: after a pause or a preemption.
        gap_count: [m] number of tokens that waited for each gap.
        kv_capacity_tokens: tokens that its KV cache holds.
        num_preemptions: preemptions for want of KV blocks.
    """

    segments: Segments
    gap_s: FloatArray
    gap_count: FloatArray
    kv_capacity_tokens: int
    num_preemptions: int

    def within(self, edges_s: FloatArray, which: int) -> WorkerRun:
        """What began in one of the spans of time between rising edges; single gaps, whose times are not kept, in parts.

        Args:
            edges_s: [k] inner edges of k + 1 spans, s.
            which: the span, from 0.
        """
        chosen = np.searchsorted(edges_s, self.segments.start_s, side="right") == which
        bounds = np.linspace(0, len(self.gap_s), len(edges_s) + 2).astype(int)
        gaps = slice(bounds[which], bounds[which + 1])
        return replace(self, segments=self.segments[chosen], gap_s=self.gap_s[gaps], gap_count=self.gap_count[gaps])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """The requests of a run and when each was served.

    Args:
        arrival_s: [n] arrival times; in a closed loop, when the completion that started it happened.
        input_length: [n] prompt tokens.
        output_length: [n] generated tokens.
        is_served: [n] False for a request that no worker's KV cache can hold: rejected. Its times are infinite.
        admitted_s: [n] when a worker first admitted it.
        first_token_s: [n] when its first token was seen by the client.
        finish_s: [n] when its last token was seen by the client.
        workers: one record for each worker.
        found_tokens: [n] prompt tokens that its worker held; None where nothing says which requests share what.
    """

    arrival_s: FloatArray
    input_length: IntArray
    output_length: IntArray
    is_served: BoolArray
    admitted_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    workers: tuple[WorkerRun, ...]
    found_tokens: IntArray | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    def after(self, first: int) -> ServingRun:
        """The run without its first requests, and without the iterations before the next one came: the warm-up."""
        if not first:
            return self
        columns = ("arrival_s", "input_length", "output_length", "is_served", "admitted_s", "first_token_s", "finish_s")
        start = np.array([self.arrival_s[first]])
        return ServingRun(
            **{name: getattr(self, name)[first:] for name in columns},
            found_tokens=None if self.found_tokens is None else self.found_tokens[first:],
            workers=tuple(
                replace(worker, segments=worker.segments[worker.segments.start_s >= start]) for worker in self.workers
            ),
        )

    @property
    def num_rejected(self) -> int:
        """Requests that fit no worker."""
        return int(len(self) - np.count_nonzero(self.is_served))

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all workers."""
        return sum(worker.num_preemptions for worker in self.workers)

    @property
    def end_s(self) -> float:
        """When the last request was served; 0 if none was."""
        return float(self.finish_s[self.is_served].max(initial=0.0))
