"""All-reduce times in groups of every size: measured ones come back, others continue them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.catalogs.surfaces.collectives import collective_curve, shipped_curves
from meshplan.planner.cluster.machine import Machine, machine_of
from meshplan.planner.serving.estimator.exchange.collectives import COLLECTIVE_S, MEASURED_LINKS, PCIE_DEVICE, Exchange
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel

SIZES = np.array([1e3, 14336.0, 14336.0 * 64, 1e7, 1e9])


@pytest.fixture(scope="module")
def machine(catalog: Catalog) -> Machine:
    return Machine(
        device=catalog.device("gb200"),
        num_devices=72,
        devices_per_host=4,
        domain_size=72,
        scale_up_bytes_per_s=9e11,
        scale_up_latency_s=8.8e-6,
        scale_out_bytes_per_s=5e10,
        scale_out_latency_s=1e-5,
    )


@pytest.mark.parametrize(
    ("group", "device"), [(2, "gb200"), (4, "gb200"), (8, "b200-sxm-180gb")], ids=["own 2", "own 4", "links of 8"]
)
def test_measured_groups_are_the_measured_curves(machine: Machine, group: int, device: str) -> None:
    curve = collective_curve(device, "all_reduce", group, "trtllm")
    assert curve is not None
    found = Exchange(machine=machine, engine="trtllm").all_reduce_s(SIZES, group)
    assert found == pytest.approx(curve.time_s(SIZES))


def test_a_doubling_beyond_the_measured_adds_what_the_last_one_did(machine: Machine) -> None:
    exchange = Exchange(machine=machine, engine="sglang")
    curves = [
        collective_curve(*key, "sglang") for key in (("gb200", "all_reduce", 4), ("b200-sxm-180gb", "all_reduce", 8))
    ]
    sizes = np.union1d(*(curve.sizes_bytes for curve in curves if curve is not None))
    four, eight, sixteen, more = (exchange.all_reduce_s(sizes, group) for group in (4, 8, 16, 32))
    added = np.maximum(eight - four, 0.0)
    assert sixteen == pytest.approx(np.maximum.accumulate(eight + added))
    assert more == pytest.approx(np.maximum.accumulate(eight + 2.0 * added))


def test_small_messages_in_a_domain_are_not_priced_by_hops(machine: Machine) -> None:
    """Sixteen devices behind one switch take a few times what four take, not a ring's sixteenfold latency."""
    exchange = Exchange(machine=machine, engine="trtllm")
    assert exchange.all_reduce_s(SIZES[:1], 16)[0] < 3.0 * exchange.all_reduce_s(SIZES[:1], 4)[0]


def test_unmeasured_devices_keep_the_closed_form(machine: Machine) -> None:
    unknown = replace(machine, device=replace(machine.device, slug="unheard-of"))
    ring = 2.0 * 7.0 / 8.0 * SIZES / Exchange(machine=unknown).scale_up_bytes_per_s
    found = Exchange(machine=unknown).all_reduce_s(SIZES, 8)
    assert np.all(found > ring)


# --- links that are stated count, whatever was measured ------------------------------------------------------------


def nodes_of(catalog: Catalog, slug: str, count: int = 2) -> Machine:
    group = NodeGroup(node=catalog.node_type(slug), count=count)
    return machine_of(Cluster(name=slug, groups=(group,)))


def test_curves_are_for_the_links_of_the_catalog(catalog: Catalog) -> None:
    for node in catalog.node_types():
        link = node.scale_up_link
        if node.device.slug in MEASURED_LINKS:
            rate, latency_s = MEASURED_LINKS[node.device.slug]
            assert link.bandwidth_bytes_per_s == rate, node.slug
            assert link.latency_s <= latency_s, node.slug
        if link.technology == "pcie":
            assert link.latency_s <= MEASURED_LINKS[PCIE_DEVICE][1], node.slug
    assert {device for device, *_ in shipped_curves()} <= {*MEASURED_LINKS, "l40s"}


