"""The fleet problem as a mixed-integer program, and the routing over a given fleet as another.

Notation
    o, g, b, s    offer, kind of replica, bucket with traffic, scenario; t(s) the fleet that carries s
    N_to          units rented of offer o in fleet t          D_o   devices of a unit      c_o   USD/h of a unit
    n_tg          replicas, spares included                   d_g   devices of a replica
    y_tg          1 where kind g is in use (only with spares)
    x_sgb         share of bucket b sent to kind g            load_sgb = rate_sb / max_request_rate_gb
    u_g           max_utilization · (1 − interruption_headroom_o) · (1 − headroom_g)
    π_t           weight of fleet t: 1, or that of its scenario
    a_to, z_to    units started and stopped against the present fleet

Objective     min Σ_t π_t Σ_o c_o · N_to + (start · a_to + stop · z_to) / switch_hours     (or watts, or devices)
Constraints   Σ_{g mixed, prefill} x_sgb = 1;  Σ_{g prefill} x_sgb = Σ_{g decode} x_sgb       for each s, b
              Σ_b load_sgb · x_sgb ≤ u_g · (n_t(s)g − spare · y_t(s)g)
              Σ_{g on o} d_g · n_tg ≤ D_o · N_to, or patterns where replicas leave gaps (:mod:`.packing`)
              N_to ≤ max_count_o;  n_tg ≤ most_g · y_tg
              prefill and decode kinds: at most one of each role and service in use, of one provider and region
              N_to equal in all t for reserved offers;  Σ_o power_o · N_to ≤ max_power_w;  Σ_o c_o · N_to ≤ budget
              Σ_{o in quota} D_o · N_to ≤ max_devices
              x_sgb = k_sgb / steps, k whole, where the router knows steps only
              N_to − present_o ≤ a_to;  present_o − N_to ≤ z_to

Routing       min p   with   Σ_b load_sgb · x_sgb ≤ p · u_g · (n_g − spare)  and the rows above on x_sgb, for one s and
              given n: p is how full the fullest kind is
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.milp import Program
from meshplan.planner.gpu_allocation.nodes.packing import lay_out, most_units
from meshplan.planner.gpu_allocation.nodes.problem import FleetObjective, FleetProblem, Offer
from meshplan.planner.gpu_allocation.replicas.instance import busy_replicas
from meshplan.planner.serving.problem.config import Role


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
    return np.where(rate > 0, busy_replicas(rate, capacity), 0.0)


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
        names = [f"{kind.name}[{stage}]" for kind in problem.kinds]
        counts = [
            program.column(f"replicas {name}", 0, count, whole=True) for name, count in zip(names, most, strict=True)
        ]
        flags = [program.column(f"use {name}", 0, 1, whole=True) for name in names if problem.min_spare_replicas]
        for g, flag in enumerate(flags):
            program.row(f"spare {names[g]}", {flag: float(most[g]), counts[g]: -1.0}, low=0.0)
        for o, offer in enumerate(problem.offers):
            laid = [(counts[g], kind.num_devices) for g, kind in enumerate(problem.kinds) if kind.offer == o]
            lay_out(program, f"{offer.name}[{stage}]", units[stage][o], laid, offer.num_devices)
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
        mine = [g for g, kind in enumerate(problem.kinds) if kind.offer == o]
        sizes, counts = [problem.kinds[g].num_devices for g in mine], [most[g] for g in mine]
        useful = max(most_units(sizes, counts, offer.num_devices), offer.present)
        high = useful if offer.max_count is None else min(useful, offer.max_count)
        name = f"{offer.name}[{stage}]"
        column = program.column(f"units {name}", 0, high, cost=weight * unit_cost(problem, offer), whole=True)
        columns.append(column)
        for verb, usd, sign in (("start", problem.start_usd, 1.0), ("stop", problem.stop_usd, -1.0)):
            if usd and problem.objective is FleetObjective.COST:
                changed = program.column(f"{verb} {name}", 0, math.inf, cost=weight * usd / problem.switch_hours)
                program.row(f"{verb} {name}", {changed: 1.0, column: -sign}, low=-sign * offer.present)
    return tuple(columns)


def _limits(problem: FleetProblem, program: Program, units: list[tuple[int, ...]]) -> None:
    for t, stage in enumerate(units):
        if problem.max_power_w is not None:
            watts = {column: offer.power_w or 0.0 for column, offer in zip(stage, problem.offers, strict=True)}
            program.row(f"max_power_w[{t}]", watts, high=problem.max_power_w)
        if problem.max_usd_per_hour is not None:
            money = {column: offer.usd_per_hour for column, offer in zip(stage, problem.offers, strict=True)}
            program.row(f"max_usd_per_hour[{t}]", money, high=problem.max_usd_per_hour)
        for quota in problem.quotas:
            devices = {stage[o]: float(problem.offers[o].num_devices) for o in quota.offers}
            program.row(f"quota {quota.name}[{t}]", devices, high=float(quota.max_devices))
    for t, stage in enumerate(units[1:], start=1):
        for o, offer in enumerate(problem.offers):
            if offer.is_fixed:
                program.row(f"reserved {offer.name}[{t}]", {units[0][o]: 1.0, stage[o]: -1.0}, low=0.0, high=0.0)


def _pairs(problem: FleetProblem, program: Program, counts: list[int], most: list[int]) -> None:
    """At most one prefill and one decode kind of a service in use, of one provider and region."""
    split = [g for g, kind in enumerate(problem.kinds) if kind.role is not Role.MIXED]
    chosen = {g: program.column(f"choose {problem.kinds[g].name}", 0, 1, whole=True) for g in split}
    for g, flag in chosen.items():
        program.row(f"choose {problem.kinds[g].name}", {flag: float(most[g]), counts[g]: -1.0}, low=0.0)
    for service in {problem.kinds[g].service for g in split}:
        mine = [g for g in split if problem.kinds[g].service == service]
        prefill, decode = ([g for g in mine if problem.kinds[g].role is role] for role in (Role.PREFILL, Role.DECODE))
        for alike in (prefill, decode):
            program.row(f"one kind per role, service {service}", {chosen[g]: 1.0 for g in alike}, high=1.0)
        for first, second in product(prefill, decode):
            offers = [problem.offers[problem.kinds[g].offer] for g in (first, second)]
            if len({(offer.provider, offer.region) for offer in offers}) > 1:
                names = f"{problem.kinds[first].name} with {problem.kinds[second].name}"
                program.row(f"not {names}", {chosen[first]: 1.0, chosen[second]: 1.0}, high=1.0)


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
        name = f"bucket {group[0]}[{scenario}]"
        columns, row_of_group = share_columns(problem, program, name, serves, most=1.0)
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
        program.row(f"load {problem.kinds[g].name}[{scenario}]", row, low=0.0)


def arriving(problem: FleetProblem, scenario: int) -> list[list[int]]:
    """Buckets with traffic, by what is routed together."""
    rates = problem.scenarios[scenario].request_rate_per_s
    groups = [[b for b in group if rates[b] > 0.0] for group in problem.routed_together]
    return [group for group in groups if group]


def share_columns(
    problem: FleetProblem, program: Program, name: str, serves: npt.NDArray[np.bool_], *, most: float
) -> tuple[dict[int, int], int]:
    """Add the shares of one bucket and the rows that send all of it somewhere.

    Args:
        problem: for the roles.
        program: grows.
        name: name of the bucket.
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
        share = f"share {problem.kinds[g].name}, {name}"
        column = columns[g] = program.column(share, 0.0, most)
        if problem.routing_steps is not None:
            steps = program.column(f"steps of {share}", 0.0, float(problem.routing_steps), whole=True)
            program.row(f"steps of {share}", {column: float(problem.routing_steps), steps: -1.0}, low=0.0, high=0.0)
        if role is not Role.DECODE:
            whole[column] = 1.0
        if role is not Role.MIXED:
            handed[column] = 1.0 if role is Role.PREFILL else -1.0
    row = program.row(f"all of {name}", whole, low=1.0, high=1.0)
    if handed:
        program.row(f"prefill = decode, {name}", handed, low=0.0, high=0.0)
    return columns, row


