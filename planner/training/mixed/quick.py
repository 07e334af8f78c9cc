"""Step time of many plans of one question: the price of each distinct stage is kept.

The same figures as :func:`~meshplan.planner.training.mixed.estimator.price_mixed`, without memory; a test holds both
together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshplan.planner.training.estimator.assembly import StageFigures
from meshplan.planner.training.mixed.estimator import messages_s, stage_figures
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem
from meshplan.planner.training.pipeline.closed_forms import staged_pipeline_s


class QuickPrice:
    """Prices plans of one question.

    Args:
        problem: the question.
    """

    def __init__(self, problem: MixedProblem) -> None:
        self._problem = problem
        self._known: dict[Any, StageFigures] = {}

    def stage(self, config: MixedConfig, index: int) -> StageFigures:
        """What one stage takes."""
        last = len(config.stages) - 1
        ends = (index == 0, index == last, last == 0)
        key = (config.stages[index], *ends, config.num_microbatches, config.zero_stage)
        if key not in self._known:
            self._known[key] = stage_figures(self._problem, config, index)
        return self._known[key]

    def seconds(self, config: MixedConfig, index: int) -> float:
        """Time of one micro-batch on a stage, forward and backward."""
        return float(self.stage(config, index).seconds[0])

    def step_s(self, config: MixedConfig) -> float:
        """Seconds of an optimizer step."""
        stages = [self.stage(config, index) for index in range(len(config.stages))]
        rounds = np.array([config.num_microbatches])
        shares = [one.forward_share for one in stages]
        pipeline = staged_pipeline_s(
            config.schedule,
            virtual_pipeline_stages=1,
            num_microbatches=rounds,
            stages_s=np.stack([one.seconds for one in stages]),
            forward_share=np.stack(shares),
        )
        overhead = max(
            float(np.asarray(self._problem.pools[pool].calibration.time.step_overhead_s)) for pool in config.pools
        )
        ending = max(float(one.exposed_s[0]) for one in stages) + max(float(one.optimizer_s[0]) for one in stages)
        return float(pipeline[0]) + messages_s(self._problem, config) + ending + overhead
