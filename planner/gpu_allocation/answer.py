"""An allocation as plain JSON: what to rent, what runs on it, router weights, the proof, what else it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.planner.gpu_allocation.alternatives import alternatives, carried, notes
from meshplan.planner.gpu_allocation.capacity import pool_of
from meshplan.planner.gpu_allocation.nodes.problem import FleetAllocation, FleetProblem
from meshplan.planner.gpu_allocation.nodes.schedule import Schedule
from meshplan.planner.gpu_allocation.nodes.solve import bucket_prices, usd_per_hour
from meshplan.planner.gpu_allocation.replay import Replay
from meshplan.planner.gpu_allocation.schedule import BANDS, plan_hours
from meshplan.planner.gpu_allocation.search import Compiled, Searched
from meshplan.planner.serving.problem.config import ServingConfig, serving_config_document

# Shares below this are rounding of the linear program.
_LEAST_SHARE = 1e-6


def answer_document(searched: Searched, *, seed: int = 0) -> dict[str, Any]:
    """The whole answer of a plan.

    Returns:
        ``objective``, ``usd_per_hour`` (mean over scenarios), ``fleets`` (one per stage: offers and kinds),
        ``services`` (buckets with rates, routing weights and prices), ``replays``, ``headroom``, ``carries`` (multiple
        of the traffic), ``alternatives``, ``notes``.
    """
    compiled, allocation = searched.compiled, searched.solution.assignment
    if allocation is None:
        return {}
    found = alternatives(searched)
    problem = compiled.problem
    weights = [one.weight for one in problem.scenarios] if problem.num_stages > 1 else [1.0]
    return {
        "objective": problem.objective.value,
        "usd_per_hour": math.fsum(
            weight * usd_per_hour(problem, units) for weight, units in zip(weights, allocation.units, strict=True)
        ),
        "usd_per_hour_before_headroom": searched.first_cost if problem.objective.value == "cost" else None,
        "num_rounds": searched.num_rounds,
        "carries": carried(compiled, allocation),
        "fleets": [fleet_document(compiled, allocation, stage) for stage in range(problem.num_stages)],
        "services": services_document(compiled, allocation),
        "replays": [replay_document(compiled, one) for one in searched.replays],
        "alternatives": found,
        "notes": notes(searched, found),
        **({} if compiled.question.spec.schedule is None else {"schedule": schedule_document(searched, seed)}),
    }


def schedule_document(searched: Searched, seed: int) -> dict[str, Any]:
    """The fleet of every hour, with the capacity margins of the peak hour and those of each band of traffic.

    See :mod:`meshplan.planner.gpu_allocation.schedule`.

    Returns:
        ``usd``, ``bound_usd``, ``gap``, ``switching_usd``, ``num_switches``, ``constant_usd`` (the peak's fleet
        throughout), ``cpu_s``, ``fleets`` (units and routing weights by service and bucket) and ``hours`` (rows of
        hour, rate_factor, usd_per_hour, fleet, units), ``margins`` (by band of traffic), ``replays``.
    """
    compiled, spec = searched.compiled, searched.compiled.question.spec
    if spec.schedule is None:
        return {}
    factors, switching = spec.schedule.hourly_rate_factor, spec.switching
    peak = max(factors)
    hourly = plan_hours(
        searched,
        [factor / peak for factor in factors],
        start_usd=switching.start_usd,
        stop_usd=switching.stop_usd,
        seed=seed,
    )
    solution, found = hourly.solution, hourly.solution.assignment
    if found is None:
        return {}
    units = [
        {offer.name: count for offer, count in zip(compiled.problem.offers, fleet.units[0], strict=True) if count}
        for fleet in found.fleets
    ]
    return {
        "usd": solution.objective,
        "bound_usd": solution.bound,
        "gap": solution.gap,
        "switching_usd": found.switching_usd,
        "num_switches": found.num_switches,
        "constant_usd": found.constant_usd,
        "solver": solution.solver,
        "margins": [
            {"share_of_peak": end, "margin": margin} for end, margin in zip(BANDS, hourly.margins, strict=True)
        ],
        "num_rounds": hourly.num_rounds,
        "replays": [
            {
                "fleet": one.fleet,
                "num_hours": one.num_hours,
                "share_of_peak": one.share_of_peak,
                **replay_document(compiled, one.replay),
            }
            for one in hourly.replays
        ],
        "fleets": [
            {"units": units[k], "services": services_document(compiled, fleet, priced=False)}
            for k, fleet in enumerate(found.fleets)
        ],
        "hours": _hours(compiled.problem, found, factors, units),
    }


def _hours(
    problem: FleetProblem, found: Schedule, factors: Sequence[float], units: Sequence[Mapping[str, int]]
) -> list[dict[str, Any]]:
    """The rows of a day.

    Args:
        problem: what the fleets answer.
        found: the fleet of every hour.
        factors: traffic of every hour over the mean.
        units: offer → units, of each fleet.
    """
    return [
        {
            "hour": hour,
            "rate_factor": factor,
            "usd_per_hour": usd_per_hour(problem, found.fleets[k].units[0]),
            "fleet": k,
            "units": units[k],
        }
        for hour, (factor, k) in enumerate(zip(factors, found.fleet_of, strict=True))
    ]


def fleet_document(compiled: Compiled, allocation: FleetAllocation, stage: int) -> dict[str, Any]:
    """Units and replicas of one fleet; scenarios that it carries."""
    problem = compiled.problem
    carries = [s for s in range(len(problem.scenarios)) if problem.stage_of(s) == stage]
    return {
        "scenarios": [problem.scenarios[s].name for s in carries],
        "usd_per_hour": usd_per_hour(problem, allocation.units[stage]),
        "power_w": _power(compiled, allocation, stage),
        "units": [
            {
                "offer": offer.name,
                "node_type": offer.node_type,
                "provider": offer.provider,
                "region": offer.region,
                "zone": offer.zone,
                "terms": offer.terms,
                "count": count,
                "num_devices": offer.num_devices,
                "usd_per_hour_each": offer.usd_per_hour,
                "usd_per_hour": count * offer.usd_per_hour,
                "at_its_cap": offer.max_count == count,
            }
            for offer, count in zip(problem.offers, allocation.units[stage], strict=True)
            if count
        ],
        "replicas": [
            {
                "kind": kind.name,
                "service": compiled.question.services[compiled.offerings[g].replica.service].name,
                "offer": problem.offers[kind.offer].name,
                "role": kind.role.value,
                "count": count,
                "spare": min(problem.min_spare_replicas, count),
                "num_devices": kind.num_devices,
                "headroom": kind.headroom,
                "ceiling": problem.fill(g),
                "utilization": [allocation.utilization[s][g] for s in carries],
            }
            for g, (kind, count) in enumerate(zip(problem.kinds, allocation.replicas[stage], strict=True))
            if count
        ],
    }


def _power(compiled: Compiled, allocation: FleetAllocation, stage: int) -> float | None:
    total = 0.0
    for offer, count in zip(compiled.problem.offers, allocation.units[stage], strict=True):
        if count and offer.power_w is None:
            return None
        total += count * (offer.power_w or 0.0)
    return total


def services_document(compiled: Compiled, allocation: FleetAllocation, *, priced: bool = True) -> list[dict[str, Any]]:
    """Each service's buckets: what arrives, where it goes, what it costs, in every scenario."""
    problem = compiled.problem
    unknown: list[float | None] = [None] * len(problem.buckets)
    prices = [bucket_prices(problem, s) if priced else unknown for s in range(len(problem.scenarios))]
    documents, first = [], 0
    for service in compiled.question.services:
        buckets = []
        for b in range(first, first + len(service.buckets)):
            one = problem.buckets[b]
            buckets.append(
                {
                    "input_tokens": list(one.input_tokens),
                    "output_tokens": list(one.output_tokens),
                    "scenarios": [
                        {
                            "scenario": scenario.name,
                            "request_rate_per_s": scenario.request_rate_per_s[b],
                            "weights": _weights(compiled, allocation, s, b),
                            "usd_per_million_requests": prices[s][b],
                        }
                        for s, scenario in enumerate(problem.scenarios)
                    ],
                    "max_request_rate_per_s": {
                        kind.name: row[b]
                        for kind, row in zip(problem.kinds, problem.max_request_rate_per_s, strict=True)
                        if row[b] > 0.0
                    },
                }
            )
        first += len(service.buckets)
        documents.append(
            {
                "name": service.name,
                "model": service.problem.shape.slug,
                "slo": {slo.key: slo.limit_s for slo in service.slos},
                "buckets": buckets,
            }
        )
    return documents