def routing_program(
    problem: FleetProblem, scenario: int, replicas: Sequence[int]
) -> tuple[Program, dict[tuple[int, int], int]]:
    """The routing of one scenario over given replicas that leaves the fullest kind as empty as possible.

    Args:
        problem: the question.
        scenario: whose traffic.
        replicas: [kinds], spares included.

    Returns:
        The program, whose objective is the peak over the kinds of load / capacity, and (kind, bucket) → column.
    """
    program, load = Program(), loads(problem, scenario)
    peak = program.column("peak", 0.0, math.inf, cost=1.0)
    columns: dict[tuple[int, int], int] = {}
    usable = [max(count - problem.min_spare_replicas, 0) for count in replicas]
    room = np.array([problem.fill(g) * count for g, count in enumerate(usable)])
    for group in arriving(problem, scenario):
        serves: npt.NDArray[np.bool_] = np.isfinite(load[:, group]).all(axis=1) & (room > 0.0)
        found, _ = share_columns(problem, program, f"bucket {group[0]}", serves, most=math.inf)
        columns.update({(g, b): column for g, column in found.items() for b in group})
    for g, size in enumerate(room.tolist()):
        row: dict[int, float] = {}
        for b in range(len(problem.buckets)):
            if (g, b) in columns:
                row[columns[g, b]] = row.get(columns[g, b], 0.0) - float(load[g, b])
        if row:
            program.row(f"load {problem.kinds[g].name}", {peak: size, **row}, low=0.0)
    return program, columns
