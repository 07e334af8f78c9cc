"""From ``workload`` of a spec to the workload of the problem, with the model at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.problems import Problems
from meshplan.planner.core.text import counted
from meshplan.planner.serving.problem.requests import Arrival, Images, Requests, Sampling, ServingWorkload, Task
from meshplan.planner.serving.problem.trace import BLOCK_TOKENS, read_trace
from meshplan.planner.serving.problem.workload.described import described_requests, lengths_of
from meshplan.planner.serving.problem.workload.lengths import LengthDistribution
from meshplan.planner.serving.problem.workload.spec import ImagesSpec, LengthsSpec, ServingWorkloadSpec

# Share of prompt tokens that may be found, below all of them: one is always computed.
MOST_SHARED = 0.999


def asked_workload(
    asked: ServingWorkloadSpec, shape: ModelShape, base: Path, problems: Problems, *, sound_frames: int
) -> ServingWorkload:
    """The workload of a question; what the model cannot take becomes a problem.

    Args:
        asked: the section of the spec.
        shape: the model.
        base: folder that a trace's path starts from.
        problems: of the spec; added to.
        sound_frames: that the model's encoder reads of a window of sound.
    """
    trace = described_requests(asked)
    if asked.trace is not None:
        trace = read_trace(base / asked.trace, asked.block_tokens or BLOCK_TOKENS)
        _check_longest(trace, shape, problems)
    task = Task(asked.task)
    prompt, output = float(asked.prompt_length or 0), float(asked.answer_length or task.is_pooled)
    rate, images = asked.request_rate_per_s, _images(asked.images, shape, problems)
    if images is not None:
        prompt += images.per_request * images.tokens
    if trace is not None:
        prompt, output = float(trace.input_length.mean()), float(trace.output_length.mean())
        rate = rate or _recorded_rate(trace)
        last = min(asked.num_requests or len(trace), len(trace)) - 1
        if rate is not None and asked.num_requests != 1 and trace.arrival_s[last] <= trace.arrival_s[0]:
            problems.say(
                "workload.trace",
                f"its first {last + 1} requests arrive at once, which no rate spreads: leave request_rate_per_s out, "
                "or take more num_requests of it",
            )
    return ServingWorkload(
        arrival=asked.process or Arrival.CLOSED_LOOP,
        input_length=prompt,
        output_length=output,
        length_ratio=asked.length_ratio,
        request_rate_per_s=rate,
        concurrency=asked.concurrency,
        burstiness=asked.burstiness,
        num_requests=asked.num_requests or (None if trace is None else len(trace)),
        input_lengths=_drawn_anew(asked.input_lengths, trace),
        output_lengths=_drawn_anew(asked.output_lengths, trace),
        prefix_hit_rate=_shared(asked) if trace is None else trace.cached_share,
        prefix_tokens=asked.prefix_tokens if trace is None else None,
        num_prefixes=asked.num_prefixes if trace is None else None,
        trace=trace,
        images=images,
        sound_frames=sound_frames,
        sampling=None if asked.sampling is None else Sampling(**asked.sampling.model_dump()),
        task=task,
    )


def _drawn_anew(lengths: LengthsSpec | None, trace: Requests | None) -> LengthDistribution | None:
    """Lengths that every run draws for itself; a recording has its own, and so have stages and conversations."""
    return None if lengths is None or trace is not None else lengths.distribution


def _images(asked: ImagesSpec | None, shape: ModelShape, problems: Problems) -> Images | None:
    """The images of a request as the model's encoder cuts them; a problem where it has none that is read."""
    tower = shape.vision
    if asked is None:
        return None
    if tower is None:
        problems.say("workload.images", f"no vision encoder of {shape.name} is known: leave images out")
        return None
    patches, tokens = (count(asked.width, asked.height) for count in (tower.patches, tower.tokens))
    return Images(per_request=asked.per_request, patches=patches, tokens=tokens)


def _shared(asked: ServingWorkloadSpec) -> float:
    """Share of prompt tokens that a cache holds at most."""
    if asked.prefix_tokens is None:
        return asked.prefix_hit_rate
    return min(asked.prefix_tokens / lengths_of(asked, "input_length").mean, MOST_SHARED)


def _check_longest(trace: Requests, shape: ModelShape, problems: Problems) -> None:
    """Report requests that no server of the model would take."""
    longest = shape.max_sequence_length
    if longest is None:
        return
    beyond = np.flatnonzero(trace.input_length + trace.output_length > longest)
    if len(beyond):
        tokens = int((trace.input_length + trace.output_length).max())
        problems.say(
            "workload.trace",
            f"{counted(len(beyond), 'request')} of more tokens than {shape.name} was trained for, {longest:,} (the "
            f"longest has {tokens:,}): servers refuse them, so leave them out",
        )


def _recorded_rate(trace: Requests) -> float | None:
    span = float(trace.arrival_s[-1] - trace.arrival_s[0])
    return (len(trace) - 1) / span if span > 0.0 else None
