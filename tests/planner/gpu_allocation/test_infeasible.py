"""Questions that no fleet answers: each change that is named makes one possible, and a smaller one does not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshplan.planner.core.solution import Status
from meshplan.planner.gpu_allocation.infeasible import binding, least_changes
from meshplan.planner.gpu_allocation.nodes.problem import (
    FleetObjective,
    FleetProblem,
    Offer,
    Quota,
    ReplicaKind,
    Scenario,
)
from meshplan.planner.gpu_allocation.nodes.solve import solve_fleet
from meshplan.planner.gpu_allocation.replicas.problem import Bucket


def is_possible(problem: FleetProblem) -> bool:
    return solve_fleet(problem).status is not Status.INFEASIBLE


def two_offers(**changes: object) -> FleetProblem:
    """A cheap offer of little capacity and a dear one of much, each rented by the node of two devices."""
    problem = FleetProblem(
        name="two",
        offers=(
            Offer(name="cheap", usd_per_hour=1.0, num_devices=2, power_w=1000.0),
            Offer(name="dear", usd_per_hour=4.0, num_devices=2, power_w=500.0),
        ),
        kinds=(ReplicaKind(name="small", offer=0, num_devices=2), ReplicaKind(name="large", offer=1, num_devices=2)),
        buckets=(Bucket(input_tokens=(1, 100), output_tokens=(1, 100)),),
        scenarios=(Scenario(name="", request_rate_per_s=(8.0,)),),
        max_request_rate_per_s=((1.0,), (2.0,)),
    )
    return replace(problem, **changes)  # type: ignore[arg-type]  # fields of the problem


def changed(problem: FleetProblem, change: dict[str, object], *, by: float = 0.0) -> FleetProblem:
    """The problem with a change that was named, or less of it."""
    if "quota" in change:
        (quota,) = problem.quotas
        return replace(problem, quotas=(replace(quota, max_devices=int(str(change["max_devices"])) - round(by)),))
    name = str(change["limit"])
    return replace(problem, **{name: float(str(change["least"])) - by})  # type: ignore[arg-type]  # either is a number


def test_a_quota_is_raised_as_far_as_the_budget_needs() -> None:
    """The budget was left out: no more devices were said to suffice, and four dear nodes cost too much."""
    problem = two_offers(max_usd_per_hour=10.0, quotas=(Quota(name="all", offers=(0, 1), max_devices=8),))
    assert not is_possible(problem)
    (change,) = [one for one in least_changes(problem) if "quota" in one]
    # Six cheap nodes and a dear one carry 8 requests/s for 10 USD/h; with fewer nodes more of them are dear.
    assert change["max_devices"] == 14
    assert is_possible(changed(problem, change))
    assert not is_possible(changed(problem, change, by=1))


@pytest.mark.parametrize("objective", list(FleetObjective))
def test_the_least_budget_is_that_of_the_cheapest_fleet_whatever_is_asked_for(objective: FleetObjective) -> None:
    """It was the rent of the fleet with the fewest devices, 16 USD/h, said to be the least."""
    problem = two_offers(objective=objective, max_usd_per_hour=5.0)
    (change,) = [one for one in least_changes(problem) if one.get("limit") == "max_usd_per_hour"]
    assert change["least"] == pytest.approx(8.0)
    assert is_possible(changed(problem, change))
    assert not is_possible(changed(problem, change, by=0.5))


def test_limits_that_bind_together_are_all_named() -> None:
    """The caps of offers alone were named, and that of an offer that nobody needed more of."""
    problem = two_offers(max_usd_per_hour=2.0, quotas=(Quota(name="all", offers=(0, 1), max_devices=2),))
    assert not least_changes(problem)
    assert binding(problem, [], 0.12) == "max_usd_per_hour (2) with quota of all (2): 12.0% of the traffic fits"
    capped = replace(problem, offers=(replace(problem.offers[0], max_count=3), problem.offers[1]), quotas=())
    assert binding(capped, [], 0.12).startswith("max_usd_per_hour (2) with max_nodes of cheap (3): ")


@pytest.mark.parametrize("seed", range(30))
def test_every_change_alone_suffices_and_less_of_it_does_not(seed: int) -> None:
    draw = random.Random(seed)
    while True:
        problem = two_offers(
            objective=draw.choice(list(FleetObjective)),
            max_usd_per_hour=draw.choice([None, 6.0, 9.0, 12.0]),
            max_power_w=draw.choice([None, 3000.0, 5000.0]),
            max_request_rate_per_s=((draw.choice([0.5, 1.0]),), (draw.choice([1.0, 2.5]),)),
            quotas=(Quota(name="q", offers=draw.choice([(0, 1), (1,)]), max_devices=draw.choice([2, 6, 10])),),
        )
        if not is_possible(problem):
            break
    for change in least_changes(problem):
        if "quota" in change or "limit" in change:
            assert is_possible(changed(problem, change))
            assert not is_possible(changed(problem, change, by=1.0 if "quota" in change else 0.25))
