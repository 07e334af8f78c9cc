"""Nodes without a switch: known nodes by hand, cuts against networkx, rings found one by one, wider links."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import networkx as nx
import numpy as np
import pytest
from core_cases import machine_with
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.constants.training import Calibration, TimeConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.meshed import pair_links
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.mesh import Mesh, mesh_of
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel

EXACT = Calibration(
    framework="any", architecture="any", time=TimeConstants(scale_up_efficiency=1.0, network_efficiency=1.0)
)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to six devices with up to three links a pair, all of them joined."""
    count = draw(st.integers(2, 6))
    links = np.zeros((count, count), dtype=int)
    for second in range(1, count):
        for first in range(second):
            links[first, second] = draw(st.integers(0, 3))
        if not links[:second, second].any():
            links[draw(st.integers(0, second - 1)), second] = 1
    return whole(links + links.T)


def whole(links: np.ndarray[Any, Any]) -> Mesh:
    """A node of which all devices are used."""
    mesh = mesh_of(tuple(tuple(row) for row in links.tolist()), len(links))
    assert mesh is not None
    return mesh


def share(mesh: Mesh, kind: str, size: int, stride: int = 1, world_size: int | None = None) -> float:
    arguments = (np.array([size]), np.array([stride]), np.array([world_size or len(mesh.links)]))
    return float(getattr(mesh, f"{kind}_share")(*arguments)[0])


def mesh_from(catalog: Catalog, slug: str) -> Mesh:
    return whole(np.array(catalog.node_type(slug).pair_links))


@pytest.mark.parametrize(
    ("size", "stride", "links"),
    [(8, 1, 6), (4, 1, 4), (2, 1, 1), (4, 2, 2), (2, 4, 1)],
    ids=["all", "a quad", "neighbours", "every second", "across the cube"],
)
def test_rings_of_eight_v100(catalog: Catalog, size: int, stride: int, links: int) -> None:
    """NCCL makes six rings over all eight and four over a quad; pairs have one link or two, of six a device."""
    assert share(mesh_from(catalog, "v100-16gb-sxm2-8"), "ring", size, stride) == pytest.approx(links / 6)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_pair_of_mi300x_has_one_link_of_seven(catalog: Catalog, size: int) -> None:
    mesh = mesh_from(catalog, "hgx-mi300x")
    assert share(mesh, "ring", size) == pytest.approx((size - 1) / 7)
    assert share(mesh, "all_to_all", size) == pytest.approx((size - 1) / 7)
    assert mesh.boundary_share(np.array([size])) == pytest.approx(1 / 7 if size < 8 else 1.0)


def test_devices_of_a_package_are_closer_than_others(catalog: Catalog) -> None:
    """Two dies of an MI250X have four links of seven; some of those two apart have one."""
    mesh = mesh_from(catalog, "hgx-mi250x-dies")
    assert share(mesh, "ring", 2, 1) == pytest.approx(4 / 7)
    assert share(mesh, "ring", 2, 2) == pytest.approx(1 / 7)


def test_eight_dies_have_the_four_rings_of_rccl(catalog: Catalog) -> None:
    """Five links leave each package, and no fifth ring fits. RCCL's own (src/graph/rome_models.cc, rome_model_71,
    ringBase), each link in each direction no more often than it is there, are as many.
    """
    mesh = mesh_from(catalog, "hgx-mi250x-dies")
    rings = ["01324576", "67542310", "01542376", "67324510"]
    used = Counter((int(a), int(b)) for ring in rings for a, b in zip(ring, ring[1:] + ring[0], strict=True))
    assert all(count <= mesh.links[first][second] for (first, second), count in used.items())
    assert share(mesh, "ring", 8) == pytest.approx(len(rings) / 7)
    assert share(mesh, "ring", 4) == pytest.approx(2 / 7)


def test_devices_without_a_link_are_reached_through_another() -> None:
    """0 – 1 – 2 in a line: what 0 and 2 exchange passes 1."""
    line = whole(np.array([[0, 2, 0], [2, 0, 1], [0, 1, 0]]))
    assert share(line, "ring", 2, 2, 3) == pytest.approx(1 / 3)
    assert line.boundary_share(np.array([2])) == pytest.approx(1 / 3)


@given(meshes())
def test_rings_are_no_more_than_the_least_cut_has_links(mesh: Mesh) -> None:
    """The least cut by another algorithm (Stoer and Wagner); of a pair, as many."""
    links = np.array(mesh.links)
    least, _ = nx.stoer_wagner(nx.from_numpy_array(links))
    rings = share(mesh, "ring", len(links)) * mesh.device_links
    assert rings <= least + 1e-9
    if len(links) == 2:
        assert rings == pytest.approx(least)


