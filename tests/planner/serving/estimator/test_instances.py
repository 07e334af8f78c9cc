"""Devices cut by MIG: what the parts have together, how fast a worker in one is, what a plan and its files say."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from shared_devices import problem_with, shared_and_whole

from meshplan.catalogs.constants.machines.mig_profiles import MigProfile, mig_profiles
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.planner.cluster.shares import CutMachine, cut, instance_of
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import emit_plan
from meshplan.planner.serving.estimator.instances import LOADS
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import Layout, Pool, Role, serving_config_from_document
from meshplan.planner.serving.search.search import _space
from meshplan.planner.serving.search.what_if import what_if
from meshplan.planner.store import plan_from_document

question = partial(problem_with, mig=["1g.20gb"])
EVERYTHING = MigProfile(name="7g.80gb", instances=1, compute_share=1.0, memory_share=1.0, memory_bytes=79.25 * 2.0**30)


@pytest.fixture(scope="module")
def plans(catalog: Catalog) -> dict[bool, Plan]:
    """With instances to choose from, and without."""
    return shared_and_whole(catalog, mig=["1g.20gb"])


@pytest.mark.parametrize("device", mig_profiles())
def test_the_instances_of_a_device_have_no_more_than_the_device(catalog: Catalog, device: str) -> None:
    whole = catalog.device(device)
    for profile in mig_profiles()[device].values():
        part = instance_of(whole, profile)
        assert profile.instances * part.usable_memory_bytes <= whole.usable_memory_bytes
        assert profile.instances * part.memory_bandwidth_bytes_per_s <= whole.memory_bandwidth_bytes_per_s
        assert profile.instances * part.peak_flops_per_s["bf16"] <= whole.peak_flops_per_s["bf16"]


def test_a_worker_in_an_instance_is_slower_than_on_the_whole_device_and_faster_in_a_larger_one(
    catalog: Catalog,
) -> None:
    problem = question(catalog)
    machine = problem.machines["dgx-h100"]
    pool = Pool(
        role=Role.MIXED,
        layout=Layout(),
        num_workers=1,
        limits=problem.rules.default_limits(machine.device),
        quantization=problem.quantizations[0],
        node_type="dgx-h100",
    )
    known = mig_profiles()["h100-sxm-80gb"]
    profiles = [None, EVERYTHING, *(known[name] for name in ("3g.40gb", "2g.20gb", "1g.10gb"))]
    costs = [pool_worker(problem.site, replace(pool, share=one), problem.workload).step_cost() for one in profiles]
    for load in LOADS:
        times = [cost.decode_s(load) + cost.decode_context_s[load] * load * 96.5 for cost in costs]
        assert times == sorted(times), load


def test_a_cut_machine_costs_what_the_whole_one_does_and_is_not_cut_again(catalog: Catalog) -> None:
    problem = question(catalog)
    whole, profile = problem.machines["dgx-h100"], problem.share_options[0]
    parts = cut(whole, profile)
    assert isinstance(parts, CutMachine)
    assert cut(parts, profile) is parts
    assert cut(whole, None) is whole
    prices = [one.num_devices * (one.usd_per_hour_per_device or 0.0) for one in (whole, parts)]
    assert prices[0] == pytest.approx(prices[1]) == 24.0
    assert problem.with_share(profile).num_devices == problem.num_devices == 1
    assert what_if(problem.with_share(profile)) == []
    free = question(catalog, constraints={})
    assert free.with_share(profile).num_devices == free.num_devices == 8


def test_a_question_that_does_not_ask_searches_whole_devices_alone(catalog: Catalog) -> None:
    assert [one.machines for one in question(catalog, mig=None).with_each_share] == [question(catalog).machines]


def test_workers_in_instances_have_one_each_and_devices_are_rented_whole(catalog: Catalog) -> None:
    rejected = Counter[str]()
    _, families = _space(question(catalog), rejected, lambda: None)
    cut_up = [family for family in families if family.problem.share is not None]
    assert cut_up
    assert all(kind.num_devices == 1 for family in cut_up for kind in family.kinds)
    assert all(not family.is_disaggregated for family in cut_up)
    for family in cut_up:
        assert family.usd_per_hour((1,)) == family.usd_per_hour((4,)) == pytest.approx(3.0)
        assert [family.num_devices((count,)) for count in (1, 4, 5)] == [1, 1, 2]
        assert family.fits((4,))
        assert not family.fits((5,))


def test_more_ways_to_cut_are_never_worse_and_a_plan_in_instances_is_read_back(plans: dict[bool, Plan]) -> None:
    with_share, without = plans[True], plans[False]
    rates = [plan.predicted["output_tokens_per_s_per_device"].value for plan in (without, with_share)]
    assert rates == sorted(rates)
    pool = with_share.config["pools"][0]
    assert pool["mig"]["instances"] == pool["num_workers"]
    assert pool["num_devices"] == with_share.config["num_devices"] == 1
    assert len(with_share.rank_table or ()) == pool["num_workers"]
    read = plan_from_document(json.loads(json.dumps(with_share.to_document())), name="plan")
    assert serving_config_from_document(read.config).pools[0].share in mig_profiles()["h100-sxm-80gb"].values()
    assert any("MIG" in doubt for doubt in with_share.provenance["not_validated"])


def test_files_give_every_server_an_instance_and_name_the_command_that_cuts(
    plans: dict[bool, Plan], catalog: Catalog
) -> None:
    pool = plans[True].config["pools"][0]
    emitted = emit_plan(plans[True], "vllm", catalog)
    script = next(file.content for file in emitted.artifacts if str(file.path) == "launch.sh")
    assert f'"MIG "{pool["mig"]["name"]}" "' in script
    assert "CUDA_VISIBLE_DEVICES=$devices" not in script
    names = ",".join([pool["mig"]["name"]] * pool["num_workers"])
    assert any(f"nvidia-smi mig -cgi {names} -C" in note for note in emitted.notes)
    with pytest.raises(CannotExpressError, match="workers on parts of devices"):
        emit_plan(plans[True], "lws", catalog)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mig": ["1g.99gb"]}, "h100-sxm-80gb has 1g.10gb"),
        ({"cluster": {"nodes": [{"type": "hgx-mi300x", "count": 1}]}}, "no source says its profiles"),
        ({"power_caps_w": [500]}, "leave them out"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_can(catalog: Catalog, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        question(catalog, **changes)