def _weights(compiled: Compiled, allocation: FleetAllocation, s: int, b: int) -> dict[str, float]:
    """Kind → share, without those that are rounding; MIXED and PREFILL shares sum to 1, DECODE to what PREFILL has."""
    rows = {
        kind.name: row[b]
        for kind, row in zip(compiled.problem.kinds, allocation.routing[s], strict=True)
        if row[b] > _LEAST_SHARE
    }
    return dict(sorted(rows.items(), key=lambda item: (-item[1], item[0])))


def replay_document(compiled: Compiled, one: Replay) -> dict[str, Any]:
    """The simulation of one scenario."""
    return {
        "scenario": compiled.problem.scenarios[one.scenario].name,
        "num_requests": one.num_requests,
        "num_runs": one.num_runs,
        "num_rejected": one.num_rejected,
        "burstiness": one.burstiness,
        "is_kept": one.is_kept,
        "note": one.note,
        "promises": [
            {
                "service": compiled.question.services[kept.service].name,
                "promise": kept.slo.key,
                "limit_s": kept.slo.limit_s,
                "attained": kept.attained,
                "lower_limit": kept.lower,
                "is_kept": kept.is_kept,
            }
            for kept in one.kept
        ],
        "kinds": {compiled.problem.kinds[g].name: share for g, share in one.by_kind.items()},
    }


def config_document(searched: Searched) -> dict[str, Any]:
    """The choices that launchers need: every service's pools, and the units of every offer (first stage)."""
    compiled, allocation = searched.compiled, searched.solution.assignment
    if allocation is None:
        return {}
    problem = compiled.problem
    services = []
    for index, service in enumerate(compiled.question.services):
        used = [
            (g, count)
            for g, count in enumerate(allocation.replicas[0])
            if count and compiled.offerings[g].replica.service == index
        ]
        pools = tuple(pool_of(compiled.offerings[g].replica, service, count) for g, count in used)
        document = serving_config_document(ServingConfig(engine=service.problem.rules.name, pools=pools))
        for pool, (g, _) in zip(document["pools"], used, strict=True):
            pool["kind"] = problem.kinds[g].name
            pool["offer"] = problem.offers[problem.kinds[g].offer].name
        services.append({"name": service.name, "model": service.problem.shape.slug, **document})
    units = {offer.name: count for offer, count in zip(problem.offers, allocation.units[0], strict=True) if count}
    return {"services": services, "units": units}