NODES = ("l40s-pcie-8", "h100-pcie-8", "dgx-h100", "gb200-nvl72", "hgx-mi300x", "rtx-pro-6000-pcie-8", "dgx-a100-80gb")


@settings(max_examples=60, deadline=None)
@given(
    slug=st.sampled_from(NODES),
    size=st.floats(1e2, 1e10),
    group=st.integers(2, 72),
    rate=st.floats(1e9, 2e12),
    times=st.floats(1.0, 4.0),
    engine=st.sampled_from(["", "vllm", "sglang", "trtllm"]),
    gathers=st.booleans(),
)
def test_slower_links_are_never_faster(
    catalog: Catalog, slug: str, size: float, group: int, rate: float, times: float, engine: str, gathers: bool
) -> None:
    slow = replace(nodes_of(catalog, slug, 12), scale_up_bytes_per_s=rate)
    fast = replace(slow, scale_up_bytes_per_s=rate * times)
    near = replace(slow, scale_up_latency_s=slow.scale_up_latency_s / times)
    wide = replace(slow, scale_out_bytes_per_s=slow.scale_out_bytes_per_s * times)
    payload = np.array([size, 10.0 * size])
    least = Exchange(machine=slow, engine=engine)
    experts = {"group": group, "ranks": group, "hidden": 4096, "top_k": 8, "activation_bytes": 1.0, "gathers": gathers}
    for better in (fast, near, wide):
        exchange = Exchange(machine=better, engine=engine)
        assert np.all(exchange.all_reduce_s(payload, group) <= least.all_reduce_s(payload, group) * (1 + 1e-12))
        assert np.all(exchange.experts_s(payload, **experts) <= least.experts_s(payload, **experts) * (1 + 1e-12))
        assert np.all(exchange.pipeline_s(payload, 5, group) <= least.pipeline_s(payload, 5, group) * (1 + 1e-12))
    found = least.all_reduce_s(payload, group)
    assert found[0] <= found[1] * (1 + 1e-12)


@pytest.mark.parametrize("activation_bytes", [2.0, 1.0, 0.5625])
def test_engines_that_gather_pay_both_collectives_whatever_the_routing(
    catalog: Catalog, activation_bytes: float
) -> None:
    tokens, elements = np.array([1.0, 80.0, 1024.0]), np.array([1.0, 80.0, 1024.0]) * 8 * 7168
    gather, scatter = (collective_curve("b200-sxm-180gb", name, 8) for name in ("all_gather", "reduce_scatter"))
    assert gather is not None
    assert scatter is not None
    there, back = gather.time_s(elements * activation_bytes), scatter.time_s(elements * 2.0)
    exchange = Exchange(machine=nodes_of(catalog, "lambda-8x-b200"), engine="vllm")
    layer = {"group": 8, "ranks": 8, "hidden": 7168, "top_k": 8, "activation_bytes": activation_bytes}
    assert exchange.experts_s(tokens, **layer, gathers=True) == pytest.approx(there + back)
    uneven = exchange.experts_s(tokens, **layer, gathers=True, near=np.array([[1.0], [3.0]]))
    assert uneven == pytest.approx(np.tile(there + back, (2, 1)))
    assert np.all(exchange.experts_s(tokens, **layer) < there + back)


def test_gathering_costs_no_less_than_the_cheaper_way_where_nothing_was_measured(machine: Machine) -> None:
    exchange = Exchange(machine=machine, engine="vllm")
    layer = {"group": 16, "ranks": 16, "hidden": 7168, "top_k": 8, "activation_bytes": 1.0}
    tokens = np.array([1.0, 32.0, 512.0])
    assert np.all(exchange.experts_s(tokens, **layer, gathers=True) >= exchange.experts_s(tokens, **layer))


