"""Ways to deal a step's documents out to ranks and micro-batches, each simulated on the same steps.

| way | what is dealt out |
|---|---|
| as they come | sequences, in the order in which they are packed |
| sequences by work | the same sequences: to ranks so that these have equal work, on a rank in order of work |
| documents by work | whole pieces: micro-batches of equal work, not tokens (WLB-LLM's variable-length packing) |
| long documents held | the same, and long documents wait for others of their length |
| buckets | padded micro-batches of documents of like lengths, nothing packed (:mod:`.buckets`) |
| mixed groups | context-parallel groups by length (:mod:`.mixed`) |
| attention apart | attention and the other work, each spread over all ranks in its own way (:mod:`.apart`) |

(:mod:`meshplan.planner.lengths`: ``balance``, ``queue``, ``groups``.)

A step takes what the estimator says for equal micro-batches, and in place of those the simulated pipelines
(:mod:`meshplan.planner.training.pipeline.uneven`) of the longest rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.balance import Assignment, balanced
from meshplan.planner.lengths.packing import PackedDocuments
from meshplan.planner.lengths.queue import DocumentQueue
from meshplan.planner.lengths.work import Work
from meshplan.planner.training.pipeline.uneven import uneven_pipeline_units
from meshplan.planner.training.problem.problem import TrainingConfig

AS_THEY_COME = "as they come"
SEQUENCES, DOCUMENTS, HELD = "sequences by work", "documents by work", "long documents held"
# Steps that are simulated; fewer where a step has more pieces than this together.
MOST_STEPS, MOST_PIECES = 16, 120_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What one way comes to over some steps.

    Args:
        name: of the module's table.
        step_s: seconds of each step, as if it trained the tokens of a mean one.
        imbalance: longest micro-batch over the mean, on average; without a pipeline, rank; of groups, group.
        gap: how much shorter another assignment may be at most, on average; None where no bound is known.
    """

    name: str
    step_s: FloatArray
    imbalance: float
    gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration and its documents.

    Args:
        config: the configuration.
        documents: what lies in its sequences.
        work: seconds of a micro-batch from its documents.
        mean_s: the mean micro-batch on the slowest stage.
        equal_s: the step with equal micro-batches.
        most_tokens: of one micro-batch.
    """

    config: TrainingConfig
    documents: PackedDocuments
    work: Work
    mean_s: float
    equal_s: float
    most_tokens: int

    def steps(self) -> list[tuple[IntArray, IntArray]]:
        """(tokens of each piece, sequence that it lies in) of some steps."""
        packed, batch = self.documents.sample, self.config.global_batch_size
        pieces_of_step = max(len(packed.pieces) * batch // packed.num_sequences, 1)
        count = min(packed.num_sequences // batch, MOST_STEPS, max(MOST_PIECES // pieces_of_step, 1))
        borders = np.searchsorted(packed.sequence_of, np.arange(count + 1) * batch)
        return [
            (packed.pieces[begin:end], packed.sequence_of[begin:end] - step * batch)
            for step, (begin, end) in enumerate(itertools.pairwise(borders.tolist()))
        ]

    def step_s(self, micro_batches_s: FloatArray) -> float:
        """A step with these micro-batches, s [ranks, micro-batches] on one stage, in the order in which they run."""
        config = self.config
        schedule, p, v = config.pipeline_schedule, config.pipeline_parallel, config.virtual_pipeline_stages
        sizes = micro_batches_s / self.mean_s
        units = uneven_pipeline_units(schedule, p, v, sizes).max()
        even = uneven_pipeline_units(schedule, p, v, np.ones((1, config.num_microbatches)))[0]
        return self.equal_s + float(units - even) * self.mean_s

    def even_s(self, work_s: float) -> float:
        """A step whose micro-batches share so much work evenly, s."""
        config = self.config
        count = config.data_parallel * config.num_microbatches
        return self.step_s(np.full((1, config.num_microbatches), work_s / count))

    def sequences_s(self, pieces: IntArray, sequence_of: IntArray) -> FloatArray:
        """Seconds of every sequence of a step."""
        return np.bincount(sequence_of, self.work.of(pieces), minlength=self.config.global_batch_size)


def way_of(
    setting: Setting,
    name: str,
    seconds: Sequence[float],
    even: Sequence[float],
    imbalance: Sequence[float],
    gaps: Sequence[float] = (),
) -> Way:
    """A way from its steps, each beside the step with equal micro-batches of the same documents.

    Steps differ in work, and a queue's in tokens: what they lose is put on the mean step, their spread is kept.

    Args:
        setting: the configuration and its documents.
        name: of the way.
        seconds: of each step.
        even: of each step with its work spread evenly over all micro-batches.
        imbalance: of each step.
        gaps: of each step.
    """
    mean_s = setting.equal_s * sum(seconds) / sum(even)
    return Way(
        name=name,
        step_s=mean_s * np.array(seconds) / np.mean(seconds),
        imbalance=float(np.mean(imbalance)),
        gap=float(np.mean(gaps)) if len(gaps) else None,
    )


def imbalance_of(setting: Setting, micro_batches_s: FloatArray) -> float:
    """The longest micro-batch over the mean; without a pipeline, where micro-batches need not be alike, rank."""
    alike = micro_batches_s if setting.config.pipeline_parallel > 1 else micro_batches_s.sum(axis=-1)
    return float(alike.max() / alike.mean())


def as_they_come(setting: Setting) -> Way:
    """Sequences in the order in which they are packed."""
    config = setting.config
    shape = (config.data_parallel, config.num_microbatches, config.micro_batch_size)
    found = [setting.sequences_s(*step).reshape(shape).sum(axis=-1) for step in setting.steps()]
    return way_of(
        setting,
        AS_THEY_COME,
        [setting.step_s(one) for one in found],
        [setting.even_s(float(one.sum())) for one in found],
        [imbalance_of(setting, one) for one in found],
    )


def sequences_by_work(setting: Setting) -> Way:
    """The packed sequences, to ranks so that these have equal work, on a rank in order of work."""
    config = setting.config
    window = config.sequence_length
    lengths = np.full(config.global_batch_size, window, dtype=np.int64)

    def deal(pieces: IntArray, sequence_of: IntArray) -> Assignment:
        return _dealt(setting, setting.sequences_s(pieces, sequence_of), lengths, config.micro_batch_size * window)

    return _judged(setting, SEQUENCES, deal)


def documents_by_work(setting: Setting) -> Way | None:
    """Pieces to micro-batches of equal work; None where they do not fit into the memory's micro-batches."""

    def deal(pieces: IntArray, _sequence_of: IntArray) -> Assignment:
        return _dealt(setting, setting.work.of(pieces), pieces, setting.most_tokens)

    try:
        return _judged(setting, DOCUMENTS, deal)
    except ValueError:  # exactly full sequences leave no room to deal
        return None


