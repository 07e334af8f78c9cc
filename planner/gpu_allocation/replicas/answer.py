"""The answer of a GPU allocation as plain JSON: the decision, its proof, and what other decisions would cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.solution import Solution, relative_gap
from meshplan.planner.gpu_allocation.replicas.infeasible import explain, impossible
from meshplan.planner.gpu_allocation.replicas.instance import Instance, instance_of
from meshplan.planner.gpu_allocation.replicas.problem import Allocation, GpuAllocationProblem
from meshplan.planner.gpu_allocation.replicas.search import WorkBudget, cheapest_fleet, round_up

# Work spent on the cost without each type; enough for a proof at the sizes where it is computed.
_WHAT_IF_WORK_S = 0.3
_MILLION = 1e6
_LEAST_USD_PER_HOUR = 1e-6


def answer(problem: GpuAllocationProblem, solution: Solution[Allocation]) -> dict[str, Any]:
    """The solution in the benchmark's format, with explanations under further keys.

    Returns:
        ``status``, ``cost_usd_per_hour``, ``bound_usd_per_hour``, ``gap``, ``counts`` (type → replicas), ``routing``
        (type → share of each bucket); ``utilization`` (of the usable replicas of each type in use);
        ``single_type_usd_per_hour`` (what a fleet of one type costs, null where it cannot serve all);
        ``without_type`` (cost, bound and status when a type in use is not to be had; small problems only);
        ``bucket_usd_per_million_requests`` and ``notes`` (shadow prices of the linear relaxation, in words).
        For an infeasible problem ``status`` and the keys of
        :func:`meshplan.planner.gpu_allocation.replicas.infeasible.explain`.
    """
    allocation = solution.assignment
    if allocation is None or solution.objective is None:
        return {"status": solution.status.value, **explain(problem)}
    instance = instance_of(problem)
    names = [gpu_type.name for gpu_type in problem.gpu_types]
    singles = _single_types(problem, instance)
    return {
        "status": solution.status.value,
        "cost_usd_per_hour": solution.objective,
        "bound_usd_per_hour": solution.bound,
        "gap": solution.gap,
        "counts": dict(zip(names, allocation.counts, strict=True)),
        "routing": {name: list(row) for name, row in zip(names, allocation.routing, strict=True)},
        "utilization": {
            name: used for name, used, n in zip(names, allocation.utilization, allocation.counts, strict=True) if n
        },
        "single_type_usd_per_hour": singles,
        "without_type": _without_each(problem, instance, allocation),
        "bucket_usd_per_million_requests": _bucket_prices(problem, instance, allocation),
        "notes": _notes(problem, instance, allocation, solution.objective, singles),
    }


def _single_types(problem: GpuAllocationProblem, instance: Instance) -> dict[str, float | None]:
    """What serving everything on one type costs, USD/h."""
    possible: npt.NDArray[np.bool_] = np.all(instance.servable, axis=1)
    busy = np.where(possible[:, None], instance.load, 0.0).sum(axis=1)
    usable = round_up(busy / instance.utilization)
    counts = usable + instance.spare * (usable > 0)
    possible &= usable <= instance.cap
    return {
        gpu_type.name: float(n * gpu_type.usd_per_hour) if can else None
        for gpu_type, n, can in zip(problem.gpu_types, counts, possible, strict=True)
    }


def _without_each(
    problem: GpuAllocationProblem, instance: Instance, allocation: Allocation
) -> dict[str, dict[str, Any]]:
    """What the best fleet costs without each of the types in use."""
    if not instance.narrow:
        return {}
    budget = WorkBudget(work_s=_WHAT_IF_WORK_S, deadline_s=math.inf)
    results: dict[str, dict[str, Any]] = {}
    for g, (gpu_type, count) in enumerate(zip(problem.gpu_types, allocation.counts, strict=True)):
        if not count:
            continue
        fewer = instance.without(g)
        fleet = None if impossible(fewer) else cheapest_fleet(fewer, budget)
        if fleet is None:
            results[gpu_type.name] = {"status": "infeasible"}
        else:
            results[gpu_type.name] = {
                "cost_usd_per_hour": fleet.cost,
                "bound_usd_per_hour": fleet.bound,
                "gap": relative_gap(fleet.cost, fleet.bound),
            }
    return results


def _bucket_prices(problem: GpuAllocationProblem, instance: Instance, allocation: Allocation) -> list[float | None]:
    """What a million more requests of each bucket would cost in the linear relaxation, USD; null without traffic."""
    prices = np.array(allocation.prices_usd_per_hour)
    result: list[float | None] = [None] * len(problem.buckets)
    per_hour = np.where(instance.servable, prices[:, None] * np.where(instance.servable, instance.load, 1.0), np.inf)
    for b, usd_per_hour in zip(instance.buckets.tolist(), per_hour.min(axis=0).tolist(), strict=True):
        result[b] = usd_per_hour / problem.request_rate_per_s[b] / SECONDS_PER_HOUR * _MILLION
    return result


def _notes(
    problem: GpuAllocationProblem,
    instance: Instance,
    allocation: Allocation,
    cost: float,
    singles: dict[str, float | None],
) -> list[str]:
    """The results as sentences."""
    notes = []
    possible = {name: usd for name, usd in singles.items() if usd is not None}
    if possible:
        best = min(possible, key=lambda name: (possible[name], name))
        saved = possible[best] - cost
        if saved > _LEAST_USD_PER_HOUR:
            notes.append(
                f"{saved:.2f} USD/h ({saved / possible[best]:.1%}) below the best single type, {best} at "
                f"{possible[best]:.2f} USD/h"
            )
        else:
            notes.append(f"as cheap as the best single type, {best}")
    elif instance.buckets.size:
        notes.append("no single type can serve all of it")
    worth = instance.utilization * np.array(allocation.prices_usd_per_hour) - instance.price
    for g, gpu_type in enumerate(problem.gpu_types):
        if gpu_type.max_count is not None and worth[g] > _LEAST_USD_PER_HOUR:
            notes.append(
                f"max_count {gpu_type.max_count} of {gpu_type.name} binds: one more would save about {worth[g]:.2f} "
                "USD/h (linear relaxation)"
            )
    return notes
