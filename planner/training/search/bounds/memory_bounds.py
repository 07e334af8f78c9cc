"""What must the candidates of a template recompute at least to stay within memory? Asked before they are made.

*Notation.* Of the candidates of a template under p stages, the *leader* shards most and its layers may be recomputed
one by one: no other needs less memory, whatever the split of the layers (:mod:`..memory_savers` has why). R is the time
of the least recompute that brings the leader within memory under any split of the layers over the stages, a linear
programme (:mod:`..layers.least_recompute`), infinite where all layers recomputed are still too much.

*Bound.* Recompute of a layer takes the same time in a block and in full, so that every candidate that fits spends R or
more on a micro-batch, over all stages: it is added to what they need without. Schedules that run forwards ahead share
one R, that of the fewest micro-batches in flight.

*Where it says nothing*, R = 0: ZeRO-3 is possible, whose gathered layers depend on the split; the rules of the
framework are asked about stages alone, and those that want to know more count as met. Likewise where other choices
change what a candidate needs (offload, choices on request), or a checkpoint is loaded whole. Where a cheaper recompute
than that of whole layers is possible, or links are uneven, R is 0 or infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import PipelineSplit
from meshplan.planner.training.estimator.states import ZERO_GRADIENTS, ZERO_OPTIMIZER, ZERO_PARAMETERS
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import OFFLOADS, TrainingProblem
from meshplan.planner.training.search.layers.least_recompute import least_recompute_s
from meshplan.planner.training.search.memory_savers import takes_blocks
from meshplan.planner.training.search.templates import ZERO_STAGES, candidates_with, recompute_modes


class MemoryBounds:
    """R of the templates of one question.

    Args:
        problem: the question.
    """

    def __init__(self, problem: TrainingProblem) -> None:
        self.problem = problem
        moves = problem.limits.offload or any(problem.fixed.get(choice) for choice in OFFLOADS.values())
        style = "context_parallel_style" in problem.fixed
        self._applies = not (problem.search_over or moves or style or problem.calibration.recipe.loads_whole)
        self._by_layer = takes_blocks(problem) and int(Recompute.SELECTIVE) not in recompute_modes(problem)
        self._stages: dict[int, int | None] = {}

    def least_s(self, split: PipelineSplit, columns: Mapping[str, IntArray]) -> FloatArray:
        """R of some templates, over the stages of one micro-batch together, s [n]; infinite where nothing fits.

        Args:
            split: any split of the layers over the stages, under the schedule in question.
            columns: what the templates choose.
        """
        rows = len(columns["data_parallel"])
        zero = self._most_sharded(split.pipeline_parallel) if self._applies else None
        if zero is None or not rows:
            return np.zeros(rows)
        chosen = {
            "zero_stage": np.full(rows, zero),
            "data_parallel_shard": columns["data_parallel"] if zero >= ZERO_OPTIMIZER else np.ones(rows, dtype=int),
            "recompute": np.full(rows, int(Recompute.NONE if self._by_layer else Recompute.FULL)),
        }
        again_s = least_recompute_s(self.problem, candidates_with(self.problem, {**columns, **chosen}, split))
        if self.problem.machine.network_model is None:
            return again_s
        return np.where(np.isfinite(again_s), 0.0, np.inf)

    def _most_sharded(self, num_stages: int) -> int | None:
        """ZeRO stage of the leader under so many pipeline stages; None where there is no leader."""
        if num_stages not in self._stages:
            possible = [zero for zero in self._asked() if self._may_be(zero, num_stages)]
            most = max(possible, default=ZERO_PARAMETERS)
            # Fully sharded frameworks sum whole gradients in a pipeline, and keep gathered what ZeRO-2 has sharded.
            keeps_whole = self.problem.calibration.recipe.is_fsdp and most >= ZERO_GRADIENTS
            self._stages[num_stages] = None if most >= ZERO_PARAMETERS or keeps_whole else most
        return self._stages[num_stages]

    def _asked(self) -> tuple[int, ...]:
        pinned = self.problem.fixed.get("zero_stage")
        return ZERO_STAGES if pinned is None else (int(pinned),)

    def _may_be(self, zero: int, num_stages: int) -> bool:
        """False where a rule that looks at nothing else refuses a ZeRO stage under so many pipeline stages."""
        alone = SimpleNamespace(zero_stage=zero, pipeline_parallel=num_stages)
        for rule in self.problem.rules.rules:
            try:
                if not np.all(rule.holds(self.problem.shape, alone)):
                    return False
            except AttributeError:  # it depends on another choice
                continue
        return True
