"""Small training questions on several pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshplan.planner.cluster.pools import PoolLinks
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Share, Stage
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem


def pooled(
    problems: Sequence[TrainingProblem],
    *,
    bytes_per_s: float | None = None,
    latency_s: float | None = None,
    pins: dict[str, Any] | None = None,
) -> MixedProblem:
    """A question on several pools; between two of them the slower network unless one is given."""
    machines = [problem.machine for problem in problems]
    rates = np.full((len(machines), len(machines)), np.inf)
    latencies = np.zeros_like(rates)
    for one, first in enumerate(machines):
        for other, second in enumerate(machines):
            if one != other:
                slower = min(first.scale_out_bytes_per_s, second.scale_out_bytes_per_s)
                rates[one, other] = bytes_per_s or slower
                later = max(first.scale_out_latency_s, second.scale_out_latency_s)
                latencies[one, other] = later if latency_s is None else latency_s
    names = tuple(f"type-{index}" for index in range(len(machines)))
    links = PoolLinks(names=names, bytes_per_s=rates, latency_s=latencies, sources={})
    return MixedProblem(pools=tuple(problems), links=links, pins=pins or {})


def as_stages(config: TrainingConfig, pools: Sequence[int]) -> MixedConfig:
    """A uniform configuration as stages, stage i on pool ``pools[i]``."""
    return MixedConfig(
        stages=tuple(
            Stage(
                num_layers=layers,
                tensor_parallel=config.tensor_parallel,
                shares=(
                    Share(pool=pool, data_parallel=config.data_parallel, micro_batch_size=config.micro_batch_size),
                ),
                activation_recompute=config.activation_recompute,
            )
            for layers, pool in zip(config.layers_per_chunk, pools, strict=True)
        ),
        num_microbatches=config.num_microbatches,
        zero_stage=config.zero_stage,
        sequence_parallel=config.sequence_parallel,
    )
