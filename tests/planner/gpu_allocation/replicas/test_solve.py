"""The GPU allocation solver against two other solvers, exhaustive search, known optima and general properties."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Progress, Status
from meshplan.planner.gpu_allocation.nodes.milp import prove
from meshplan.planner.gpu_allocation.replicas.instance import families, instance_of
from meshplan.planner.gpu_allocation.replicas.problem import Bucket, GpuAllocationProblem, GpuType
from meshplan.planner.gpu_allocation.replicas.solve import answer, solve

DATA = Path(__file__).parents[3] / "data" / "gpu_allocation"
OPTIMA = list(csv.DictReader((DATA / "optima.csv").read_text().splitlines()))
SHARE_TOLERANCE = CAPACITY_TOLERANCE = 1e-6


def load(name: str) -> GpuAllocationProblem:
    return GpuAllocationProblem.from_document(json.loads((DATA / f"{name}.json").read_text()), DATA)


def answered(problem: GpuAllocationProblem) -> dict[str, Any]:
    """The answer after a trip through JSON, checked from scratch."""
    document: dict[str, Any] = json.loads(json.dumps(answer(problem, solve(problem)), allow_nan=False))
    check(problem, document)
    return document


def check(problem: GpuAllocationProblem, document: dict[str, Any]) -> None:
    """Recompute feasibility, cost, bound and proof with nothing but the problem and plain loops."""
    if document["status"] == "infeasible":
        assert "counts" not in document
        assert "routing" not in document
        assert proven_infeasible(problem, document["bucket_prices"])
        return
    cost = 0.0
    for g, gpu_type in enumerate(problem.gpu_types):
        n, row = document["counts"][gpu_type.name], document["routing"][gpu_type.name]
        assert isinstance(n, int)
        assert 0 <= n <= (math.inf if gpu_type.max_count is None else gpu_type.max_count)
        cost += n * gpu_type.usd_per_hour
        busy = 0.0
        for share, rate, most in zip(row, problem.request_rate_per_s, problem.max_request_rate_per_s[g], strict=True):
            assert share >= 0
            assert share == 0 or (most > 0 and rate > 0)
            busy += share * rate / most if share else 0.0
        fill = problem.max_utilization * (1 - gpu_type.interruption_headroom)
        room = fill * (n - problem.min_spare_replicas) if n else 0.0
        assert room >= 0
        assert busy <= room + CAPACITY_TOLERANCE * max(1, n)
    for b, rate in enumerate(problem.request_rate_per_s):
        if rate > 0:
            served = sum(row[b] for row in document["routing"].values())
            assert served == pytest.approx(1.0, abs=SHARE_TOLERANCE)
    assert document["cost_usd_per_hour"] == pytest.approx(cost)
    bound = document["bound_usd_per_hour"]
    assert bound <= cost * (1 + 1e-12)
    assert document["gap"] == pytest.approx((cost - bound) / cost if cost else 0.0, abs=1e-9)
    assert (document["status"] == "optimal") == (document["gap"] <= 1e-9)


def proven_infeasible(problem: GpuAllocationProblem, prices: list[float]) -> bool:
    """Farkas: the whole fleet serves less, valued at these prices, than arrives."""
    assert min(prices) >= 0
    assert sum(prices) == pytest.approx(1.0)
    total = 0.0
    for gpu_type, row in zip(problem.gpu_types, problem.max_request_rate_per_s, strict=True):
        fill = problem.max_utilization * (1 - gpu_type.interruption_headroom)
        most = math.inf if gpu_type.max_count is None else max(gpu_type.max_count - problem.min_spare_replicas, 0)
        rates = zip(prices, row, problem.request_rate_per_s, strict=True)
        value = max((price * capacity / rate for price, capacity, rate in rates if rate > 0), default=0.0)
        total += fill * most * value if value else 0.0
    return total < 1 - 1e-9


def make(
    prices: list[float],
    capacities: list[list[float]],
    rates: list[float],
    *,
    caps: list[int | None] | None = None,
    max_utilization: float = 1.0,
    spare: int = 0,
) -> GpuAllocationProblem:
    caps = caps or [None] * len(prices)
    return GpuAllocationProblem(
        name="made",
        gpu_types=tuple(
            GpuType(name=f"g{i}", usd_per_hour=price, max_count=cap)
            for i, (price, cap) in enumerate(zip(prices, caps, strict=True))
        ),
        buckets=tuple(Bucket(input_tokens=(1, 2 + b), output_tokens=(1, 2)) for b in range(len(rates))),
        request_rate_per_s=tuple(rates),
        max_request_rate_per_s=tuple(tuple(row) for row in capacities),
        max_utilization=max_utilization,
        min_spare_replicas=spare,
    )


@st.composite
def problems(draw: st.DrawFn, *, types: int = 3, buckets: int = 4, capped: bool = True) -> GpuAllocationProblem:
    num_types, num_buckets = draw(st.integers(1, types)), draw(st.integers(1, buckets))
    rate = st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0, 7.5])
    capacity = st.sampled_from([0.0, 0.3, 1.0, 1.7, 2.0, 5.0, 11.0])
    row = st.lists(capacity, min_size=num_buckets, max_size=num_buckets)
    cap = st.one_of(st.none(), st.integers(0, 6)) if capped else st.none()
    return make(
        draw(st.lists(st.integers(10, 900).map(lambda cents: cents / 100), min_size=num_types, max_size=num_types)),
        draw(st.lists(row, min_size=num_types, max_size=num_types)),
        draw(st.lists(rate, min_size=num_buckets, max_size=num_buckets)),
        caps=draw(st.lists(cap, min_size=num_types, max_size=num_types)),
        max_utilization=draw(st.sampled_from([1.0, 0.85, 0.5])),
        spare=draw(st.integers(0, 2)),
    )


def cost_of(problem: GpuAllocationProblem) -> float:
    """Proven cost, ∞ where there is none."""
    solution = solve(problem)
    assert solution.status is not Status.FEASIBLE
    return math.inf if solution.objective is None else solution.objective


@pytest.mark.parametrize("row", OPTIMA, ids=lambda row: row["name"])
def test_instances_with_known_optima_are_solved_to_them(row: dict[str, str]) -> None:
    document = answered(load(row["name"]))
    assert document["status"] == row["status"]
    if row["usd_per_hour"]:
        assert document["cost_usd_per_hour"] == pytest.approx(float(row["usd_per_hour"]), rel=1e-9)


def test_the_published_example_costs_4_68_usd_per_hour_and_says_why() -> None:
    document = answered(load("toy"))
    assert document["counts"] == {"A10G": 1, "A100-80GB": 1}
    assert document["single_type_usd_per_hour"] == pytest.approx({"A10G": 12.12, "A100-80GB": 7.34})
    assert document["without_type"]["A10G"]["cost_usd_per_hour"] == pytest.approx(7.34)
    assert document["notes"] == ["2.66 USD/h (36.2%) below the best single type, A100-80GB at 7.34 USD/h"]


@pytest.mark.parametrize("parts", [2, 7, 40])
def test_the_published_example_costs_the_same_however_finely_its_buckets_are_cut(parts: int) -> None:
    toy = load("toy")
    cut = replace(
        toy,
        buckets=tuple(bucket for bucket in toy.buckets for _ in range(parts)),
        request_rate_per_s=tuple(rate / parts for rate in toy.request_rate_per_s for _ in range(parts)),
        max_request_rate_per_s=tuple(
            tuple(most for most in row for _ in range(parts)) for row in toy.max_request_rate_per_s
        ),
    )
    assert cost_of(cut) == pytest.approx(4.68)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(factors=st.lists(st.floats(0.5, 2.0), min_size=14, max_size=14))
def test_perturbed_variants_of_the_published_example_agree_with_cbc(factors: list[float]) -> None:
    toy = load("toy")
    rates, rows = factors[:4], (factors[4:8], factors[8:12])
    perturbed = replace(
        toy,
        gpu_types=tuple(
            replace(one, usd_per_hour=round(factor * one.usd_per_hour, 2))
            for one, factor in zip(toy.gpu_types, factors[12:], strict=True)
        ),
        request_rate_per_s=tuple(f * rate for f, rate in zip(rates, toy.request_rate_per_s, strict=True)),
        max_request_rate_per_s=tuple(
            tuple(f * most for f, most in zip(row, mosts, strict=True))
            for row, mosts in zip(rows, toy.max_request_rate_per_s, strict=True)
        ),
    )
    assert cost_of(perturbed) == pytest.approx(prove(perturbed, "cbc").cost)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problem=problems())
def test_agrees_with_scip(problem: GpuAllocationProblem) -> None:
    document = answered(problem)
    proven = prove(problem, "scip")
    if proven.cost is None:
        assert document["status"] == "infeasible"
    else:
        assert document["status"] == "optimal"
        assert document["cost_usd_per_hour"] == pytest.approx(proven.cost, rel=1e-9, abs=1e-9)


@st.composite
def with_near_identical_types(draw: st.DrawFn) -> GpuAllocationProblem:
    """Each type is offered again, up to three times, a little dearer or cheaper and a little faster or slower."""
    problem = draw(problems(types=2, buckets=4))
    around = st.integers(94, 106).map(lambda percent: percent / 100)
    types, rows = [], []
    for one, row in zip(problem.gpu_types, problem.max_request_rate_per_s, strict=True):
        for copy in range(draw(st.integers(1, 3))):
            price = round(one.usd_per_hour * draw(around), 3)
            types.append(replace(one, name=f"{one.name}-{copy}", usd_per_hour=price))
            rows.append(tuple(most * draw(around) for most in row))
    return replace(problem, gpu_types=tuple(types), max_request_rate_per_s=tuple(rows))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=with_near_identical_types())
def test_near_identical_types_agree_with_scip(problem: GpuAllocationProblem) -> None:
    proven = prove(problem, "scip")
    answered(problem)
    assert cost_of(problem) == pytest.approx(math.inf if proven.cost is None else proven.cost, rel=1e-9, abs=1e-9)


def test_families_hold_types_of_similar_price_and_speed() -> None:
    rows = [[1.0, 2.0], [1.05, 1.9], [4.0, 8.0], [1.0, 2.0], [0.0, 2.1]]
    prices = [1.0, 1.1, 4.0, 3.0, 1.05]
    assert families(instance_of(make(prices, rows, [1.0, 1.0]))).tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0]]
    assert not len(families(instance_of(make(prices, rows, [1.0, 1.0], spare=1))))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problem=problems(types=4, buckets=6))
def test_agrees_with_cbc(problem: GpuAllocationProblem) -> None:
    proven = prove(problem, "cbc")
    assert cost_of(problem) == pytest.approx(math.inf if proven.cost is None else proven.cost, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["feature-spare-1", "mixed-slo40-r2", "feature-infeasible-caps"])
def test_the_referees_agree_on_real_sizes(name: str) -> None:
    problem = load(name)
    scip, cbc = prove(problem, "scip"), prove(problem, "cbc")
    assert scip.cost == (None if cbc.cost is None else pytest.approx(cbc.cost))
    assert cost_of(problem) == pytest.approx(math.inf if scip.cost is None else scip.cost)


def fits_two_types(problem: GpuAllocationProblem, usable: tuple[int, int]) -> bool:
    """Exact for two types: fill the first with the buckets that it serves cheapest relative to the second."""
    room = [problem.max_utilization * n for n in usable]
    shared: list[tuple[float, float]] = []
    for rate, first, second in zip(problem.request_rate_per_s, *problem.max_request_rate_per_s, strict=True):
        if rate == 0:
            continue
        if not first and not second:
            return False
        if first and second:
            shared.append((rate / first, rate / second))
        elif first:
            room[0] -= rate / first
        else:
            room[1] -= rate / second
    if room[0] < -1e-9:
        return False
    for busy_first, busy_second in sorted(shared, key=lambda pair: pair[0] / pair[1]):
        share = min(1.0, max(room[0], 0.0) / busy_first)
        room[0] -= share * busy_first
        room[1] -= (1 - share) * busy_second
    return room[1] >= -1e-9


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problem=problems(types=2, buckets=4))
def test_agrees_with_exhaustive_search(problem: GpuAllocationProblem) -> None:
    if len(problem.gpu_types) == 1:
        twin = replace(problem.gpu_types[0], name="absent", max_count=0)
        row = problem.max_request_rate_per_s[0]
        problem = replace(problem, gpu_types=(*problem.gpu_types, twin), max_request_rate_per_s=(row, row))
    spare, ranges = problem.min_spare_replicas, []
    for gpu_type, row in zip(problem.gpu_types, problem.max_request_rate_per_s, strict=True):
        busy = sum(rate / most for rate, most in zip(problem.request_rate_per_s, row, strict=True) if most)
        useful = math.ceil(busy / problem.max_utilization)
        cap = math.inf if gpu_type.max_count is None else gpu_type.max_count - spare
        ranges.append(range(int(max(min(useful, cap), 0)) + 1))
    best = math.inf
    prices = [gpu_type.usd_per_hour for gpu_type in problem.gpu_types]
    for usable in itertools.product(*ranges):
        cost = sum(price * (m + spare) for price, m in zip(prices, usable, strict=True) if m)
        if cost < best and fits_two_types(problem, (usable[0], usable[1])):
            best = cost
    assert cost_of(problem) == pytest.approx(best, rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problem=problems(capped=False))
def test_twice_the_traffic_costs_at_most_twice_as_much_and_never_less(problem: GpuAllocationProblem) -> None:
    doubled = replace(problem, request_rate_per_s=tuple(2 * rate for rate in problem.request_rate_per_s))
    once, twice = cost_of(problem), cost_of(doubled)
    assert once <= twice + 1e-9
    assert twice <= 2 * once + 1e-9


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problem=problems(), price=st.integers(1, 500), capacity=st.sampled_from([0.0, 0.5, 2.0, 9.0]))
def test_one_more_type_on_offer_never_costs_more(problem: GpuAllocationProblem, price: int, capacity: float) -> None:
    more = replace(
        problem,
        gpu_types=(*problem.gpu_types, GpuType(name="more", usd_per_hour=price / 100)),
        max_request_rate_per_s=(*problem.max_request_rate_per_s, (capacity,) * len(problem.buckets)),
    )
    assert cost_of(more) <= cost_of(problem) + 1e-9


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problem=problems())
def test_each_least_change_suffices_and_one_replica_less_does_not(problem: GpuAllocationProblem) -> None:
    document = answered(problem)
    if document["status"] != "infeasible":
        return
    for change in document["least_changes"]:
        if "gpu_type" in change:
            assert cost_of(with_more(problem, change["gpu_type"], change["more"])) < math.inf
            assert cost_of(with_more(problem, change["gpu_type"], change["more"] - 1)) == math.inf
        if "request_rate_factor" in change:
            factor = change["request_rate_factor"]
            less = tuple(rate * factor * (1 - 1e-6) for rate in problem.request_rate_per_s)
            assert cost_of(replace(problem, request_rate_per_s=less)) < math.inf


def with_more(problem: GpuAllocationProblem, name: str, more: int) -> GpuAllocationProblem:
    types = tuple(
        replace(gpu_type, max_count=gpu_type.max_count + more)
        if gpu_type.name == name and gpu_type.max_count is not None
        else gpu_type
        for gpu_type in problem.gpu_types
    )
    return replace(problem, gpu_types=types)


def test_infeasible_by_caps_names_them_and_the_cheapest_way_out() -> None:
    document = answered(load("feature-infeasible-caps"))
    assert "L4 (8), A10G (4), A100-80G (3), H100 (1)" in document["binding"]
    assert document["least_changes"][0] == {
        "change": "1 more A100-80G (max_count 4)",
        "gpu_type": "A100-80G",
        "more": 1,
        "usd_per_hour": 3.67,
    }


def test_infeasible_by_the_objective_names_the_bucket() -> None:
    document = answered(load("feature-infeasible-slo"))
    assert document["unservable_buckets"] == [1]
    assert "bucket 1 (1–250 input and 251–1000 output tokens)" in document["binding"]


def test_nothing_to_be_had_at_all() -> None:
    document = answered(make([1.0, 2.0], [[1.0], [2.0]], [3.0], caps=[0, 1], spare=1))
    assert document["status"] == "infeasible"
    assert "no replica is usable" in document["binding"]
    assert [change["more"] for change in document["least_changes"]] == [4, 2]


def test_no_traffic_needs_no_fleet() -> None:
    document = answered(make([1.0], [[0.0, 2.0]], [0.0, 0.0]))
    assert (document["status"], document["cost_usd_per_hour"], document["counts"]) == ("optimal", 0.0, {"g0": 0})


def test_owned_replicas_may_cost_nothing() -> None:
    document = answered(make([0.0, 1.5], [[1.0, 1.0], [2.0, 2.0]], [3.0, 2.0], caps=[3, None]))
    assert document["counts"] == {"g0": 3, "g1": 1}


def test_rates_over_many_orders_of_magnitude() -> None:
    document = answered(make([0.7, 3.67], [[1e-3, 5.0, 2.0], [1e-2, 50.0, 9.0]], [1e-7, 4e4, 1e-3]))
    assert document["status"] == "optimal"
    closed_bound = 4e4 / 50 * 3.67 + 1e-3 / 9 * 3.67
    assert closed_bound <= document["cost_usd_per_hour"] <= closed_bound + 3.67


def test_spot_headroom_makes_a_replica_smaller() -> None:
    plain = make([1.0], [[1.0]], [3.0])
    spot = replace(plain.gpu_types[0], terms="spot", interruption_headroom=0.25)
    document = answered(replace(plain, gpu_types=(spot,)))
    assert document["counts"] == {"g0": 4}
    assert document["utilization"]["g0"] == pytest.approx(0.75)


def test_the_same_question_has_the_same_answer() -> None:
    problem = load("mixed-slo40-r2")
    assert json.dumps(answer(problem, solve(problem))) == json.dumps(answer(problem, solve(problem)))


def test_a_short_time_limit_still_gives_a_fleet_and_its_gap() -> None:
    problem = load("mixed-slo40-r2")
    document = answer(problem, solve(problem, budget=Budget(0.0)))
    check(problem, document)
    assert document["status"] == "feasible"
    assert document["gap"] > 0


def test_progress_is_told_with_falling_costs() -> None:
    told: list[Progress] = []
    solution = solve(load("pubmed-slo40-r1"), on_progress=told.append)
    costs = [progress.incumbent for progress in told if progress.incumbent is not None]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(solution.objective)
