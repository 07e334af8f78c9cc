"""A run on a number of devices: the share of its time that trains, how long it takes, and with what probability.

Notation
    η  progress per time while no node is waited for (:mod:`.checkpoints`)
    A  share of the time that no node is waited for, 1 − B(S + 1, a) (:mod:`.spares`)
    s  slowdown by stragglers, at least 1
    effective training time ratio, ETTR = A η / s,      wall time = training time / ETTR
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.goodput.checkpoints import best_interval, efficiency
from meshplan.planner.goodput.conditions import Checkpoints, FailureRate, Interruptions
from meshplan.planner.goodput.spares import waiting_share

# A ratio below it counts as no progress at all: the run takes ten thousand times its training time.
LEAST_RATIO = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """A run's conditions on any number of devices.

    Args:
        rate: interruptions of one node.
        devices_per_node: devices that fail together.
        restart_s: R.
        broken_share: share of interruptions that break a node.
        repair_s: mean time until it is back.
        spares: nodes that stand by.
        late_share: share of silent corruption among interruptions.
        late_s: its age when it is found.
        slowdown: s, of the slowest device over the typical one, a margin.
        state_bytes: of a whole checkpoint.
        store_bytes_per_s: rate at which the store takes it from the whole cluster.
        snapshot_bytes_per_s: of one device to its host; None: the writing itself blocks.
        block_s: b where the user knows it.
        interval_s: τ where the user pins it.
        finish_by_s: when the run should have ended.
    """

    rate: FailureRate
    devices_per_node: int
    restart_s: float
    broken_share: float
    repair_s: float
    spares: int
    late_share: float
    late_s: float
    slowdown: float
    state_bytes: float
    store_bytes_per_s: float
    snapshot_bytes_per_s: float | None
    block_s: float | None = None
    interval_s: float | None = None
    finish_by_s: float | None = None

    @property
    def spare_devices(self) -> int:
        """Devices of the spare nodes."""
        return self.spares * self.devices_per_node

    def nodes(self, devices: int) -> int:
        """Nodes of a job on that many devices."""
        return -(-devices // self.devices_per_node)

    def stops(self, devices: int, *, rate: float | None = None) -> Interruptions:
        """Interruptions of a job on that many devices.

        Args:
            devices: of the job, spares left out.
            rate: interruptions per node and day where another rate is asked about.
        """
        per_node = self.rate if rate is None else replace(self.rate, per_node_day=rate)
        return Interruptions(
            per_s=per_node.per_s(self.nodes(devices)),
            restart_s=self.restart_s,
            broken_share=self.broken_share,
            repair_s=self.repair_s,
            spares=self.spares,
            late_share=self.late_share,
            late_s=self.late_s,
        )

    def checkpoints(self, devices: int) -> Checkpoints:
        """What a checkpoint of a job on that many devices costs.

        Written in the background, training waits only for the copy from each device to its host.
        """
        upload_s = self.state_bytes / self.store_bytes_per_s
        if self.snapshot_bytes_per_s is None:
            return Checkpoints(block_s=upload_s if self.block_s is None else self.block_s, interval_s=self.interval_s)
        copy_s = self.state_bytes / devices / self.snapshot_bytes_per_s
        return Checkpoints(
            block_s=copy_s if self.block_s is None else self.block_s, durable_s=upload_s, interval_s=self.interval_s
        )

    def interval(self, devices: int, *, rate: float | None = None) -> float:
        """τ: the pinned one, else the best."""
        if self.interval_s is not None:
            return self.interval_s
        return best_interval(self.stops(devices, rate=rate), self.checkpoints(devices)).interval_s

    def ratio(self, devices: int, *, rate: float | None = None, interval_s: float | None = None) -> float:
        """ETTR = A η / s, between 0 and 1.

        Args:
            devices: of the job, spares left out.
            rate: interruptions per node and day where another rate is asked about.
            interval_s: τ where another one is asked about; a plan keeps its τ whatever the rate turns out to be.
        """
        stops = self.stops(devices, rate=rate)
        interval = self.interval(devices, rate=rate) if interval_s is None else interval_s
        progress = float(efficiency(interval, stops, self.checkpoints(devices)))
        return (1.0 - waiting_share(stops)) * progress / self.slowdown


class Stretches:
    """Wall time over training time, 1/ETTR, by number of devices; each number is worked out once.

    Args:
        setting: the run.
    """

    def __init__(self, setting: RunSetting) -> None:
        self.setting = setting
        self._known: dict[int, float] = {}

    def of(self, devices: FloatArray) -> FloatArray:
        """1/ETTR, [n], at least 1; infinite where a run makes no progress."""
        counts = np.asarray(devices, dtype=float)
        distinct, place = np.unique(counts, return_inverse=True)
        return np.array([self.one(int(count)) for count in distinct])[place].reshape(counts.shape)

    def one(self, devices: int) -> float:
        """1/ETTR of one number of devices."""
        # Devices of one node fail together, but copies of a checkpoint go on side by side: the count matters, too.
        if devices not in self._known:
            ratio = self.setting.ratio(devices)
            self._known[devices] = 1.0 / ratio if ratio > LEAST_RATIO else math.inf
        return self._known[devices]
