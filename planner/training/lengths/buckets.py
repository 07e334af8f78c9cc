"""Bucketed batches in place of packed sequences, for a plan: nothing is packed or masked, and padding takes time."""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.lengths.balance import balanced
from meshplan.planner.lengths.buckets import bucketed
from meshplan.planner.training.lengths.assigned import Setting, Way, imbalance_of, way_of

BUCKETS = "buckets"


def buckets(setting: Setting) -> Way:
    """Padded micro-batches of like lengths, dealt to ranks so that these have equal work.

    A rank runs as many as its share of them, more than the plan's where padding fills them; ranks with one fewer wait.
    """
    config = setting.config
    seconds, even, imbalance, gaps = [], [], [], []
    for pieces, _ in setting.steps():
        work_s = bucketed(pieces, config.micro_batch_size * config.sequence_length).work_s(setting.work)
        dealt = balanced(
            work_s,
            np.ones(len(work_s), dtype=np.int64),
            ranks=config.data_parallel,
            micro_batches=-(-len(work_s) // config.data_parallel),
            pipeline_parallel=config.pipeline_parallel,
            most_tokens=1,
        )
        seconds.append(setting.step_s(dealt.work_s))
        even.append(setting.even_s(float(setting.work.of(pieces).sum())))
        imbalance.append(imbalance_of(setting, _without_empty(dealt.work_s)))
        gaps.append(dealt.gap)
    return way_of(setting, BUCKETS, seconds, even, imbalance, gaps)


def _without_empty(work_s: FloatArray) -> FloatArray:
    return work_s[:, work_s.max(axis=0) > 0.0]
