"""Why no fleet serves the load: the proof, and the least changes that make one possible.

Two reasons exist. A bucket has no type that meets the objective for it (with a usable replica at all). Or the caps are
below the need: then prices p_b ≥ 0 of the buckets with

    Σ_g u_g · usable_g · max_b (p_b / load_gb)  <  Σ_b p_b                                   (Farkas)

prove it: the left side is the most traffic, valued at p, that the whole fleet can serve, the right side what arrives.
The best balance over the largest fleet gives both the prices (p_b = min_g w_g · load_gb) and the part of the
traffic that can be served, 1 / peak.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.gpu_allocation.replicas.instance import Instance, instance_of
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem
from meshplan.planner.gpu_allocation.replicas.relaxation import WHOLE, balance

_FITS_TOLERANCE = 1e-7
_MOST_NAMED = 3


def impossible(instance: Instance) -> bool:
    """Whether some bucket has no type with a usable replica that can serve it."""
    return not bool((instance.servable & (instance.cap > 0)[:, None]).any(axis=0).all())


def explain(problem: GpuAllocationProblem) -> dict[str, Any]:
    """The binding constraint of an infeasible problem.

    Returns:
        ``binding`` (one line), and as they apply ``unservable_buckets``, ``served_fraction_upper_bound``,
        ``bucket_prices`` (the proof, summing to 1), ``least_changes`` (each alone suffices; cheapest first).
    """
    instance = instance_of(problem)
    beyond = np.flatnonzero(~instance.servable.any(axis=0))
    if beyond.size:
        return _beyond_the_objective(problem, instance, beyond)
    critical = _critical(instance)
    load, capacity = (
        instance.load[:, critical],
        instance.utilization * np.where(np.isinf(instance.cap), 0, instance.cap),
    )
    stranded = ~(np.isfinite(load) & (capacity > 0)[:, None]).any(axis=0)
    found = None if stranded.any() else balance(load, capacity)
    if found is None:
        price, served = stranded / stranded.sum(), 0.0
        buckets = instance.buckets[critical[stranded]].tolist()
        binding = (
            f"{len(buckets)} buckets (first: {problem.buckets[buckets[0]]}) are served only by types of which no "
            f"replica is usable: max_count is at most the {instance.spare} spare ones"
        )
    else:
        usable = np.isfinite(load) & (capacity > 0)[:, None]
        price = np.where(usable, found.prices[:, None] * np.where(usable, load, 1.0), np.inf).min(axis=0)
        price, served = price / price.sum(), 1.0 / found.bound
        binding = (
            f"the max_count of {', '.join(_capped_names(problem, instance, critical))}: together they can serve at "
            f"most {served:.1%} of the traffic that only they can serve"
        )
    proof = np.zeros(len(problem.buckets))
    proof[instance.buckets[critical]] = price
    result: dict[str, Any] = {
        "binding": binding,
        "served_fraction_upper_bound": served,
        "bucket_prices": proof.tolist(),
        "least_changes": _least_changes(problem, instance),
    }
    if found is not None:
        result["least_changes"].append(
            {"change": f"at most {served:.4f} times the request rate", "request_rate_factor": served}
        )
    return result


def _beyond_the_objective(problem: GpuAllocationProblem, instance: Instance, beyond: IntArray) -> dict[str, Any]:
    buckets = instance.buckets[beyond].tolist()
    names = [f"bucket {b} ({problem.buckets[b]})" for b in buckets]
    shown = ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )
    prices = np.zeros(len(problem.buckets))
    prices[buckets] = 1.0 / len(buckets)
    rate = sum(problem.request_rate_per_s[b] for b in buckets)
    change = f"loosen the objective for {shown}, or add a GPU type that meets it there"
    return {
        "binding": f"no GPU type serves {shown} within the objective ({rate:g} requests/s)",
        "unservable_buckets": buckets,
        "served_fraction_upper_bound": 0.0,
        "bucket_prices": prices.tolist(),
        "least_changes": [{"change": change, "buckets": buckets}],
    }


def _critical(instance: Instance) -> IntArray:
    """Buckets that no type without a cap can serve."""
    free = (instance.servable & np.isinf(instance.cap)[:, None]).any(axis=0)
    return np.flatnonzero(~free).astype(np.int64)


def _capped_names(problem: GpuAllocationProblem, instance: Instance, critical: IntArray) -> list[str]:
    capped = np.isfinite(instance.cap) & instance.servable[:, critical].any(axis=1)
    return [f"{problem.gpu_types[g].name} ({problem.gpu_types[g].max_count})" for g in np.flatnonzero(capped)]


def _least_changes(problem: GpuAllocationProblem, instance: Instance) -> list[dict[str, Any]]:
    """For each capped type alone: how many more replicas make a fleet possible, the cheapest first."""
    changes = []
    for g, gpu_type in enumerate(problem.gpu_types):
        if gpu_type.max_count is None:
            continue
        more = _replicas_more(instance, g)
        if more is None:
            continue
        needed = max(instance.spare - gpu_type.max_count, 0) + more
        changes.append(
            {
                "change": f"{needed} more {gpu_type.name} (max_count {gpu_type.max_count + needed})",
                "gpu_type": gpu_type.name,
                "more": needed,
                "usd_per_hour": needed * gpu_type.usd_per_hour,
            }
        )
    return sorted(changes, key=lambda change: (change["usd_per_hour"], change["gpu_type"]))


def _replicas_more(instance: Instance, g: int) -> int | None:
    """Least whole number of usable replicas of type ``g`` beyond its cap that make a fleet possible."""
    critical = _critical(instance)
    load = instance.load[:, critical]
    usable = np.where(np.isinf(instance.cap), 0.0, instance.cap)

    def fits(more: int) -> bool:
        raised: FloatArray = usable.copy()
        raised[g] += more
        found = balance(load, instance.utilization * raised, tolerance=_FITS_TOLERANCE)
        return found is not None and found.peak <= 1.0 + WHOLE

    high = int(np.ceil(np.where(np.isfinite(load[g]), load[g], 0.0).sum() / instance.utilization[g])) + 1
    if not fits(high):
        return None
    low = 0  # does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
