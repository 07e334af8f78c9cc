"""Rates of groups of ranks on uneven links, against a plain walk over every rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, MOE, SMALL_SHAPES, configured, problem_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.network.network import Network, Trunk
from meshplan.planner.cluster.network.network_model import BestLinks, OneOrder
from meshplan.planner.cluster.network.orders import Messages, Orders, slowest_pipeline_s
from meshplan.planner.cluster.network.rank_layout import ALL_TO_ALL, RING
from meshplan.planner.cluster.network.slot_links import Group, group_of
from meshplan.planner.training.estimator.priced import price

DOMAIN = 4


def network_of(rates: np.ndarray, *, latency: float = 0.0, trunks: tuple[Trunk, ...] = ()) -> Network:
    rates = rates.astype(float)
    np.fill_diagonal(rates, np.inf)
    latencies = np.full(rates.shape, latency)
    np.fill_diagonal(latencies, 0.0)
    return Network(
        names=tuple(f"n{i}" for i in range(len(rates))),
        bytes_per_s=rates,
        latency_s=latencies,
        usable=tuple(range(len(rates))),
        trunks=trunks,
    )


def random_network(nodes: int, seed: int) -> Network:
    return network_of(np.random.default_rng(seed).uniform(1e9, 1e11, (nodes, nodes)))


def bytes_per_s(view: Orders, group: Group) -> np.ndarray:
    """Rate of one device on the network: of what it sends over its NIC, all its links together."""
    inside = min(DOMAIN // group.stride, group.size)
    sent = (group.size - inside) / group.size if group.kind == ALL_TO_ALL else 1.0 / inside
    return sent / view.seconds_per_byte(group)


def test_an_all_to_all_waits_for_the_worst_pair_or_the_nic() -> None:
    rates = np.full((4, 4), 10e9)
    network = network_of(rates)
    group = group_of(ALL_TO_ALL, size=16, stride=1, world_size=16, domain_size=DOMAIN)
    assert group is not None
    view = Orders(network=network, orders=np.arange(4)[None], domain_size=DOMAIN)
    assert bytes_per_s(view, group)[0] == pytest.approx(10e9)  # the NIC: three peers share it
    rates[1, 2] = 1e9
    view = Orders(network=network_of(rates), orders=np.arange(4)[None], domain_size=DOMAIN)
    assert bytes_per_s(view, group)[0] == pytest.approx(3e9)  # a third of the bytes over the slow link


def test_links_that_cross_a_trunk_share_it() -> None:
    site = np.array([True, True, False, False])
    trunk = Trunk(name="line", senders=site, receivers=~site, bytes_per_s=6e9)
    network = network_of(np.full((4, 4), 10e9), trunks=(trunk,))
    group = group_of(RING, size=4, stride=4, world_size=16, domain_size=DOMAIN)
    pairs = group_of(RING, size=2, stride=4, world_size=16, domain_size=DOMAIN)
    assert group is not None
    assert pairs is not None
    orders = np.array([[0, 1, 2, 3], [0, 2, 1, 3]])
    view = Orders(network=network, orders=orders, domain_size=DOMAIN)
    assert bytes_per_s(view, group) == pytest.approx([6e9, 3e9])  # the line once, then twice each way
    assert bytes_per_s(view, pairs) == pytest.approx([10e9, 3e9])


def test_the_slowest_pipeline_is_the_one_of_a_loop() -> None:
    network = random_network(6, 3)
    order = [4, 2, 0, 5, 1, 3]
    asked = Messages(sent_bytes=1e6, num_stages=3, stage_devices=2 * DOMAIN, inside_s=0.0, waits=8.0)
    view = Orders(network=network, orders=np.array([order]), domain_size=DOMAIN)
    times = []
    for pipeline in range(2):
        nodes = [order[2 * stage + pipeline] for stage in range(3)]
        hops = [1e6 / network.bytes_per_s[a, b] + 1e6 / network.bytes_per_s[b, a] for a, b in itertools.pairwise(nodes)]
        times.append(sum(hops) + 8.0 * (hops[0] + hops[1]) / 2)
    assert slowest_pipeline_s(view.hops_s(asked), asked)[0] == pytest.approx(max(times))


def test_chunks_in_a_circle_pay_for_the_way_back_to_the_first_stage() -> None:
    rates = np.full((3, 3), 50e9)
    rates[0, 2] = rates[2, 0] = 1e9  # only the way back from the last stage
    asked = Messages(sent_bytes=1e6, num_stages=3, stage_devices=DOMAIN, inside_s=0.0, waits=8.0)
    view = Orders(network=network_of(rates), orders=np.array([[0, 1, 2]]), domain_size=DOMAIN)
    fast, slow = 2 * 1e6 / 50e9, 2 * 1e6 / 1e9
    assert slowest_pipeline_s(view.hops_s(asked), asked)[0] == pytest.approx(2 * fast + 8 * fast)
    circle = replace(asked, wraps=True)
    assert slowest_pipeline_s(view.hops_s(circle), circle)[0] == pytest.approx(2 * fast + 8 * (fast + slow) / 2)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(SMALL_SHAPES),
    nodes=st.sampled_from([1, 2, 3, 4, 5, 6]),
    tensor=st.sampled_from([1, 2, 3, 4, 6, 8]),
    context=st.sampled_from([1, 2, 3, 4]),
    stages=st.sampled_from([1, 2, 3, 4, 6]),
    chunks=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    groups=st.sampled_from([1, 2, 3]),
    data=st.data(),
)
def test_a_cluster_costs_the_same_link_by_link(
    shape: ModelShape,
    nodes: int,
    tensor: int,
    context: int,
    stages: int,
    chunks: int,
    zero: int,
    groups: int,
    data: st.DataObject,
) -> None:
    """Uniform links, and the same links one by one under any mapping, whatever straddles nodes."""
    most = 8 * nodes // (tensor * context * stages)
    assume(most >= 1)
    width = data.draw(st.integers(1, most))
    problem = problem_of(shape, num_devices=8 * nodes, global_batch_size=2 * width * stages)
    machine = problem.machine
    network = network_of(np.full((nodes, nodes), machine.scale_out_bytes_per_s), latency=machine.scale_out_latency_s)
    order = tuple(data.draw(st.permutations(range(nodes))))
    network_model = OneOrder(network=network, order=order, domain_size=machine.domain_size)
    explicit = replace(problem, machine=replace(machine, network=network, network_model=network_model))
    config = configured(
        problem,
        tensor_parallel=tensor,
        context_parallel=context,
        pipeline_parallel=stages,
        virtual_pipeline_stages=chunks if stages > 1 else 1,
        data_parallel=width,
        zero_stage=zero,
        data_parallel_shard=width // groups if zero and width % groups == 0 else width if zero else 1,
    )
    if shape.moe is not None:
        devices = tensor * context * width
        config = replace(
            config, expert_parallel=data.draw(st.sampled_from([e for e in (1, 2, 4, 8) if devices % e == 0]))
        )
    same, other = price(problem, config), price(explicit, config)
    assert other.step_s == pytest.approx(same.step_s, rel=1e-12)
    assert dict(other.breakdown_s) == pytest.approx(dict(same.breakdown_s), rel=1e-9, abs=1e-15)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), which=st.integers(0, 3))
def test_no_mapping_beats_the_best_links(seed: int, which: int) -> None:
    shape = MOE if which == 3 else DENSE
    problem = problem_of(shape, num_devices=32, global_batch_size=32)
    choices = (
        {"data_parallel": 32, "zero_stage": 3, "data_parallel_shard": 32},
        {"pipeline_parallel": 2, "data_parallel": 16},
        {"tensor_parallel": 8, "pipeline_parallel": 4},
        {"data_parallel": 32},
    )[which]
    config = configured(problem, **choices)
    if shape is MOE:
        config = replace(config, expert_parallel=8)
    network = random_network(4, seed)
    size = problem.machine.domain_size

    def step_s(network_model: object) -> float:
        machine = replace(problem.machine, network=network, network_model=network_model)
        return price(replace(problem, machine=machine), config).step_s

    least = step_s(BestLinks(network=network, domain_size=size))
    for order in itertools.permutations(range(4)):
        assert step_s(OneOrder(network=network, order=order, domain_size=size)) >= least * (1.0 - 1e-12)
