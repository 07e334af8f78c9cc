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

from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.memory import MemoryModel, StageMemory
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import OFFLOADS, TrainingProblem


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
