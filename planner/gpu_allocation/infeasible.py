"""No fleet meets every SLO: which bucket, cap or limit binds, and the least change that makes a fleet possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshplan.planner.core.solution import Status
from meshplan.planner.core.text import rounded_up
from meshplan.planner.gpu_allocation.alternatives import scaled
from meshplan.planner.gpu_allocation.nodes.problem import FleetObjective, FleetProblem, Quota
from meshplan.planner.gpu_allocation.nodes.solve import solve_fleet
from meshplan.planner.gpu_allocation.question import Service
from meshplan.planner.gpu_allocation.search import Compiled
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.slo import Slo

MAX_NAMED = 3
# Halvings for the traffic that can be carried: to a thousandth.
_BISECTIONS = 10
# Limits of the whole fleet that are lifted one at a time, with their units and what the least of them is least in.
_LIMITS = {"max_usd_per_hour": ("USD/h", FleetObjective.COST), "max_power_w": ("W", FleetObjective.POWER)}


def explain_allocation(compiled: Compiled) -> dict[str, Any]:
    """The part of an infeasible plan's ``solution`` that names the cause and the remedies.

    Returns:
        ``binding_constraint``, ``least_change`` (changes, each of which alone makes the question feasible), ``tried``
        (in words), ``unservable_buckets`` where SLOs bind, ``served_fraction`` where caps do.
    """
    beyond = _beyond(compiled)
    if beyond:
        return _by_slo(compiled, beyond)
    problem = compiled.problem
    changes = least_changes(problem)
    fraction = served_fraction(problem)
    if fraction > 0.0:
        changes.append({"change": f"at most {fraction:.3f} times the request rate", "request_rate_factor": fraction})
    tried = [f"{name} lifted" for name in _LIMITS if getattr(problem, name) is not None]
    tried += [f"more devices for {quota.name}" for quota in problem.quotas]
    tried += [f"more {offer.name}" for offer in problem.offers if offer.max_count is not None]
    tried.append("a lower request rate")
    return {
        "binding_constraint": binding(problem, changes, fraction),
        "served_fraction": fraction,
        "least_change": changes,
        "tried": tried,
    }


# --- SLOs -------------------------------------------------------------------------------------------------------------


def _beyond(compiled: Compiled) -> list[int]:
    """Buckets with traffic that no kind (or no pair of prefill and decode kinds) serves within the SLOs.

    A kind has to serve all of the buckets that the router cannot distinguish.
    """
    problem = compiled.problem
    table = np.array(problem.max_request_rate_per_s).reshape(len(problem.kinds), len(problem.buckets)) > 0.0
    for group in problem.tied:
        table[:, group] = table[:, group].all(axis=1, keepdims=True)
    by_role = {
        role: table[[g for g, kind in enumerate(problem.kinds) if kind.role is role]].any(axis=0) for role in Role
    }
    served = by_role[Role.MIXED] | (by_role[Role.PREFILL] & by_role[Role.DECODE])
    arrives = np.array([scenario.request_rate_per_s for scenario in problem.scenarios]).max(axis=0) > 0.0
    return [int(b) for b in np.flatnonzero(arrives & ~served)]


def _by_slo(compiled: Compiled, beyond: list[int]) -> dict[str, Any]:
    named, changes = [], []
    first = 0
    for index, service in enumerate(compiled.question.services):
        mine = [b for b in beyond if first <= b < first + len(service.buckets)]
        first += len(service.buckets)
        if mine:
            named += [f"{service.name}: {compiled.problem.buckets[b]}" for b in mine]
            changes += _eased(compiled, index, service, mine)
    shown = "; ".join(named[:MAX_NAMED]) + (f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else "")
    return {
        "binding_constraint": f"no replica on any offer serves {shown} within the SLOs",
        "unservable_buckets": beyond,
        "served_fraction": 0.0,
        "least_change": changes,
        "tried": ["SLOs eased for these buckets"],
    }


def _eased(compiled: Compiled, index: int, service: Service, beyond: list[int]) -> list[dict[str, Any]]:
    """The nearest feasible SLOs: the smallest factor on the limits too tight with which every bucket is served."""
    curves = [
        [replica.curves[b] for replica in compiled.replicas if replica.service == index and b in replica.curves]
        for b in beyond
    ]
    bare = [b for b, some in zip(beyond, curves, strict=True) if not some]
    if bare:
        reason = compiled.rejected.most_common(1)
        text = f"{compiled.problem.buckets[bare[0]]} fits no replica" + (f" ({reason[0][0]})" if reason else "")
        return [{"change": f"larger nodes or constraints.max_devices_per_replica: {text}", "buckets": bare}]
    factor = max(min(_factor(curve, service.slos) for curve in some) for some in curves)
    nearest = [min(some, key=lambda curve: _factor(curve, service.slos)) for some in curves]
    wanted = {}
    for slo in service.slos:
        least = max(curve.least(slo.metric) for curve in nearest)
        if least > slo.limit_s:
            wanted[slo.key] = rounded_up(least)
    text = " and ".join(f"slo.{key}: {value:g}" for key, value in wanted.items())
    return [{"change": text, "slo": wanted, "slo_factor": factor, "buckets": beyond}]


def _factor(curve: Any, slos: tuple[Slo, ...]) -> float:
    return max((curve.least(slo.metric) / slo.limit_s for slo in slos), default=0.0)


# --- caps and limits --------------------------------------------------------------------------------------------------


def least_changes(problem: FleetProblem) -> list[dict[str, Any]]:
    """Limits, quotas and caps of offers, each changed alone by as little as makes a fleet possible, if it can."""
    return [*_limits(problem), *_quotas(problem), *_caps(problem)]


def binding(problem: FleetProblem, changes: Sequence[Mapping[str, Any]], fraction: float) -> str:
    """The constraint that binds: the first that helps when it alone is changed, else all of them together.

    Args:
        problem: without a fleet.
        changes: of :func:`least_changes`.
        fraction: of the traffic that some fleet carries.
    """
    alone = next((str(change["constraint"]) for change in changes if "constraint" in change), None)
    if alone is not None:
        return alone
    limits = [f"{name} ({getattr(problem, name):g})" for name in _LIMITS if getattr(problem, name) is not None]
    quotas = [f"quota of {quota.name} ({quota.max_devices})" for quota in problem.quotas]
    capped = [f"{offer.name} ({offer.max_count})" for offer in problem.offers if offer.max_count is not None]
    parts = [*limits, *quotas, *([f"max_nodes of {', '.join(capped)}"] if capped else [])]
    return f"{' with '.join(parts)}: {fraction:.1%} of the traffic fits"


def _limits(problem: FleetProblem) -> Iterator[dict[str, Any]]:
    """Each limit of the whole fleet alone lifted: the fleet with the least of what it limits."""
    for name, (unit, objective) in _LIMITS.items():
        limit = getattr(problem, name)
        if limit is None:
            continue
        free = replace(problem, **{name: None})  # type: ignore[arg-type]  # either is a float or None
        lifted = solve_fleet(replace(free, objective=objective, start_usd=0.0, stop_usd=0.0))
        if lifted.assignment is None:
            continue
        least = max(
            sum(
                count * (offer.usd_per_hour if objective is FleetObjective.COST else offer.power_w or 0.0)
                for offer, count in zip(problem.offers, stage, strict=True)
            )
            for stage in lifted.assignment.units
        )
        yield {
            "constraint": f"{name}: {limit:g} {unit}, {least - limit:.2f} below the least",
            "change": f"constraints.{name}: {rounded_up(least):g}",
            "limit": name,
            "least": rounded_up(least),
        }


def _quotas(problem: FleetProblem) -> Iterator[dict[str, Any]]:
    """Each quota alone raised: the fewest more devices with which a fleet exists, under every other limit."""
    for place, quota in enumerate(problem.quotas):
        before, after = problem.quotas[:place], problem.quotas[place + 1 :]

        def raised(
            more: int | None,
            quota: Quota = quota,
            before: tuple[Quota, ...] = before,
            after: tuple[Quota, ...] = after,
        ) -> FleetProblem:
            own = () if more is None else (replace(quota, max_devices=quota.max_devices + more),)
            return replace(problem, quotas=(*before, *own, *after))

        more = _least_more(raised)
        if more is not None:
            needed = quota.max_devices + more
            yield {
                "constraint": f"quota of {quota.name}: {quota.max_devices} devices",
                "change": f"{more} more devices for {quota.name} (max_devices {needed})",
                "quota": quota.name,
                "max_devices": needed,
            }


def _caps(problem: FleetProblem) -> list[dict[str, Any]]:
    """For each capped offer alone: how many more units make a fleet possible, the cheapest first."""
    changes = []
    for o, offer in enumerate(problem.offers):
        if offer.max_count is None:
            continue
        more = _units_more(problem, o)
        if more is not None:
            changes.append(
                {
                    "change": f"{more} more {offer.name} (max_nodes {offer.max_count + more})",
                    "offer": offer.name,
                    "more": more,
                    "usd_per_hour": more * offer.usd_per_hour,
                }
            )
    return sorted(changes, key=lambda change: (change["usd_per_hour"], change["offer"]))


def _units_more(problem: FleetProblem, o: int) -> int | None:
    had = problem.offers[o].max_count

    def raised(more: int | None) -> FleetProblem:
        most = None if more is None or had is None else had + more
        offers = tuple(replace(one, max_count=most) if i == o else one for i, one in enumerate(problem.offers))
        return replace(problem, offers=offers)

    return _least_more(raised)


def _least_more(raised: Callable[[int | None], FleetProblem]) -> int | None:
    """The least number by which a limit must be raised for a fleet to exist; None where lifting it does not help.

    Args:
        raised: the problem with the limit so much higher, or without it.
    """

    def fits(more: int | None) -> bool:
        return solve_fleet(raised(more)).status is not Status.INFEASIBLE

    if not fits(None):
        return None
    low, high = 0, 1
    while not fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def served_fraction(problem: FleetProblem) -> float:
    """The largest share of the traffic that some fleet carries, to a thousandth, rounded down."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        feasible = solve_fleet(scaled(problem, middle)).status is not Status.INFEASIBLE
        low, high = (middle, high) if feasible else (low, middle)
    return math.floor(low * 1000.0) / 1000.0
