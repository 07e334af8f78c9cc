"""What groups of ranks and pipelines cost, against a walk over every rank on a graph of devices, NICs and links.

The oracle knows nothing of slots, shares or closed forms: it builds the graph, routes every message over it, counts
the bytes on each edge and lets the fullest edge decide.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshplan.planner.cluster.network.network import Network, Trunk
from meshplan.planner.cluster.network.network_model import EqualLinks, NetworkModel, OneOrder
from meshplan.planner.cluster.network.rank_layout import ALL_TO_ALL, NEIGHBOURS, RING, fewest_on_a_slot, group_span

RATE, LATENCY, INSIDE_S = 50e9, 4e-6, 3e-6


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)


def groups_of(size: int, stride: int, world: int) -> list[list[int]]:
    return [
        [first + offset + stride * member for member in range(size)]
        for first in range(0, world, size * stride)
        for offset in range(stride)
    ]


class Walk:
    """Devices as a graph: every device has a NIC of its own, each pair of nodes a link; a trunk is one more edge.

    Args:
        rates: [nodes, nodes] bandwidth per device.
        domain: devices of a node.
        trunk: nodes on its near side and its capacity, in both directions.
    """

    def __init__(self, rates: np.ndarray[Any, Any], domain: int, trunk: tuple[set[int], float] | None = None) -> None:
        self.rates, self.domain, self.trunk = rates, domain, trunk
        self.graph = nx.DiGraph()
        nodes = range(len(rates))
        for a in nodes:
            for b in nodes:
                if a != b:
                    self.graph.add_edge(a, b, rate=rates[a, b])

    def node(self, rank: int) -> int:
        return rank // self.domain

    def crosses(self, size: int, stride: int, world: int) -> bool:
        return any(len({self.node(rank) for rank in group}) > 1 for group in groups_of(size, stride, world))

    def _over_trunk(self, loads: dict[tuple[int, int], float]) -> float:
        if self.trunk is None:
            return 0.0
        side, capacity = self.trunk
        out = sum(load for (a, b), load in loads.items() if a in side and b not in side)
        back = sum(load for (a, b), load in loads.items() if a not in side and b in side)
        return max(out, back) / capacity

    def ring_s(self, size: int, stride: int, world: int, *, together: bool) -> float:
        """One byte around every ring, either way; with ``together`` all members on a node send for it."""
        worst, loads = 0.0, defaultdict(float)
        for group in groups_of(size, stride, world):
            there: dict[int, int] = defaultdict(int)
            for rank in group:
                there[self.node(rank)] += 1
            around = list(there)
            for a, b in zip(around, around[1:] + around[:1], strict=True):
                if a != b:
                    rails = min(there[a], there[b]) if together else 1
                    rate = min(self.graph.edges[a, b]["rate"], self.graph.edges[b, a]["rate"])
                    worst = max(worst, 1.0 / (rails * rate))
                    loads[a, b] += 1.0
        return max(worst, self._over_trunk(loads))

    def all_to_all_s(self, size: int, stride: int, world: int) -> float:
        """Every rank sends a byte in equal parts: its NIC, its share of each link, and the trunk."""
        worst, loads = 0.0, defaultdict(float)
        for group in groups_of(size, stride, world):
            for rank in group:
                own, sent = self.node(rank), defaultdict(float)
                for other in group:
                    if self.node(other) != own:
                        sent[self.node(other)] += 1.0 / size
                for far, part in sent.items():
                    worst = max(worst, part / self.graph.edges[own, far]["rate"])
                    loads[own, far] += part
                if sent:
                    out = max(data["rate"] for _, _, data in self.graph.out_edges(own, data=True))
                    into = max(data["rate"] for _, _, data in self.graph.in_edges(own, data=True))
                    worst = max(worst, sum(sent.values()) / min(out, into))
        return max(worst, self._over_trunk(loads))

    def pipeline_s(self, sent: float, stages: int, devices: int, waits: float, *, wraps: bool) -> float:
        """Each device's pipeline: over all boundaries once, then for each wait the worst stage's half round trips."""
        boundaries = [(q, (q + 1) % stages) for q in range(stages if wraps else stages - 1)]
        loads: dict[Any, float] = defaultdict(float)
        if self.trunk is not None:
            for q, (first, second) in enumerate(boundaries):
                for offset in range(devices):
                    a, b = self.node(first * devices + offset), self.node(second * devices + offset)
                    for x, y in ((a, b), (b, a)):
                        if (x in self.trunk[0]) != (y in self.trunk[0]):
                            loads[q, x in self.trunk[0]] += 1.0
        worst = 0.0
        for offset in range(devices):
            trips = []
            for q, (first, second) in enumerate(boundaries):
                a, b = self.node(first * devices + offset), self.node(second * devices + offset)
                trip = INSIDE_S if a == b else 2.0 * LATENCY
                for x, y in ((a, b), (b, a)):
                    if x != y:
                        each = 1.0 / self.graph.edges[x, y]["rate"]
                        if self.trunk is not None and (x in self.trunk[0]) != (y in self.trunk[0]):
                            each = max(each, loads[q, x in self.trunk[0]] / self.trunk[1])
                        trip += sent * each
                trips.append(trip)
            beside = [
                sum(trip for (first, second), trip in zip(boundaries, trips, strict=True) if stage in (first, second))
                for stage in range(stages)
            ]
            if wraps and stages == 2:
                beside = [sum(trips)] * 2
            worst = max(worst, sum(trips[: stages - 1]) + waits * max(beside) / 2.0)
        return worst


def network_of(rates: np.ndarray[Any, Any], trunks: tuple[Trunk, ...] = ()) -> Network:
    rates = rates.astype(float)
    np.fill_diagonal(rates, np.inf)
    latency = np.full(rates.shape, LATENCY)
    np.fill_diagonal(latency, 0.0)
    count = len(rates)
    return Network(
        names=tuple(f"n{i}" for i in range(count)),
        bytes_per_s=rates,
        latency_s=latency,
        usable=tuple(range(count)),
        trunks=trunks,
    )


def explicit(rates: np.ndarray[Any, Any], domain: int, trunk: tuple[set[int], float] | None = None) -> OneOrder:
    trunks: tuple[Trunk, ...] = ()
    if trunk is not None:
        side = np.array([node in trunk[0] for node in range(len(rates))])
        each = trunk[1] / domain
        trunks = tuple(Trunk(name="line", senders=one, receivers=~one, bytes_per_s=each) for one in (side, ~side))
    return OneOrder(network=network_of(rates, trunks), order=tuple(range(len(rates))), domain_size=domain)


DOMAINS, SIZES = st.integers(1, 12), st.integers(1, 12)
MOST_NODES = 12  # of a walk


def models_and_walks(domain: int, nodes: int, seed: int) -> tuple[tuple[NetworkModel, Walk], ...]:
    """Equal links, the same written one by one, uneven ones, and these with a trunk: each model with its oracle."""
    even = np.full((nodes, nodes), RATE)
    uneven = np.random.default_rng(seed).uniform(1e9, 1e11, (nodes, nodes))
    trunk = (set(range(nodes // 2)), 1e10)
    equal = EqualLinks(bytes_per_s=RATE, link_latency_s=LATENCY, domain_size=domain)
    return (
        (equal, Walk(even, domain)),
        (explicit(even, domain), Walk(even, domain)),
        (explicit(uneven, domain), Walk(uneven, domain)),
        (explicit(uneven, domain, trunk), Walk(uneven, domain, trunk)),
    )


@settings(max_examples=40, deadline=None)
@given(domain=DOMAINS, size=SIZES, stride=SIZES, blocks=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_groups_cost_what_a_walk_over_all_ranks_finds(
    domain: int, size: int, stride: int, blocks: int, seed: int
) -> None:
    blocks = min(blocks, MOST_NODES * domain // (size * stride))
    assume(blocks > 0)
    world = size * stride * blocks
    nodes = max(-(-world // domain), 2)
    for model, walk in models_and_walks(domain, nodes, seed):
        expected = {
            RING: walk.ring_s(size, stride, world, together=True),
            NEIGHBOURS: walk.ring_s(size, stride, world, together=False),
            ALL_TO_ALL: walk.all_to_all_s(size, stride, world),
        }
        for kind, seconds in expected.items():
            spacing, latency = model.across(kind, ints(size), ints(stride), ints(world))
            assert spacing == pytest.approx(seconds, rel=1e-9), (kind, model)
            assert latency == pytest.approx(LATENCY if walk.crosses(size, stride, world) else 0.0)


@settings(max_examples=40, deadline=None)
@given(
    domain=DOMAINS,
    stages=st.integers(2, 8),
    devices=st.integers(1, 14),
    waits=st.floats(0.0, 50.0),
    wraps=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_pipelines_cost_what_a_walk_over_all_ranks_finds(
    domain: int, stages: int, devices: int, waits: float, wraps: bool, seed: int
) -> None:
    assume(stages * devices <= MOST_NODES * domain)
    nodes = max(-(-stages * devices // domain), 2)
    sent = np.array([1e6])
    for model, walk in models_and_walks(domain, nodes, seed):
        found = model.pipelines_s(sent, stages, ints(devices), np.array([INSIDE_S]), np.array([waits]), wraps=wraps)
        assert found == pytest.approx(walk.pipeline_s(1e6, stages, devices, waits, wraps=wraps), rel=1e-9), model


@settings(max_examples=15, deadline=None)
@given(domain=st.integers(1, 72), seed=st.integers(0, 10**6))
def test_many_groups_at_once_are_as_each_by_itself(domain: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    size, stride = draw.integers(1, 24, 16), draw.integers(1, 24, 16)
    world = size * stride * draw.integers(1, 8, 16)
    together = fewest_on_a_slot(size, stride, world, domain)
    for row, fewest in enumerate(together.tolist()):
        counts = [
            list(Counter(rank // domain for rank in group).values())
            for group in groups_of(int(size[row]), int(stride[row]), int(world[row]))
        ]
        crossing = [min(count) for count in counts if len(count) > 1]
        assert fewest == min(crossing, default=size[row])
        span = group_span(int(size[row]), int(stride[row]), int(world[row]), domain)
        assert span == (fewest, max(len(count) for count in counts))


def test_every_second_boundary_of_half_node_stages_crosses() -> None:
    """Stages of 4 devices on nodes of 8: 3 of 7 boundaries go over the network."""
    equal = EqualLinks(bytes_per_s=RATE, link_latency_s=0.0, domain_size=8)
    seconds = equal.pipelines_s(np.array([1e9]), 8, ints(4), np.zeros(1), np.zeros(1), wraps=False)
    assert seconds == pytest.approx(3 * 2 * 1e9 / RATE)


def test_groups_that_straddle_nodes_pay_for_the_network() -> None:
    """24 ranks on three nodes of 8 in groups of 3: members 6 and 7, and 8 on the next node, share one NIC."""
    equal = EqualLinks(bytes_per_s=RATE, link_latency_s=0.0, domain_size=8)
    assert equal.across(RING, ints(3), ints(1), ints(24))[0] == pytest.approx(1.0 / RATE)
    assert equal.across(RING, ints(3), ints(1), ints(6))[0] == 0.0


def test_without_a_network_what_crosses_takes_for_ever() -> None:
    none = EqualLinks(bytes_per_s=0.0, link_latency_s=0.0, domain_size=8)
    assert none.across(RING, ints(16, 8), ints(1, 1), ints(16, 16))[0].tolist() == [np.inf, 0.0]
    seconds = none.pipelines_s(np.ones(2), 2, ints(8, 4), np.ones(2), np.ones(2), wraps=False)
    assert np.isinf(seconds[0])
    assert np.isfinite(seconds[1])
