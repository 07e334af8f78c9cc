"""What other fleets cost: one type only, one type fewer, more traffic, one more unit, other SLOs. Each is solved.

Alternatives reuse the capacity margins found by the simulation; replica kinds absent from the chosen fleet get the
largest of these margins. Alternatives are not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshplan.planner.gpu_allocation.nodes.problem import FleetAllocation, FleetObjective, FleetProblem, Scenario
from meshplan.planner.gpu_allocation.nodes.solve import solve_fleet
from meshplan.planner.gpu_allocation.search import Compiled, Searched, assemble

# Multiples of the traffic whose fleets are shown.
GROWTH = (1.1, 1.25, 1.5, 2.0)
# Multiples of every latency limit on the Pareto front of cost against SLOs.
SLO_FACTORS = (0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0)
UNITS = {FleetObjective.COST: "USD/h", FleetObjective.POWER: "W", FleetObjective.NUM_DEVICES: "devices"}
_LEAST_SAVING = 1e-9


def alternatives(searched: Searched) -> dict[str, Any]:
    """Every alternative; costs are objectives, None where no fleet exists.

    Returns:
        ``single_type`` (node type → objective), ``without`` (offer in use → objective), ``growth`` (rows of
        rate_factor, objective), ``one_more`` (capped offer that binds → objective with one more unit), ``larger_quota``
        (rows of quota, more_devices, objective, where a quota binds), ``pareto`` (rows of slo_factor, objective).
    """
    allocation, base = searched.solution.assignment, _base(searched)
    if allocation is None:
        return {}
    used = [o for o, offer in enumerate(base.offers) if any(stage[o] for stage in allocation.units)]
    present = searched.solution.objective or 0.0
    types = dict.fromkeys(offer.node_type for offer in base.offers)
    return {
        "single_type": {name: _cost(_only(base, {name})) for name in types},
        "without": {base.offers[o].name: _cost(_capped(base, o, 0)) for o in used} if len(base.offers) > 1 else {},
        "growth": [{"rate_factor": factor, "objective": _cost(scaled(base, factor))} for factor in GROWTH],
        "one_more": dict(_one_more(base, present)),
        "larger_quota": list(_larger_quota(base, present)),
        "pareto": pareto(searched),
    }


def pareto(searched: Searched) -> list[dict[str, Any]]:
    """Cost against SLOs: every limit times a factor, capacities and fleet computed anew."""
    compiled = searched.compiled
    rows = []
    for factor in SLO_FACTORS:
        slos = [
            [replace(slo, limit_s=factor * slo.limit_s) for slo in service.slos]
            for service in compiled.question.services
        ]
        problem = with_headroom_of(searched, assemble(compiled.question, compiled.replicas, slos).problem)
        rows.append({"slo_factor": factor, "objective": _cost(problem)})
    return rows


def scaled(problem: FleetProblem, factor: float) -> FleetProblem:
    """The same question at a multiple of the traffic."""
    scenarios = tuple(
        Scenario(
            name=one.name,
            request_rate_per_s=tuple(factor * rate for rate in one.request_rate_per_s),
            weight=one.weight,
        )
        for one in problem.scenarios
    )
    return replace(problem, scenarios=scenarios)


def notes(searched: Searched, found: Mapping[str, Any]) -> list[str]:
    """The alternatives as sentences."""
    cost, unit = searched.solution.objective, UNITS[searched.compiled.problem.objective]
    if cost is None or not found:
        return []
    lines = []
    singles = {name: value for name, value in found["single_type"].items() if value is not None}
    if singles:
        best = min(singles, key=lambda name: (singles[name], name))
        saved = singles[best] - cost
        if saved > _LEAST_SAVING:
            lines.append(f"{saved:.2f} {unit} ({saved / singles[best]:.1%}) below the best single type, {best}")
        else:
            lines.append(f"as good as the best single type, {best}")
    else:
        lines.append("no single type can serve all of it")
    for name, value in found["without"].items():
        if value is None:
            lines.append(f"without {name} there is no plan")
        else:
            lines.append(f"without {name}: {value - cost:+.2f} {unit}")
    for name, value in found["one_more"].items():
        lines.append(f"one more {name} saves {cost - value:.2f} {unit}")
    for row in found["larger_quota"]:
        more, saved = row["more_devices"], cost - row["objective"]
        lines.append(
            f"{more} more device{'s' * (more > 1)} for {row['quota']} save{'s' * (more == 1)} {saved:.2f} {unit}"
        )
    step = next((row for row in found["growth"] if row["objective"] is not None), None)
    if step is not None:
        added = step["objective"] - cost
        more = f"{step['rate_factor'] - 1.0:.0%} more traffic"
        lines.append(f"{more} needs no more" if added <= _LEAST_SAVING else f"{more} costs {added:+.2f} {unit}")
    return lines


def _base(searched: Searched) -> FleetProblem:
    return with_headroom_of(searched, searched.compiled.problem)


def with_headroom_of(searched: Searched, problem: FleetProblem) -> FleetProblem:
    """The problem with the margins of the plan; kinds that it does not use get the largest of them."""
    known = {kind.name: kind.headroom for kind in searched.compiled.problem.kinds if kind.headroom}
    allocation = searched.solution.assignment
    if allocation is not None:
        for g, kind in enumerate(searched.compiled.problem.kinds):
            if any(stage[g] for stage in allocation.replicas):
                known.setdefault(kind.name, 0.0)
    most = max(known.values(), default=0.0)
    kinds = tuple(replace(kind, headroom=known.get(kind.name, most)) for kind in problem.kinds)
    return replace(problem, kinds=kinds)


def _cost(problem: FleetProblem) -> float | None:
    return solve_fleet(problem).objective


def _capped(problem: FleetProblem, o: int, most: int) -> FleetProblem:
    offers = tuple(replace(offer, max_count=most) if i == o else offer for i, offer in enumerate(problem.offers))
    return replace(problem, offers=offers)


def _only(problem: FleetProblem, node_types: set[str]) -> FleetProblem:
    offers = tuple(offer if offer.node_type in node_types else replace(offer, max_count=0) for offer in problem.offers)
    return replace(problem, offers=offers)


def _one_more(problem: FleetProblem, present: float) -> Iterator[tuple[str, float]]:
    """Capped offers of which one more unit lowers the cost, whether the cap is reached or not, and the cost then."""
    for o, offer in enumerate(problem.offers):
        if offer.max_count is None:
            continue
        value = _cost(_capped(problem, o, offer.max_count + 1))
        if value is not None and value < present * (1.0 - _LEAST_SAVING):
            yield offer.name, value


def _larger_quota(problem: FleetProblem, present: float) -> Iterator[dict[str, Any]]:
    """Quotas whose increase by their smallest unit lowers the cost, and what the fleet costs then.

    Every quota is tried: even one that the fleet does not exhaust may exclude a different, cheaper fleet.
    """
    for q, quota in enumerate(problem.quotas):
        unit = min(problem.offers[o].num_devices for o in quota.offers)
        larger = replace(quota, max_devices=quota.max_devices + unit)
        quotas = tuple(larger if i == q else one for i, one in enumerate(problem.quotas))
        value = _cost(replace(problem, quotas=quotas))
        if value is not None and value < present * (1.0 - _LEAST_SAVING):
            yield {"quota": quota.name, "more_devices": unit, "objective": value}


def carried(compiled: Compiled, allocation: FleetAllocation) -> float:
    """The multiple of the traffic that the chosen replicas carry at the planned utilisation, least over scenarios."""
    problem = compiled.problem
    fullest = [used / problem.fill(g) for row in allocation.utilization for g, used in enumerate(row) if used > 0.0]
    return 1.0 / max(fullest) if fullest else 1.0