def long_documents_held(setting: Setting) -> Way | None:
    """Pieces to micro-batches of equal work, long ones held for others; None where micro-batches cannot grow."""
    config = setting.config
    window = config.micro_batch_size * config.sequence_length
    if setting.most_tokens <= window:
        return None
    queue = DocumentQueue(
        work=setting.work,
        ranks=config.data_parallel,
        micro_batches=config.num_microbatches,
        pipeline_parallel=config.pipeline_parallel,
        window_tokens=window,
        most_tokens=setting.most_tokens,
    )
    found: list[Assignment] = []
    for pieces, _ in setting.steps():
        queue.add(pieces)
        step = queue.next_step()
        if step is not None:
            found.append(step.assignment)
    return _way_of_assignments(setting, HELD, found)


def _dealt(setting: Setting, work: FloatArray, tokens: IntArray, most: int) -> Assignment:
    config = setting.config
    return balanced(
        work,
        tokens,
        ranks=config.data_parallel,
        micro_batches=config.num_microbatches,
        pipeline_parallel=config.pipeline_parallel,
        most_tokens=most,
    )


def _judged(setting: Setting, name: str, deal: Callable[[IntArray, IntArray], Assignment]) -> Way:
    return _way_of_assignments(setting, name, [deal(*step) for step in setting.steps()])


def _way_of_assignments(setting: Setting, name: str, found: Sequence[Assignment]) -> Way:
    return way_of(
        setting,
        name,
        [setting.step_s(one.work_s) for one in found],
        [setting.even_s(float(one.work_s.sum())) for one in found],
        [imbalance_of(setting, one.work_s) for one in found],
        [one.gap for one in found],
    )
