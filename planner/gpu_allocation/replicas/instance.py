"""A GPU allocation problem as arrays: only the buckets with traffic, and loads in busy replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem

# A bucket with traffic counts as at least this much of a replica: below lies the rounding of the linear programs.
_LEAST_LOAD = 1e-6
_NARROW = 5_000  # entries of the load matrix
# Types of one family: prices, and loads of the median bucket that both serve, within this factor of its dearest type's.
_ALIKE = 1.15
_PRICE_DECIMALS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Arrays of one problem.

    Args:
        buckets: [active] index of each bucket with traffic.
        load: [types, active] busy replicas that all traffic of a bucket keeps busy; ∞ where the type cannot serve it.
        price: [types] USD/h of a replica.
        utilization: [types] load that a usable replica may carry.
        cap: [types] most usable replicas (spares not counted), ∞ where there is no limit.
        most: [types] like ``cap``, but never more than all traffic needs.
        spare: replicas of each type in use that carry no load.
    """

    buckets: IntArray
    load: FloatArray
    price: FloatArray
    utilization: FloatArray
    cap: FloatArray
    most: FloatArray
    spare: int

    @property
    def servable(self) -> npt.NDArray[np.bool_]:
        """[types, active] whether the type meets the objective for the bucket."""
        return np.isfinite(self.load)

    @property
    def narrow(self) -> bool:
        """Whether the load matrix is small enough to solve every relaxation to the end."""
        return int(self.load.size) <= _NARROW

    def without(self, g: int) -> Instance:
        """The same question without type ``g``."""
        cap, most = self.cap.copy(), self.most.copy()
        cap[g] = most[g] = 0.0
        return Instance(
            buckets=self.buckets,
            load=self.load,
            price=self.price,
            utilization=self.utilization,
            cap=cap,
            most=most,
            spare=self.spare,
        )

    def only(self, types: IntArray) -> Instance:
        """The same question with no types but these, in this order."""
        return Instance(
            buckets=self.buckets,
            load=self.load[types],
            price=self.price[types],
            utilization=self.utilization[types],
            cap=self.cap[types],
            most=self.most[types],
            spare=self.spare,
        )


def instance_of(problem: GpuAllocationProblem) -> Instance:
    """The arrays of a problem."""
    rate = np.array(problem.request_rate_per_s, dtype=np.float64)
    capacity = np.array(problem.max_request_rate_per_s, dtype=np.float64).reshape(len(problem.gpu_types), len(rate))
    buckets = np.flatnonzero(rate > 0)
    capacity = capacity[:, buckets]
    load = busy_replicas(rate[buckets], capacity)
    types = problem.gpu_types
    spare = problem.min_spare_replicas
    utilization = problem.max_utilization * np.array([1.0 - gpu_type.interruption_headroom for gpu_type in types])
    cap = np.array(
        [np.inf if gpu_type.max_count is None else max(gpu_type.max_count - spare, 0) for gpu_type in types],
        dtype=float,
    )
    all_servable = np.where(np.isfinite(load), load, 0.0).sum(axis=1)
    return Instance(
        buckets=buckets.astype(np.int64),
        load=load,
        price=np.array([gpu_type.usd_per_hour for gpu_type in types], dtype=float),
        utilization=utilization,
        cap=cap,
        most=np.minimum(np.ceil(all_servable / utilization), cap),
        spare=spare,
    )


def busy_replicas(rate: FloatArray, capacity: FloatArray) -> FloatArray:
    """[types, buckets] replicas that all traffic of a bucket keeps busy; ∞ where the type cannot serve it.

    Args:
        rate: [buckets] requests/s, above 0.
        capacity: [types, buckets] requests/s that one replica serves.
    """
    load = np.full(capacity.shape, np.inf)
    with np.errstate(over="ignore"):
        np.divide(rate, capacity, out=load, where=capacity > 0)
    return np.maximum(load, _LEAST_LOAD)


def families(instance: Instance) -> FloatArray:
    """[families, types] 1 where a type belongs to the family: near-identical types, of each more than one.

    Types of a family substitute for each other, so their total count matters more than the count of each. With spares
    it matters more which types are in use at all, since each adds its spares: no families then.
    """
    if instance.spare:
        return np.zeros((0, len(instance.price)))
    leaders: list[int] = []
    of_leader: dict[int, list[int]] = {}
    for g in np.argsort(-instance.price, kind="stable").tolist():
        leader = next((other for other in leaders if _alike(instance, g, other)), None)
        if leader is None:
            leaders.append(g)
        of_leader.setdefault(g if leader is None else leader, []).append(g)
    shared = [types for types in of_leader.values() if len(types) > 1]
    members = np.zeros((len(shared), len(instance.price)))
    for row, types in zip(members, shared, strict=True):
        row[types] = 1.0
    return members


def _alike(instance: Instance, g: int, other: int) -> bool:
    if instance.price[other] > _ALIKE * instance.price[g]:
        return False
    both = np.isfinite(instance.load[g]) & np.isfinite(instance.load[other])
    if not both.any():
        return False
    ratio = float(np.median(instance.load[g, both] / instance.load[other, both]))
    return 1.0 / _ALIKE <= ratio <= _ALIKE


def price_step(price: FloatArray) -> float:
    """The greatest step of which all prices are multiples, USD/h; 0 when they have more than six decimals.

    >>> price_step(np.array([0.7, 1.01, 3.67]))
    0.01
    """
    scale: int = 10**_PRICE_DECIMALS
    scaled = [Decimal(repr(float(value))) * scale for value in price]
    if any(value != value.to_integral_value() for value in scaled):
        return 0.0
    return float(math.gcd(*(int(value) for value in scaled)) / scale)
