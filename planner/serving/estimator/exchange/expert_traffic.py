"""What routing and the places of experts do to one layout: the fullest device, and visits by level of the links.

A layer's experts lie on G devices, on nodes n of m_n devices; expert e takes the share p_e of the token copies, of
which a_ed go to its copies on device d. A layer ends when its last device ends, so each layer is priced by its fullest
device, and the mean over the recorded layers stands for all:

- q_d = Σ_e p_e·a_ed; the fullest device gets G·max q_d times the mean load (its *load factor*).
- A token is sent once to each device that holds one of its k experts: it visits d with probability v_d, counted where
  tokens were recorded, else 1 − (1 − q_d)^k, and a node with Q_n = Σ_{d on n} q_d in the same way.

*Returns.* Tokens start from their attention rank and return to it; ranks have as many tokens each. The fullest device
takes (m_n − 1)·v_d tokens of a rank's from its own node, each NIC of the fullest node (G − m_n)·v_n/m_n from others.
Both are given over what even routing would make of them, so that the exchange of even loads costs what it costs where
nothing is said of them. (Kernels then cost more: their tables without a load factor are those of a power law.)

*Stays* (ExFlow, arXiv:2401.08383, §4). A token goes from the device of its first expert to that of the next layer's
(recorded transitions), where the results of its other k − 1 experts, taken as independent, are sent, too. Every device
then needs every token's keys and values: they are gathered, and each device's cache holds all requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.expert_placement.problem.objectives import device_shares
from meshplan.planner.serving.estimator.exchange.collectives import COLLECTIVE_S, Exchange
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.expert_routing import Dispatch, ExpertRouting

# Ratio of neighbouring load factors at which kernels are priced: DeepSeek-V3 on 32 H200 is planned in 12 CPU-seconds,
# with every layer's own factor in 34. Single factors are off by 0.9 % (OLMoE), 2.2 % (Qwen3-235B) and 4.9 %
# (DeepSeek-V3) at worst (16 H100, factors up to 4, 16 to 65,536 tokens).
FACTOR_STEP = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """Shares of the ways that token copies go, by the level of the links, means over layers; they sum to 1.

    Args:
        same_device: no link.
        same_node: another device of the node.
        other_node: over the network.
    """

    same_device: float
    same_node: float
    other_node: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StayingTraffic:
    """Token copies into (or out of) the fullest device, over all tokens of the group, [layers] each.

    Args:
        first_near: first experts' tokens from its node.
        first_far: first experts' tokens from other nodes, per NIC of the fullest node.
        other_near: those of the other k − 1 experts, from its node.
        other_far: those of the other k − 1 experts from other nodes, per NIC.
    """

    first_near: FloatArray
    first_far: FloatArray
    other_near: FloatArray
    other_far: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTraffic:
    """One layout's loads and ways, by recorded layer.

    Args:
        load_factor: [L] load of the fullest device over the mean.
        near: [L] tokens that the fullest device takes from its node, over those of even routing.
        far: [L] tokens that a NIC of the fullest node takes, over those of even routing.
        hops: see :class:`Hops`.
        num_slots: experts and their copies in a layer.
        staying: None where tokens return.
    """

    load_factor: FloatArray
    near: FloatArray
    far: FloatArray
    hops: Hops
    num_slots: int
    staying: StayingTraffic | None = None

    def mean_over_layers(self, price: Callable[[float], FloatArray]) -> FloatArray:
        """Mean over layers of a price by load factor, linear between powers of :data:`FACTOR_STEP`.

        The knots are the same for all loads, so that a smaller load never costs more.
        """
        place = np.log(np.maximum(self.load_factor, 1.0)) / np.log(FACTOR_STEP)
        below = np.floor(place)
        share = (self.load_factor - FACTOR_STEP**below) / (FACTOR_STEP ** (below + 1.0) - FACTOR_STEP**below)
        share = np.clip(share, 0.0, 1.0)
        weights = np.zeros(int(below.max()) + 2)
        np.add.at(weights, below.astype(int), 1.0 - share)
        np.add.at(weights, below.astype(int) + 1, share)
        knots = np.flatnonzero(weights)
        total = sum(weights[knot] * price(float(FACTOR_STEP**knot)) for knot in knots)
        return np.asarray(total / len(self.load_factor))


def expert_traffic(
    routing: ExpertRouting | None, layout: Layout, *, top_k: int, domain_size: int
) -> ExpertTraffic | None:
    """Loads and ways under a layout; None where nothing is said, or where every device has all experts.

    Args:
        routing: loads and the places of the experts.
        layout: whose ``expert_parallel`` devices hold the experts; where each expert is split further, a visit counts
            once for all of its devices, as without recorded loads.
        top_k: k, experts of a token.
        domain_size: devices of a node; the group starts on a node, and fills nodes in order.
    """
    if routing is None or layout.expert_parallel == 1:
        return None
    spread = layout.expert_parallel
    per_node = max(min(spread, domain_size // layout.expert_tensor_parallel), 1)
    nodes = np.arange(spread) // per_node
    layers = len(routing.load)
    in_order = np.tile(np.arange(routing.num_experts), (layers, 1))
    placement = in_order if routing.placement is None else routing.placement
    shares = device_shares(placement, routing.num_experts, spread)
    load = np.einsum("le,leg->lg", routing.load, shares)
    visits = _visits(routing, placement, load, np.arange(spread), top_k)
    node_visits = _visits(routing, placement, by_node(load, nodes), nodes, top_k)
    even = np.full((1, spread), 1.0 / spread)
    near, far = _fullest(visits, node_visits, nodes)
    even_near, even_far = _fullest(_by_chance(even, top_k), _by_chance(by_node(even, nodes), top_k), nodes)
    staying = _staying(routing, shares, load, nodes, top_k) if routing.dispatch is Dispatch.STAYS else None
    return ExpertTraffic(
        load_factor=spread * load.max(axis=1),
        near=_over(near, even_near),
        far=_over(far, even_far),
        hops=_returning_hops(visits, nodes) if staying is None else _staying_hops(routing, shares, nodes),
        num_slots=routing.num_slots,
        staying=staying,
    )


def by_node(by_device: FloatArray, nodes: IntArray) -> FloatArray:
    """[…, nodes] sums over the devices of each node of [… , G]."""
    return by_device @ np.eye(int(nodes.max()) + 1)[nodes]


def _over(value: FloatArray, even: FloatArray) -> FloatArray:
    return np.asarray(value / even if even[0] > 0.0 else np.ones_like(value))


def _by_chance(load: FloatArray, top_k: int) -> FloatArray:
    """Probability that one of k independent choices falls on each place."""
    return np.asarray(1.0 - (1.0 - load) ** top_k)


def _visits(routing: ExpertRouting, placement: IntArray, load: FloatArray, places: IntArray, top_k: int) -> FloatArray:
    """[L, places] share of the tokens that visit each device or node.

    Args:
        routing: with the recorded tokens, or without any.
        placement: [L, S].
        load: [L, places] share of the token copies.
        places: [G] device or node of each device.
        top_k: choices of a token where none was recorded.
    """
    tokens = routing.token_experts
    if tokens is None:
        return _by_chance(load, top_k)
    found = np.zeros_like(load)
    device = places[np.arange(placement.shape[1]) // (placement.shape[1] // len(places))]
    for layer, (chosen, slots) in enumerate(zip(tokens, placement, strict=True)):
        copies = np.bincount(slots, minlength=routing.num_experts)
        here = np.zeros((routing.num_experts + 1, load.shape[1]))  # the last row: no choice
        np.add.at(here, (slots, device), 1.0 / copies[slots])
        there = chosen[(chosen >= 0).any(axis=1)]
        if len(there):  # each copy of an expert is as likely to be the one that is asked
            missed = np.ones((len(there), load.shape[1]))
            for choice in there.T:
                missed *= 1.0 - np.minimum(here[choice], 1.0)
            found[layer] = 1.0 - missed.mean(axis=0)
    return found


def _fullest(visits: FloatArray, node_visits: FloatArray, nodes: IntArray) -> tuple[FloatArray, FloatArray]:
    """[L] tokens of a rank's that the fullest device takes from its node, and a NIC of the fullest node from others."""
    size = np.bincount(nodes)
    near = ((size[nodes] - 1) * visits).max(axis=1)
    far = ((len(nodes) - size) * node_visits / size).max(axis=1)
    return np.asarray(near), np.asarray(far)


