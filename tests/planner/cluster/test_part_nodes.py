"""Nodes of which only some devices may be used: no plan takes more of a type than there are, and files count them."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.cluster.lookup import part_of_node
from meshplan.planner.service import emit_plan, make_plan

SERVING: dict[str, Any] = {
    "kind": "serving",
    "model": "qwen2.5-14b",
    "cluster": {
        "nodes": [
            {"type": "rtx-4090-pcie-8", "count": 1, "devices": 2},
            {"type": "dgx-a100-80gb", "count": 1, "devices": 1},
        ]
    },
    "workload": {"input_length": 1024, "output_length": 1024, "request_rate_per_s": 2.0},
    "slo": {"ttft_p95_s": 2.0, "tpot_p95_s": 0.06},
}
TRAINING: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.2-1b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 2, "devices": 2}]},
    "workload": {"sequence_length": 2048, "global_batch_size": 16},
}


def test_a_plan_takes_of_each_type_what_there_is(catalog: Catalog) -> None:
    plan = make_plan(SERVING, catalog)
    used = {pool["node_type"]: pool["num_devices"] for pool in plan.config["pools"]}
    assert used == {"rtx-4090-pcie-8": 2, "dgx-a100-80gb": 1}
    files = {one.path.name: one.content for one in emit_plan(plan, "vllm", catalog).artifacts}
    workers = [line.split() for line in files["workers.txt"].splitlines() if line and not line.startswith("#")]
    assert {line[2]: line[-1] for line in workers} == {"0": "0,1", "1": "0"}


def test_ranks_are_spread_over_hosts_of_so_many_devices(catalog: Catalog) -> None:
    plan = make_plan(TRAINING, catalog)
    assert plan.rank_table is not None
    assert sorted(plan.rank_table) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    hosts = {one.path.name for one in emit_plan(plan, "megatron", catalog).artifacts if "host_" in one.path.name}
    assert hosts == {"launch_host_000.sh", "launch_host_001.sh"}


def test_a_part_keeps_each_devices_share_of_the_network(catalog: Catalog) -> None:
    whole = catalog.node_type("dgx-h100")
    part = part_of_node(whole, 2)
    assert part.num_devices == 2
    assert part.scale_out_bytes_per_s_per_device == whole.scale_out_bytes_per_s_per_device
    assert part.prices == whole.prices


def test_of_racks_whole_hosts_are_used_and_paid(catalog: Catalog) -> None:
    """Four racks of 64: groups of 64 stay within NVLink, which racks of 72 that are filled one by one cut."""
    whole = catalog.node_type("gb200-nvl72")
    part = part_of_node(whole, 64)
    assert (part.num_devices, part.devices_per_host, part.num_hosts) == (64, 4, 16)
    assert part.prices[0].usd_per_hour / 64 == pytest.approx(whole.prices[0].usd_per_hour / 72)
    racks = {"nodes": [{"type": "gb200-nvl72", "count": 2, "devices": 64}]}
    experts = {"model": "qwen3-30b-a3b", "workload": {"sequence_length": 4096, "global_batch_size": 512}}
    pins = {"fixed": {"pipeline_parallel": 2, "expert_parallel": 64, "tensor_parallel": 1, "context_parallel": 1}}
    full = {"nodes": [{"type": "gb200-nvl72", "count": 2}]}
    within, cut = (
        make_plan({**TRAINING, **experts, **pins, "cluster": cluster, "constraints": {"max_devices": 128}}, catalog)
        for cluster in (racks, full)
    )
    assert within.predicted["iteration_s"].value < 0.8 * cut.predicted["iteration_s"].value
    assert within.rank_table is not None
    assert {device for _, device in within.rank_table} == set(range(4))
    hosts = {one.path.name for one in emit_plan(within, "megatron", catalog).artifacts if "host_" in one.path.name}
    assert len(hosts) == 32


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            [{"type": "dgx-h100", "count": 1, "devices": 9}],
            r"nodes\[0\]\.devices: 9 of the 8 that dgx-h100 has",
        ),
        ([{"type": "gb200-nvl72", "count": 1, "devices": 6}], "of a rack whole hosts of 4 may be used, not 6 devices"),
        ([{"type": "aws-p3dn-24xlarge", "count": 1, "devices": 4}], "its devices are joined in pairs: leave it out"),
        (
            [{"type": "dgx-h100", "count": 1, "devices": 2}, {"type": "dgx-h100", "count": 1}],
            "nodes of dgx-h100 all have the same number of 'devices'",
        ),
    ],
)
def test_parts_that_cannot_be_planned_are_refused(nodes: list[dict[str, Any]], words: str, catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=words):
        make_plan({**TRAINING, "cluster": {"nodes": nodes}}, catalog)


def test_single_devices_are_not_rented_of_part_nodes(catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=r"nodes\[0\]\.devices: with constraints\.rent: device no whole node is paid"):
        make_plan({**SERVING, "constraints": {"rent": "device"}}, catalog)


def test_a_limit_on_devices_of_several_types_says_what_takes_its_place(catalog: Catalog) -> None:
    nodes = [{"type": "dgx-h100", "count": 1}, {"type": "dgx-a100-80gb", "count": 1}]
    with pytest.raises(SpecError, match=r"constraints\.max_devices: .* in one job: say cluster\.nodes\[\]\.devices"):
        make_plan({**TRAINING, "cluster": {"nodes": nodes}, "constraints": {"max_devices": 4}}, catalog)
