"""The fleet problem as a mixed-integer program.

Notation
    o, g, b, s    offer, kind of replica, bucket with traffic, scenario; t(s) the fleet that carries s
    N_to          units rented of offer o in fleet t          D_o   devices of a unit      c_o   USD/h of a unit
    n_tg          replicas, spares included                   d_g   devices of a replica
    y_tg          1 where kind g is in use (only with spares)
    x_sgb         share of bucket b sent to kind g            load_sgb = rate_sb / max_request_rate_gb
    u_g           max_utilization · (1 − interruption_headroom_o) · (1 − headroom_g)
    π_t           weight of fleet t: 1, or that of its scenario
    a_to, z_to    units started and stopped against today's

Objective     min Σ_t π_t Σ_o c_o · N_to + (start · a_to + stop · z_to) / switch_hours     (or watts, or devices)
Constraints   Σ_{g mixed, prefill} x_sgb = 1;  Σ_{g prefill} x_sgb = Σ_{g decode} x_sgb       for each s, b
              Σ_b load_sgb · x_sgb ≤ u_g · (n_t(s)g − spare · y_t(s)g)
              Σ_{g on o} d_g · n_tg ≤ D_o · N_to;  N_to ≤ max_count_o;  n_tg ≤ most_g · y_tg
              prefill and decode kinds: at most one of each role and service in use, of one provider and region
              N_to equal in all t for reserved offers;  Σ_o power_o · N_to ≤ max_power_w;  Σ_o c_o · N_to ≤ budget
              Σ_{o in quota} D_o · N_to ≤ max_devices
              x_sgb = k_sgb / steps, k whole, where the router knows steps only
              N_to − present_o ≤ a_to;  present_o − N_to ≤ z_to
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.gpu_allocation.nodes.problem import FleetObjective, FleetProblem, Offer
from meshplan.planner.gpu_allocation.replicas.program import Program
from meshplan.planner.serving.problem.config import Role

# A bucket with traffic counts as at least this much of a replica: below lies the solvers' tolerance.
_LEAST_LOAD = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetProgram:
    """A program and where its columns and rows mean something.

    Args:
        program: see the module's text.
        units: [stages][offers] columns.
        replicas: [stages][kinds] columns.
        shares: (scenario, kind, bucket) → column.
        served: (scenario, bucket) → row that sends the bucket somewhere.
    """

    program: Program
    units: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[int, ...], ...]
    shares: dict[tuple[int, int, int], int]
    served: dict[tuple[int, int], int]


def loads(problem: FleetProblem, scenario: int) -> FloatArray:
    """[kinds, buckets] busy replicas that all traffic of a bucket keeps busy; ∞ where a kind cannot serve it."""
    rate = np.array(problem.scenarios[scenario].request_rate_per_s, dtype=float)
    capacity = np.array(problem.max_request_rate_per_s, dtype=float).reshape(len(problem.kinds), len(rate))
    load = np.full(capacity.shape, np.inf)
    with np.errstate(over="ignore"):
        np.divide(np.broadcast_to(rate, capacity.shape), capacity, out=load, where=capacity > 0)
    return np.where(rate > 0, np.maximum(load, _LEAST_LOAD), 0.0)


def most_replicas(problem: FleetProblem) -> list[int]:
    """[kinds] replicas, spares included, beyond which no plan can use one."""
    most = []
    for g, kind in enumerate(problem.kinds):
        offer = problem.offers[kind.offer]
        needed = 0.0
        for s in range(len(problem.scenarios)):
            row = loads(problem, s)[g]
            needed = max(needed, float(row[np.isfinite(row)].sum()))
        useful = math.ceil(needed / problem.fill(g)) if needed else 0
        had = math.inf if offer.max_count is None else offer.max_count * offer.num_devices // kind.num_devices
        usable = min(useful, had - problem.min_spare_replicas)
        most.append(int(usable) + problem.min_spare_replicas if usable > 0 else 0)
    return most


def fleet_program(problem: FleetProblem) -> FleetProgram:
    """Build the program."""
    program = Program()
    most = most_replicas(problem)
    units = [_units(problem, program, stage, most) for stage in range(problem.num_stages)]
    replicas, in_use = [], []
    for stage in range(problem.num_stages):
        counts = [program.column(0, count, whole=True) for count in most]
        flags = [program.column(0, 1, whole=True) for _ in most] if problem.min_spare_replicas else []
        for g, flag in enumerate(flags):
            program.row({flag: float(most[g]), counts[g]: -1.0}, low=0.0)
        for o, offer in enumerate(problem.offers):
            laid = {counts[g]: -float(kind.num_devices) for g, kind in enumerate(problem.kinds) if kind.offer == o}
            program.row({units[stage][o]: float(offer.num_devices), **laid}, low=0.0)
        _pairs(problem, program, counts, most)
        replicas.append(tuple(counts))
        in_use.append(flags)
    _limits(problem, program, units)
    shares: dict[tuple[int, int, int], int] = {}
    served: dict[tuple[int, int], int] = {}
    for s in range(len(problem.scenarios)):
        stage = problem.stage_of(s)
        _traffic(problem, program, s, replicas[stage], in_use[stage], shares, served)
    return FleetProgram(program=program, units=tuple(units), replicas=tuple(replicas), shares=shares, served=served)


def unit_cost(problem: FleetProblem, offer: Offer) -> float:
    """What a unit counts in the objective."""
    if problem.objective is FleetObjective.POWER:
        return offer.power_w or 0.0
    return float(offer.num_devices) if problem.objective is FleetObjective.NUM_DEVICES else offer.usd_per_hour


def stage_weight(problem: FleetProblem, stage: int) -> float:
    """π_t."""
    return problem.scenarios[stage].weight if problem.num_stages > 1 else 1.0


def _units(problem: FleetProblem, program: Program, stage: int, most: list[int]) -> tuple[int, ...]:
    weight = stage_weight(problem, stage)
    columns = []
    for o, offer in enumerate(problem.offers):
        devices = sum(
            count * kind.num_devices for count, kind in zip(most, problem.kinds, strict=True) if kind.offer == o
        )
        useful = max(-(-devices // offer.num_devices), offer.present)
        high = useful if offer.max_count is None else min(useful, offer.max_count)
        column = program.column(0, high, cost=weight * unit_cost(problem, offer), whole=True)
        columns.append(column)
        for usd, sign in ((problem.start_usd, 1.0), (problem.stop_usd, -1.0)):
            if usd and problem.objective is FleetObjective.COST:
                changed = program.column(0, math.inf, cost=weight * usd / problem.switch_hours)
                program.row({changed: 1.0, column: -sign}, low=-sign * offer.present)
    return tuple(columns)


def _limits(problem: FleetProblem, program: Program, units: list[tuple[int, ...]]) -> None:
    for stage in units:
        if problem.max_power_w is not None:
            watts = {column: offer.power_w or 0.0 for column, offer in zip(stage, problem.offers, strict=True)}
            program.row(watts, high=problem.max_power_w)
        if problem.max_usd_per_hour is not None:
            money = {column: offer.usd_per_hour for column, offer in zip(stage, problem.offers, strict=True)}
            program.row(money, high=problem.max_usd_per_hour)
        for quota in problem.quotas:
            devices = {stage[o]: float(problem.offers[o].num_devices) for o in quota.offers}
            program.row(devices, high=float(quota.max_devices))
    for stage in units[1:]:
        for o, offer in enumerate(problem.offers):
            if offer.is_fixed:
                program.row({units[0][o]: 1.0, stage[o]: -1.0}, low=0.0, high=0.0)


def _pairs(problem: FleetProblem, program: Program, counts: list[int], most: list[int]) -> None:
    """At most one prefill and one decode kind of a service in use, side by side."""
    apart = [g for g, kind in enumerate(problem.kinds) if kind.role is not Role.MIXED]
    chosen = {g: program.column(0, 1, whole=True) for g in apart}
    for g, flag in chosen.items():
        program.row({flag: float(most[g]), counts[g]: -1.0}, low=0.0)
    for service in {problem.kinds[g].service for g in apart}:
        mine = [g for g in apart if problem.kinds[g].service == service]
        prefill, decode = ([g for g in mine if problem.kinds[g].role is role] for role in (Role.PREFILL, Role.DECODE))
        for alike in (prefill, decode):
            program.row({chosen[g]: 1.0 for g in alike}, high=1.0)
        for first, second in product(prefill, decode):
            offers = [problem.offers[problem.kinds[g].offer] for g in (first, second)]
            if len({(offer.provider, offer.region) for offer in offers}) > 1:
                program.row({chosen[first]: 1.0, chosen[second]: 1.0}, high=1.0)


def _traffic(
    problem: FleetProblem,
    program: Program,
    scenario: int,
    replicas: tuple[int, ...],
    in_use: list[int],
    shares: dict[tuple[int, int, int], int],
    served: dict[tuple[int, int], int],
) -> None:
    load = loads(problem, scenario)
    for group in arriving(problem, scenario):
        serves: npt.NDArray[np.bool_] = np.all(np.isfinite(load[:, group]), axis=1)
        columns, row_of_group = share_columns(problem, program, serves, most=1.0)
        served.update({(scenario, b): row_of_group for b in group})
        shares.update({(scenario, g, b): column for g, column in columns.items() for b in group})
    for g in range(len(problem.kinds)):
        fill = problem.fill(g)
        row = {replicas[g]: fill}
        if in_use:
            row[in_use[g]] = -fill * problem.min_spare_replicas
        for b in range(len(problem.buckets)):
            if (scenario, g, b) in shares:
                column = shares[scenario, g, b]
                row[column] = row.get(column, 0.0) - float(load[g, b])
        program.row(row, low=0.0)


def arriving(problem: FleetProblem, scenario: int) -> list[list[int]]:
    """Buckets with traffic, by what is routed together."""
    rates = problem.scenarios[scenario].request_rate_per_s
    groups = [[b for b in group if rates[b] > 0.0] for group in problem.routed_together]
    return [group for group in groups if group]


def share_columns(
    problem: FleetProblem, program: Program, serves: npt.NDArray[np.bool_], *, most: float
) -> tuple[dict[int, int], int]:
    """Add the shares of one bucket and the rows that send all of it somewhere.

    Args:
        problem: for the roles.
        program: grows.
        serves: [kinds] that may take some.
        most: upper bound of a share.

    Returns:
        Kind → column, and the row that sums to 1.
    """
    columns: dict[int, int] = {}
    whole: dict[int, float] = {}
    handed: dict[int, float] = {}
    for g in np.flatnonzero(serves).tolist():
        role = problem.kinds[g].role
        column = columns[g] = program.column(0.0, most)
        if problem.routing_steps is not None:
            steps = program.column(0.0, float(problem.routing_steps), whole=True)
            program.row({column: float(problem.routing_steps), steps: -1.0}, low=0.0, high=0.0)
        if role is not Role.DECODE:
            whole[column] = 1.0
        if role is not Role.MIXED:
            handed[column] = 1.0 if role is Role.PREFILL else -1.0
    row = program.row(whole, low=1.0, high=1.0)
    if handed:
        program.row(handed, low=0.0, high=0.0)
    return columns, row
