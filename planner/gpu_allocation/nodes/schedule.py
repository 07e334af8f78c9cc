"""A fleet for every hour when traffic varies and changing the fleet costs money: a day, or a year of 8,760 hours.

Notation
    f_t           traffic of hour t, as a multiple of the problem's       N_t     units rented, by offer
    c             USD/h of a unit                                         s, p    USD to start and to give back a unit
    φ(N)          most traffic that fleet N carries, in the same multiples

Objective     min Σ_t c·N_t + s·Σ(N_t − N_t−1)⁺ + p·Σ(N_t−1 − N_t)⁺     with φ(N_t) ≥ f_t and N_0 the present fleet

Method        Candidates are cheapest fleets: at every level of traffic that occurs (within 1 %), at each level among
              those that hold the level below's, and among those that the level above's holds, so that
              few units change between levels. Over them the best schedule is found by dynamic programming, hour by
              hour, with every hour's own traffic.

Bound         Rent v_t = c·N_t is at least opt(f_t), the cheapest fleet's, and a start costs at least s' = min_o s/c_o
              for each USD/h that the rent rises (p' likewise for falls). So

                  min Σ_t v_t + s'·(v_t − v_t−1)⁺ + p'·(v_t−1 − v_t)⁺   with v_t ≥ opt(f_t)

              bounds every schedule from below. It is a chain of one number, solved exactly over the values of opt; the
              traffic is rounded down to a level here, up for the candidates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.solution import Solution, Status, relative_gap, status_of
from meshplan.planner.gpu_allocation.nodes.problem import FleetAllocation, FleetObjective, FleetProblem, Scenario
from meshplan.planner.gpu_allocation.nodes.solve import allocation_of, route, solve_fleet

# Fleets that were solved for before.
Memory = dict[FleetProblem, Solution[FleetAllocation]]
# Distance of two levels of traffic.
LEVEL_STEP = 0.01
# Fleets that the dynamic program chooses from; its work grows with their square.
MAX_CANDIDATES = 600
# Relative; the tolerance of the linear program that routes.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A fleet for every hour.

    Args:
        fleets: distinct fleets in use.
        fleet_of: [hours] which of them.
        rent_usd: rent of all hours.
        switching_usd: cost of all changes, that from the present fleet included.
        num_switches: hours in which the fleet changes.
        constant_usd: rent of the cheapest fleet for the busiest hour throughout, with the change to it.
    """

    fleets: tuple[FleetAllocation, ...]
    fleet_of: tuple[int, ...]
    rent_usd: float
    switching_usd: float
    num_switches: int
    constant_usd: float


def solve_schedule(
    problem: FleetProblem,
    factors: Sequence[float],
    *,
    start_usd: float,
    stop_usd: float,
    memory: Memory | None = None,
) -> Solution[Schedule]:
    """Find the cheapest schedule.

    Args:
        problem: with one scenario, whose traffic the factors multiply; its own cost of switching is not looked at.
        factors: [hours] f.
        start_usd: s.
        stop_usd: p.
        memory: fleets solved for other schedules of the same problem; grows.

    Raises:
        SpecError: the problem has several scenarios or another objective than cost.
        SolverError: a solver broke.
    """
    if len(problem.scenarios) > 1 or problem.objective is not FleetObjective.COST:
        message = "a schedule is of one scenario, at least cost"
        raise SpecError.at("schedule", message)
    started, cpu_started = time.monotonic(), time.process_time()
    problem = replace(problem, start_usd=0.0, stop_usd=0.0)
    traffic = np.array(factors, dtype=float)
    levels = traffic_levels(traffic)
    memory = {} if memory is None else memory
    found = [_solved(_at(problem, level), memory) for level in levels]
    schedule = bound = gap = None
    status, cost = Status.INFEASIBLE, None
    if found[-1].assignment is not None:
        candidates = _candidates(problem, levels, found, memory)
        schedule = _best_schedule(problem, traffic, candidates, start_usd, stop_usd)
        cost = schedule.rent_usd + schedule.switching_usd
        bound = min(_bound(problem, traffic, levels, found, start_usd, stop_usd), cost)
        gap, status = relative_gap(cost, bound), status_of(cost, bound)
    return Solution(
        status=status,
        assignment=schedule,
        objective=cost,
        bound=bound,
        gap=gap,
        wall_s=time.monotonic() - started,
        cpu_s=time.process_time() - cpu_started,
        solver="dynamic program over cheapest fleets",
    )


