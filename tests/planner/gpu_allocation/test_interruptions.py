"""Replicas that vanish: states against a simulated clock, and plans whose promises hold all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.gpu_allocation.interruptions import LEAST_SHARE, states_of, states_together
from meshplan.planner.gpu_allocation.nodes.problem import Offer, ReplicaKind
from meshplan.planner.service import make_plan

SPEC: dict[str, Any] = {
    "kind": "gpu-allocation",
    "model": "llama-3.1-8b",
    "workload": {"buckets": [{"input_tokens": [16, 256], "output_tokens": [8, 128], "request_rate_per_s": 30.0}]},
    "slo": {"ttft_p99_s": 2.0, "tpot_p99_s": 0.08},
    "replay": {"num_requests": 500},
}


def offer(**parts: Any) -> Offer:
    return Offer(name="o", usd_per_hour=1.0, **parts)


def spot(**parts: Any) -> dict[str, Any]:
    entry = {"type": "aws-g6e-xlarge", "terms": ["spot"], **parts}
    return {**SPEC, "market": {"offers": [entry]}}


def test_states_agree_with_a_clock() -> None:
    rate_per_hour, away_s, num = 2.0, 600.0, 3
    rng = np.random.default_rng(0)
    grid = np.arange(0.0, 4e6, 60.0)
    missing = np.zeros(len(grid), dtype=int)
    for _ in range(num):  # each unit: up for an exponential time, then away for a fixed one
        ups = rng.exponential(3600.0 / rate_per_hour, 3000)
        starts = np.cumsum(ups + away_s) - away_s
        place = np.searchsorted(starts, grid, side="right") - 1
        missing += (place >= 0) & (grid < starts[np.maximum(place, 0)] + away_s)
    found = states_of(
        offer(interruptions_per_hour=rate_per_hour, interruption_s=away_s),
        ReplicaKind(name="k", offer=0),
        count=num,
        usable=num,
    )
    assert {state.usable[0]: state.share for state in found} == pytest.approx(
        {num - gone: float((missing == gone).mean()) for gone in range(num + 1)}, abs=0.02
    )


def test_replicas_of_a_node_go_together_and_spares_take_over() -> None:
    node = offer(num_devices=4, interruptions_per_hour=1.0, interruption_s=360.0)
    found = states_of(node, ReplicaKind(name="k", offer=0, num_devices=2), count=4, usable=3)
    assert {state.usable[0] for state in found} == {3, 2, 0}
    away = 0.1 / 1.1
    assert found[0].share == pytest.approx((1 - away) ** 2)
    wide = states_of(node, ReplicaKind(name="k", offer=0, num_devices=8), count=1, usable=1)
    assert wide[-1].share == pytest.approx(0.2 / 1.2)  # two nodes: twice as often
    steady = states_of(offer(), ReplicaKind(name="k", offer=0), count=500, usable=500)
    assert [(state.usable, state.share) for state in steady] == [((500,), 1.0)]


def test_pools_that_serve_together_fail_apart() -> None:
    risky = states_of(
        offer(interruptions_per_hour=1.0, interruption_s=36.0), ReplicaKind(name="k", offer=0), count=2, usable=2
    )
    found = states_together([risky, risky])
    assert all(state.share >= LEAST_SHARE for state in found)
    assert sum(state.share for state in found) == pytest.approx(1.0, abs=10 * LEAST_SHARE)
    assert found[0].usable == (2, 2)


def test_promises_hold_through_interruptions_and_cost_more(catalog: Catalog) -> None:
    costs = []
    for often in (0.0, 2.0):
        made = make_plan(spot(interruptions_per_hour=often, interruption_s=300.0), catalog)
        assert made.solution["kept"]
        assert made.answer is not None
        assert all(row["lower_limit"] >= 0.99 for row in made.answer["replays"][0]["promises"])
        costs.append(made.solution["objective"])
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_how_often_needs_how_long(catalog: Catalog) -> None:
    with pytest.raises(SpecError, match="go together"):
        make_plan(spot(interruptions_per_hour=0.2), catalog)
    with pytest.raises(SpecError, match="how often"):
        make_plan(spot(), catalog)
