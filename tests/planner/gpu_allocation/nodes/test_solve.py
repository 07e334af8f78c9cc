"""The fleet problem: two unrelated solvers, a checker from scratch, the plain problem inside it, general properties."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.gpu_allocation.nodes.problem import (
    FleetAllocation,
    FleetObjective,
    FleetProblem,
    Offer,
    Quota,
    ReplicaKind,
    Scenario,
    ScenarioPolicy,
    as_plain,
    lifted,
)
from meshplan.planner.gpu_allocation.nodes.solve import solve_fleet
from meshplan.planner.gpu_allocation.replicas.problem import Bucket, GpuAllocationProblem
from meshplan.planner.serving.problem.config import Role

DATA = Path(__file__).parents[3] / "data" / "gpu_allocation"
OPTIMA = {row["name"]: row for row in csv.DictReader((DATA / "optima.csv").read_text().splitlines())}
TOLERANCE = 1e-5


def load(name: str) -> GpuAllocationProblem:
    return GpuAllocationProblem.from_document(json.loads((DATA / f"{name}.json").read_text()), DATA)


def cost_of(problem: FleetProblem, backend: str = "scip") -> float:
    solution = solve_fleet(problem, backend=backend)
    if solution.assignment is None or solution.objective is None:
        return math.inf
    check(problem, solution.assignment)
    assert solution.bound == pytest.approx(solution.objective, rel=1e-6)
    return solution.objective


def check(problem: FleetProblem, found: FleetAllocation) -> None:
    """Every constraint again, with plain loops."""
    for t, (units, replicas) in enumerate(zip(found.units, found.replicas, strict=True)):
        apart = [(k, problem.offers[k.offer]) for n, k in zip(replicas, problem.kinds, strict=True) if n]
        apart = [(kind, offer) for kind, offer in apart if kind.role is not Role.MIXED]
        assert len({(kind.service, kind.role) for kind, _ in apart}) == len(apart)
        assert len({(kind.service, offer.region) for kind, offer in apart}) <= len({k.service for k, _ in apart})
        for o, offer in enumerate(problem.offers):
            assert 0 <= units[o] <= (math.inf if offer.max_count is None else offer.max_count)
            assert not offer.is_fixed or units[o] == found.units[0][o]
            laid = sum(n * k.num_devices for n, k in zip(replicas, problem.kinds, strict=True) if k.offer == o)
            assert laid <= offer.num_devices * units[o], t
        watts = sum(n * (offer.power_w or 0.0) for n, offer in zip(units, problem.offers, strict=True))
        assert problem.max_power_w is None or watts <= problem.max_power_w
        usd = sum(n * offer.usd_per_hour for n, offer in zip(units, problem.offers, strict=True))
        assert problem.max_usd_per_hour is None or usd <= problem.max_usd_per_hour + 1e-9
    for s, scenario in enumerate(problem.scenarios):
        shares, replicas = found.routing[s], found.replicas[problem.stage_of(s)]
        for b, rate in enumerate(scenario.request_rate_per_s):
            by_role = dict.fromkeys(Role, 0.0)
            for kind, row in zip(problem.kinds, shares, strict=True):
                by_role[kind.role] += row[b]
            if rate > 0:
                assert by_role[Role.MIXED] + by_role[Role.PREFILL] == pytest.approx(1.0, abs=TOLERANCE)
                assert by_role[Role.DECODE] == pytest.approx(by_role[Role.PREFILL], abs=TOLERANCE)
        for g, row in enumerate(problem.max_request_rate_per_s):
            busy = 0.0
            for b, rate in enumerate(scenario.request_rate_per_s):
                share = shares[g][b]
                assert share == 0 or row[b] > 0
                busy += share * rate / row[b] if share else 0.0
            usable = max(replicas[g] - problem.min_spare_replicas, 0)
            assert busy <= problem.fill(g) * usable + TOLERANCE * max(1, usable)


PRICES = st.integers(20, 900).map(lambda cents: cents / 100)
CAPACITY = st.sampled_from([0.0, 0.3, 1.0, 1.7, 2.0, 5.0, 11.0])
RATE = st.sampled_from([0.0, 0.2, 1.0, 3.0, 7.5])


@st.composite
def fleets(
    draw: st.DrawFn,
    *,
    capped: bool = True,
    scenarios: int = 2,
    split: bool = False,
    whole: bool = False,
    tied: bool = False,
) -> FleetProblem:
    num_offers, num_buckets = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cap = st.one_of(st.none(), st.integers(0, 4)) if capped else st.none()
    offers = tuple(
        Offer(
            name=f"o{i}",
            usd_per_hour=draw(PRICES),
            num_devices=1 if whole else draw(st.sampled_from([1, 2, 4])),
            max_count=draw(cap),
            terms=draw(st.sampled_from(["on-demand", "spot", "reserved"])),
            interruption_headroom=draw(st.sampled_from([0.0, 0.2])),
            power_w=draw(st.sampled_from([100.0, 400.0])),
            present=draw(st.integers(0, 2)) if capped is False else 0,
            region=draw(st.sampled_from(["east", "west"])) if split else None,
        )
        for i in range(num_offers)
    )
    kinds, table = [], []
    for o in range(num_offers):
        for size in draw(st.sampled_from([(1,), (1, 2), (2,)])):
            roles = [Role.MIXED, Role.PREFILL, Role.DECODE] if split else [Role.MIXED]
            for role in roles:
                kinds.append(ReplicaKind(name=f"o{o} x{size} {role.value}", offer=o, num_devices=size, role=role))
                table.append(tuple(draw(st.lists(CAPACITY, min_size=num_buckets, max_size=num_buckets))))
    count = draw(st.integers(1, scenarios))
    return FleetProblem(
        name="made",
        offers=offers,
        kinds=tuple(kinds),
        buckets=tuple(Bucket(input_tokens=(1, 2 + b), output_tokens=(1, 2)) for b in range(num_buckets)),
        scenarios=tuple(
            Scenario(
                name=f"s{s}",
                request_rate_per_s=tuple(draw(st.lists(RATE, min_size=num_buckets, max_size=num_buckets))),
                weight=1.0 / count,
            )
            for s in range(count)
        ),
        max_request_rate_per_s=tuple(table),
        max_utilization=draw(st.sampled_from([1.0, 0.85])),
        min_spare_replicas=draw(st.integers(0, 1)),
        policy=draw(st.sampled_from(list(ScenarioPolicy))),
        tied=draw(st.sampled_from([(), ((0, num_buckets - 1),)])) if tied and num_buckets > 1 else (),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=fleets(tied=True))
def test_scip_and_cbc_agree(problem: FleetProblem) -> None:
    assert cost_of(problem) == pytest.approx(cost_of(problem, "cbc"), rel=1e-6)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=fleets(split=True, scenarios=1))
def test_they_agree_on_prefill_and_decode_apart(problem: FleetProblem) -> None:
    assert cost_of(problem) == pytest.approx(cost_of(problem, "cbc"), rel=1e-6)


@pytest.mark.parametrize("name", ["toy", "mixed-slo40-r2", "feature-spare-1", "feature-infeasible-caps"])
def test_a_plain_problem_keeps_its_optimum(name: str) -> None:
    problem = lifted(load(name))
    known = OPTIMA[name]["usd_per_hour"]
    expected = float(known) if known else math.inf
    assert as_plain(problem) is not None
    assert cost_of(problem) == pytest.approx(expected)
    assert cost_of(problem, "cbc") == pytest.approx(expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=fleets(scenarios=1, whole=True))
def test_the_search_over_fleets_agrees_with_the_program(problem: FleetProblem) -> None:
    if as_plain(problem) is None:
        return
    assert cost_of(problem) == pytest.approx(cost_of(problem, "cbc"), rel=1e-6)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=fleets(scenarios=1), factor=st.sampled_from([0.7, 1.0]))
def test_one_offer_and_one_kind_against_plain_counting(problem: FleetProblem, factor: float) -> None:
    one = replace(
        problem,
        offers=problem.offers[:1],
        kinds=problem.kinds[:1],
        max_request_rate_per_s=problem.max_request_rate_per_s[:1],
        max_utilization=factor,
    )
    row, rates = one.max_request_rate_per_s[0], one.scenarios[0].request_rate_per_s
    offer, kind = one.offers[0], one.kinds[0]
    if any(rate and not most for rate, most in zip(rates, row, strict=True)):
        assert cost_of(one) == math.inf
        return
    busy = sum(rate / most for rate, most in zip(rates, row, strict=True) if rate)
    usable = math.ceil(busy / one.fill(0) - 1e-9)
    replicas = usable + one.min_spare_replicas if usable else 0
    units = next(n for n in itertools.count() if n * offer.num_devices >= replicas * kind.num_devices)
    fits = offer.max_count is None or units <= offer.max_count
    assert cost_of(one) == pytest.approx(units * offer.usd_per_hour if fits else math.inf)


# --- properties -------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problem=fleets(capped=False))
def test_twice_the_traffic_costs_at_most_twice_as_much_and_never_less(problem: FleetProblem) -> None:
    twice = replace(
        problem,
        scenarios=tuple(
            replace(one, request_rate_per_s=tuple(2 * rate for rate in one.request_rate_per_s))
            for one in problem.scenarios
        ),
    )
    once, doubled = cost_of(problem), cost_of(twice)
    assert once <= doubled + 1e-6
    assert doubled <= 2 * once + 1e-6


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problem=fleets(), price=PRICES, capacity=CAPACITY)
def test_another_offer_never_costs_more(problem: FleetProblem, price: float, capacity: float) -> None:
    more = replace(
        problem,
        offers=(*problem.offers, Offer(name="more", usd_per_hour=price)),
        kinds=(*problem.kinds, ReplicaKind(name="more", offer=len(problem.offers))),
        max_request_rate_per_s=(*problem.max_request_rate_per_s, (capacity,) * len(problem.buckets)),
    )
    assert cost_of(more) <= cost_of(problem) + 1e-6


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problem=fleets(), factor=st.sampled_from([1.1, 1.5]))
def test_looser_promises_never_cost_more(problem: FleetProblem, factor: float) -> None:
    looser = replace(
        problem,
        max_request_rate_per_s=tuple(tuple(factor * most for most in row) for row in problem.max_request_rate_per_s),
    )
    assert cost_of(looser) <= cost_of(problem) + 1e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=fleets())
def test_a_fleet_of_each_scenarios_own_never_costs_more_than_one_for_all(problem: FleetProblem) -> None:
    robust = cost_of(replace(problem, policy=ScenarioPolicy.ROBUST))
    assert cost_of(replace(problem, policy=ScenarioPolicy.EXPECTED)) <= robust + 1e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=fleets(scenarios=1, split=True))
def test_prefill_and_decode_apart_never_cost_more(problem: FleetProblem) -> None:
    mixed = [g for g, kind in enumerate(problem.kinds) if kind.role is Role.MIXED]
    only = replace(
        problem,
        kinds=tuple(problem.kinds[g] for g in mixed),
        max_request_rate_per_s=tuple(problem.max_request_rate_per_s[g] for g in mixed),
    )
    assert cost_of(problem) <= cost_of(only) + 1e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=fleets(scenarios=1, tied=True))
def test_a_router_that_sees_less_never_costs_less(problem: FleetProblem) -> None:
    solution = solve_fleet(problem)
    if solution.assignment is not None and problem.tied:
        first, last = problem.tied[0]
        rates = problem.scenarios[0].request_rate_per_s
        for row in solution.assignment.routing[0]:
            assert row[first] == row[last] or not (rates[first] and rates[last])
    assert cost_of(replace(problem, tied=())) <= cost_of(problem) + 1e-6


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=fleets(scenarios=2, tied=True), steps=st.sampled_from([1, 3, 16]))
def test_a_router_with_steps_gets_shares_in_steps_that_fit(problem: FleetProblem, steps: int) -> None:
    stepped = replace(problem, routing_steps=steps)
    solution = solve_fleet(stepped)
    assert cost_of(stepped) == pytest.approx(cost_of(stepped, "cbc"), rel=1e-6)
    assert cost_of(problem) <= cost_of(stepped) + 1e-6
    assert cost_of(replace(problem, routing_steps=2 * steps)) <= cost_of(stepped) + 1e-6
    if solution.assignment is None:
        return
    for s, shares in enumerate(solution.assignment.routing):
        rates = problem.scenarios[s].request_rate_per_s
        counts = solution.assignment.replicas[problem.stage_of(s)]
        for b, rate in enumerate(rates):
            assert sum(row[b] for row in shares) == pytest.approx(1.0 if rate else 0.0, abs=1e-12)
        for g, row in enumerate(shares):
            assert all(abs(steps * share - round(steps * share)) < 1e-9 for share in row)
            busy = sum(
                share * rate / most
                for share, rate, most in zip(row, rates, problem.max_request_rate_per_s[g], strict=True)
                if share
            )
            assert busy <= problem.fill(g) * max(counts[g] - problem.min_spare_replicas, 0) + 1e-5


# --- what each part means ---------------------------------------------------------------------------------------------


def node(**fields: object) -> FleetProblem:
    """One node type of eight devices with replicas of one and of four devices, one bucket."""
    base = FleetProblem(
        name="node",
        offers=(Offer(name="node", usd_per_hour=8.0, num_devices=8, power_w=1000.0),),
        kinds=(ReplicaKind(name="x1", offer=0), ReplicaKind(name="x4", offer=0, num_devices=4)),
        buckets=(
            Bucket(input_tokens=(1, 10), output_tokens=(1, 10)),
            Bucket(input_tokens=(11, 99), output_tokens=(1, 10)),
        ),
        scenarios=(Scenario(name="", request_rate_per_s=(3.0, 1.0)),),
        max_request_rate_per_s=((1.0, 0.0), (3.0, 1.0)),
    )
    return replace(base, **fields)


def test_replicas_of_two_shapes_share_a_node() -> None:
    found = solve_fleet(node()).assignment
    assert found is not None
    assert (found.units, found.replicas) == (((1,),), ((3, 1),))


def test_shares_that_no_router_can_express_cost_more() -> None:
    # 4.2 requests/s over two offers of 3 and 2: the first takes 0.53 to 0.71 of them, so thirds fit and halves do not.
    two = node(
        offers=(
            Offer(name="a", usd_per_hour=3.0, max_count=1),
            Offer(name="b", usd_per_hour=2.0, max_count=1),
            Offer(name="c", usd_per_hour=9.0),
        ),
        kinds=tuple(ReplicaKind(name=name, offer=o) for o, name in enumerate("abc")),
        buckets=(Bucket(input_tokens=(1, 10), output_tokens=(1, 10)),),
        scenarios=(Scenario(name="", request_rate_per_s=(4.2,)),),
        max_request_rate_per_s=((3.0,), (2.0,), (5.0,)),
    )
    assert solve_fleet(two).objective == 5.0
    assert solve_fleet(replace(two, routing_steps=2)).objective == 9.0
    in_thirds = solve_fleet(replace(two, routing_steps=3)).assignment
    assert in_thirds is not None
    assert [row[0] for row in in_thirds.routing[0]] == [2 / 3, 1 / 3, 0.0]


def test_a_node_is_rented_whole() -> None:
    more = node(scenarios=(Scenario(name="", request_rate_per_s=(4.5, 1.0)),))
    assert solve_fleet(more).objective == 16.0
    assert (
        solve_fleet(replace(more, offers=(replace(more.offers[0], num_devices=1, usd_per_hour=1.0),))).objective == 9.0
    )


def test_the_cap_of_an_offer_holds_for_all_its_shapes() -> None:
    capped = node(offers=(Offer(name="node", usd_per_hour=8.0, num_devices=8, max_count=1),))
    assert solve_fleet(capped).objective == 8.0
    more = (Scenario(name="", request_rate_per_s=(4.5, 1.0)),)
    assert solve_fleet(replace(capped, scenarios=more)).assignment is None


def test_a_quota_holds_for_all_its_offers_together() -> None:
    cheap, dear = Offer(name="cheap", usd_per_hour=1.0), Offer(name="dear", usd_per_hour=3.0)
    problem = FleetProblem(
        name="quota",
        offers=(cheap, cheap, dear),
        kinds=tuple(ReplicaKind(name=f"k{o}", offer=o) for o in range(3)),
        buckets=(Bucket(input_tokens=(1, 2), output_tokens=(1, 2)),),
        scenarios=(Scenario(name="", request_rate_per_s=(5.0,)),),
        max_request_rate_per_s=((1.0,), (1.0,), (1.0,)),
    )
    assert solve_fleet(problem).objective == pytest.approx(5.0)
    limited = replace(problem, quotas=(Quota(name="east", offers=(0, 1), max_devices=2),))
    assert solve_fleet(limited).objective == pytest.approx(2 * 1.0 + 3 * 3.0)
    assert solve_fleet(limited, backend="cbc").objective == pytest.approx(11.0)


def test_power_and_money_are_limits_and_power_can_be_the_objective() -> None:
    thrifty = Offer(name="thrifty", usd_per_hour=20.0, num_devices=8, power_w=300.0)
    both = node()
    both = replace(
        both,
        offers=(*both.offers, thrifty),
        kinds=(*both.kinds, ReplicaKind(name="t4", offer=1, num_devices=4)),
        max_request_rate_per_s=(*both.max_request_rate_per_s, (3.0, 1.0)),
    )
    assert solve_fleet(both).objective == 8.0
    assert solve_fleet(replace(both, max_power_w=500.0)).objective == 20.0
    assert solve_fleet(replace(both, objective=FleetObjective.POWER)).objective == 300.0
    assert solve_fleet(replace(both, objective=FleetObjective.NUM_DEVICES)).objective == 8.0
    assert solve_fleet(replace(both, max_power_w=500.0, max_usd_per_hour=19.0)).assignment is None


def test_switching_cost_keeps_todays_fleet_where_the_saving_is_small() -> None:
    offers = (
        Offer(name="old", usd_per_hour=1.1, present=3),
        Offer(name="new", usd_per_hour=1.0),
    )
    problem = FleetProblem(
        name="switch",
        offers=offers,
        kinds=(ReplicaKind(name="old", offer=0), ReplicaKind(name="new", offer=1)),
        buckets=(Bucket(input_tokens=(1, 2), output_tokens=(1, 2)),),
        scenarios=(Scenario(name="", request_rate_per_s=(3.0,)),),
        max_request_rate_per_s=((1.0,), (1.0,)),
        start_usd=0.5,
        stop_usd=0.1,
    )
    assert solve_fleet(problem).assignment.units == ((3, 0),)
    moved = solve_fleet(replace(problem, switch_hours=24.0))
    assert moved.assignment is not None
    assert moved.assignment.units == ((0, 3),)
    assert moved.objective == pytest.approx(3.0 + 3 * 0.6 / 24.0)


def test_reserved_nodes_are_rented_in_every_scenario() -> None:
    problem = FleetProblem(
        name="day and night",
        offers=(
            Offer(name="reserved", usd_per_hour=0.6, terms="reserved-1y"),
            Offer(name="on-demand", usd_per_hour=1.0),
        ),
        kinds=(ReplicaKind(name="r", offer=0), ReplicaKind(name="d", offer=1)),
        buckets=(Bucket(input_tokens=(1, 2), output_tokens=(1, 2)),),
        scenarios=(
            Scenario(name="day", request_rate_per_s=(10.0,), weight=0.5),
            Scenario(name="night", request_rate_per_s=(4.0,), weight=0.5),
        ),
        max_request_rate_per_s=((1.0,), (1.0,)),
        policy=ScenarioPolicy.EXPECTED,
    )
    found = solve_fleet(problem)
    assert found.assignment is not None
    assert found.assignment.units == ((4, 6), (4, 0))
    assert found.objective == pytest.approx(0.5 * (2.4 + 6.0) + 0.5 * 2.4)


def test_two_models_share_nodes_but_not_replicas() -> None:
    # The first bucket belongs to one model, the second to the other: each kind serves its own.
    problem = node(max_request_rate_per_s=((1.0, 0.0), (0.0, 1.0)))
    found = solve_fleet(problem).assignment
    assert found is not None
    assert found.units == ((1,),)
    assert found.routing[0] == ((1.0, 0.0), (0.0, 1.0))
