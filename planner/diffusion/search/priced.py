"""Every candidate with what it takes: latency, memory, power, money, and the replicas that the load needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.diffusion.estimator.demand import demand
from meshplan.planner.diffusion.estimator.latency import Latency, latency
from meshplan.planner.diffusion.estimator.memory import Memory, memory
from meshplan.planner.diffusion.estimator.power import power_share
from meshplan.planner.diffusion.problem.degrees import DiffusionConfig, degrees_of
from meshplan.planner.diffusion.problem.legality import most_replicas
from meshplan.planner.diffusion.problem.problem import MAX_UTILIZATION, DiffusionProblem
from meshplan.planner.diffusion.problem.spec import DiffusionObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Candidates and their prices, [n] each.

    Args:
        configs: one replica each.
        taken: latency by parts.
        memory: of the busiest rank.
        replicas: pinned, as many as the rate needs, or as many as there is room, money and power for.
        room: replicas that the cluster has room for.
        items_per_s: of all replicas when busy.
        utilization: share of the time in which they are busy; 1 without a rate.
        power_w: of all devices on average; NaN where the board's limit is unknown.
        energy_per_item_j: joule; NaN likewise.
        usd_per_hour: of all devices; NaN without a price.
        usd_per_item: NaN likewise.
    """

    configs: tuple[DiffusionConfig, ...]
    taken: Latency
    memory: Memory
    replicas: IntArray
    room: IntArray
    items_per_s: FloatArray
    utilization: FloatArray
    power_w: FloatArray
    energy_per_item_j: FloatArray
    usd_per_hour: FloatArray
    usd_per_item: FloatArray

    @property
    def latency_s(self) -> FloatArray:
        """[n] Of one batch."""
        return self.taken.total_s

    @property
    def devices(self) -> IntArray:
        """[n] Of all replicas."""
        return self.replicas * np.array([config.replica_devices for config in self.configs])

    def config(self, index: int) -> DiffusionConfig:
        """One candidate with its replicas."""
        one = self.configs[index]
        return DiffusionConfig(
            ulysses=one.ulysses,
            ring=one.ring,
            cfg_parallel=one.cfg_parallel,
            pipefusion=one.pipefusion,
            tensor_parallel=one.tensor_parallel,
            batch_size=one.batch_size,
            replicas=int(self.replicas[index]),
        )


def priced(problem: DiffusionProblem, configs: list[DiffusionConfig]) -> Priced:
    """Price configurations of one replica."""
    machine, constants = problem.machine, problem.calibration.constants
    degrees = degrees_of(configs)
    taken = latency(demand(problem.job, machine, degrees), constants)
    each = degrees.batch_size / taken.total_s  # items/s of a replica
    rate = problem.request_rate_per_s
    limit = np.nan if machine.device.tdp_w is None else machine.device.tdp_w
    per_device = np.nan if machine.usd_per_hour_per_device is None else machine.usd_per_hour_per_device
    room = np.array([most_replicas(problem, size) for size in degrees.devices.tolist()])
    if "replicas" in problem.pinned:
        replicas = np.full(len(configs), problem.pinned["replicas"])
    elif rate is not None:
        replicas = np.ceil(rate / (each * MAX_UTILIZATION)).astype(int)
    else:
        affordable = np.minimum(
            _most_within(problem.max_usd_per_hour, degrees.devices * per_device),
            _most_within(problem.max_power_w, degrees.devices * limit * power_share(taken, constants)),
        )
        replicas = np.maximum(np.minimum(room, affordable), 1).astype(int)
    items = each * replicas
    busy = np.ones_like(items) if rate is None else np.minimum(rate / items, 1.0)
    devices = degrees.devices * replicas
    share = busy * power_share(taken, constants) + (1.0 - busy) * constants.waiting_share
    power = devices * limit * share
    usd = devices * per_device
    return Priced(
        configs=tuple(configs),
        taken=taken,
        memory=memory(problem.job, degrees),
        replicas=replicas,
        room=room,
        items_per_s=items,
        utilization=busy,
        power_w=power,
        energy_per_item_j=power / (items * busy),
        usd_per_hour=usd,
        usd_per_item=usd / SECONDS_PER_HOUR / (items * busy),
    )


def _most_within(limit: float | None, each: FloatArray) -> FloatArray:
    """[n] Replicas of ``each`` watts or dollars an hour that a limit lets run; no limit, or none known, lets all run.

    The division may round a whole number down, so one more is tried by the product, as the limit itself is.
    """
    if limit is None:
        return np.full(len(each), np.inf)
    whole = np.floor(limit / each)
    whole += (whole + 1.0) * each <= limit
    return np.where(np.isnan(each), np.inf, whole)


def cost(problem: DiffusionProblem, found: Priced) -> FloatArray:
    """[n] What the objective makes least; throughput is made most, so its cost is devices over items/s."""
    return {
        DiffusionObjective.LATENCY: found.latency_s,
        DiffusionObjective.THROUGHPUT_PER_DEVICE: found.devices / found.items_per_s,
        DiffusionObjective.USD_PER_ITEM: found.usd_per_item,
        DiffusionObjective.NUM_DEVICES: found.devices.astype(float),
        DiffusionObjective.ENERGY: found.energy_per_item_j,
    }[problem.objective]
