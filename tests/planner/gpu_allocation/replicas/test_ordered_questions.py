"""Questions whose cheapest fleets must be ordered, on random instances; every answer is summed again in plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.core.solution import Status
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem
from meshplan.planner.gpu_allocation.replicas.solve import answer, solve

SAME = 1e-9


def instance(rng: np.random.Generator) -> dict[str, Any]:
    types, buckets = int(rng.integers(2, 5)), int(rng.integers(1, 7))
    capacity = rng.lognormal(1.0, 0.7, (types, buckets)) * (rng.random((types, buckets)) < 0.8)
    capacity[0] = np.maximum(capacity[0], 0.3)  # the first type serves everything
    return {
        "kind": "gpu-allocation",
        "gpu_types": [{"name": f"t{g}", "usd_per_hour": round(float(rng.uniform(0.5, 8.0)), 2)} for g in range(types)],
        "buckets": [{"input_tokens": [b, b + 1], "output_tokens": [0, 1]} for b in range(buckets)],
        "request_rate_per_s": rng.uniform(0.0, 12.0, buckets).tolist(),
        "max_request_rate_per_s": {f"t{g}": row.tolist() for g, row in enumerate(capacity)},
        "max_utilization": float(rng.choice([0.7, 1.0])),
        "min_spare_replicas": int(rng.integers(0, 2)),
    }


def cost_of(document: dict[str, Any]) -> float | None:
    """Cost of the proven cheapest fleet, after every rule is checked; None where there is none."""
    problem = GpuAllocationProblem.from_document(document, Path())
    solution = solve(problem)
    found = answer(problem, solution)
    if solution.status is Status.INFEASIBLE:
        assert "counts" not in found
        return None
    assert solution.status is Status.OPTIMAL
    rates = document["request_rate_per_s"]
    cost = 0.0
    for one in document["gpu_types"]:
        name, count = one["name"], found["counts"][one["name"]]
        busy = 0.0
        for share, rate, most in zip(
            found["routing"][name], rates, document["max_request_rate_per_s"][name], strict=True
        ):
            assert share >= 0
            if share > 0 and rate > 0:
                assert most > 0
                busy += share * rate / most
        usable = count - document["min_spare_replicas"] if count else 0
        assert busy <= document["max_utilization"] * usable * (1 + 1e-6) + 1e-9
        assert count <= one.get("max_count", count)
        cost += count * one["usd_per_hour"]
    for bucket, rate in enumerate(rates):
        if rate > 0:
            assert sum(row[bucket] for row in found["routing"].values()) == pytest.approx(1.0, abs=1e-6)
    assert found["cost_usd_per_hour"] == pytest.approx(cost, rel=1e-12)
    return cost


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_tighter_questions_are_never_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = instance(rng)
    cost = cost_of(given_)
    assert cost is not None
    capped = [{**one, "max_count": int(rng.integers(0, 4))} for one in given_["gpu_types"]]
    chosen = int(rng.integers(len(capped)))
    tighter: list[dict[str, Any]] = [
        {**given_, "gpu_types": capped},
        {**given_, "gpu_types": [*given_["gpu_types"][:chosen], capped[chosen], *given_["gpu_types"][chosen + 1 :]]},
        {**given_, "max_utilization": 0.8 * given_["max_utilization"]},
        {**given_, "min_spare_replicas": given_["min_spare_replicas"] + 1},
        {**given_, "request_rate_per_s": [rate * rng.uniform(1.0, 1.5) for rate in given_["request_rate_per_s"]]},
    ]
    for document in tighter:
        found = cost_of(document)
        assert found is None or found >= cost * (1 - SAME)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_more_types_never_cost_more_and_twice_the_traffic_at_most_twice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = instance(rng)
    cost = cost_of(given_)
    assert cost is not None
    rates = rng.lognormal(1.0, 0.7, len(given_["buckets"])).tolist()
    more = {
        **given_,
        "gpu_types": [*given_["gpu_types"], {"name": "new", "usd_per_hour": round(float(rng.uniform(0.5, 8.0)), 2)}],
        "max_request_rate_per_s": {**given_["max_request_rate_per_s"], "new": rates},
    }
    twice = {**given_, "request_rate_per_s": [2 * rate for rate in given_["request_rate_per_s"]]}
    with_more, with_twice = cost_of(more), cost_of(twice)
    assert with_more is not None
    assert with_more <= cost * (1 + SAME)
    assert with_twice is not None
    assert with_twice <= 2 * cost * (1 + SAME)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_types_and_buckets_changes_no_cost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = instance(rng)
    types, buckets = rng.permutation(len(given_["gpu_types"])), rng.permutation(len(given_["buckets"]))
    shuffled = {
        **given_,
        "gpu_types": [given_["gpu_types"][g] for g in types],
        "buckets": [given_["buckets"][b] for b in buckets],
        "request_rate_per_s": [given_["request_rate_per_s"][b] for b in buckets],
        "max_request_rate_per_s": {
            name: [row[b] for b in buckets] for name, row in given_["max_request_rate_per_s"].items()
        },
    }
    assert cost_of(shuffled) == pytest.approx(cost_of(given_), rel=SAME)