def _returning_hops(visits: FloatArray, nodes: IntArray) -> Hops:
    """From an attention rank, each with as many tokens, to the devices that a token visits."""
    share = (visits / visits.sum(axis=1, keepdims=True)).mean(axis=0)
    same_node = float((share * np.bincount(nodes)[nodes]).sum()) / len(nodes)
    return Hops(same_device=1.0 / len(nodes), same_node=same_node - 1.0 / len(nodes), other_node=1.0 - same_node)


# --- tokens that stay -------------------------------------------------------------------------------------------------


def _ways(routing: ExpertRouting, shares: FloatArray) -> FloatArray:
    """[L − 1, G, G] share of a layer's tokens that go from each device to each."""
    if routing.transitions is None:
        raise AssertionError("tokens stay only where transitions were recorded")
    counts = np.einsum("led,lef,lfg->ldg", shares[:-1], routing.transitions, shares[1:], optimize=True)
    return np.asarray(counts / np.maximum(counts.sum(axis=(1, 2), keepdims=True), 1.0))


def _staying_hops(routing: ExpertRouting, shares: FloatArray, nodes: IntArray) -> Hops:
    """From the device of one layer's first expert to that of the next, by tokens over all layers."""
    ways = _ways(routing, shares).mean(axis=0)
    same_device = float(np.trace(ways))
    same_node = float(ways[nodes[:, None] == nodes[None, :]].sum())
    return Hops(same_device=same_device, same_node=same_node - same_device, other_node=1.0 - same_node)


