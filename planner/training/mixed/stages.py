"""The choices of a training plan on several types of devices, and its question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.planner.cluster.pools import PoolLinks
from meshplan.planner.training.problem.problem import TrainingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The data-parallel ranks of a stage that are on one pool.

    Args:
        pool: index of the pool.
        data_parallel: replicas there, each of ``tensor_parallel`` devices of the stage.
        micro_batch_size: sequences of a micro-batch that one of them takes.
    """

    pool: int
    data_parallel: int
    micro_batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage.

    Args:
        num_layers: transformer layers; fractions are for measured runs that cut inside a layer.
        tensor_parallel: devices that split each matrix product.
        shares: its data-parallel ranks, by pool; one share where the stage is on one type of device.
        activation_recompute: ``none``, ``selective`` or ``full``.
        in_flight: micro-batches whose activations it holds, where a measured run states them; 0: the schedule's.
    """

    num_layers: float
    tensor_parallel: int
    shares: tuple[Share, ...]
    activation_recompute: str = "none"
    in_flight: int = 0

    @property
    def data_parallel(self) -> int:
        """Replicas of the stage, on all pools."""
        return sum(share.data_parallel for share in self.shares)

    @property
    def sequences(self) -> int:
        """Sequences of one micro-batch, all replicas together."""
        return sum(share.data_parallel * share.micro_batch_size for share in self.shares)

    @property
    def num_devices(self) -> int:
        """Devices of the stage."""
        return self.tensor_parallel * self.data_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig:
    """Every choice of one plan.

    Args:
        stages: in pipeline order.
        num_microbatches: of one step; each passes all stages.
        zero_stage: 0, or 1 where optimizer states are sharded over a stage's replicas; 2, gradients too, only in
            measured runs.
        sequence_parallel: norms are split over tensor-parallel devices where there are several.
    """

    stages: tuple[Stage, ...]
    num_microbatches: int
    zero_stage: int = 1
    sequence_parallel: bool = True

    @property
    def world_size(self) -> int:
        """Devices in use."""
        return sum(stage.num_devices for stage in self.stages)

    @property
    def pools(self) -> tuple[int, ...]:
        """Pools in use, in the order in which a token meets them."""
        return tuple(dict.fromkeys(share.pool for stage in self.stages for share in stage.shares))

    @property
    def schedule(self) -> str:
        """Pipeline schedule."""
        return "1f1b" if len(self.stages) > 1 else "none"

    def devices_of(self, pool: int) -> int:
        """Devices in use of one pool."""
        return sum(
            stage.tensor_parallel * share.data_parallel
            for stage in self.stages
            for share in stage.shares
            if share.pool == pool
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedProblem:
    """A training question on several pools.

    Args:
        pools: each pool as the question that it would be by itself: machine, constants, rules and limits; model and
            workload are the same in all of them.
        links: between pools.
        pins: choice → value that the user pinned.
    """

    pools: tuple[TrainingProblem, ...]
    links: PoolLinks
    pins: Mapping[str, Any]

    @property
    def any(self) -> TrainingProblem:
        """One of them, for what is the same in all: model, workload, rules."""
        return self.pools[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Node type of each pool."""
        return self.links.names
