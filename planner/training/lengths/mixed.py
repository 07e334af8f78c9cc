"""Context-parallel groups by length in place of a plan's equal ones, for plans without a pipeline.

The ranks of a plan's data × context parallelism are rearranged for each step. What a document takes in a group of c is
the plan's own micro-batch priced with context parallelism c and as many tokens on a rank; attention that is split over
many ranks loses in the kernel (:mod:`meshplan.planner.lengths.attention_kernel`). A step whose documents do not fit at
once runs several rounds, documents of like length together, and its groups change from round to round.

Assumes: groups of any size exist beforehand (communicators are made once); gradients are reduced as in the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.attention_kernel import split_slowdown
from meshplan.planner.lengths.groups import GroupQuestion, MixedGroups, mixed_groups
from meshplan.planner.lengths.packing import PackedDocuments, causal_pairs
from meshplan.planner.lengths.work import Work
from meshplan.planner.training.lengths.assigned import Setting, Way, way_of
from meshplan.planner.training.lengths.micro_batch import micro_batch
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

MIXED = "mixed groups"
# Rounds that are tried beyond those that the tokens need.
MORE_ROUNDS = 2
# Devices whose groups are worked out with a plan, and steps: more take longer than a plan should.
MOST_RANKS, MOST_STEPS = 64, 4
# Short documents go in bundles of at most so much of what a rank holds.
BUNDLE_SHARE = 1.0 / 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCosts:
    """What documents take in groups of each size.

    Args:
        works: size c → seconds of a micro-batch from its documents.
        heads: query heads on a rank.
        head_dim: width of a head.
        ranks: of data × context parallelism together.
        static_size: c of the plan.
        most_tokens: that one rank holds.
    """

    works: Mapping[int, Work]
    heads: float
    head_dim: int
    ranks: int
    static_size: int
    most_tokens: int

    def question(self, tokens: IntArray) -> GroupQuestion:
        """The groups' question for some documents."""
        return GroupQuestion(
            seconds={size: self._seconds(size, tokens) for size in self.works},
            tokens=tokens,
            ranks=self.ranks,
            most_tokens=self.most_tokens,
        )

    def _seconds(self, size: int, tokens: IntArray) -> FloatArray:
        work = self.works[size]
        slower = split_slowdown(tokens, size, heads=self.heads, head_dim=self.head_dim)
        usual = split_slowdown(tokens, self.static_size, heads=self.heads, head_dim=self.head_dim)
        seconds = work.per_token_s * tokens
        for window, per_pair_s in work.per_pair_s:
            seconds = seconds + per_pair_s * causal_pairs(tokens, window) * slower / usual
        return np.asarray(seconds)


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


def in_rounds(costs: GroupCosts, tokens: IntArray) -> tuple[MixedGroups, ...] | None:
    """Groups of every round of a step; None where a document fits into no group.

    Args:
        costs: what documents take.
        tokens: of every document of the step.
    """
    least = math.ceil(int(tokens.sum()) / (costs.ranks * costs.most_tokens))
    order = np.argsort(-tokens, kind="stable")
    best: tuple[MixedGroups, ...] | None = None
    for count in range(least, least + MORE_ROUNDS):
        found = _rounds(costs, tokens, order, count)
        if found is not None and (best is None or _total_s(found) < _total_s(best)):
            best = found
    return best


def _rounds(costs: GroupCosts, tokens: IntArray, order: IntArray, count: int) -> tuple[MixedGroups, ...] | None:
    """Documents by falling length, cut into rounds of as many tokens."""
    ends = np.cumsum(tokens[order])
    borders = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="right")
    found = []
    for part in np.split(order, borders):
        if not len(part):
            continue
        own = _bundled(costs, tokens, part)
        groups = mixed_groups(own[0], static_size=costs.static_size)
        if groups is None:
            return None
        inside = tuple(tuple(d for bundle in members for d in own[1][bundle]) for members in groups.documents)
        found.append(replace(groups, documents=inside))
    return tuple(found)


def _bundled(costs: GroupCosts, tokens: IntArray, part: IntArray) -> tuple[GroupQuestion, list[list[int]]]:
    """The question of some documents with short ones in bundles, and the documents of each bundle.

    Args:
        costs: what documents take.
        tokens: of every document of the step.
        part: the documents, by falling length.
    """
    most = BUNDLE_SHARE * costs.most_tokens
    bundles: list[list[int]] = []
    filled = most
    for document, length in zip(part.tolist(), tokens[part].tolist(), strict=True):
        if filled + length > most:
            bundles.append([])
            filled = 0
        bundles[-1].append(document)
        filled += length
    whole = costs.question(tokens[part])
    starts = np.cumsum([0, *(len(own) for own in bundles[:-1])])
    question = GroupQuestion(
        seconds={size: np.add.reduceat(seconds, starts) for size, seconds in whole.seconds.items()},
        tokens=np.add.reduceat(tokens[part], starts),
        ranks=costs.ranks,
        most_tokens=costs.most_tokens,
    )
    return question, bundles


def _total_s(rounds: tuple[MixedGroups, ...]) -> float:
    return sum(one.seconds for one in rounds)


def mixed(setting: Setting, costs: GroupCosts) -> tuple[Way, tuple[tuple[int, int], ...]] | None:
    """What mixed groups come to over some steps, and how often they have each size.

    A step of which they would be longer than dealing the same documents out to the plan's own groups keeps those.

    Args:
        setting: the configuration and its documents.
        costs: what documents take in groups.
    """
    config = setting.config
    seconds, even, gaps, sizes, imbalance = [], [], [], Counter[int](), []
    outside = setting.equal_s - config.num_microbatches * setting.mean_s
    shape = (config.data_parallel, -1)
    for pieces, sequence_of in setting.steps()[:MOST_STEPS]:
        rounds = in_rounds(costs, pieces)
        static = float(setting.sequences_s(pieces, sequence_of).reshape(shape).sum(axis=1).max())
        even.append(setting.even_s(float(setting.work.of(pieces).sum())))
        if rounds is None or _total_s(rounds) >= static:
            seconds.append(outside + static)
            sizes[config.context_parallel] += config.data_parallel * config.num_microbatches
            continue
        seconds.append(outside + _total_s(rounds))
        sizes.update(size for one in rounds for size in one.sizes)
        question = costs.question(pieces)
        bound = max(question.least_s(question.sizes), 0.0)
        gaps.append(max(_total_s(rounds) - bound, 0.0) / _total_s(rounds))
        imbalance.append(_idle_over_mean(costs, pieces, rounds))
    if not gaps:
        return None
    way = way_of(setting, MIXED, seconds, even, imbalance, gaps)
    return way, tuple(sorted(sizes.items(), reverse=True))


def _idle_over_mean(costs: GroupCosts, tokens: IntArray, rounds: tuple[MixedGroups, ...]) -> float:
    """Time of all rounds over what ranks are busy on average."""
    question, busy = costs.question(tokens), 0.0
    for one in rounds:
        for size, inside in zip(one.sizes, one.documents, strict=True):
            busy += size * float(question.seconds[size][list(inside)].sum())
    return _total_s(rounds) / (busy / costs.ranks)
