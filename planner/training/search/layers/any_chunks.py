"""Interleaved pipelines over the same stages, bounded together whatever their number of chunks.

*Bound.* Interleaving v chunks a stage, v' ≤ v ≤ v'', sends more messages the more chunks there are and puts no fewer
layers on a stage, while the bubble and what fills the pipeline before a stage, φ/v, shrink. Stage i of p keeps
p + (p − 2i − 1)/v micro-batches in flight: fewer with more chunks on the first half of the stages, more on the second.
The bound of :class:`~.uneven.UnevenSplits` with the messages and the fewest layers of v', the bubble of v'' and the
least memory of both holds for every v between.

*Use.* Most candidates that other splits of the layers might win are closed by what does not depend on v: 70 billion
parameters on 64 devices leave 35 pipelines open, 32 of which differ from two others in v alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates, joined
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.uneven import UnevenSplits


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPipeline:
    """Candidates of one pipeline of which another split of the layers may win.

    Args:
        least: their bounds, [n].
        batch: the candidates.
        is_expanded: every size of sharding group is among them.
    """

    least: FloatArray
    batch: Candidates
    is_expanded: bool = False

    def take(self, rows: IntArray) -> OpenPipeline:
        """The same of some of them."""
        return replace(self, least=self.least[rows], batch=self.batch.take(rows))


def by_stages(problem: TrainingProblem, pipelines: Sequence[OpenPipeline]) -> list[list[OpenPipeline]]:
    """The pipelines, together those that interleave over the same stages; where documents differ in length none do,
    because what stages wait for them depends on the chunks.
    """
    groups: dict[tuple[int, bool, int], list[OpenPipeline]] = {}
    for index, one in enumerate(pipelines):
        split = one.batch.split
        alone = split.schedule != "interleaved" or problem.workload.documents is not None
        key = split.pipeline_parallel, split.vocabulary_parallel, index if alone else -1
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def as_one(problem: TrainingProblem, batches: Sequence[Candidates]) -> tuple[UnevenSplits, list[IntArray]]:
    """Candidates of interleaved pipelines over the same stages, each once, with a bound of all their numbers of chunks.

    Args:
        problem: the question.
        batches: the candidates of each pipeline.

    Returns:
        The bound, and for each pipeline which of its candidates each one is, [n] each.
    """
    splits = sorted((batch.split for batch in batches), key=lambda split: split.virtual_pipeline_stages)
    every = joined([replace(batch, split=splits[0]) for batch in batches])
    first, which = every.distinct()
    ends = np.cumsum([len(batch) for batch in batches])[:-1]
    return UnevenSplits(problem, every.take(first), splits[-1].virtual_pipeline_stages), np.split(which, ends)