def _staying(
    routing: ExpertRouting, shares: FloatArray, load: FloatArray, nodes: IntArray, top_k: int
) -> StayingTraffic:
    ways, size = _ways(routing, shares), np.bincount(nodes)
    inside = (nodes[:, None] == nodes[None, :]) & ~np.eye(len(nodes), dtype=bool)
    between = np.swapaxes(by_node(np.swapaxes(by_node(ways, nodes), 1, 2), nodes), 1, 2)
    between = between * ~np.eye(len(size), dtype=bool)
    on_node = by_node(load, nodes)
    first_near = np.maximum((ways * inside).sum(axis=1).max(axis=1), (ways * inside).sum(axis=2).max(axis=1))
    first_far = np.maximum((between.sum(axis=1) / size).max(axis=1), (between.sum(axis=2) / size).max(axis=1))
    return StayingTraffic(
        first_near=first_near,
        first_far=first_far,
        other_near=(top_k - 1) * (load * (on_node[:, nodes] - load)).max(axis=1),
        other_far=(top_k - 1) * (on_node * (1.0 - on_node) / size).max(axis=1),
    )


def staying_s(
    exchange: Exchange,
    staying: StayingTraffic,
    tokens: FloatArray,
    *,
    group: int,
    hidden: int,
    activation_bytes: float,
    kv_bytes: float,
) -> FloatArray:
    """Mean time of one layer's ways where tokens stay, s.

    Args:
        exchange: links.
        staying: token copies on them.
        tokens: of all devices.
        group: devices.
        hidden: size of a token's state, which moves in 16 bits.
        activation_bytes: of one element sent to an expert; results return in 16 bits.
        kv_bytes: keys and values of one token in one layer.
    """
    state, row = hidden * BYTES_16_BIT, hidden * (activation_bytes + BYTES_16_BIT)
    inside, across = 1.0 / exchange.scale_up_bytes_per_s, exchange.network_s_per_byte
    crosses = bool(staying.first_far.any() or staying.other_far.any())
    near = (staying.first_near * state).mean() + (staying.other_near * row).mean()
    far = (staying.first_far * state).mean() + (staying.other_far * row).mean()
    latency_s = COLLECTIVE_S + (exchange.machine.scale_out_latency_s if crosses else 0.0)
    waits = 2.0 if staying.other_near.any() or staying.other_far.any() else 1.0
    slowest = max(inside, across / exchange.fewest_on_a_node(group)) if crosses else inside
    gathered = (group - 1) / group * kv_bytes * slowest
    moved = np.maximum(near * inside, far * across if crosses else 0.0)
    return np.asarray(waits * latency_s + tokens * (moved + gathered))
