"""KV cache in a second tier, or shared by all workers, from the spec to the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost, random_requests

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.serving.problem.config import EngineLimits, serving_config_document, serving_config_from_document
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.cache_shapes import pooled
from meshplan.planner.serving.simulation.engine import simulate
from meshplan.planner.serving.simulation.reference import reference_run

SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-70b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {
        "input_length": 8000,
        "output_length": 200,
        "request_rate_per_s": 1.5,
        "prefix_hit_rate": 0.9,
        "num_prefixes": 120,
        "num_requests": 600,
    },
    "fixed": {"mode": "aggregated", "tensor_parallel": 4, "num_workers": 2},
}
TIER = {"store": "host", "gib_per_device": 100, "gb_per_s_per_device": 25}


def test_a_tier_shortens_the_wait_and_reaches_the_plan(catalog: Catalog) -> None:
    without, tiered = estimate_plan(SPEC, catalog), estimate_plan({**SPEC, "kv_tier": TIER}, catalog)
    assert tiered.predicted["ttft_mean_s"].value < 0.9 * without.predicted["ttft_mean_s"].value
    config = serving_config_from_document(tiered.config)
    tier = config.pools[0].kv_tier
    assert tier is not None
    assert (tier.store, tier.bytes_per_device, tier.bytes_per_s_per_device) == ("host", 100 * 2**30, 25e9)
    assert serving_config_document(config) == tiered.config
    assert "kv_tier" not in without.config["pools"][0]


def test_a_plan_without_a_tier_says_what_one_would_bring(catalog: Catalog) -> None:
    without, tiered = estimate_plan(SPEC, catalog), estimate_plan({**SPEC, "kv_tier": TIER}, catalog)
    assert without.answer is not None
    assert tiered.answer is not None
    rows = {row["name"]: row for row in without.answer["what_if_simulated"]}
    assert set(rows) >= {"prefixes kept in host memory", "prefixes kept on NVMe"}
    assert all(row["validated"] is False for row in rows.values())
    assert rows["prefixes kept in host memory"]["by_engine"]
    assert rows["prefixes kept on NVMe"]["by_engine"]
    assert rows["prefixes kept in host memory"]["ttft_mean_s"] < 0.9 * without.predicted["ttft_mean_s"].value
    assert not [row for row in tiered.answer["what_if_simulated"] if "prefixes" in row["name"]]


def test_workers_whose_cache_is_short_are_shown_with_one_cache(catalog: Catalog) -> None:
    load = {"input_length": 60000, "output_length": 200, "concurrency": 48, "num_requests": 100}
    made = estimate_plan({**SPEC, "workload": load}, catalog)
    assert made.answer is not None
    (row,) = made.answer["what_if_simulated"]
    assert row["name"] == "one KV cache over all workers"
    assert not row["by_engine"]
    assert row["num_rejected"] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_tier": {**TIER, "store": "nvme"}, "constraints": {"target": "trtllm"}}, "trtllm has no flag for nvme"),
        ({"kv_tier": {**TIER, "gib_per_device": 1e4}}, "kv_tier.gib_per_device"),
        ({"kv_tier": {**TIER, "gb_per_s_per_device": 0}}, "kv_tier.gb_per_s_per_device"),
        ({"kv_tier": TIER, "fixed": {"mode": "disaggregated"}}, "needs workers that prefill and decode"),
        ({"kv_tier": TIER, "workload": {**SPEC["workload"], "num_prefixes": None}}, "give workload.num_prefixes"),
        ({"workload": {**SPEC["workload"], "prefix_hit_rate": 0.0}}, "num_prefixes goes with a prefix_hit_rate"),
        ({"workload": {**SPEC["workload"], "num_prefixes": 0}}, "workload.num_prefixes"),
    ],
)
def test_a_tier_that_makes_no_sense_is_named(catalog: Catalog, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        make_plan({**SPEC, **changes}, catalog)
    assert said in str(refused.value)


def test_every_engine_takes_a_tier_in_host_memory(catalog: Catalog) -> None:
    for target in ("vllm", "sglang", "trtllm"):
        asked = read_serving_spec({**SPEC, "kv_tier": TIER, "constraints": {"target": target}})
        assert resolve_serving(asked, catalog, Path()).problem.kv_tier is not None


# --- one cache over several workers -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    instances=st.sampled_from([1, 2, 3]),
    rate=st.sampled_from([5.0, 50.0]),
    capacity=st.sampled_from([500, 4000]),
    chunked=st.booleans(),
)
def test_pooled_workers_agree_with_the_reference(
    seed: int, instances: int, rate: float, capacity: int, chunked: bool
) -> None:
    requests = random_requests(seed, 40, rate_per_s=rate)
    cost = pooled(linear_cost(most_seqs=16, most_tokens=512), instances, borrow_s=1e-4)
    limits = EngineLimits(max_num_seqs=16 * instances, max_batched_tokens=512, chunked_prefill=chunked)
    run = simulate(requests, cost, limits, kv_capacity_tokens=capacity)
    everyone, _ = reference_run(requests, cost, limits, kv_capacity_tokens=capacity, kv_block_tokens=16)
    assert run.finish_s.tolist() == pytest.approx([one.finish_s for one in everyone], rel=1e-9, abs=1e-12)


def test_an_even_batch_over_pooled_workers_takes_as_long_as_on_each_alone() -> None:
    one = linear_cost(most_seqs=16)
    for instances in (2, 4):
        together = pooled(one, instances, borrow_s=0.0)
        assert together.max_num_seqs == 16 * instances
        for n, context in ((1, 700.0), (7, 12_000.0), (16, 0.0)):
            assert together.step_s(instances * n, instances * context, 0, 0, 0.0) == pytest.approx(
                one.step_s(n, context, 0, 0, 0.0)
            )
    assert pooled(one, 1, borrow_s=1.0) is one


def test_a_request_that_fits_no_worker_fits_all_of_them_together() -> None:
    requests = random_requests(1, 30)
    long = replace(requests, input_length=np.where(np.arange(30) == 7, 900, requests.input_length))
    cost, limits = linear_cost(most_seqs=16), EngineLimits(max_num_seqs=16)
    assert simulate(long, cost, limits, kv_capacity_tokens=600).num_rejected == 1
    assert simulate(long, pooled(cost, 2, borrow_s=1e-4), limits, kv_capacity_tokens=1200).num_rejected == 0
