"""Links as people describe them: the matrix that comes out, and every description that does not fit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import networkx as nx
import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.training.service import resolve

NIC, NVLINK = 50e9, 450e9


def spec(nodes: int = 8, per_node: int = 8, **cluster: Any) -> dict[str, Any]:
    links = {
        "intra_node": {"bandwidth": "450 GB/s", "latency": "2 us"},
        "inter_node": {"bandwidth": "50 GB/s", "latency": "5 us"},
        **cluster.pop("links", {}),
    }
    return {
        "kind": "training",
        "model": "llama-3.1-8b",
        "cluster": {
            "devices": {"type": "h100-sxm-80gb", "per_node": per_node, "nodes": nodes},
            "links": links,
            **cluster,
        },
        "workload": {"sequence_length": 4096, "global_batch_size": 64},
    }


def network(catalog: Catalog, document: dict[str, Any]) -> Network:
    found = resolve(document, catalog).problem.machine.network
    assert found is not None
    return found


def described(catalog: Catalog, nodes: int = 8, **links: Any) -> Network:
    return network(catalog, spec(nodes, links=links))


def test_plain_links_need_no_network(catalog: Catalog) -> None:
    assert resolve(spec(), catalog).problem.machine.network is None


def test_islands_lines_and_degraded_links(catalog: Catalog) -> None:
    made = described(
        catalog,
        islands=[{"nodes": "0-3"}, {"nodes": "4-7", "bandwidth": "25 GB/s"}],
        between_islands=[
            {"from": 0, "to": 1, "bandwidth": "2 GB/s", "latency": "1 ms"},
            {"from": 1, "to": 0, "bandwidth": "1 GB/s", "total": "16 GB/s"},
        ],
        degraded=[{"from": 0, "to": "1-2", "bandwidth": "3 GB/s"}],
    )
    assert made.bytes_per_s[3, 2] == NIC
    assert made.bytes_per_s[4, 5] == 25e9
    assert made.bytes_per_s[0, 4] == 2e9
    assert made.latency_s[0, 4] == 1e-3
    assert made.bytes_per_s[4, 0] == 1e9
    assert made.latency_s[4, 0] == pytest.approx(5e-6)
    assert [made.bytes_per_s[0, 1], made.bytes_per_s[0, 2], made.bytes_per_s[1, 0]] == [3e9, 3e9, NIC]
    assert [trunk.bytes_per_s for trunk in made.trunks] == [16e9 / 8]
    assert not made.is_uniform


def test_a_fat_tree_shares_its_uplinks(catalog: Catalog) -> None:
    made = described(catalog, topology={"kind": "fat-tree", "nodes_per_leaf": 4, "oversubscription": 2})
    assert (made.between_usable == NIC).all()
    assert {trunk.name: trunk.bytes_per_s for trunk in made.trunks} == dict.fromkeys(
        ("leaf 0 up", "leaf 0 down", "leaf 1 up", "leaf 1 down"), 4 * NIC / 2
    )
    assert not described(catalog, topology={"kind": "rail-optimized", "nodes_per_leaf": 4}).trunks


def test_other_topologies(catalog: Catalog) -> None:
    assert described(catalog, topology={"kind": "rail-only", "nodes_per_leaf": 8}).is_uniform
    domains = described(catalog, topology={"kind": "nvlink-domains", "nodes_per_domain": 2})
    assert [domains.bytes_per_s[0, 1], domains.bytes_per_s[1, 2]] == [NVLINK, NIC]
    torus = described(catalog, topology={"kind": "torus", "shape": [2, 4]})
    assert [torus.bytes_per_s[0, other] for other in (1, 2, 3, 4, 6)] == [NIC, NIC / 2, NIC, NIC, NIC / 3]
    assert torus.latency_s[0, 6] == pytest.approx(15e-6)
    shared = described(catalog, topology={"kind": "pcie-only"})
    assert (shared.between_usable == NIC / 8).all()
    wan = {"total": "100 Gb/s", "latency": "20 ms"}
    sites = described(catalog, topology={"kind": "two-data-centers", "nodes_in_first": 3, "wan": wan})
    assert sites.bytes_per_s[2, 3] == sites.bytes_per_s[7, 0] == 100e9 / 8 / 8
    assert [trunk.bytes_per_s for trunk in sites.trunks] == [100e9 / 8 / 8] * 2


def test_excluded_and_spare_nodes(catalog: Catalog) -> None:
    excluded = {"nodes": "1-2", "devices": [{"node": 5, "device": 7}]}
    resolved = resolve(spec(exclude=excluded, spare_nodes=1), catalog)
    assert resolved.problem.machine.network.usable == (0, 3, 4, 6, 7)
    assert resolved.problem.limits.max_devices == 32
    plan = make_plan(spec(exclude=excluded, spare_nodes=1), catalog)
    used = {host for host, _ in plan.rank_table or ()}
    assert used <= {0, 3, 4, 6, 7}
    assert len(used) <= 4
    assert plan.mapping is not None
    assert plan.mapping["method"] == "rank order (uniform links)"
    assert plan.mapping["gain"] == 0.0
    assert plan.mapping["excluded_nodes"] == [1, 2, 5]
    assert sorted([*plan.mapping["spare_nodes"], *used]) == [0, 3, 4, 6, 7]


TWO = [{"nodes": "0-3"}, {"nodes": "4-7"}]
LINE = {"bandwidth": "1 GB/s"}


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ({"islands": TWO}, "'islands' and 'between_islands' go together"),
        ({"islands": [{"nodes": "0-3"}, {"nodes": "3-7"}], "between_islands": LINE}, "node 3 is in island 0 and in"),
        (
            {"islands": [{"nodes": "0-3"}, {"nodes": "4-6"}], "between_islands": LINE},
            "1 of 8 nodes are in no island: 7",
        ),
        ({"islands": [{"nodes": "0-3"}, {"nodes": "4-9"}], "between_islands": LINE}, "there is no node 8.* and 1 more"),
        ({"islands": TWO, "between_islands": [{"from": 0, "to": 1, **LINE}]}, "no link from island 1 to island 0"),
        ({"islands": TWO, "between_islands": [{"from": 0, "to": 2, **LINE}]}, "there is no island 2"),
        ({"islands": TWO, "between_islands": {"latency": "1 ms"}}, "give bandwidth .* or total"),
        ({"islands": TWO, "between_islands": {"bandwidth": "0 GB/s"}}, "must be within"),
        ({"islands": TWO, "between_islands": {"bandwidth": "5 GB"}}, "a bandwidth .bytes/s. is wanted"),
        ({"degraded": [{"from": 0, "to": 0, **LINE}]}, "node 0 has no link to itself"),
        ({"degraded": [{"from": 0, "to": 8, **LINE}]}, "there is no node 8: the cluster has 8, from 0"),
        ({"degraded": [{"from": "0,0", "to": 1, **LINE}]}, "node 0 appears twice"),
        ({"degraded": [{"from": "x", "to": 1, **LINE}]}, "no node number and no range"),
        ({"topology": {"kind": "torus", "shape": [3, 3]}}, "3 × 3 = 9 nodes, the cluster has 8"),
        ({"topology": {"kind": "torus"}}, "torus needs shape"),
        ({"topology": {"kind": "pcie-only", "shape": [8]}}, "pcie-only has no shape"),
        ({"topology": {"kind": "rail-only", "nodes_per_leaf": 4}}, "are 2 clusters that cannot reach each other"),
        (
            {
                "topology": {
                    "kind": "two-data-centers",
                    "nodes_in_first": 8,
                    "wan": {"total": "1 GB/s", "latency": "1 ms"},
                }
            },
            "leave the other site empty",
        ),
        ({"degrated": []}, "unknown key; did you mean 'degraded'"),
        ({"inter_node": "100 Gb/s"}, "write {bandwidth: 100 Gb/s, latency: 5 us}, with your latency"),
    ],
)
def test_a_description_that_does_not_fit_is_named(catalog: Catalog, links: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        resolve(spec(links=links), catalog)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exclude": {"nodes": [8]}}, "there is no node 8"),
        ({"exclude": {"nodes": [1, 1]}}, "node 1 appears twice"),
        ({"exclude": {"devices": [{"node": 1, "device": 8}]}}, "there is no device 8: node 1 has 8, from 0"),
        ({"exclude": {"devices": [{"node": 1, "device": 0}] * 2}}, "device 0 of node 1 appears twice"),
        ({"exclude": {"nodes": "0-7"}}, "none is left"),
        ({"spare_nodes": 8}, "none is left"),
        ({"profile": "lab", "links": {"topology": {"kind": "pcie-only"}}}, "give either 'profile'"),
    ],
)
def test_bad_exclusions_are_named(catalog: Catalog, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        resolve(spec(**deepcopy(changes)), catalog)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ([0, 0, 1], "node 0 appears twice"),
        ([0, 9], "node 9 does not exist: there are 8, from 0"),
        ([2], "node 2 is excluded"),
        ("worst", "must be one of"),
    ],
)
def test_a_bad_mapping_is_named(catalog: Catalog, mapping: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        resolve({**spec(exclude={"nodes": [2]}), "mapping": mapping}, catalog)
    with pytest.raises(SpecError, match=r"all links of this cluster are alike|must be"):
        resolve({**spec(), "mapping": mapping}, catalog)


def test_more_ranks_than_usable_devices_are_refused(catalog: Catalog) -> None:
    document = {**spec(exclude={"nodes": "4-7"}), "fixed": {"data_parallel": 64}}
    with pytest.raises(SpecError, match="need 64 devices, the cluster has 32"):
        resolve(document, catalog)


def test_a_given_mapping_is_priced_as_given(catalog: Catalog) -> None:
    links = {"islands": [{"nodes": "0,2,4,6"}, {"nodes": "1,3,5,7"}], "between_islands": {"bandwidth": "1 GB/s"}}
    fixed = {"tensor_parallel": 8, "pipeline_parallel": 2, "data_parallel": 4, "zero_stage": 1}
    question = {**spec(links=links), "fixed": fixed}
    plans = {
        name: estimate_plan({**question, "mapping": mapping}, catalog)
        for name, mapping in (("best", "best"), ("identity", "identity"), ("given", [1, 3, 5, 7, 0, 2, 4, 6]))
    }
    steps = {name: plan.predicted["iteration_s"].value for name, plan in plans.items()}
    assert steps["best"] == pytest.approx(steps["given"])
    assert steps["identity"] > 1.2 * steps["best"]
    assert plans["given"].mapping["nodes"] == [1, 3, 5, 7, 0, 2, 4, 6]
    assert plans["given"].rank_table[:2] == ((1, 0), (1, 1))
    assert plans["best"].mapping["identity_s"] == pytest.approx(steps["identity"])
    best = plans["best"].mapping
    assert best is not None
    assert best["bound_s"] <= best["objective_s"] <= best["random_mean_s"]


def test_uneven_descriptions_work_with_catalog_nodes(catalog: Catalog) -> None:
    document = spec()
    document["cluster"] = {
        "nodes": [{"type": "dgx-h100", "count": 4}],
        "links": {"degraded": [{"from": 1, "to": 2, "bandwidth": "1 GB/s"}]},
    }
    made = network(catalog, document)
    assert made.bytes_per_s[1, 2] == 1e9
    assert len(np.unique(made.between_usable)) == 2


def test_torus_hops_are_shortest_paths(catalog: Catalog) -> None:
    made = described(catalog, nodes=12, topology={"kind": "torus", "shape": [2, 3, 2]})
    torus = nx.grid_graph([2, 3, 2], periodic=True)
    hops = nx.floyd_warshall_numpy(torus, nodelist=sorted(torus))
    between = ~np.eye(12, dtype=bool)
    np.testing.assert_allclose(made.bytes_per_s[between], (NIC / np.maximum(hops, 1))[between])


def test_what_a_leaf_sends_at_once_is_the_minimum_cut_of_the_fat_tree(catalog: Catalog) -> None:
    made = described(catalog, topology={"kind": "fat-tree", "nodes_per_leaf": 4, "oversubscription": 2})
    tree = nx.Graph()
    for node in range(8):
        tree.add_edge(f"node {node}", f"leaf {node // 4}", capacity=NIC)
    tree.add_edge("leaf 0", "leaf 1", capacity=4 * NIC / 2)
    for node in range(4):  # the four nodes of a leaf send to the four of the other
        tree.add_edge("source", f"node {node}", capacity=np.inf)
        tree.add_edge("target", f"node {node + 4}", capacity=np.inf)
    cut, _ = nx.minimum_cut(tree, "source", "target")
    up = next(trunk for trunk in made.trunks if trunk.name == "leaf 0 up")
    assert cut == up.bytes_per_s
    assert up.senders.tolist() == [True] * 4 + [False] * 4
