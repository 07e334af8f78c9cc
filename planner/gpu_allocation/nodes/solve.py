"""Solves the fleet problem: units to rent, replicas on them, and the share of each bucket that goes to each kind.

Where only the routing couples the kinds, the question is the plain one and the search over fleets answers it
(:mod:`meshplan.planner.gpu_allocation.replicas.solve`). Elsewhere SCIP proves the program of
:mod:`meshplan.planner.gpu_allocation.nodes.program`; its counts are kept and the routing is computed anew, so
that the fullest kind is as empty as possible.

Status        ``optimal`` where bound and cost agree; SCIP is stopped after a number of boxes, with the gap it has then.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshplan.catalogs.errors import SolverError
from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.milp import BACKENDS, DEFAULT_BACKEND, solve_program, solve_relaxed
from meshplan.planner.core.solution import OnProgress, Solution, Status, bounded, relative_gap, status_of
from meshplan.planner.gpu_allocation.nodes.problem import FleetAllocation, FleetObjective, FleetProblem, as_plain
from meshplan.planner.gpu_allocation.nodes.program import (
    fleet_program,
    loads,
    routing_program,
    stage_weight,
    unit_cost,
)
from meshplan.planner.gpu_allocation.replicas import solve as gpu_allocation

# Nodes of SCIP's tree after which its best fleet is taken with its gap: about 30 s for 40 kinds and 50 buckets.
MAX_NODES = 50_000
# The same for the routing in steps over a given fleet, which need not be the best, only fit.
ROUTING_MAX_NODES = 500
# Share by which the routing may exceed a capacity: SCIP's tolerance on a row.
_FITS = 1e-6


def solve_fleet(
    problem: FleetProblem, *, backend: str = DEFAULT_BACKEND, on_progress: OnProgress | None = None
) -> Solution[FleetAllocation]:
    """Find the best fleet and a routing that fits it.

    Args:
        problem: the question.
        backend: one of :data:`~meshplan.planner.core.milp.BACKENDS`; any but the default solves the program even where
            the search over fleets would answer.
        on_progress: called when a better fleet is found, where the search over fleets is used.

    Raises:
        SolverError: a solver broke.
    """
    if problem.routing_steps is not None:
        return _in_steps(problem, backend)
    plain = as_plain(problem) if backend == DEFAULT_BACKEND else None
    if plain is None:
        return _by_program(problem, backend)
    solution = gpu_allocation.solve(plain, on_progress=on_progress)
    found = solution.assignment
    allocation = None
    if found is not None:
        units = [0] * len(problem.offers)
        for kind, count in zip(problem.kinds, found.counts, strict=True):
            units[kind.offer] += count * kind.num_devices // problem.offers[kind.offer].num_devices
        allocation = FleetAllocation(
            units=(tuple(units),),
            replicas=(found.counts,),
            routing=(found.routing,),
            utilization=(found.utilization,),
        )
    return Solution(
        status=solution.status,
        assignment=allocation,
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap,
        wall_s=solution.wall_s,
        cpu_s=solution.cpu_s,
        solver=solution.solver,
    )


def _in_steps(problem: FleetProblem, backend: str) -> Solution[FleetAllocation]:
    """The fleet for any shares where it has a routing in steps; else what the program with whole shares finds."""
    free = solve_fleet(replace(problem, routing_steps=None), backend=backend)
    if free.assignment is None:
        return free
    found = [route(problem, s, free.assignment.replicas[problem.stage_of(s)]) for s in range(len(problem.scenarios))]
    if all(peak <= 1.0 + _FITS for _, peak in found):
        shares = [shares for shares, _ in found]
        stepped = allocation_of(problem, free.assignment.units, free.assignment.replicas, shares)
        return replace(free, assignment=stepped)
    solution = _by_program(problem, backend)
    if solution.objective is None or solution.bound is None or free.bound is None:
        return solution
    bound = min(max(solution.bound, free.bound), solution.objective)
    return bounded(solution, bound, free)


def _by_program(problem: FleetProblem, backend: str) -> Solution[FleetAllocation]:
    """The fleet of the mixed-integer program, with a routing that is as even as its replicas allow.

    Raises:
        SolverError: no fleet was found within :data:`MAX_NODES` nodes of the tree.
    """
    importlib.import_module("ortools.linear_solver.pywraplp")  # before the clocks start
    started, cpu_started = time.monotonic(), time.process_time()
    built = fleet_program(problem)
    solved = solve_program(built.program, backend, max_nodes=MAX_NODES)
    allocation = None
    objective = bound = gap = None
    status = Status.INFEASIBLE
    if solved.values:
        units = tuple(tuple(round(solved.values[column]) for column in stage) for stage in built.units)
        replicas = tuple(tuple(round(solved.values[column]) for column in stage) for stage in built.replicas)
        if problem.routing_steps is None:
            allocation = routed(problem, units, replicas)
        else:
            allocation = allocation_of(problem, units, replicas, _whole_shares(problem, built.shares, solved.values))
        objective = fleet_objective(problem, units)
        bound = objective if solved.bound >= solved.objective else min(solved.bound, objective)
        gap, status = relative_gap(objective, bound), status_of(objective, bound)
    elif solved.bound < math.inf:
        raise SolverError(f"SCIP found no fleet within {MAX_NODES} boxes; ask for fewer kinds, buckets or scenarios")
    return Solution(
        status=status,
        assignment=allocation,
        objective=objective,
        bound=bound,
        gap=gap,
        wall_s=time.monotonic() - started,
        cpu_s=time.process_time() - cpu_started,
        solver=f"mixed-integer program ({BACKENDS[backend].label})",
    )


def fleet_objective(problem: FleetProblem, units: Sequence[Sequence[int]]) -> float:
    """The objective of a fleet, recomputed: [stages][offers] units."""
    total = []
    for stage, counts in enumerate(units):
        weight = stage_weight(problem, stage)
        for offer, count in zip(problem.offers, counts, strict=True):
            total.append(weight * count * unit_cost(problem, offer))
            if problem.objective is FleetObjective.COST:
                change = count - offer.present
                usd = problem.start_usd * max(change, 0) + problem.stop_usd * max(-change, 0)
                total.append(weight * usd / problem.switch_hours)
    return math.fsum(total)


def usd_per_hour(problem: FleetProblem, units: Sequence[int]) -> float:
    """Rent of one fleet, USD/h."""
    return math.fsum(count * offer.usd_per_hour for count, offer in zip(units, problem.offers, strict=True))


def routed(
    problem: FleetProblem, units: tuple[tuple[int, ...], ...], replicas: tuple[tuple[int, ...], ...]
) -> FleetAllocation:
    """Route every scenario over given replicas so that the fullest kind is as empty as possible.

    Raises:
        SolverError: the replicas do not carry the traffic.
    """
    found = [route(problem, s, replicas[problem.stage_of(s)]) for s in range(len(problem.scenarios))]
    peak = max(peak for _, peak in found)
    if peak > 1.0 + _FITS * max(len(problem.buckets), 1):
        raise SolverError(f"the routing over the chosen fleet needs {peak:.6f} times its capacity")
    return allocation_of(problem, units, replicas, [shares for shares, _ in found])


def allocation_of(
    problem: FleetProblem,
    units: tuple[tuple[int, ...], ...],
    replicas: tuple[tuple[int, ...], ...],
    shares: Sequence[FloatArray],
) -> FleetAllocation:
    """The decision with what its routing fills: [scenarios] of [kinds, buckets] shares."""
    routing, utilization = [], []
    for s, of_scenario in enumerate(shares):
        busy = busy_replicas(problem, s, of_scenario)
        usable = np.array([_usable(problem, count) for count in replicas[problem.stage_of(s)]], dtype=float)
        full = np.divide(busy, usable, out=np.zeros_like(busy), where=usable > 0)
        routing.append(tuple(tuple(row) for row in of_scenario.tolist()))
        utilization.append(tuple(full.tolist()))
    return FleetAllocation(units=units, replicas=replicas, routing=tuple(routing), utilization=tuple(utilization))


def busy_replicas(problem: FleetProblem, scenario: int, shares: FloatArray) -> FloatArray:
    """[kinds] replicas that a routing keeps busy."""
    load = loads(problem, scenario)
    busy: FloatArray = np.where(shares > 0, shares * np.where(np.isfinite(load), load, 0.0), 0.0).sum(axis=1)
    return busy


def _whole_shares(
    problem: FleetProblem, columns: Mapping[tuple[int, int, int], int], values: Sequence[float]
) -> list[FloatArray]:
    """[scenarios] of [kinds, buckets] the program's shares, to the step."""
    steps = problem.routing_steps or 1
    shares = [np.zeros((len(problem.kinds), len(problem.buckets))) for _ in problem.scenarios]
    for (s, g, b), column in columns.items():
        shares[s][g, b] = round(steps * values[column]) / steps
    return shares