def traffic_levels(traffic: FloatArray) -> FloatArray:
    """Levels in rising order, such that every hour lies at most LEVEL_STEP below one; 0 is one where it occurs.

    Few different rates are their own levels. Many share a grid that depends on the busiest hour alone: schedules with
    the same peak have the same levels.
    """
    rates = np.unique(traffic)
    if len(rates) <= 1.0 / LEVEL_STEP:
        return rates
    peak, step = float(rates[-1]), math.log1p(LEVEL_STEP)
    deepest = math.floor(math.log(peak / float(rates[rates > 0.0][0])) / step)
    grid = peak * np.exp(-step * np.arange(deepest, -1, -1))
    grid[-1] = peak
    return grid if rates[0] > 0.0 else np.concatenate([[0.0], grid])


def _solved(problem: FleetProblem, memory: Memory) -> Solution[FleetAllocation]:
    if problem not in memory:
        memory[problem] = solve_fleet(problem)
    return memory[problem]


def _at(problem: FleetProblem, factor: float) -> FleetProblem:
    scenario = problem.scenarios[0]
    rates = tuple(factor * rate for rate in scenario.request_rate_per_s)
    return replace(problem, scenarios=(Scenario(name=scenario.name, request_rate_per_s=rates),))


# --- candidates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    units: tuple[int, ...]
    replicas: tuple[int, ...]
    shares: FloatArray
    carries: float


