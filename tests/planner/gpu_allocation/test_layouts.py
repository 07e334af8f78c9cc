"""What is laid on rented nodes: nothing that spans them for nothing, pipelines too, and files for it all together."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError, SpecError
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import emit_plan, make_plan

ANSWERS: dict[str, Any] = {"input_tokens": [16, 256], "output_tokens": [8, 128], "request_rate_per_s": 75.0}
TEXTS: dict[str, Any] = {"input_tokens": [16, 2048], "output_tokens": [8, 512], "request_rate_per_s": 50.0}


def asked(model: str, node: str, bucket: dict[str, Any], **constraints: Any) -> dict[str, Any]:
    return {
        "kind": "gpu-allocation",
        "model": model,
        "market": {"offers": [{"type": node, "usd_per_hour_per_node": 8}]},
        "workload": {"buckets": [copy.deepcopy(bucket)]},
        "slo": {"tpot_p99_s": 0.5},
        "constraints": constraints,
        "replay": {"enabled": False},
    }


def fleet_of(plan: Plan) -> dict[str, Any]:
    assert plan.answer is not None
    fleet: dict[str, Any] = plan.answer["fleets"][0]
    return fleet


def test_three_devices_of_four_are_a_whole_node(catalog: Catalog) -> None:
    """Four pipelines of three stages were laid on three nodes of four devices, and launched on four."""
    made = make_plan(asked("phi-4", "aws-g4dn-12xlarge", ANSWERS, max_devices_per_replica=3), catalog)
    (pool,), (rented,) = fleet_of(made)["replicas"], fleet_of(made)["units"]
    assert pool["num_devices"] == 3
    assert rented["count"] == pool["count"]


def test_larger_replicas_are_never_dearer_and_every_fleet_is_launched(catalog: Catalog) -> None:
    """A tensor-parallel replica over five devices of two nodes kept all pipelines out, and no engine launches it."""
    costs = []
    for most in (4, 5, 6):
        question = asked("phi-4", "aws-g4dn-12xlarge", TEXTS, max_devices_per_replica=most)
        made = make_plan(question, catalog)
        assert emit_plan(made, "vllm", catalog).artifacts
        costs.append(made.solution["objective"])
    assert costs == sorted(costs, reverse=True)


def test_pipelines_are_rented_where_they_serve_more_per_device(catalog: Catalog) -> None:
    """As a serving plan of the same node finds: over PCIe stages beat an all-reduce in every layer."""
    fleet = fleet_of(make_plan(asked("llama-3.1-70b", "a100-pcie-8", TEXTS), catalog))
    assert any("PP" in pool["kind"] for pool in fleet["replicas"])


def test_stages_are_left_out_where_they_save_nothing(catalog: Catalog) -> None:
    fleet = fleet_of(make_plan(asked("llama-3.1-70b", "dgx-h100", ANSWERS), catalog))
    assert {pool["kind"] for pool in fleet["replicas"]} == {"dgx-h100 TP2"}


def test_interruptions_of_nodes_that_are_not_spot_are_refused(catalog: Catalog) -> None:
    for said in ({"interruption_headroom": 0.2}, {"interruptions_per_hour": 0.1, "interruption_s": 600}):
        question = asked("llama-3.1-8b", "dgx-h100", ANSWERS)
        question["market"]["offers"][0] |= said
        with pytest.raises(SpecError, match="only spot nodes are interrupted"):
            make_plan(question, catalog)
        question["market"]["offers"][0]["terms"] = ["spot"]
        assert make_plan(question, catalog).config


def test_replicas_that_do_not_fit_what_is_rented_are_planned_again(catalog: Catalog) -> None:
    made = make_plan(asked("phi-4", "aws-g4dn-12xlarge", ANSWERS, max_devices_per_replica=3), catalog)
    answer = copy.deepcopy(dict(made.answer or {}))
    answer["fleets"][0]["units"][0]["count"] -= 1
    with pytest.raises(EmitError, match="need 4 units, 3 are rented"):
        emit_plan(replace(made, answer=answer), "vllm", catalog)


def on_one_node(**more: Any) -> dict[str, Any]:
    service = {"workload": {"buckets": [ANSWERS]}, "slo": {"tpot_p99_s": 0.1}}
    return {
        "kind": "gpu-allocation",
        "services": [
            {"name": "a", "model": "llama-3.1-8b", **service},
            {"name": "b", "model": "phi-4", **service},
            {"name": "c", "model": "llama-3.1-70b", **service},
        ],
        "market": {"offers": [{"type": "dgx-h100", "usd_per_hour_per_node": 8}]},
        "replay": {"enabled": False},
        **more,
    }


@pytest.mark.parametrize("more", [{}, {"constraints": {"disaggregated": True, "min_spare_replicas": 1}}])
def test_pools_on_one_node_share_no_device_and_no_port(more: dict[str, Any], catalog: Catalog) -> None:
    """Every pool began at device 0 and port 8100 of its first host, also where the host was another pool's, too."""
    made = make_plan(on_one_node(**more), catalog)
    emitted = emit_plan(made, "vllm", catalog)
    readme = next(one.content for one in emitted.artifacts if one.path == PurePosixPath("README.md"))
    said = dict(re.findall(r"(pools/[^/]+/) runs on nodes? ([0-9, ]+) of dgx-h100", readme))
    taken: list[tuple[int, str]] = []
    for one in emitted.artifacts:
        if one.path.name not in ("workers.txt", "router.sh"):
            continue
        hosts = [int(number) for number in said[f"{one.path.parent}/"].split(", ")]
        if one.path.name == "router.sh":
            taken += [(0, f"port {port}") for port in re.findall(r"--port (\d+)", one.content)]
            continue
        rows = [line.split() for line in one.content.splitlines() if not line.startswith("#")]
        for _, _, host, _, _, port, internal, devices in rows:
            node = hosts[int(host)]
            taken += [(node, f"port {port}"), (node, f"port {internal}")]
            taken += [(node, f"device {device}") for device in devices.split(",")]
    assert len(taken) == len(set(taken))
    assert {node for node, _ in taken} <= set(range(fleet_of(made)["units"][0]["count"]))