def _usable(problem: FleetProblem, count: int) -> int:
    return max(count - problem.min_spare_replicas, 0)


def route(problem: FleetProblem, scenario: int, replicas: Sequence[int]) -> tuple[FloatArray, float]:
    """Shares that minimise the peak over the kinds of load / (u · usable replicas): a linear program.

    With steps it is a mixed-integer program, stopped after some boxes: its shares may not be the best in steps.

    Returns:
        [kinds, buckets] shares, and the peak: above 1 the replicas do not carry the scenario; ∞ where a bucket has
        nowhere to go.
    """
    load = loads(problem, scenario)
    shares = np.zeros(load.shape)
    if not any(problem.scenarios[scenario].request_rate_per_s):
        return shares, 0.0
    program, columns = routing_program(problem, scenario, replicas)
    steps = problem.routing_steps
    solved = solve_relaxed(program) if steps is None else solve_program(program, max_nodes=ROUTING_MAX_NODES)
    if not solved.values:
        return shares, math.inf
    for (g, b), column in columns.items():
        share = max(solved.values[column], 0.0)
        shares[g, b] = share if steps is None else round(steps * share) / steps
    return shares, solved.objective


def bucket_prices(problem: FleetProblem, scenario: int = 0) -> list[float | None]:
    """What a million more requests of each bucket cost in the linear relaxation, USD; None without traffic.

    Buckets that are routed together have the price of their mix.
    """
    built = fleet_program(problem)
    solved = solve_relaxed(built.program)
    prices: list[float | None] = [None] * len(problem.buckets)
    together = {b: group for group in problem.routed_together for b in group}
    for (s, b), row in built.served.items():
        if s == scenario and solved.duals:
            rate = sum(problem.scenarios[s].request_rate_per_s[k] for k in together[b])
            prices[b] = solved.duals[row] / rate / SECONDS_PER_HOUR * 1e6
    return prices
