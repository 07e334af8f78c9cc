"""What a simulation leaves behind: when each request was served, and what the workers did in between."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# start, end, decode iterations, decoding, KV tokens, in prefill, prompt tokens, first iteration, gaps of each iteration
NUM_COLUMNS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Stretches of iterations of one worker between which nothing but the context changed; arrays of one length.

    Args:
        start_s: of the first iteration.
        end_s: of the last.
        steps: decode iterations; 0 for an iteration that only prefilled.
        num_decoding: requests that decode in each.
        kv_tokens: tokens of KV cache held at the start, by decodes and by prompts in prefill.
        num_prefilling: prompts in prefill, those that wait for budget too.
        prompt_tokens: prompt tokens of the iteration.
        first_step_s: duration of the first iteration; those of a stretch grow by equal steps.
        num_gaps: requests for which each iteration is one gap between tokens; 0 where the gaps are listed apart,
            because the requests had been waiting for others' prefill.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    steps: NDArray[np.float64]
    num_decoding: NDArray[np.float64]
    kv_tokens: NDArray[np.float64]
    num_prefilling: NDArray[np.float64]
    prompt_tokens: NDArray[np.float64]
    first_step_s: NDArray[np.float64]
    num_gaps: NDArray[np.float64]

    @classmethod
    def from_records(cls, records: array[float]) -> Segments:
        """From a worker's flat list, NUM_COLUMNS numbers a stretch."""
        table = np.frombuffer(records, dtype=float).reshape(-1, NUM_COLUMNS) if records else np.zeros((0, NUM_COLUMNS))
        names = cls.__dataclass_fields__
        return cls(**{name: table[:, j] for j, name in enumerate(names)})

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def last_step_s(self) -> NDArray[np.float64]:
        """Duration of the last decode iteration of each stretch: durations rise by equal steps, so 2·mean − first."""
        steps = np.maximum(self.steps, 1.0)
        return 2.0 * (self.end_s - self.start_s) / steps - self.first_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRun:
    """What one worker did.

    Args:
        segments: its stretches of iterations, in order.
        gap_s: [m] gaps between tokens that are no iteration's duration: after a pause or a preemption.
        gap_count: [m] how many tokens each stands for.
        kv_capacity_tokens: tokens that its KV cache holds.
        num_preemptions: requests thrown out for want of KV blocks, each time counted.
    """

    segments: Segments
    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.float64]
    kv_capacity_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """The requests of a run and when each was served.

    Args:
        arrival_s: [n] when each came; in a closed loop, when the completion that started it happened.
        input_length: [n] prompt tokens.
        output_length: [n] generated tokens.
        is_served: [n] False for a request that no worker's KV cache can hold: rejected. Its times are infinite.
        admitted_s: [n] when a worker first took it from its queue.
        first_token_s: [n] when its first token was seen.
        finish_s: [n] when its last token was seen.
        workers: what each worker did.
        is_closed_loop: a constant number was in flight.
    """

    arrival_s: NDArray[np.float64]
    input_length: NDArray[np.int64]
    output_length: NDArray[np.int64]
    is_served: NDArray[np.bool_]
    admitted_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    workers: tuple[WorkerRun, ...]
    is_closed_loop: bool

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def num_rejected(self) -> int:
        """Requests that fit no worker."""
        return int(len(self) - np.count_nonzero(self.is_served))

    @property
    def num_preemptions(self) -> int:
        """Of all workers."""
        return sum(worker.num_preemptions for worker in self.workers)

    @property
    def end_s(self) -> float:
        """When the last request was served; 0 if none was."""
        return float(self.finish_s[self.is_served].max(initial=0.0))
