"""Replicas on one device under MPS: what they have together, how fast one is, what a plan and its files say."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from shared_devices import problem_with, shared_and_whole

from meshplan.catalogs.constants.machines.device_shares import MOST_REPLICAS, DeviceShare, MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import mig_profiles
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, SpecError, StoreError
from meshplan.planner.cluster.shares import cut
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import emit_plan
from meshplan.planner.serving.estimator.host.front_end import NO_FRONT_END
from meshplan.planner.serving.estimator.instances import LOADS
from meshplan.planner.serving.estimator.pools import pool_memory, pool_worker
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import Layout, Pool, Role, serving_config_from_document
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.search.workers import priced_workers
from meshplan.planner.store import plan_from_document

question = partial(problem_with, mps=[2, 4])


def replica(problem: ServingProblem, share: DeviceShare | None) -> Pool:
    device = problem.machines["dgx-h100"].device
    return Pool(
        role=Role.MIXED,
        layout=Layout(),
        num_workers=1,
        limits=problem.rules.default_limits(device),
        quantization=problem.quantizations[0],
        node_type="dgx-h100",
        share=share,
    )


def iteration_s(cost: StepCost, load: int) -> float:
    """A decode iteration of so many requests half-way through."""
    return float(cost.decode_s(load) + cost.decode_context_s[load] * load * 96.0)


def test_the_device_takes_as_often_as_long_and_the_host_as_long_as_ever(catalog: Catalog) -> None:
    """host + n · device of what the kernels take on the whole device: linear in n."""
    problem = question(catalog)
    memory = problem.machines["dgx-h100"].device.memory_bytes
    shares = [None, *(MpsShare.of(memory, count) for count in (2, 4))]
    workers = [pool_worker(problem.site, replica(problem, share), problem.workload) for share in shares]
    one, two, four = (replace(worker, hides_host=False, front_end=NO_FRONT_END).step_cost() for worker in workers)
    for load in LOADS:
        device = iteration_s(two, load) - iteration_s(one, load)
        assert 0.0 < device < iteration_s(one, load)  # the rest is the host's
        assert iteration_s(four, load) - iteration_s(one, load) == pytest.approx(3.0 * device)


def test_a_host_that_prepares_ahead_hides_behind_replicas(catalog: Catalog) -> None:
    """About the longer of host and n · device: never less than either, nor more than both."""
    problem = question(catalog)
    memory = problem.machines["dgx-h100"].device.memory_bytes
    for share in (None, *(MpsShare.of(memory, count) for count in (2, 4))):
        ahead = pool_worker(problem.site, replica(problem, share), problem.workload)
        assert ahead.hides_host
        idle = replace(ahead.constants, host_step_s=0.0, host_s_per_seq=0.0)
        step_s, per_seq = ahead.host_times(ahead.constants)
        for load in LOADS:
            device, host = iteration_s(ahead.step_cost(idle), load), step_s + per_seq * load
            assert max(device, host) <= iteration_s(ahead.step_cost(), load) < device + host


@pytest.mark.parametrize("replicas", [2, 3, 7, MOST_REPLICAS])
def test_replicas_have_no_more_together_than_the_device(catalog: Catalog, replicas: int) -> None:
    problem = question(catalog)
    whole = problem.machines["dgx-h100"].device
    share = MpsShare.of(whole.memory_bytes, replicas)
    pool = replica(problem, share)
    assert replicas * pool.fraction_of_device == pytest.approx(pool.limits.memory_fraction)
    part = cut(problem.machines["dgx-h100"], share).device
    assert replicas * part.usable_memory_bytes <= whole.usable_memory_bytes
    assert 100 <= replicas * share.thread_percentage < 100 + replicas
    if replicas < MOST_REPLICAS:  # so many have no room for the model
        alone = pool_memory(problem.site, replica(problem, None), problem.workload).kv_capacity_tokens
        assert replicas * pool_memory(problem.site, pool, problem.workload).kv_capacity_tokens < alone


def test_an_instance_of_mig_is_a_device_of_its_own(catalog: Catalog) -> None:
    pool = replica(question(catalog), mig_profiles()["h100-sxm-80gb"]["3g.40gb"])
    assert pool.fraction_of_device == pool.limits.memory_fraction


@pytest.mark.parametrize("share", [MpsShare.of(80 * 2**30, 3), mig_profiles()["h100-sxm-80gb"]["3g.40gb"]])
def test_parts_of_a_device_draw_together_what_the_device_does(catalog: Catalog, share: DeviceShare) -> None:
    """At the same requests/s no less than the whole device, because each reads the weights, and not many times it."""
    problem = question(catalog)
    constants = problem.power.constants
    whole = priced_workers(problem.with_share(None), Role.MIXED, Counter())[0]
    part = priced_workers(problem.with_share(share), Role.MIXED, Counter())[0]
    for rate in (10.0, 40.0, 100.0):
        alone, each = whole.power_w(rate, constants), part.power_w(rate / share.instances, constants)
        assert alone is not None
        assert each is not None
        assert 0.98 * alone < share.instances * each < 1.5 * alone


@pytest.fixture(scope="module")
def plans(catalog: Catalog) -> dict[bool, Plan]:
    """With replicas to choose from, and without."""
    return shared_and_whole(catalog, mps=[2, 4])


def test_more_ways_to_share_are_never_worse_and_a_plan_of_replicas_is_read_back(plans: dict[bool, Plan]) -> None:
    with_mps, without = plans[True], plans[False]
    rates = [plan.predicted["output_tokens_per_s_per_device"].value for plan in (without, with_mps)]
    assert rates == sorted(rates)
    pool = with_mps.config["pools"][0]
    assert pool["mps"]["instances"] == pool["num_workers"]
    assert pool["num_devices"] == with_mps.config["num_devices"] == 1
    read = plan_from_document(json.loads(json.dumps(with_mps.to_document())), name="plan")
    share = serving_config_from_document(read.config).pools[0].share
    assert isinstance(share, MpsShare)
    larger = json.loads(json.dumps(with_mps.to_document()))
    larger["config"]["pools"][0]["mps"]["memory_share"] = 1.0
    with pytest.raises(StoreError, match="no equal part"):
        plan_from_document(larger, name="plan")
    assert any("MPS" in doubt for doubt in with_mps.provenance["not_validated"])


def test_both_ways_to_share_are_tried_side_by_side(catalog: Catalog) -> None:
    names = [one.share.name for one in question(catalog, mig=["3g.40gb"]).with_each_share if one.share is not None]
    assert names == ["3g.40gb", "1 of 2 under MPS", "1 of 4 under MPS"]
    assert [one.share for one in question(catalog, mps=None).with_each_share] == [None]


def test_files_name_the_daemon_and_others_refuse(plans: dict[bool, Plan], catalog: Catalog) -> None:
    replicas = plans[True].config["pools"][0]["num_workers"]
    emitted = emit_plan(plans[True], "vllm", catalog)
    assert any(f"{replicas} servers at the same time under CUDA's MPS" in note for note in emitted.notes)
    with pytest.raises(CannotExpressError, match="workers on parts of devices"):
        emit_plan(plans[True], "lws", catalog)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mps": [1]}, "must be at least 2"),
        ({"cluster": {"nodes": [{"type": "hgx-mi300x", "count": 1}]}}, "one type of NVIDIA's devices"),
        ({"constraints": {"target": "sglang"}}, "vllm alone"),
        ({"power_caps_w": [500]}, "power limits were not priced for replicas"),
    ],
)
def test_what_cannot_be_shared_is_refused(catalog: Catalog, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        question(catalog, **changes)
