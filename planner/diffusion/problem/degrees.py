"""Degrees of a diffusion deployment: one choice as a record, many as arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

# Ranks are numbered with the first degree fastest (xDiT: tensor, sequence with Ulysses innermost, pipeline, guidance).
RANK_ORDER = ("tensor_parallel", "ulysses", "ring", "pipefusion", "cfg_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig:
    """One deployment.

    Args:
        ulysses: devices that exchange attention heads for tokens by all-to-alls.
        ring: devices around which keys and values travel.
        cfg_parallel: 2 where the two guidance passes run on different devices.
        pipefusion: stages of a pipeline of layers through which patches travel.
        tensor_parallel: devices that share each weight.
        replicas: independent groups of devices, each with a batch of its own.
        batch_size: items of one batch of a replica.
    """

    ulysses: int = 1
    ring: int = 1
    cfg_parallel: int = 1
    pipefusion: int = 1
    tensor_parallel: int = 1
    replicas: int = 1
    batch_size: int = 1

    @property
    def replica_devices(self) -> int:
        """Devices of one replica."""
        return self.ulysses * self.ring * self.cfg_parallel * self.pipefusion * self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The same for n candidates, [n] each, without replicas."""

    ulysses: IntArray
    ring: IntArray
    cfg_parallel: IntArray
    pipefusion: IntArray
    tensor_parallel: IntArray
    batch_size: IntArray

    @property
    def devices(self) -> IntArray:
        """[n] Devices of one replica."""
        return self.ulysses * self.ring * self.cfg_parallel * self.pipefusion * self.tensor_parallel

    @property
    def sequence_split(self) -> IntArray:
        """[n] Devices that share a sequence."""
        return self.ulysses * self.ring

    def extent(self, degree: str) -> IntArray:
        """[n] Consecutive ranks that a group of ``degree`` spans."""
        span = np.ones_like(self.ulysses)
        for name in RANK_ORDER:
            span = span * getattr(self, name)
            if name == degree:
                break
        return span

    def only(self, kept: FloatArray) -> Degrees:
        """The candidates of a mask or of indices."""
        return Degrees(**{one.name: getattr(self, one.name)[kept] for one in fields(self)})

    def at(self, index: int, *, replicas: int = 1) -> DiffusionConfig:
        """One candidate as a record."""
        chosen = {one.name: int(getattr(self, one.name)[index]) for one in fields(self)}
        return DiffusionConfig(**chosen, replicas=replicas)


def short_config(config: DiffusionConfig) -> str:
    """The choices that are not 1.

    >>> short_config(DiffusionConfig(ulysses=4, batch_size=2))
    'ulysses 4, batch_size 2'
    """
    chosen = {one.name: getattr(config, one.name) for one in fields(config)}
    return ", ".join(f"{name} {value}" for name, value in chosen.items() if value != 1) or "one device, one item"


def degrees_of(configs: list[DiffusionConfig]) -> Degrees:
    """Records as arrays."""
    return Degrees(**{one.name: np.array([getattr(config, one.name) for config in configs]) for one in fields(Degrees)})
