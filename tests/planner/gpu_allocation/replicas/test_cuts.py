"""Inequalities that every fleet meets, and the integer programs over them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.core.budget import Budget
from meshplan.planner.gpu_allocation.nodes.milp import prove
from meshplan.planner.gpu_allocation.replicas import instance as gpu_allocation_instance
from meshplan.planner.gpu_allocation.replicas.cuts import sharpen
from meshplan.planner.gpu_allocation.replicas.exchange import CutPool
from meshplan.planner.gpu_allocation.replicas.instance import instance_of
from meshplan.planner.gpu_allocation.replicas.problem import Bucket, GpuAllocationProblem, GpuType
from meshplan.planner.gpu_allocation.replicas.relaxation import balance
from meshplan.planner.gpu_allocation.replicas.solve import solve


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), num_types=st.integers(2, 5), num_buckets=st.integers(1, 6))
def test_a_broken_balance_leaves_an_inequality_that_fleets_with_other_types_meet_too(
    seed: int, num_types: int, num_buckets: int
) -> None:
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0.0, 1.0, (num_types, num_buckets))
    load[rng.random(load.shape) < 0.2] = np.inf
    capacity = np.where(rng.random(num_types) < 0.5, 0.0, rng.integers(1, 4, num_types)).astype(float)
    found = balance(load, capacity)
    if found is None:
        return
    for _ in range(20):  # fleets that work, of any types
        fleet = rng.integers(0, 6, num_types).astype(float)
        other = balance(load, fleet)
        if other is not None and other.peak <= 1.0:
            assert found.prices @ fleet >= found.least * (1.0 - 1e-6)


def wide(seed: int, *, num_types: int = 8, num_buckets: int = 700, usd_per_hour: float = 25.0) -> GpuAllocationProblem:
    """Types that trade arithmetic against bandwidth over many buckets: wide enough for the integer programs."""
    rng = np.random.default_rng(seed)
    flops, bandwidth = rng.uniform(1.0, 8.0, num_types), rng.uniform(1.0, 8.0, num_types)
    price = (0.3 * (flops + bandwidth) * rng.uniform(0.95, 1.05, num_types)).round(3)
    prompts, answers = rng.lognormal(0.0, 1.0, num_buckets), rng.lognormal(0.0, 1.0, num_buckets)
    capacity = 1.0 / (prompts / flops[:, None] + answers / bandwidth[:, None])
    rate = rng.lognormal(0.0, 1.0, num_buckets)
    rate *= usd_per_hour / (rate * (price[:, None] / capacity).min(axis=0)).sum()
    return GpuAllocationProblem(
        name="wide",
        gpu_types=tuple(GpuType(name=f"g{g}", usd_per_hour=float(usd)) for g, usd in enumerate(price)),
        buckets=tuple(Bucket(input_tokens=(1, 2), output_tokens=(1, 2 + b)) for b in range(num_buckets)),
        request_rate_per_s=tuple(rate.tolist()),
        max_request_rate_per_s=tuple(tuple(row) for row in capacity.tolist()),
    )


@pytest.mark.parametrize("seed", [0])
def test_wide_problems_agree_with_the_plain_program(seed: int) -> None:
    problem = wide(seed)
    assert not instance_of(problem).narrow
    solution = solve(problem)
    least = prove(problem, "scip").cost
    assert least is not None
    assert solution.bound is not None
    assert solution.objective is not None
    assert solution.bound <= least * (1.0 + 1e-6)
    assert least * (1.0 - 1e-6) <= solution.objective
    assert solution.objective <= least * 1.01


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_wide_problems_with_near_identical_types_agree_with_the_plain_program(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_allocation_instance, "_NARROW", 0)  # the search for wide problems, at the referee's size
    once, rng = wide(seed, num_types=3, num_buckets=40, usd_per_hour=12.0), np.random.default_rng(seed)
    rows, types = [], []
    for one, row in zip(once.gpu_types, once.max_request_rate_per_s, strict=True):
        for copy in range(2):
            price = round(one.usd_per_hour * rng.uniform(0.97, 1.03), 3)
            types.append(replace(one, name=f"{one.name}-{copy}", usd_per_hour=price))
            rows.append(tuple((np.array(row) * rng.lognormal(0.0, 0.1, len(row))).tolist()))
    problem = replace(once, gpu_types=tuple(types), max_request_rate_per_s=tuple(rows))
    assert not instance_of(problem).narrow
    solution, least = solve(problem), prove(problem, "scip").cost
    assert least is not None
    assert solution.bound is not None
    assert solution.objective is not None
    assert solution.bound * (1.0 - 1e-6) <= least <= solution.objective * (1.0 + 1e-6)
    assert solution.objective <= solution.bound * 1.01


def test_the_same_wide_question_has_the_same_answer() -> None:
    first, second = solve(wide(5)), solve(wide(5))
    assert (first.objective, first.bound, first.assignment) == (second.objective, second.bound, second.assignment)


def test_sharpening_starts_from_any_fleet_that_works() -> None:
    problem = wide(1)
    instance = instance_of(problem)
    everything = np.ceil(instance.load.sum(axis=1)) * (np.arange(8) == 0)
    cost = float(instance.price @ everything)
    found = sharpen(instance, everything, cost, 0.0, CutPool(8), work_s=3.0, budget=Budget())
    assert found.bound <= found.cost <= cost
    assert found.cost <= (solve(problem).objective or 0.0) * 1.05
    routed = balance(instance.load, instance.utilization * found.usable)
    assert routed is not None
    assert routed.peak <= 1.0 + 1e-6
