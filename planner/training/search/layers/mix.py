"""Layer by layer: which keep their parameters gathered and which are recomputed, under the memory limit.

*Notation.* A fully sharded candidate has chunks of L layers. k of them, from the first, keep their parameters gathered
between the passes (T falls by a gather each, M grows by the layer's 16-bit parameters), r of them are recomputed (T
grows by a forward pass each, M falls by its activations). Galvatron-BMW (arXiv:2307.02031, §4.3) chooses a strategy a
layer by dynamic programming over the layers and every megabyte. Layers of one kind are alike, so that only how many of
them do what matters, not which: both terms add up, whatever layers carry both, and the pairs (k, r) are all there is.

*Objective.* min f(T(k, r), n) subject to M(k, r) ≤ device memory.

*Solution.* For a given k time does not fall with r and memory does not grow, so the least r that fits is the best
(:meth:`~meshplan.planner.training.estimator.memory.MemoryModel.least_recomputed`): L candidates instead of L².

*Bound.* T(k, r) ≥ T(L, 0), without a look at the memory; less X, its exposed data-parallel communication, where smaller
sharding groups are tried later (:func:`~meshplan.planner.training.search.variants.without_communication_s`).
Candidates are visited by this bound, best first, and left out once it is no better than the K-th best incumbent.

Assumes: layers of different kinds (dense, experts) are taken in the model's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.assembly import DATA_COMMUNICATION
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.templates import tries_smaller_groups
from meshplan.planner.training.search.variants import without_communication_s

NAME = "gathered_num_layers"
# Candidates expanded at once: each of them is copied once for every number of gathered layers.
ROWS_AT_ONCE = 32

# (candidates) → which of them can still be kept, given the seconds of their steps.
Hopeful = Callable[[Candidates, FloatArray], FloatArray]


def is_pinned(problem: TrainingProblem) -> bool:
    """Whether some layers have to stay gathered."""
    return int(problem.fixed.get(NAME, 0)) > 0


def gathered_mixes(problem: TrainingProblem, batch: Candidates, hopeful: Hopeful) -> Iterator[Candidates]:
    """Fully sharded candidates with 1, 2, … layers of each chunk gathered; most promising first, rules not asked yet.

    Args:
        problem: the question.
        batch: legal candidates.
        hopeful: asked again before every portion, so that what was kept meanwhile counts.
    """
    is_searched = NAME in problem.search_over and NAME not in problem.fixed
    full = batch.take(batch.zero_stage == ZERO_PARAMETERS)
    if not len(full) or not (is_searched or is_pinned(problem)):
        return
    longest = max(full.split.layers_per_chunk)
    pinned = int(problem.fixed.get(NAME, 0))
    numbers = [min(pinned, longest)] if pinned else list(range(1, longest + 1))
    bound_s = _least_s(problem, replace(full, gathered_num_layers=np.full(len(full), longest)))
    order = np.argsort(bound_s, kind="stable")
    for start in range(0, len(order), ROWS_AT_ONCE):
        rows = order[start : start + ROWS_AT_ONCE]
        rows = rows[hopeful(full.take(rows), bound_s[rows])]
        if not len(rows):
            continue
        mixed = full.take(np.repeat(rows, len(numbers)))
        yield replace(mixed, gathered_num_layers=np.tile(np.array(numbers, dtype=np.int64), len(rows)))


def _least_s(problem: TrainingProblem, batch: Candidates) -> FloatArray:
    """Steps of candidates, or what is left of them under the best size of their sharding groups, s [n]."""
    estimate = estimate_training(
        problem.shape, problem.machine, problem.workload, batch, problem.calibration, with_memory=False
    )
    step_s = np.asarray(estimate.step_s)
    if not tries_smaller_groups(problem):
        return step_s
    return np.minimum(step_s, without_communication_s(batch, step_s, estimate.breakdown_s[DATA_COMMUNICATION]))
