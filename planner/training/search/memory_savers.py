"""What brings a candidate within memory: recompute of a block of layers, and offload.

*Recompute of a block.* A candidate without recompute that exceeds the memory has variants that recompute the first r
layers of each chunk, 1 ≤ r < the layers of the longest chunk. Time does not fall with r and memory does not grow, so
the least r that fits is the best of them, and the only one that is priced
(:meth:`~meshplan.planner.training.estimator.memory.MemoryModel.least_recomputed`). A block of the longest chunk is full
recompute under another name, but where a model predicts several tokens: the layer that predicts them is no layer of a
chunk, full recompute repeats it and a block does not (Megatron-Core, transformer/multi_token_prediction.py,
``_checkpointed_forward``: "block" warns and skips it).

*Offload* of optimizer states, parameters or kept activations takes no less time and no more device memory: where the
limits allow it, candidates that exceed the device memory are tried with every allowed set. Of the optimizer states
only a share moves where the framework can do that: time rises with the share and memory falls, so the least whole per
cent that fits is the best of them, and the only one that is priced; so it is beside every block of recomputed layers
and every number of offloaded ones.

*Activations of layers without recompute* go the same way: candidates without recompute that exceed the memory are tried
with the first n layers' activations off the device. Memory falls with n and time does not, so the least n that fits is
the best; a framework that refuses it is asked for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.memory import MemoryModel, StageMemory
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.choices import ALL_STATES
from meshplan.planner.training.problem.problem import OFFLOADED_LAYERS, OFFLOADS, TrainingProblem
from meshplan.planner.training.search.templates import TEMPLATE, rule_view

SafeBytes = Callable[[Candidates], FloatArray]
_SHARE = "optimizer_offload_percent"


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
    if problem.search_over or problem.moves_off_devices:
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


def takes_whole_chunks(problem: TrainingProblem) -> bool:
    """A block may be as long as the longest chunk: it is pinned, or is not the same as full recompute."""
    return takes_blocks_only(problem) or problem.shape.num_nextn_predict_layers > 0


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
    most = longest if takes_whole_chunks(problem) else longest - 1
    fits = (batch.recompute == Recompute.NONE) & (least >= 1) & (least <= most) & ~batch.offloads_layers
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


def blocks_beside_shares(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """Offloaded candidates without recompute, with every block of recomputed layers that may stand beside a share."""
    if not takes_blocks(problem) or _SHARE in problem.fixed or "recompute_num_layers" in problem.fixed:
        return
    plain = batch.take((batch.recompute == Recompute.NONE) & batch.optimizer_offload)
    block = np.full(len(plain), int(Recompute.BLOCK))
    longest = max(batch.split.layers_per_chunk)
    for count in range(1, longest + takes_whole_chunks(problem)) if len(plain) else ():
        yield replace(plain, recompute=block, recompute_num_layers=np.full(len(plain), count))


def moves_layers(problem: TrainingProblem) -> bool:
    """Activations of layers that are not recomputed may leave the devices, and nobody says of how many."""
    return "activations" in problem.limits.offload and OFFLOADED_LAYERS not in problem.fixed


def with_least_layers(problem: TrainingProblem, batch: Candidates, safe_bytes: SafeBytes) -> Iterator[Candidates]:
    """The candidates that offload of layers' activations brings within memory, each with the fewest layers; then with
    all layers. The rules of the framework are not asked.

    Args:
        problem: the question.
        batch: candidates beyond the memory; those that recompute or have several stages are left out.
        safe_bytes: of a batch, [n] the device memory of the fullest rank.
    """
    if batch.split.pipeline_parallel > 1:
        return
    plain = batch.take((batch.recompute == Recompute.NONE) & ~batch.activation_offload)
    every = np.full(len(plain), problem.shape.num_hidden_layers)
    whole = replace(plain, activation_offload_num_layers=every)
    whole = whole.take(safe_bytes(whole) <= problem.limits.memory_bytes) if len(plain) else whole
    least = _least_that_fits(problem, whole, safe_bytes, OFFLOADED_LAYERS)
    fewer = least < whole.activation_offload_num_layers
    yield replace(whole, activation_offload_num_layers=least).take(fewer)
    yield whole


def layers_beside_shares(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """Candidates of one stage that move all optimizer states, with every number of layers beside a share of them."""
    if not moves_layers(problem) or _SHARE in problem.fixed or batch.split.pipeline_parallel > 1:
        return
    plain = batch.take((batch.recompute == Recompute.NONE) & batch.optimizer_offload)
    for count in range(1, problem.shape.num_hidden_layers + 1) if len(plain) else ():
        yield replace(plain, activation_offload_num_layers=np.full(len(plain), count))


def with_all_states(problem: TrainingProblem, batch: Candidates) -> Candidates:
    """The batch with all of the states moved of which a share is, unless that is pinned."""
    if _SHARE in problem.fixed or not batch.optimizer_offload.any():
        return batch
    return replace(batch, optimizer_offload_percent=np.full(len(batch), ALL_STATES))


def with_least_share(problem: TrainingProblem, batch: Candidates, safe_bytes: SafeBytes) -> Candidates:
    """The batch with no more of the offloaded optimizer states moved than memory asks for, where rules allow a part.

    Args:
        problem: the question.
        batch: candidates, some with all optimizer states offloaded.
        safe_bytes: of a batch, [n] the device memory of the fullest rank.

    Returns:
        The same candidates; those that exceed the memory with all states moved keep them moved.
    """
    rules = [rule for rule in problem.rules.rules if _SHARE in rule.about]
    if not len(batch) or not batch.optimizer_offload.any() or _SHARE in problem.fixed or not rules:
        return batch
    least, most = np.ones(len(batch), dtype=np.int64), batch.optimizer_offload_percent.copy()
    view = rule_view(problem, replace(batch, optimizer_offload_percent=least))
    may = batch.optimizer_offload.copy()
    for rule in rules:
        may &= np.broadcast_to(np.asarray(rule.holds(problem.shape, view)), may.shape)
    may &= safe_bytes(batch) <= problem.limits.memory_bytes
    most[may] = _least_that_fits(problem, batch.take(may), safe_bytes, _SHARE)
    return replace(batch, optimizer_offload_percent=most)


def _least_that_fits(problem: TrainingProblem, batch: Candidates, safe_bytes: SafeBytes, choice: str) -> IntArray:
    """[n] the least value of a choice, from 1 on, that stays within memory; with their own all candidates do."""

    def with_value(value: IntArray) -> Candidates:
        changed: dict[str, Any] = {choice: value}
        return replace(batch, **changed)

    low, high = np.ones(len(batch), dtype=np.int64), getattr(batch, choice).copy()
    while len(batch) and (low < high).any():
        middle = (low + high) // 2
        fits = safe_bytes(with_value(middle)) <= problem.limits.memory_bytes
        low, high = np.where(fits, low, np.minimum(middle + 1, high)), np.where(fits, middle, high)
    return high
