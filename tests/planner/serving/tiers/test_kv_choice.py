"""Stores and sizes of a second tier of prefix cache that a plan finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.service import make_plan
from meshplan.planner.serving.problem.config import EngineLimits, Role, serving_config_from_document
from meshplan.planner.serving.problem.requests import Arrival, ServingWorkload
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.workload.described import described_requests
from meshplan.planner.serving.problem.workload.spec import ServingWorkloadSpec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.cluster import ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.prefix_cache import PrefixCache, TierShape, empty_cache
from meshplan.planner.serving.simulation.request_state import RequestState
from meshplan.planner.serving.tiers.kv_choice import sized, tokens_for

SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-70b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {
        "input_length": 8000,
        "output_length": 200,
        "prefix_hit_rate": 0.9,
        "num_prefixes": 120,
        "num_requests": 600,
    },
    "slo": {"ttft_p99_s": 2.0},
    "fixed": {"mode": "aggregated", "tensor_parallel": 4, "num_workers": 2},
}
ALL = {"choose": ["host", "nvme", "remote"]}


def prefix_load(num_prefixes: int) -> ServingWorkload:
    """Requests far apart that ask for prefixes at random."""
    return ServingWorkload(
        arrival=Arrival.POISSON,
        input_length=100.0,
        output_length=10.0,
        request_rate_per_s=2.0,
        num_requests=40 * num_prefixes,
        prefix_hit_rate=0.8,
        num_prefixes=num_prefixes,
    )


def found_share(num_prefixes: int, capacity_tokens: int) -> float:
    """Share of the later half of the requests that find their prefix in a cache of the simulation."""
    state = RequestState(make_requests(prefix_load(num_prefixes), seed=1))
    cache = PrefixCache(state, capacity_tokens)
    found = [cache.find(request) > 0 for request in range(len(state.input_length))]
    return float(np.mean(found[len(found) // 2 :]))


def mean_wait_s(num_prefixes: int, tier_tokens: int, *, is_shared: bool, is_warm: bool = True) -> float:
    """Mean time to first token of three workers whose devices hold next to nothing."""
    pool = SimulatedPool(
        role=Role.MIXED,
        cost=linear_cost(most_seqs=16, most_tokens=512),
        limits=EngineLimits(max_num_seqs=16, max_batched_tokens=512, prefix_caching=True),
        kv_capacity_tokens=400,
        num_workers=3,
        tier=TierShape(capacity_tokens=tier_tokens, seconds_per_token=1e-9, is_shared=is_shared),
    )
    requests = replace(make_requests(prefix_load(num_prefixes), seed=1), finds_warm_caches=is_warm)
    run = simulate_system(requests, ServingSystem(pools=(pool,)))
    return float((run.first_token_s - run.arrival_s).mean())


@pytest.mark.parametrize("found", [0.5, 0.8, 0.95, 0.99])
def test_a_cache_of_the_formula_finds_what_it_says(found: float) -> None:
    assert found_share(60, int(tokens_for(prefix_load(60), found))) == pytest.approx(found, abs=0.03)


@pytest.mark.parametrize("found", [0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("is_named_whole", [False, True])
def test_of_recorded_requests_a_cache_finds_that_share_of_what_one_without_limit_finds(
    found: float, is_named_whole: bool
) -> None:
    load = {"input_length": 600, "output_length": 130, "request_rate_per_s": 5.0, "num_requests": 1500}
    asked = ServingWorkloadSpec.model_validate({**load, "sessions": {"turns": 6, "gap_s": 30.0}})
    requests = described_requests(asked)
    if is_named_whole:
        requests = make_requests(prefix_load(40), seed=1)
    assert requests is not None
    workload = ServingWorkload(arrival=Arrival.TRACE, input_length=1.0, output_length=1.0, trace=requests)
    found_in = []
    for tokens in (tokens_for(workload, found), 10**9):
        cache = empty_cache(RequestState(replace(requests, finds_warm_caches=False)), int(tokens))
        found_in.append(sum(cache.find(request) for request in range(len(requests))))
    assert found_in[0] / found_in[1] == pytest.approx(found, abs=0.06)


def test_a_tier_has_no_use_for_requests_that_share_nothing(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,input_length,output_length\n0,100,5\n1,100,5\n")
    asked = {**SPEC, "workload": {"trace": "t.csv"}, "kv_tier": ALL}
    with pytest.raises(SpecError, match="sessions, or a trace with a column prefix or hash_ids"):
        resolve_serving(read_serving_spec(asked), catalog, tmp_path)


def test_a_larger_cache_never_finds_less() -> None:
    shares = [found_share(40, tokens) for tokens in (200, 1000, 3000, 10_000, 100_000)]
    assert shares == sorted(shares)


def test_workers_that_share_a_tier_wait_no_longer_than_each_alone() -> None:
    for tokens in (1500, 6000, 10**6):
        alone = mean_wait_s(40, tokens, is_shared=False)
        assert mean_wait_s(40, 3 * tokens, is_shared=True) <= alone * (1.0 + 1e-3)
    # On fresh workers with room for everything a prefix is computed once, not once for each worker.
    shared, own = (mean_wait_s(200, 10**6, is_shared=is_shared, is_warm=False) for is_shared in (True, False))
    assert shared < own


def test_workers_of_a_service_hold_what_fits_when_a_run_starts() -> None:
    """Cold caches wrote a queue that took the rest of the run to drain, and no plan kept its SLO."""
    requests = make_requests(prefix_load(50), seed=1)
    room, shared = 20 * 80, 80
    held = PrefixCache(RequestState(requests), room)
    assert (held.held_tokens, len(held.held)) == (room, room // shared)
    roomy = PrefixCache(RequestState(requests), 10**6)
    assert all(roomy.matched(request) == shared for request in range(len(requests)))
    fresh = PrefixCache(RequestState(replace(requests, finds_warm_caches=False)), room)
    assert fresh.held_tokens == 0
    assert mean_wait_s(200, 10**6, is_shared=False) < mean_wait_s(200, 10**6, is_shared=False, is_warm=False)


@settings(max_examples=50, deadline=None)
@given(share=st.floats(0.1, 0.98), prefixes=st.integers(1, 10_000), hit=st.floats(0.01, 1.0))
def test_more_prefixes_and_more_found_need_more(share: float, prefixes: int, hit: float) -> None:
    workload = ServingWorkload(
        arrival=Arrival.POISSON, input_length=1000.0, output_length=50.0, prefix_hit_rate=hit, num_prefixes=prefixes
    )
    tokens = tokens_for(workload, share)
    assert tokens_for(workload, share + 0.01) > tokens
    assert tokens_for(replace(workload, num_prefixes=prefixes + 1), share) > tokens


def test_a_plan_finds_the_store_and_its_size(catalog: Catalog) -> None:
    without, chosen = make_plan(SPEC, catalog), make_plan({**SPEC, "kv_tier": ALL}, catalog)
    assert chosen.solution["objective"] < without.solution["objective"]
    assert chosen.solution["bound"] <= without.solution["bound"] * (1.0 + 1e-9)
    assert chosen.answer is not None
    rows = chosen.answer["kv_stores"]
    assert [row["store"] for row in rows] == ALL["choose"]
    (taken,) = [row for row in rows if row["is_chosen"]]
    tier = serving_config_from_document(chosen.config).pools[0].kv_tier
    assert tier is not None
    assert (tier.store, tier.bytes_per_device) == (taken["store"], taken["bytes_per_device"])
    assert tier.bytes_per_s_per_device > taken["break_even_bytes_per_s_per_device"]
    # Nothing is chosen that a plan without a tier beats.
    assert all(row["objective"] is None or row["objective"] >= chosen.solution["objective"] for row in rows)


def test_a_tier_that_brings_nothing_is_not_taken(catalog: Catalog) -> None:
    few = {**SPEC, "workload": {**SPEC["workload"], "num_prefixes": 2}, "kv_tier": ALL}
    made = make_plan(few, catalog)
    assert "kv_tier" not in made.config["pools"][0]
    assert made.answer is not None
    assert not any(row["is_chosen"] for row in made.answer["kv_stores"])


def test_sizes_by_a_formula_are_never_called_optimal(catalog: Catalog) -> None:
    """Nor where no store is searched, because the formula says that none pays."""
    fixed = {"mode": "aggregated", "tensor_parallel": 1, "num_workers": 1}
    slow = {**SPEC["cluster"], "drive": "samsung-pm9a3-m2"}
    asked = {**SPEC, "model": "llama-3.2-1b", "cluster": slow, "fixed": fixed, "kv_tier": {"choose": ["nvme"]}}
    made = make_plan(asked, catalog)
    assert made.answer is not None
    assert [row["reason"] for row in made.answer["kv_stores"]] == ["slower than computing prefixes again"]
    assert made.solution["status"] == "feasible"


def test_sizes_follow_the_layout_and_the_host(catalog: Catalog) -> None:
    problem = resolve_serving(read_serving_spec({**SPEC, "kv_tier": ALL}), catalog, Path()).problem
    pool = serving_config_from_document(make_plan(SPEC, catalog).config).pools[0]
    alone = sized(problem, pool, "host")
    many = sized(problem, replace(pool, num_workers=4), "remote")
    one = sized(problem, replace(pool, num_workers=1), "remote")
    assert alone is not None
    assert many is not None
    assert one is not None
    assert one.tier.bytes_per_device == pytest.approx(4.0 * many.tier.bytes_per_device)
    assert alone.tier.bytes_per_device <= alone.needed_bytes_per_device
    assert one.break_even_bytes_per_s == alone.break_even_bytes_per_s


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_tier": {"choose": ["host"], "gib_per_device": 10}}, "gib_per_device cannot be stated beside choose"),
        ({"kv_tier": {"store": "host"}}, "gib_per_device and gb_per_s_per_device missing (or choose"),
        ({"kv_tier": ALL, "constraints": {"target": "trtllm"}}, "trtllm has no flag for nvme"),
        ({"kv_tier": ALL, "fixed": {"mode": "disaggregated"}}, "needs workers that prefill and decode"),
        ({"kv_tier": ALL, "workload": {**SPEC["workload"], "num_prefixes": None}}, "give workload.num_prefixes"),
    ],
)
def test_a_choice_that_makes_no_sense_is_named(catalog: Catalog, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        make_plan({**SPEC, **changes}, catalog)
    assert said in str(refused.value)