def _candidates(
    problem: FleetProblem, levels: FloatArray, found: Sequence[Solution[FleetAllocation]], memory: Memory
) -> list[_Candidate]:
    """Fleets to choose from, with what each carries."""
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], FleetAllocation] = {}
    chains = [solution.assignment for solution in found if solution.assignment is not None]
    stride = max(2 * len(levels) // MAX_CANDIDATES, 1)
    chains += _rising(problem, levels[::stride], memory)
    chains += _falling(problem, levels[::-stride], found[-1], memory)
    for fleet in chains:
        seen.setdefault((fleet.units[0], fleet.replicas[0]), fleet)
    return [_candidate(problem, fleet) for fleet in seen.values()]


def _rising(problem: FleetProblem, levels: FloatArray, memory: Memory) -> list[FleetAllocation]:
    """At each level the cheapest fleet that contains the one below it: nothing is given back while traffic rises."""
    fleets: list[FleetAllocation] = []
    held = (0,) * len(problem.offers)
    for level in levels:
        solution = _solved(_within(_at(problem, level), low=held), memory)
        if solution.assignment is None:
            break
        fleets.append(solution.assignment)
        held = solution.assignment.units[0]
    return fleets


def _falling(
    problem: FleetProblem, levels: FloatArray, top: Solution[FleetAllocation], memory: Memory
) -> list[FleetAllocation]:
    """At each level the cheapest fleet within that of the level above: nothing new is rented while traffic falls."""
    fleets: list[FleetAllocation] = []
    held = None if top.assignment is None else top.assignment.units[0]
    for level in levels:
        if held is None:
            break
        offers = tuple(replace(offer, max_count=most) for offer, most in zip(problem.offers, held, strict=True))
        solution = _solved(_at(replace(problem, offers=offers), level), memory)
        if solution.assignment is None:
            break
        fleets.append(solution.assignment)
        held = solution.assignment.units[0]
    return fleets


def _within(problem: FleetProblem, *, low: Sequence[int]) -> FleetProblem:
    """The problem in which no unit that is held is given back: that would cost more than its rent saves."""
    present = tuple(replace(offer, present=count) for offer, count in zip(problem.offers, low, strict=True))
    dearest = max(offer.usd_per_hour for offer in problem.offers)
    return replace(problem, offers=present, stop_usd=2.0 * dearest + 1.0)


def _candidate(problem: FleetProblem, fleet: FleetAllocation) -> _Candidate:
    """A fleet with the routing that leaves the most room, and φ with its replicas as they are laid.

    Routing in steps is kept as it was found: that search has its limits.
    """
    units, replicas = fleet.units[0], fleet.replicas[0]
    if problem.routing_steps is None:
        shares, peak = route(problem, 0, replicas)
    else:
        shares = np.array(fleet.routing[0])
        peak = peak_of(problem, replicas, shares)
    return _Candidate(units, replicas, shares, math.inf if peak <= 0.0 else (1.0 + _ROUNDING) / peak)


def peak_of(problem: FleetProblem, replicas: tuple[int, ...], shares: FloatArray) -> float:
    """How full the fullest kind is, as a multiple of what it may be; ∞ where some bucket is sent nowhere."""
    arrives = np.array(problem.scenarios[0].request_rate_per_s) > 0.0
    if (arrives & ~shares.any(axis=0)).any():
        return math.inf
    full = allocation_of(problem, ((),), (replicas,), [shares]).utilization[0]
    return max((used / problem.fill(g) for g, used in enumerate(full)), default=0.0)


# --- dynamic program --------------------------------------------------------------------------------------------------


def _best_schedule(
    problem: FleetProblem, traffic: FloatArray, candidates: Sequence[_Candidate], start_usd: float, stop_usd: float
) -> Schedule:
    """The cheapest sequence of the candidates, exactly, from the fleet that is there before the first hour.

    The least cost up to hour h with fleet k in it, ∞ where k carries less than that hour's traffic::

        C_h(k) = rent(k) + min over j of (C_{h−1}(j) + change(j, k))
    """
    price = np.array([offer.usd_per_hour for offer in problem.offers])
    units = np.array([candidate.units for candidate in candidates], dtype=float)
    carries = np.array([candidate.carries for candidate in candidates])
    rent = units @ price
    change = _changes(units, units, start_usd, stop_usd)  # [from, to]
    present = np.array([[offer.present for offer in problem.offers]], dtype=float)
    first = _changes(present, units, start_usd, stop_usd)[0]
    came_from = np.zeros((len(traffic), len(candidates)), dtype=np.int32)
    cost = first.copy()
    for hour, factor in enumerate(traffic.tolist()):
        if hour:
            total = cost[:, None] + change
            came_from[hour] = total.argmin(axis=0)
            cost = total[came_from[hour], np.arange(len(candidates))]
        cost = np.where(carries >= factor, cost + rent, np.inf)
    chosen = np.zeros(len(traffic), dtype=np.int64)
    chosen[-1] = int(cost.argmin())
    for hour in range(len(traffic) - 1, 0, -1):
        chosen[hour - 1] = came_from[hour, chosen[hour]]
    switching = float(first[chosen[0]] + change[chosen[:-1], chosen[1:]].sum())
    fits = np.where(carries >= traffic.max(), len(traffic) * rent + first, np.inf)
    used, fleet_of = np.unique(chosen, return_inverse=True)
    return Schedule(
        fleets=tuple(_routed_fleet(problem, candidates[k], traffic[chosen == k].max()) for k in used.tolist()),
        fleet_of=tuple(int(k) for k in fleet_of),
        rent_usd=float(rent[chosen].sum()),
        switching_usd=switching,
        num_switches=int((chosen[1:] != chosen[:-1]).sum()),
        constant_usd=float(fits.min()),
    )


def _changes(before: FloatArray, after: FloatArray, start_usd: float, stop_usd: float) -> FloatArray:
    """[before, after] USD of going from one fleet to another."""
    total = np.zeros((len(before), len(after)))
    for o in range(before.shape[1]):
        difference = after[None, :, o] - before[:, None, o]
        total += start_usd * np.maximum(difference, 0.0) + stop_usd * np.maximum(-difference, 0.0)
    return total


def _routed_fleet(problem: FleetProblem, candidate: _Candidate, factor: float) -> FleetAllocation:
    """The fleet with its routing at the most traffic that it is given."""
    return allocation_of(_at(problem, factor), (candidate.units,), (candidate.replicas,), [candidate.shares])


# --- bound ------------------------------------------------------------------------------------------------------------


def _bound(
    problem: FleetProblem,
    traffic: FloatArray,
    levels: FloatArray,
    found: Sequence[Solution[FleetAllocation]],
    start_usd: float,
    stop_usd: float,
) -> float:
    """The lower bound on every schedule's cost, by the method of the module's docstring."""
    least = np.array([solution.bound or 0.0 for solution in found])
    below = np.searchsorted(levels, traffic * (1.0 + _ROUNDING), side="right") - 1
    needed = np.where(below >= 0, least[np.maximum(below, 0)], 0.0)
    useful = {kind.offer for kind in problem.kinds}
    dearest = max(
        (offer.usd_per_hour for o, offer in enumerate(problem.offers) if o in useful or offer.present), default=0.0
    )
    start, stop = (usd / dearest if dearest > 0.0 else 0.0 for usd in (start_usd, stop_usd))
    present = sum(offer.present * offer.usd_per_hour for offer in problem.offers)
    values = np.unique(np.concatenate([needed, [present]]))
    cost = start * np.maximum(values - present, 0.0) + stop * np.maximum(present - values, 0.0)
    for hour, need in enumerate(needed.tolist()):
        if hour:
            rising = np.minimum.accumulate(cost - start * values) + start * values
            falling = np.minimum.accumulate((cost + stop * values)[::-1])[::-1] - stop * values
            cost = np.minimum(rising, falling)
        cost = np.where(values >= need - _ROUNDING, cost + values, np.inf)
    return float(cost.min())
