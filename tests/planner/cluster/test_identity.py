"""Which specs mean the same cluster: what own runs may say something about."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.planner.cluster.identity import cluster_identity
from meshplan.planner.cluster.spec import ClusterSpec

NODES: dict[str, Any] = {"nodes": [{"type": "dgx-h100", "count": 2}]}
LINK = {"bandwidth": "50 GB/s", "latency": "5 us"}
PLACE: dict[str, Any] = {
    "devices": {"type": "h100-sxm-80gb", "per_node": 8, "nodes": 2},
    "links": {"intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"}, "inter_node": LINK},
}


def identity(**cluster: Any) -> str:
    return cluster_identity(ClusterSpec.model_validate(cluster), "dgx-h100")


def test_the_number_of_nodes_and_the_price_are_no_part_of_it() -> None:
    more = {"nodes": [{"type": "dgx-h100", "count": 64}], "usd_per_hour_per_node": 90.0, "spare_nodes": 1}
    assert identity(**NODES) == identity(**more) == "dgx-h100"


@pytest.mark.parametrize(
    "other",
    [
        {**NODES, "name": "lab"},
        {**NODES, "links": {"inter_node": LINK}},
        {**NODES, "links": {"inter_node": {**LINK, "bandwidth": "25 GB/s"}}},
        {**NODES, "profile": "lab"},
    ],
)
def test_what_a_spec_states_tells_clusters_apart(other: dict[str, Any]) -> None:
    assert identity(**other) != identity(**NODES)


def test_equal_links_written_in_another_way_are_one_cluster() -> None:
    again = {**PLACE, "links": {**PLACE["links"], "inter_node": {"bandwidth": "400 Gb/s", "latency": "5e-6 s"}}}
    assert identity(**PLACE) == identity(**again)


def test_a_name_vouches_for_the_links_and_not_for_the_node_type() -> None:
    named = {**NODES, "name": "lab"}
    assert identity(**named) == identity(**named, links={"inter_node": LINK}) == "lab:dgx-h100"
    spec = ClusterSpec.model_validate(named)
    assert cluster_identity(spec, "dgx-h200") != cluster_identity(spec, "dgx-h100")


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", "a" * 65, "a@b", "a:b"])
def test_a_name_is_short_and_plain(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        ClusterSpec.model_validate({**NODES, "name": name})