@given(meshes())
def test_no_more_rings_exist(mesh: Mesh) -> None:
    """Rings over all members, each with a weight, load no link in a direction by more than it has: greedy finds no
    more of them than the share says.
    """
    free, rings = np.array(mesh.links), 0
    count = len(free)
    tours = [(0, *rest) for rest in permutations(range(1, count))]
    for tour in tours:
        pairs = [(tour[i], tour[(i + 1) % count]) for i in range(count)]
        passes = min(free[first, second] for first, second in pairs)
        for first, second in pairs:
            free[first, second] -= passes
        rings += passes
    assert rings <= share(mesh, "ring", count) * mesh.device_links + 1e-9


@given(meshes(), st.data())
def test_a_wider_link_is_never_slower(mesh: Mesh, data: st.DataObject) -> None:
    """Only of pairs that have one: a pair without links takes a route, and its first link takes the place of that."""
    count = len(mesh.links)
    first, second = data.draw(st.sampled_from(np.argwhere(np.array(mesh.links)).tolist()))
    more = np.array(mesh.links)
    more[first, second] += 1
    more[second, first] += 1
    better = whole(more)
    for kind in ("ring", "all_to_all", "neighbour"):
        for size in range(2, count + 1):
            rates = [share(one, kind, size) * one.device_links for one in (mesh, better)]
            assert rates[1] >= rates[0] - 1e-9


@given(meshes())
def test_no_group_has_more_than_its_devices_drive(mesh: Mesh) -> None:
    for kind in ("ring", "all_to_all", "neighbour"):
        assert 0.0 < share(mesh, kind, len(mesh.links)) <= 1.0 + 1e-9


def test_a_part_of_a_node_has_the_same_links(catalog: Catalog) -> None:
    """Two of eight V100 have one link of six, whether or not a job uses the other six."""
    links = catalog.node_type("v100-16gb-sxm2-8").pair_links
    alone, among = mesh_of(links, 2), mesh_of(links, 8)
    assert alone is not None
    assert among is not None
    assert share(alone, "ring", 2, 1, 2) == share(among, "ring", 2, 1, 2) == pytest.approx(1 / 6)


def on_a_mesh(catalog: Catalog, slug: str = "hgx-mi300x") -> Machine:
    return replace(machine_with(16), mesh=mesh_from(catalog, slug))


def test_collectives_and_messages_have_the_links_of_their_members(catalog: Catalog) -> None:
    """A pair has a seventh of the 450 GB/s; over nodes it is the NICs that decide."""
    machine = replace(on_a_mesh(catalog), scale_up_latency_s=0.0, scale_out_latency_s=0.0)
    model = CommunicationModel(machine=machine, calibration=EXACT)
    sent, pair, one = np.array([9e9]), np.array([2]), np.array([1])
    assert model.gather_s(sent, pair, one) == pytest.approx(0.5 * 9e9 * 7 / 450e9)
    assert model.all_to_all_s(sent, pair, one) == pytest.approx(0.5 * 9e9 * 7 / 450e9)
    assert model.ring_step_s(sent, pair, one) == pytest.approx(9e9 * 7 / 450e9)
    assert model.pipeline_s(sent, 2, one, np.array([0.0]), wraps=False) == pytest.approx(2 * 9e9 * 7 / 450e9)
    assert model.pair_bytes_per_s == pytest.approx(450e9 / 7)
    across = model.gather_s(sent, np.array([2]), np.array([8]))
    assert across == pytest.approx(0.5 * 9e9 / 50e9)


def test_only_nodes_that_say_so_are_meshes(catalog: Catalog) -> None:
    meshed = {node.slug for node in catalog.node_types() if node.pair_links}
    assert {"hgx-mi300x", "aws-p3dn-24xlarge", "hgx-mi250x-dies"} <= meshed
    assert not {"dgx-h100", "dgx-a100-80gb", "gb200-nvl72"} & meshed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pair_links.0-1": 1}, "no links lead from device 0 to device 2"),
        ({"pair_links.0-9": 1, "links_per_pair": 1}, "devices 0 to 3"),
        ({"links_per_pair": 1, "devices_per_host": 32}, "at most 16"),
    ],
)
def test_pairs_that_make_no_node_are_refused(fields: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pair_links({"num_hosts": 1, "devices_per_host": 4, **fields})