@pytest.mark.parametrize(("slug", "rate"), [("h100-pcie-8", 63e9), ("dgx-h100", 450e9), ("hgx-mi300x", 448e9)])
def test_the_price_has_no_step_at_the_measured_rate(catalog: Catalog, slug: str, rate: float) -> None:
    machine = nodes_of(catalog, slug)
    assert machine.scale_up_bytes_per_s == rate
    slightly = replace(machine, scale_up_bytes_per_s=rate * (1 - 1e-6))
    both = [Exchange(machine=each, engine="vllm").all_reduce_s(SIZES, 8) for each in (machine, slightly)]
    assert both[0] == pytest.approx(both[1], rel=1e-5)


def test_a_stated_link_ten_times_slower_is_felt_on_a_device_with_curves(catalog: Catalog) -> None:
    machine = nodes_of(catalog, "dgx-h100")
    slow = replace(machine, scale_up_bytes_per_s=45e9)
    large = np.array([1e9])
    assert Exchange(machine=slow).all_reduce_s(large, 8) > 8 * Exchange(machine=machine).all_reduce_s(large, 8)


def test_groups_that_straddle_nodes_go_over_the_network(catalog: Catalog) -> None:
    """Two stages of TP6 on nodes of 8: the second has two devices on the first node and four on the next."""
    machine = nodes_of(catalog, "dgx-h100")
    alone = Exchange(machine=machine, world_size=6).all_reduce_s(SIZES, 6)
    staged = Exchange(machine=machine, world_size=12).all_reduce_s(SIZES, 6)
    network = Exchange(machine=machine).network_bytes_per_s
    assert np.all(staged > alone)
    assert np.all(staged >= 2 * 5 / 6 * SIZES / 2 / network)


def test_every_second_boundary_of_half_node_stages_crosses(catalog: Catalog) -> None:
    machine = replace(nodes_of(catalog, "dgx-h100", 4), scale_up_latency_s=0.0, scale_out_latency_s=0.0)
    exchange = Exchange(machine=machine, world_size=32)
    near, far = 1e9 / exchange.scale_up_bytes_per_s, 1e9 / exchange.network_bytes_per_s
    assert exchange.pipeline_s(np.array([1e9]), 8, 4) == pytest.approx(4 * near + 3 * far + 7 * COLLECTIVE_S)


def test_without_a_network_nothing_crosses_nodes(catalog: Catalog) -> None:
    exchange = Exchange(machine=nodes_of(catalog, "lambda-8x-b200"), world_size=16)
    assert np.all(np.isinf(exchange.all_reduce_s(SIZES, 16)))
    assert np.all(np.isfinite(exchange.all_reduce_s(SIZES, 8)))
    assert np.all(np.isinf(exchange.pipeline_s(SIZES, 2, 8)))
    assert np.all(np.isfinite(exchange.pipeline_s(SIZES, 2, 4)))


# Training's price over serving's. Training attains the share of a link's rate that whole steps show; of the measured
# collectives alone, eight H100 with NVLS do better (1.4), two B200 (0.8) and devices behind shared PCIe switches (0.4)
# do worse, and so do groups larger than were measured (32 GB300, 0.75).
AGREEMENT = {"pcie": (0.4, 1.35), "other": (0.7, 1.5)}


def test_training_and_serving_price_the_same_large_all_reduce(catalog: Catalog) -> None:
    sizes = np.array([2.0**28, 2.0**30])
    constants = Calibration(framework="any", architecture="any")
    for node in catalog.node_types():
        machine = nodes_of(catalog, node.slug, 4)
        least, most = AGREEMENT.get(node.scale_up_link.technology, AGREEMENT["other"])
        for group in (2, 4, 8, 12, 16, 32):
            if group > machine.joined_devices:
                continue
            ranks = np.array([group])
            training = CommunicationModel(machine=machine, calibration=constants, world_size=ranks)
            serving = Exchange(machine=machine).all_reduce_s(sizes, group)
            ratio = training.all_reduce_s(sizes, ranks, np.array([1])) / serving
            assert np.all((least <= ratio) & (ratio <= most)), (node.slug, group, ratio)
