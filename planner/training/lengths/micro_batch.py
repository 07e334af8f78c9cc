"""Time of a micro-batch of one configuration from its documents, as the estimator prices it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.lengths.packing import PackedDocuments
from meshplan.planner.lengths.work import Work
from meshplan.planner.training.estimator.priced import candidates_of, price
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

# Sizes of a micro-batch, over the planned one, that are held against the memory.
LARGER = (1.1, 1.25, 1.5, 1.75, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The mean micro-batch of a configuration on its slowest stage.

    Args:
        seconds: forward and backward.
        attention_share: part of it that grows with the pairs of documents.
        work: the same from the documents in it.
    """

    seconds: float
    attention_share: float
    work: Work


def micro_batch(problem: TrainingProblem, config: TrainingConfig, documents: PackedDocuments) -> MicroBatch:
    """The mean micro-batch: its time less attention is shared by tokens, attention by causal pairs.

    Args:
        problem: the question.
        config: a configuration; its ``sequence_length`` counts.
        documents: what lies in its sequences.
    """
    workload = replace(problem.workload, sequence_length=config.sequence_length, documents=documents)
    model = TrainingModel(
        shape=problem.shape,
        machine=problem.machine,
        workload=workload,
        candidates=candidates_of(problem, config),
        calibration=problem.calibration,
    )
    seconds, by_window = model.slowest_stage_s()
    tokens = config.micro_batch_size * config.sequence_length
    attention = sum(by_window.values())
    pairs = {window: config.micro_batch_size * float(np.mean(documents.pairs(window))) for window in by_window}
    work = Work(
        per_token_s=max(seconds - attention, 0.0) / (tokens * documents.filled),
        per_pair_s=tuple((window, own / pairs[window]) for window, own in by_window.items()),
    )
    return MicroBatch(seconds=seconds, attention_share=attention / seconds, work=work)


def most_tokens(problem: TrainingProblem, config: TrainingConfig) -> int:
    """Tokens of a micro-batch that the memory holds, of the sizes that are tried."""
    planned = config.micro_batch_size * config.sequence_length
    workload = replace(problem.workload, documents=None)
    found = planned
    for factor in LARGER:
        length = int(config.sequence_length * factor)
        length -= length % (2 * config.context_parallel * config.tensor_parallel)
        if length <= config.sequence_length:  # short sequences: no longer one can be split so
            continue
        larger = replace(problem, workload=replace(workload, sequence_length=length))
        if price(larger, replace(config, sequence_length=length)).safe_bytes > problem.limits.memory_bytes:
            break
        found = config.micro_batch_size * length
    return found
