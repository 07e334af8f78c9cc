"""Allocations as files: weights a router can load, node pools, and pools that the serving targets launch."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.gpu_allocation import instance_type, object_name
from meshplan.planner.service import emit_plan, make_plan, plan_target

SPEC: dict[str, Any] = {
    "kind": "gpu-allocation",
    "name": "chat",
    "model": "llama-3.1-8b",
    "market": {
        "offers": [
            {"type": "aws-g6e-xlarge", "terms": ["spot"], "interruption_headroom": 0.2, "max_nodes": 2},
            {"type": "aws-g6e-xlarge"},
            {"type": "dgx-h100"},
        ]
    },
    "workload": {
        "buckets": [
            {"input_tokens": [16, 256], "output_tokens": [8, 128], "request_rate_per_s": 30.0},
            {"input_tokens": [257, 8000], "output_tokens": [8, 512], "request_rate_per_s": 5.0},
        ],
    },
    "slo": {"ttft_p99_s": 2.0, "tpot_p99_s": 0.08},
    "replay": {"enabled": False},
}


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return make_plan(SPEC, catalog)


@pytest.fixture(scope="module")
def emitted(plan: Plan, catalog: Catalog) -> EmittedPlan:
    return emit_plan(plan, "vllm", catalog)


def content(emitted: EmittedPlan, path: str) -> str:
    return next(one.content for one in emitted.artifacts if one.path == PurePosixPath(path))


def test_the_plan_is_launched_by_its_engine(plan: Plan) -> None:
    assert plan_target(plan) == "vllm"


def test_router_weights_send_all_of_every_bucket_to_pools_that_exist(plan: Plan, emitted: EmittedPlan) -> None:
    document = json.loads(content(emitted, "router_weights.json"))
    assert document["meshplan"]["plan_digest"] == plan.digest
    (service,) = document["services"]
    pools = {pool["name"] for pool in service["pools"]}
    for rule in service["rules"]:
        assert set(rule["weights"]) <= pools
        assert sum(rule["weights"].values()) == pytest.approx(1.0, abs=1e-5)


def test_every_pool_has_launchers_with_its_replicas(plan: Plan, emitted: EmittedPlan) -> None:
    for pool in plan.config["services"][0]["pools"]:
        folder = f"pools/{object_name(pool['kind'])}"
        assert f"--tensor-parallel-size {pool['layout']['tensor_parallel']}" in content(
            emitted, f"{folder}/mixed_args.txt"
        )
        workers = [
            line for line in content(emitted, f"{folder}/workers.txt").splitlines() if line and not line.startswith("#")
        ]
        assert len(workers) == pool["num_workers"]
        assert "--max-model-len 8512" in content(emitted, f"{folder}/mixed_args.txt")


def test_node_pools_hold_what_is_rented_from_aws(plan: Plan, emitted: EmittedPlan) -> None:
    assert plan.answer is not None
    units = [unit for unit in plan.answer["fleets"][0]["units"] if unit["provider"] == "aws"]
    pools = list(yaml.safe_load_all(content(emitted, "node_pools.yaml")))
    assert [pool["metadata"]["name"] for pool in pools] == [object_name(unit["offer"]) for unit in units]
    for pool, unit in zip(pools, units, strict=True):
        wanted = {one["key"]: one["values"] for one in pool["spec"]["template"]["spec"]["requirements"]}
        assert wanted["karpenter.sh/capacity-type"] == [unit["terms"]]
        assert wanted["node.kubernetes.io/instance-type"] == ["g6e.xlarge"]
        assert pool["spec"]["limits"] == {"nvidia.com/gpu": str(unit["count"])}
        task = yaml.safe_load(content(emitted, f"skypilot/{object_name(unit['offer'])}.yaml"))
        assert (task["num_nodes"], task["resources"]["use_spot"]) == (unit["count"], unit["terms"] == "spot")


def test_the_picture_is_well_formed_and_files_are_distinct(emitted: EmittedPlan) -> None:
    ET.fromstring(content(emitted, "fleet.svg"))
    paths = [one.path for one in emitted.artifacts]
    assert len(paths) == len(set(paths))


def test_single_devices_get_no_nodes(catalog: Catalog) -> None:
    made = make_plan({**SPEC, "market": {**SPEC["market"], "rent": "device"}}, catalog)
    paths = [str(one.path) for one in emit_plan(made, "vllm", catalog).artifacts]
    assert "node_pools.yaml" not in paths


def test_capacities_given_by_hand_launch_nothing(catalog: Catalog) -> None:
    by_hand = {
        "kind": "gpu-allocation",
        "gpu_types": [{"name": "L4", "usd_per_hour": 1.0}],
        "buckets": [{"input_tokens": [1, 2], "output_tokens": [1, 2]}],
        "request_rate_per_s": [1.0],
        "max_request_rate_per_s": {"L4": [1.0]},
    }
    made = make_plan(by_hand, catalog)
    assert plan_target(made) is None
    with pytest.raises(EmitError, match="no pools to launch"):
        emit_plan(made, "vllm", catalog)


def test_object_names_are_dns_labels_and_long_ones_stay_different() -> None:
    assert instance_type("aws-p4de-24xlarge") == "p4de.24xlarge"
    assert object_name("AWS g5/us-east-1 TP2×DP4") == "aws-g5-us-east-1-tp2-dp4"
    assert len(object_name("x" * 100)) == 63
    assert object_name("x" * 100) != object_name("x" * 99)


def test_pools_whose_names_are_alike_are_told_apart(catalog: Catalog) -> None:
    """Names were cut at 63 characters: two services' pools wrote the same files."""
    long = "customer-support-chat-of-the-european-region-on-weekdays-"
    names = [f"{long}1", f"{long}2", "chat.1", "chat-1"]
    services = [
        {"name": name, "model": "llama-3.1-8b", "workload": SPEC["workload"], "slo": SPEC["slo"]} for name in names
    ]
    spec = {key: value for key, value in SPEC.items() if key not in ("model", "workload", "slo")}
    emitted = emit_plan(make_plan({**spec, "services": services}, catalog), "vllm", catalog)
    paths = [one.path for one in emitted.artifacts]
    assert len(paths) == len(set(paths))
    folders = {path.parts[1] for path in paths if path.parts[0] == "pools"}
    rules = json.loads(content(emitted, "router_weights.json"))["services"]
    pools = [pool["name"] for service in rules for pool in service["pools"]]
    assert sorted(pools) == sorted(folders)
