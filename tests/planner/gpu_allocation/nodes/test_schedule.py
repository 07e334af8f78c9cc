"""Schedules: against the same question written out over time, and what must hold of any of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.milp import Program, solve_program
from meshplan.planner.core.solution import Status
from meshplan.planner.gpu_allocation.nodes.problem import FleetProblem, Offer, ReplicaKind, Scenario
from meshplan.planner.gpu_allocation.nodes.program import loads, share_columns
from meshplan.planner.gpu_allocation.nodes.schedule import LEVEL_STEP, Schedule, solve_schedule, traffic_levels
from meshplan.planner.gpu_allocation.nodes.solve import solve_fleet
from meshplan.planner.gpu_allocation.replicas.problem import Bucket


def market(prices: list[float], table: list[list[float]], rates: list[float], **offer: int) -> FleetProblem:
    """An offer and a kind for each price."""
    return FleetProblem(
        name="made",
        offers=tuple(Offer(name=f"o{i}", usd_per_hour=price, **offer) for i, price in enumerate(prices)),
        kinds=tuple(ReplicaKind(name=f"o{i}", offer=i) for i in range(len(prices))),
        buckets=tuple(Bucket(input_tokens=(1, 2 + b), output_tokens=(1, 2)) for b in range(len(rates))),
        scenarios=(Scenario(name="", request_rate_per_s=tuple(rates)),),
        max_request_rate_per_s=tuple(tuple(row) for row in table),
    )


def written_out(problem: FleetProblem, factors: list[float], start_usd: float, stop_usd: float) -> float:
    """The least cost, from one program over all hours (SCIP)."""
    program = Program()
    before: list[int] | None = None
    for factor in factors:
        rates = tuple(factor * rate for rate in problem.scenarios[0].request_rate_per_s)
        at = replace(problem, scenarios=(Scenario(name="", request_rate_per_s=rates),))
        load = loads(at, 0)
        units = [
            program.column(offer.name, 0, math.inf, cost=offer.usd_per_hour, whole=True) for offer in problem.offers
        ]
        rows: list[dict[int, float]] = [{column: problem.fill(g)} for g, column in enumerate(units)]
        for b, rate in enumerate(rates):
            if rate > 0:
                columns, _ = share_columns(at, program, f"bucket {b}", np.isfinite(load[:, b]), most=1.0)
                for g, column in columns.items():
                    rows[g][column] = -float(load[g, b])
        for row in rows:
            program.row("load", row, low=0.0)
        for o, column in enumerate(units):
            started = program.column("started", 0, math.inf, cost=start_usd)
            stopped = program.column("stopped", 0, math.inf, cost=stop_usd)
            held = {column: -1.0, started: 1.0, stopped: -1.0}
            if before is None:
                present = float(problem.offers[o].present)
                program.row("held", held, low=-present, high=-present)
            else:
                program.row("held", {**held, before[o]: 1.0}, low=0.0, high=0.0)
        before = units
    return solve_program(program).objective


PRICE = st.integers(50, 400).map(lambda cents: cents / 100)
CAPACITY = st.sampled_from([0.5, 1.0, 1.7, 3.0])
FACTORS = st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]), min_size=2, max_size=5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    prices=st.lists(PRICE, min_size=2, max_size=2),
    table=st.lists(st.lists(CAPACITY, min_size=2, max_size=2), min_size=2, max_size=2),
    rates=st.lists(st.sampled_from([1.0, 4.0, 6.5]), min_size=2, max_size=2),
    factors=FACTORS,
    start=st.sampled_from([0.0, 0.4, 3.0]),
    stop=st.sampled_from([0.0, 0.2]),
    present=st.integers(0, 3),
)
def test_no_schedule_is_cheaper_than_the_bound_nor_than_the_question_written_out(
    prices: list[float],
    table: list[list[float]],
    rates: list[float],
    factors: list[float],
    start: float,
    stop: float,
    present: int,
) -> None:
    problem = market(prices, table, rates, present=present)
    solution = solve_schedule(problem, factors, start_usd=start, stop_usd=stop)
    assert solution.objective is not None
    assert solution.bound is not None
    least = written_out(problem, factors, start, stop)
    assert solution.bound <= least + 1e-6
    assert least <= solution.objective + 1e-6
    if start == stop == 0.0:
        assert solution.objective == pytest.approx(least)
        assert solution.status is Status.OPTIMAL
    check(problem, factors, start, stop, solution.assignment, solution.objective)


def check(
    problem: FleetProblem, factors: list[float], start: float, stop: float, found: Schedule | None, cost: float
) -> None:
    """Money again with plain loops, and every fleet carries its hours."""
    assert found is not None
    before, total = [offer.present for offer in problem.offers], 0.0
    for factor, k in zip(factors, found.fleet_of, strict=True):
        units = found.fleets[k].units[0]
        for had, has, offer in zip(before, units, problem.offers, strict=True):
            total += has * offer.usd_per_hour + start * max(has - had, 0) + stop * max(had - has, 0)
        before = list(units)
        for g, row in enumerate(problem.max_request_rate_per_s):
            shares = found.fleets[k].routing[0][g]
            rates = problem.scenarios[0].request_rate_per_s
            busy = sum(
                share * factor * rate / most for share, rate, most in zip(shares, rates, row, strict=True) if share
            )
            assert busy <= found.fleets[k].replicas[0][g] + 1e-4
    assert total == pytest.approx(cost)


def test_one_type_is_scheduled_exactly() -> None:
    # A unit is kept through a trough that is shorter than starting it again is dear: two hours, not three.
    problem = market([1.0], [[1.0]], [10.0])
    short, long = [1.0, 0.5, 0.5, 1.0], [1.0, 0.5, 0.5, 0.5, 1.0]
    for factors, least in ((short, 4 * 10 + 25.0), (long, 10 + 3 * 5 + 10 + 25.0 + 5 * 2.5)):
        solution = solve_schedule(problem, factors, start_usd=2.5, stop_usd=0.0)
        assert solution.status is Status.OPTIMAL
        assert solution.objective == pytest.approx(least)


def test_every_hour_of_a_router_with_steps_is_in_steps() -> None:
    problem = replace(market([1.0, 2.3], [[1.0, 0.5], [2.0, 3.0]], [4.0, 3.0]), routing_steps=4)
    factors = [0.3, 0.7, 1.0, 0.7, 0.0]
    solution = solve_schedule(problem, factors, start_usd=0.4, stop_usd=0.1)
    assert solution.assignment is not None
    for hour, k in enumerate(solution.assignment.fleet_of):
        fleet = solution.assignment.fleets[k]
        for g, row in enumerate(fleet.routing[0]):
            assert all(4 * share == round(4 * share) for share in row)
            rates = zip(row, problem.scenarios[0].request_rate_per_s, problem.max_request_rate_per_s[g], strict=True)
            busy = sum(factors[hour] * share * rate / most for share, rate, most in rates)
            assert busy <= fleet.replicas[0][g] + 1e-5
    free = solve_schedule(replace(problem, routing_steps=None), factors, start_usd=0.4, stop_usd=0.1)
    assert (solution.bound or 0.0) <= (solution.objective or 0.0)
    assert (free.bound or 0.0) <= (solution.objective or 0.0) + 1e-9


def test_a_constant_load_costs_the_constant_fleet() -> None:
    problem = market([1.0, 2.3], [[1.0, 0.5], [2.0, 3.0]], [4.0, 3.0])
    solution = solve_schedule(problem, [1.0] * 24, start_usd=0.0, stop_usd=0.0)
    assert solution.objective == pytest.approx(24 * (solve_fleet(problem).objective or 0.0))


def test_dearer_switching_switches_less_and_costs_more() -> None:
    problem = market([1.0, 2.3], [[1.0, 0.5], [2.0, 3.0]], [9.0, 7.0])
    rng = np.random.default_rng(5)
    factors = (0.6 + 0.4 * np.sin(np.arange(48) / 24 * 2 * np.pi) * rng.uniform(0.9, 1.0, 48)).clip(0.05).tolist()
    seen = [solve_schedule(problem, factors, start_usd=usd, stop_usd=0.0) for usd in (0.0, 0.5, 5.0)]
    costs = [one.objective or 0.0 for one in seen]
    switches = [one.assignment.num_switches for one in seen if one.assignment is not None]
    assert costs == sorted(costs)
    assert switches == sorted(switches, reverse=True)


def test_levels_lie_close_above_every_hour() -> None:
    traffic = np.random.default_rng(1).uniform(0.0, 1.0, 5000)
    levels = traffic_levels(traffic)
    above = levels[np.searchsorted(levels, traffic)]
    assert (above >= traffic).all()
    assert (above <= traffic * (1.0 + LEVEL_STEP) * (1 + 1e-12)).all()
    assert list(traffic_levels(np.array([0.0, 0.5, 0.5]))) == [0.0, 0.5]


def test_an_hour_beyond_the_caps_has_no_schedule() -> None:
    problem = market([1.0], [[1.0]], [10.0], max_count=7)
    solution = solve_schedule(problem, [0.5, 1.0], start_usd=0.0, stop_usd=0.0)
    assert solution.status is Status.INFEASIBLE
    assert solution.assignment is None


def test_several_scenarios_are_refused() -> None:
    problem = market([1.0], [[1.0]], [10.0])
    twice = replace(problem, scenarios=(*problem.scenarios, *problem.scenarios))
    with pytest.raises(SpecError, match="one scenario"):
        solve_schedule(twice, [1.0, 2.0], start_usd=0.0, stop_usd=0.0)
