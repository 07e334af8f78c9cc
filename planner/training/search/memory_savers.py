"""What brings a candidate within memory: recompute of a block of layers, and offload.

*Recompute of a block.* A candidate without recompute that exceeds the memory has variants that recompute the first r
layers of each chunk, 1 ≤ r < the layers of a chunk. Time does not fall with r and memory does not grow, so the least r
that fits is the best of them, and the only one that is priced
(:meth:`~meshplan.planner.training.estimator.memory.MemoryModel.least_recomputed`).

*Offload* of optimizer states, parameters or kept activations takes no less time and no more device memory: where the
limits allow it, candidates that exceed the device memory are tried with every allowed set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from meshplan.planner.core.arrays import IntArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.memory import MemoryModel, StageMemory
from meshplan.planner.training.estimator.states import ZERO_PARAMETERS
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import OFFLOADS, TrainingProblem
from meshplan.planner.training.search.templates import TEMPLATE


def leaders(problem: TrainingProblem, batch: Candidates) -> tuple[IntArray, IntArray] | None:
    """Candidates that need no more device memory than others of their template.

    Of the candidates that differ in sharding and recompute only, one that recomputes every layer, has the highest ZeRO
    stage below 3 and the largest sharding group of them needs the least memory: recompute keeps less, and each rank
    holds a smaller part of the same states. The same with ZeRO stage 3, whose gathered layers come on top.

    Args:
        problem: the question.
        batch: candidates, those of a template side by side.

    Returns:
        The leaders' rows [k], and for each candidate the place of its leader among them, k where it has none [n]. None
        where other choices change what a candidate needs.
    """
    if problem.search_over or problem.limits.offload or any(problem.fixed.get(choice) for choice in OFFLOADS.values()):
        return None
    if not len(batch):
        return None
    same = [getattr(batch, name) for name in TEMPLATE]
    starts = np.logical_or.reduce([column[1:] != column[:-1] for column in same])
    template = np.concatenate([[0], np.cumsum(starts)])
    group = 2 * template + (batch.zero_stage >= ZERO_PARAMETERS)
    order = np.lexsort((batch.data_parallel_shard, batch.zero_stage, batch.recompute == Recompute.FULL, group))
    sorted_group = group[order]
    last = np.append(sorted_group[1:] != sorted_group[:-1], True)
    candidates = order[last]
    first = np.concatenate([[0], np.flatnonzero(last)[:-1] + 1])
    is_leader = batch.recompute[candidates] == Recompute.FULL
    for column in (batch.zero_stage, batch.data_parallel_shard):
        is_leader &= column[candidates] == np.maximum.reduceat(column[order], first)
    rows = candidates[is_leader]
    place = np.full(int(group.max()) + 1, len(rows), dtype=np.int64)
    place[group[rows]] = np.arange(len(rows))
    return rows, place[group]


def takes_blocks_only(problem: TrainingProblem) -> bool:
    """Recompute of a block is pinned."""
    return problem.fixed.get("activation_recompute") == "block"


def takes_blocks(problem: TrainingProblem) -> bool:
    """Recompute of a block is pinned, or it is free and the framework has it."""
    is_free = "activation_recompute" not in problem.fixed
    return takes_blocks_only(problem) or (is_free and "block" in problem.rules.recompute_modes)


def with_blocks(problem: TrainingProblem, memory: MemoryModel, stages: Sequence[StageMemory]) -> Candidates:
    """The candidates without recompute that a block of recomputed layers brings within memory.

    Args:
        problem: the question.
        memory: of the candidates.
        stages: what it gives for them.
    """
    batch = memory.candidates
    longest = max(batch.split.layers_per_chunk)
    pinned = problem.fixed.get("recompute_num_layers")
    if pinned is None:
        least = memory.least_recomputed([stage.safe_bytes for stage in stages], problem.limits.memory_bytes)
        if takes_blocks_only(problem):  # what would fit without takes one layer; what never fits is a near miss
            least = np.clip(least, 1, longest)
    else:
        least = np.full(len(batch), min(int(pinned), longest))
    most = longest if takes_blocks_only(problem) else longest - 1
    fits = (batch.recompute == Recompute.NONE) & (least >= 1) & (least <= most)
    blocks = batch.take(fits)
    return replace(blocks, recompute=np.full(len(blocks), int(Recompute.BLOCK)), recompute_num_layers=least[fits])


def offloaded(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """The batch with every set of offloads that the limits allow and nobody pinned, fewest first."""
    limits, fixed = problem.limits, problem.fixed
    free = [choice for name, choice in OFFLOADS.items() if name in limits.offload and choice not in fixed]
    for count in range(1, len(free) + 1):
        for chosen in combinations(free, count):
            moved: dict[str, Any] = dict.fromkeys(chosen, np.ones(len(batch), dtype=bool))
            yield replace(batch, **moved)
