"""What the lengths of documents make of a plan: waiting, spread, and what other ways to deal them out are worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.planner.core.constants import INTERVAL_ENDS
from meshplan.planner.lengths.packing import PackedDocuments
from meshplan.planner.training.estimator.assembly import WAITING
from meshplan.planner.training.estimator.priced import Priced
from meshplan.planner.training.lengths.apart import attention_apart, per_moved_token_s
from meshplan.planner.training.lengths.assigned import (
    Setting,
    Way,
    as_they_come,
    documents_by_work,
    long_documents_held,
    sequences_by_work,
)
from meshplan.planner.training.lengths.buckets import buckets
from meshplan.planner.training.lengths.group_costs import GroupCosts
from meshplan.planner.training.lengths.micro_batch import MicroBatch, micro_batch, most_tokens
from meshplan.planner.training.lengths.mixed import group_costs, mixed
from meshplan.planner.training.problem.problem import TrainingProblem

# Micro-batch operations of a pipeline (stages × chunks × micro-batches) up to which ways are simulated.
MOST_OPERATIONS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStudy:
    """Documents under one plan.

    Args:
        setting: the configuration and its documents.
        micro_batch: the mean one.
        waiting_s: of the plan's step, expected.
        ways: how documents may be dealt out, the plan's own first; none where that is too long to simulate.
        groups: costs of mixed groups, where the plan's ranks can be rearranged.
        group_sizes: (size, how often) of the mixed groups of the simulated steps.
    """

    setting: Setting
    micro_batch: MicroBatch
    waiting_s: float
    ways: tuple[Way, ...]
    groups: GroupCosts | None
    group_sizes: tuple[tuple[int, int], ...] = ()


def study_lengths(problem: TrainingProblem, priced: Priced) -> LengthStudy | None:
    """Study the documents of a plan; None where its question says nothing of their lengths.

    Args:
        problem: the question.
        priced: the plan's configuration, priced.
    """
    documents, config = problem.workload.documents, priced.config
    if documents is None:
        return None
    mean = micro_batch(problem, config, documents)
    waiting = priced.breakdown_s.get(WAITING, 0.0)
    setting = Setting(
        config=config,
        documents=documents,
        work=mean.work,
        mean_s=mean.seconds,
        equal_s=priced.step_s - waiting,
        most_tokens=most_tokens(problem, config),
    )
    if not _may_be_simulated(setting):
        return LengthStudy(setting=setting, micro_batch=mean, waiting_s=waiting, ways=(), groups=None)
    ways = (as_they_come, sequences_by_work, documents_by_work, long_documents_held, buckets)
    found = [way(setting) for way in ways]
    costs = group_costs(problem, config, documents, setting.most_tokens)
    rearranged = None if costs is None else mixed(setting, costs)
    if rearranged is not None and costs is not None:
        found += [rearranged[0], attention_apart(setting, costs, per_moved_token_s(problem, config))]
    return LengthStudy(
        setting=setting,
        micro_batch=mean,
        waiting_s=waiting,
        ways=tuple(way for way in found if way is not None),
        groups=costs if rearranged is not None else None,
        group_sizes=() if rearranged is None else rearranged[1],
    )


def _may_be_simulated(setting: Setting) -> bool:
    """Documents differ, and a step is neither too long for a simulation nor larger than the sample."""
    config, documents = setting.config, setting.documents
    operations = config.pipeline_parallel * config.virtual_pipeline_stages * config.num_microbatches
    is_sampled = documents.sample.num_sequences >= config.global_batch_size
    return operations <= MOST_OPERATIONS and is_sampled and not documents.attends_across


def lengths_document(study: LengthStudy) -> dict[str, Any]:
    """The study as plain JSON."""
    setting, config = study.setting, study.setting.config
    return {
        "documents": _documents(setting.documents),
        "attention_share": study.micro_batch.attention_share,
        "waiting_s": study.waiting_s,
        "ways": [_way(one) for one in study.ways],
        "groups": None if study.groups is None else study.groups.to_document(),
        "group_sizes": [{"size": size, "count": count} for size, count in study.group_sizes],
        "assignment": {
            "data_parallel": config.data_parallel,
            "num_microbatches": config.num_microbatches,
            "pipeline_parallel": config.pipeline_parallel,
            "micro_batch_tokens": config.micro_batch_size * config.sequence_length,
            "most_tokens": setting.most_tokens,
            "work": study.micro_batch.work.to_document(),
        },
    }


def _documents(documents: PackedDocuments) -> dict[str, Any]:
    table = documents.table
    return {
        "mean": table.mean,
        "median": table.quantile(0.5),
        "p99": table.quantile(0.99),
        "longest": table.longest,
        "longer_token_share": table.token_share_above(documents.sequence_length),
        "packing": documents.packing,
        "longer": documents.longer,
        "filled": documents.filled,
        "mean_context": documents.mean_context(None),
    }


def _way(way: Way) -> dict[str, Any]:
    low, high = np.quantile(way.step_s, INTERVAL_ENDS).tolist()
    return {
        "name": way.name,
        "step_s": float(way.step_s.mean()),
        "low_s": low,
        "high_s": high,
        "imbalance": way.imbalance,
        "gap": way.gap,
    }
