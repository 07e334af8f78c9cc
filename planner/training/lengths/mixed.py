"""Context-parallel groups by length in place of a plan's equal ones, for plans without a pipeline.

The ranks of a plan's data × context parallelism are rearranged for each step. What a document takes in a group of c is
the plan's own micro-batch priced with context parallelism c and as many tokens on a rank; attention that is split over
many ranks loses in the kernel (:mod:`meshplan.planner.lengths.attention_kernel`). Groups stay for a step; each runs as
many micro-batches as its documents need, and waits for the others at the end alone.

Assumes: groups of any size exist beforehand (communicators are made once); gradients are reduced as in the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from meshplan.planner.core.arrays import IntArray
from meshplan.planner.lengths.groups import MixedGroups
from meshplan.planner.lengths.packing import PackedDocuments
from meshplan.planner.training.lengths.assigned import Setting, Way, way_of
from meshplan.planner.training.lengths.group_costs import GroupCosts, grouped
from meshplan.planner.training.lengths.micro_batch import micro_batch
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

MIXED = "mixed groups"
# Devices whose groups are worked out with a plan, and steps: more take longer than a plan should.
MOST_RANKS, MOST_STEPS = 64, 4


def group_costs(
    problem: TrainingProblem, config: TrainingConfig, documents: PackedDocuments, most_tokens: int
) -> GroupCosts | None:
    """Costs of the groups that a plan's ranks can form; None where they cannot be rearranged.

    Args:
        problem: the question.
        config: the plan's configuration.
        documents: what lies in its sequences.
        most_tokens: that a micro-batch of the plan may have.
    """
    ranks = config.data_parallel * config.context_parallel
    if config.pipeline_parallel > 1 or config.data_parallel == 1 or ranks > MOST_RANKS or ranks & (ranks - 1):
        return None
    if config.context_parallel_style != "ring" or documents.attends_across:
        return None
    works = {}
    for size in (2**power for power in range(ranks.bit_length())):
        length = config.sequence_length * size // config.context_parallel
        other = replace(
            config,
            context_parallel=size,
            data_parallel=ranks // size,
            data_parallel_shard=min(config.data_parallel_shard, ranks // size),
            sequence_length=length,
            num_microbatches=1,
        )
        own = documents if size == config.context_parallel else replace(documents, sequence_length=length)
        works[size] = micro_batch(problem, other, own).work
    return GroupCosts(
        works=works,
        heads=problem.shape.num_attention_heads / config.tensor_parallel,
        head_dim=problem.shape.head_dim,
        ranks=ranks,
        static_size=config.context_parallel,
        most_tokens=most_tokens // config.context_parallel,
    )


def mixed(setting: Setting, costs: GroupCosts) -> tuple[Way, tuple[tuple[int, int], ...]]:
    """What mixed groups come to over some steps, and how often they have each size.

    A step that would be longer with them keeps the plan's own groups, and its sequences as they come.

    Args:
        setting: the configuration and its documents.
        costs: what documents take in groups.
    """
    config = setting.config
    seconds, even, gaps, imbalance = [], [], [], []
    sizes: Counter[int] = Counter()
    outside = setting.equal_s - config.num_microbatches * setting.mean_s
    for pieces, sequence_of in setting.steps()[:MOST_STEPS]:
        static = setting.sequences_s(pieces, sequence_of).reshape(config.data_parallel, -1).sum(axis=1)
        even.append(setting.even_s(float(setting.work.of(pieces).sum())))
        groups = grouped(costs, pieces)
        if groups is None or groups.seconds >= static.max():
            seconds.append(outside + float(static.max()))
            sizes[config.context_parallel] += config.data_parallel
            imbalance.append(float(static.max() / static.mean()))
            continue
        seconds.append(outside + groups.seconds)
        sizes.update(groups.sizes)
        gaps.append(groups.gap)
        imbalance.append(_longest_over_mean(costs, pieces, groups))
    way = way_of(setting, MIXED, seconds, even, imbalance, gaps)
    return way, tuple(sorted(sizes.items(), reverse=True))


def _longest_over_mean(costs: GroupCosts, tokens: IntArray, groups: MixedGroups) -> float:
    """The longest group over what ranks are busy on average."""
    question = costs.question(tokens)
    busy = sum(
        size * float(question.seconds[size][list(inside)].sum())
        for size, inside in zip(groups.sizes, groups.documents, strict=True)
    )
    return groups.seconds * costs.ranks / busy
