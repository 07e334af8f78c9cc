"""Variants of a batch of candidates: ways to split sequences and to shard states that no measured run has.

Such a choice stays at its default, for sequences the framework's, unless it is pinned or listed in ``search_over``.
Each applicable candidate is then duplicated once per value. A pinned context-parallel style applies only to candidates
with context_parallel > 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.parameters import ZERO_OPTIMIZER, ZERO_PARAMETERS
from meshplan.planner.training.problem.choice import CONTEXT_PARALLEL_STYLES, ContextStyle, Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.templates import divisors

_RING = CONTEXT_PARALLEL_STYLES[ContextStyle.RING]
# A plain ring takes no less time than a balanced one, so that it is never searched for.
_SEARCHED_STYLES = (
    _RING,
    CONTEXT_PARALLEL_STYLES[ContextStyle.ALL_GATHER],
    CONTEXT_PARALLEL_STYLES[ContextStyle.ALL_TO_ALL],
    CONTEXT_PARALLEL_STYLES[ContextStyle.ALL_TO_ALL_AND_RING],
)


def variants(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """The batch itself, then a copy for every other value of the choices to vary; framework rules are applied later."""
    for styled in _by_style(problem, batch):
        for copied in _by_second_copy(problem, styled):
            yield from _by_outer_sharding(problem, copied)


def without_communication_s(batch: Candidates, step_s: FloatArray, exposed_s: FloatArray) -> FloatArray:
    """T(d) − X(d) of the module docstring, [n]: infinite where there are no smaller groups.

    Args:
        batch: candidates.
        step_s: their steps.
        exposed_s: their data-parallel communication, which sharding over fewer ranks can save.
    """
    left = step_s - exposed_s
    if batch.split.pipeline_parallel > 1:
        left = np.where(batch.zero_stage >= ZERO_PARAMETERS, 0.0, left)
    is_whole = (batch.zero_stage >= ZERO_OPTIMIZER) & (batch.data_parallel_shard == batch.data_parallel)
    return np.where(is_whole & (batch.data_parallel > 1), left, np.inf)


def smaller_groups(batch: Candidates) -> Candidates:
    """Every candidate with every sharding group smaller than its own; recompute of blocks is left open again."""
    sizes = {group: divisors(group)[:-1] for group in set(batch.data_parallel.tolist())}
    own = [sizes[group] for group in batch.data_parallel.tolist()]
    copies = batch.take(np.repeat(np.arange(len(batch)), [len(smaller) for smaller in own]))
    in_blocks = copies.recompute == Recompute.BLOCK
    return replace(
        copies,
        data_parallel_shard=np.array([size for smaller in own for size in smaller], dtype=np.int64),
        recompute=np.where(in_blocks, int(Recompute.NONE), copies.recompute),
        recompute_num_layers=np.where(in_blocks, 0, copies.recompute_num_layers),
    )


def _by_style(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    styles = _styles(problem)
    if styles == (_RING,):
        yield batch
        return
    split = batch.context_parallel > 1
    yield batch if _RING in styles else batch.take(np.flatnonzero(~split))
    parted = batch.take(split)
    for style in styles:
        if style == _RING or not len(parted):
            continue
        code = CONTEXT_PARALLEL_STYLES.index(style)
        named = replace(parted, context_parallel_style=np.full(len(parted), code))
        if code == ContextStyle.ALL_TO_ALL_AND_RING:
            yield from _two_dimensional(problem, named)
        else:
            yield named


def _by_second_copy(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """The batch, and its fully sharded candidates with a second copy of their parameters among neighbours (hpZ)."""
    name = "zero_hpz_partition_size"
    pinned = int(problem.fixed.get(name, 1))
    if pinned == 1:
        yield batch
        if name in problem.fixed or name not in problem.search_over:
            return
    full = batch.take(batch.zero_stage == ZERO_PARAMETERS)
    ranks = full.data_parallel_shard * full.context_parallel
    possible = sorted({size for number in np.unique(ranks) for size in divisors(int(number)) if 1 < size < number})
    for size in possible if pinned == 1 else [pinned]:
        rows = (ranks % size == 0) & (size < ranks)
        if rows.any():
            inside = full.take(rows)
            yield replace(inside, zero_hpz_partition_size=np.full(len(inside), size))


def _by_outer_sharding(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """The batch, and its candidates sharded in groups with optimizer states sharded over the groups too."""
    name = "outer_zero_stage"
    pinned = int(problem.fixed.get(name, 0))
    if not pinned:
        yield batch
        if name in problem.fixed or name not in problem.search_over:
            return
    rows = (batch.zero_stage == ZERO_PARAMETERS) & (batch.data_parallel_shard < batch.data_parallel)
    if rows.any():
        groups = batch.take(rows)
        yield replace(groups, outer_zero_stage=np.ones_like(groups.zero_stage))


def _styles(problem: TrainingProblem) -> tuple[str, ...]:
    if "context_parallel_style" in problem.fixed:
        return (str(problem.fixed["context_parallel_style"]),)
    usual = problem.rules.context_parallel_style
    return _SEARCHED_STYLES if "context_parallel_style" in problem.search_over else (usual,)


def _two_dimensional(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """The batch with every number of ranks that exchange heads inside the ring."""
    c = batch.context_parallel
    pinned = problem.fixed.get("context_parallel_heads")
    possible = sorted({u for group in np.unique(c) for u in divisors(int(group)) if 1 < u < group})
    for heads in possible if pinned is None else [int(pinned)]:
        rows = (c % heads == 0) & (heads < c)
        if rows.any():
            inside = batch.take(rows)
            yield replace(inside, context_parallel_heads=np.full(len(inside), heads))
