"""Network model of uneven links: rates of rings, all-to-alls and pipeline messages under a rank mapping.

Ranks fill *slots* of D devices in order (tensor, context, expert and data parallelism fastest, pipeline slowest); a
mapping assigns slot i to node ``order[i]``. A group of ``size`` ranks with stride ``stride`` has inside =
clip(⌊D/stride⌋, 1, size) members on a node and so spans k = ⌈size/inside⌉ slots with stride s = max(1, ⌊stride/D⌋).
All groups of all stages run at the same time, and the slowest one decides:

- ring: min over all links of all rings of the link's rate in its slower direction, in the order of the ranks;
- all-to-all over k nodes: the slowest node's NIC (its fastest link), or (k − 1) times its slowest link in the group;
- a trunk that n of these links cross leaves each of them rate/n;
- pipeline: max over pipelines of Σ_q h_q + w·max_k (h_{k−1} + h_k)/2, h_q the round trip over stage boundary q: the
  pipeline fills once, then each of w further micro-batches waits for the slowest stage k, which exchanges with the
  stage before and the one after, an activation one way and a gradient the other way at once. With interleaved chunks
  the last stage also sends to the first one.

Assumes: rings in rank order, but either way round (Gloo's ring sends to the rank before, NCCL's trees use both
directions), full-duplex NICs, one kind of collective at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from meshplan.planner.cluster.network import Network, strongly_connected
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

_BITS = 20
_MASK = (1 << _BITS) - 1
RING, ALL_TO_ALL = "ring", "all-to-all"
# Links between slots, as two arrays of slot numbers: senders and receivers.
SlotLinks = tuple[IntArray, IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All groups of ranks of one kind, in units of slots.

    Args:
        kind: :data:`RING` or :data:`ALL_TO_ALL`.
        nodes: slots that one group spans, k.
        step: stride of these slots, s.
        slots: slots in use by the whole job.
    """

    kind: str
    nodes: int
    step: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Stage-to-stage messages of one configuration.

    Args:
        sent_bytes: bytes that one device sends over a boundary, one way.
        num_stages: P.
        stage_devices: devices of one stage.
        inside_s: round trip over a boundary inside a node.
        waits: micro-batches after the first one, which wait for the slowest stage's exchanges, w.
        wraps: the last stage sends to the first one (several chunks per stage).
    """

    sent_bytes: float
    num_stages: int
    stage_devices: int
    inside_s: float
    waits: float
    wraps: bool = False


def group_of(kind: str, *, size: int, stride: int, world_size: int, domain_size: int) -> Group | None:
    """The groups in slots; None where each lies inside one node."""
    inside = min(max(domain_size // max(stride, 1), 1), size)
    nodes = -(-size // inside)
    if nodes <= 1:
        return None
    return Group(kind=kind, nodes=nodes, step=max(1, stride // domain_size), slots=-(-world_size // domain_size))


@lru_cache(maxsize=4096)
def slot_links(group: Group) -> SlotLinks:
    """All directed links that groups of one kind use, in all stages."""
    block = group.nodes * group.step
    starts = [
        base + offset
        for base in range(0, group.slots, block)
        for offset in range(group.step)
        if base + offset + (group.nodes - 1) * group.step < group.slots
    ]
    members = np.array(starts, dtype=np.int64)[:, None] + group.step * np.arange(group.nodes, dtype=np.int64)
    if group.kind == RING:
        return members.ravel(), np.roll(members, -1, axis=1).ravel()
    near, far = np.nonzero(~np.eye(group.nodes, dtype=bool))
    return members[:, near].ravel(), members[:, far].ravel()


@lru_cache(maxsize=1024)
def slot_boundaries(num_stages: int, stage_devices: int, domain_size: int, *, wraps: bool = False) -> SlotLinks:
    """[P − 1, r] slots on both sides of each stage boundary, for the r pipelines that differ in their slots.

    With ``wraps`` also the boundary from the last stage to the first, [P, r].
    """
    step = math.gcd(stage_devices, domain_size)
    offset = np.arange(0, stage_devices, step, dtype=np.int64)
    if stage_devices % domain_size == 0:
        offset = np.arange(0, stage_devices, domain_size, dtype=np.int64)
    stages = np.arange(num_stages if wraps else num_stages - 1, dtype=np.int64)[:, None]
    following = (stages + 1) % num_stages
    return (stages * stage_devices + offset) // domain_size, (following * stage_devices + offset) // domain_size


@dataclass(frozen=True, kw_only=True, eq=False)
class Orders:
    """Many rank mappings on one network.

    Args:
        network: the links.
        orders: [k, slots] node of each slot.
        domain_size: devices of a node, D.
    """

    network: Network
    orders: IntArray
    domain_size: int

    def seconds_per_byte(self, group: Group) -> FloatArray:
        """[k] inverse rate of the slowest such group, per byte that a device sends in total."""
        senders, receivers = slot_links(group)
        if not len(senders):
            return np.zeros(len(self.orders))
        sources, targets = self.orders[:, senders], self.orders[:, receivers]
        network = self.network
        spacing = network.ring_s_per_byte if group.kind == RING else network.seconds_per_byte
        links = spacing[sources, targets]
        shares = group.nodes - 1 if group.kind == ALL_TO_ALL else 1
        worst = links.max(axis=1) / shares
        if group.kind == ALL_TO_ALL:
            worst = np.maximum(worst, network.nic_s_per_byte[sources].max(axis=1))
        return np.maximum(worst, self._trunks_s_per_byte(sources, targets).max(axis=1, initial=0.0) / shares)

    def latency_s(self, group: Group) -> FloatArray:
        """[k] largest latency of a link in such a group."""
        senders, receivers = slot_links(group)
        return np.asarray(
            self.network.latency_s[self.orders[:, senders], self.orders[:, receivers]].max(axis=1, initial=0.0)
        )

    def _trunks_s_per_byte(self, sources: IntArray, targets: IntArray) -> FloatArray:
        """[k, trunks] inverse rate of each link over a trunk that all of them share, in the worse direction."""
        columns = [
            np.maximum(
                (trunk.senders[sources] & trunk.receivers[targets]).sum(axis=1),
                (trunk.senders[targets] & trunk.receivers[sources]).sum(axis=1),
            )
            / trunk.bytes_per_s
            for trunk in self.network.trunks
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self.orders), 0))

    def hops_s(self, asked: Messages) -> FloatArray:
        """[k, P − 1 (P with wraps), r] round trip over each stage boundary of each pipeline."""
        before, after = slot_boundaries(asked.num_stages, asked.stage_devices, self.domain_size, wraps=asked.wraps)
        first, second = self.orders[:, before], self.orders[:, after]
        there = self._boundary_s_per_byte(first, second)
        back = self._boundary_s_per_byte(second, first)
        latency = self.network.latency_s[first, second] + self.network.latency_s[second, first]
        return np.where(before == after, asked.inside_s, asked.sent_bytes * (there + back) + latency)

    def _boundary_s_per_byte(self, first: IntArray, second: IntArray) -> FloatArray:
        """[k, P − 1, r] inverse rate over each boundary; pipelines cross it at the same time and share its trunks."""
        spacing = self.network.seconds_per_byte[first, second]
        for trunk in self.network.trunks:
            crosses = trunk.senders[first] & trunk.receivers[second] & (first != second)
            shared = crosses.sum(axis=2, keepdims=True) / trunk.bytes_per_s
            spacing = np.where(crosses, np.maximum(spacing, shared), spacing)
        return np.asarray(spacing)


def slowest_pipeline_s(hops_s: FloatArray, asked: Messages) -> FloatArray:
    """[k] message time of the slowest pipeline: max over pipelines of Σ_q h_q + w·max_k (h_{k−1} + h_k)/2.

    Args:
        hops_s: [k, P − 1 (P with wraps), r], see :meth:`Orders.hops_s`.
        asked: the messages.
    """
    if hops_s.shape[-2] == 0:
        return np.zeros(hops_s.shape[:-2])
    if asked.wraps:
        exchanges = hops_s + np.roll(hops_s, 1, axis=-2)
    else:
        none = np.zeros_like(hops_s[..., :1, :])
        exchanges = np.concatenate([none, hops_s], axis=-2) + np.concatenate([hops_s, none], axis=-2)
    fill = hops_s[..., : asked.num_stages - 1, :].sum(axis=-2)
    return np.asarray((fill + asked.waits * exchanges.max(axis=-2) / 2.0).max(axis=-1))


class NetworkModel:
    """Rates and latencies that the training estimator needs of uneven links, for a batch of candidates (rows).

    :class:`OneOrder` prices all rows under one mapping, :class:`GivenRates` has rates for each row, and
    :class:`BestLinks` has rates that no mapping can beat.
    """

    domain_size: int

    def slowest(self, group: Group, rows: IntArray) -> tuple[FloatArray | float, FloatArray | float]:
        """Inverse rate and hop latency of the slowest group of a kind, for the rows that have it."""
        raise NotImplementedError

    def pipeline_s(self, rows: IntArray, asked: Messages) -> FloatArray | float:
        """Messages of the slowest pipeline, for rows that differ only in their mapping."""
        raise NotImplementedError

    def rates(self, kind: str, size: IntArray, stride: IntArray, world_size: IntArray) -> tuple[FloatArray, FloatArray]:
        """[n] network bandwidth per device and latency of each row's group; ∞ and 0 for groups inside a node."""
        spacing, latency = np.zeros(len(size)), np.zeros(len(size))
        # Degrees are below 2^20 (the spec's limit on devices), so three of them are one whole number.
        keys = (size.astype(np.int64) << _BITS | stride.astype(np.int64)) << _BITS | world_size.astype(np.int64)
        distinct, which = np.unique(keys, return_inverse=True)
        for index, key in enumerate(distinct.tolist()):
            group = group_of(
                kind,
                size=key >> 2 * _BITS,
                stride=key >> _BITS & _MASK,
                world_size=key & _MASK,
                domain_size=self.domain_size,
            )
            if group is not None:
                rows = np.flatnonzero(which == index) if len(distinct) > 1 else np.arange(len(size))
                spacing[rows], latency[rows] = self.slowest(group, rows)
        with np.errstate(divide="ignore"):
            return 1.0 / spacing, latency


@dataclass(kw_only=True, eq=False)
class OneOrder(NetworkModel):
    """One mapping for all rows: slot i is on node ``order[i]``.

    Args:
        network: the links.
        order: node of each slot, at least as many as any row uses.
        domain_size: devices of a node.
    """

    network: Network
    order: tuple[int, ...]
    domain_size: int
    _known: dict[Group, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def _orders(self) -> Orders:
        orders = np.array([self.order], dtype=np.int64)
        return Orders(network=self.network, orders=orders, domain_size=self.domain_size)

    def slowest(self, group: Group, rows: IntArray) -> tuple[float, float]:
        """See :class:`NetworkModel`."""
        if group not in self._known:
            spacing, latency = self._orders.seconds_per_byte(group), self._orders.latency_s(group)
            self._known[group] = (float(spacing[0]), float(latency[0]))
        return self._known[group]

    def pipeline_s(self, rows: IntArray, asked: Messages) -> float:
        """See :class:`NetworkModel`."""
        hops = self._orders.hops_s(asked)
        return float(slowest_pipeline_s(hops, asked)[0])


@dataclass(kw_only=True, eq=False)
class GivenRates(NetworkModel):
    """Given rates for each row: how the step of one candidate, repeated in all rows, depends on them.

    Args:
        spacing: group → inverse rate, s/byte [n].
        latency: group → latency, s [n].
        messages_s: messages of the slowest pipeline, s [n].
        domain_size: devices of a node.
    """

    spacing: Mapping[Group, FloatArray]
    latency: Mapping[Group, FloatArray]
    messages_s: FloatArray
    domain_size: int

    def slowest(self, group: Group, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """See :class:`NetworkModel`."""
        return self.spacing[group][rows], self.latency[group][rows]

    def pipeline_s(self, rows: IntArray, asked: Messages) -> FloatArray:
        """See :class:`NetworkModel`."""
        return np.asarray(self.messages_s[rows])


@dataclass(kw_only=True, eq=False)
class BestLinks(NetworkModel):
    """Rates that no mapping can beat.

    Groups of k nodes that run at a rate lie inside strongly connected components of the links with at least that rate,
    so that Σ ⌊component/k⌋·k must be at least the number of slots. A hop takes at least the cheapest pair of links.

    Args:
        network: the links.
        domain_size: devices of a node.
    """

    network: Network
    domain_size: int
    _known: dict[Group, float] = field(default_factory=dict)

    @cached_property
    def _usable(self) -> FloatArray:
        return np.asarray(self.network.bytes_per_s[np.ix_(self.network.usable, self.network.usable)])

    @cached_property
    def _latency_s(self) -> FloatArray:
        """[usable, usable] with ∞ on the diagonal."""
        latency = self.network.latency_s[np.ix_(self.network.usable, self.network.usable)]
        return np.asarray(latency + np.diag(np.full(len(latency), np.inf)))

    def slowest(self, group: Group, rows: IntArray) -> tuple[float, float]:
        """See :class:`NetworkModel`."""
        if group not in self._known:
            self._known[group] = self._least(group)
        return self._known[group], float(self._latency_s.min())

    def _least(self, group: Group) -> float:
        links = np.minimum(self._usable, self._usable.T) if group.kind == RING else self._usable
        rates = np.unique(links[np.isfinite(links)])
        needed = len(slot_links(group)[0])
        needed = needed if group.kind == RING else needed // (group.nodes - 1)
        shares = 1 if group.kind == RING else group.nodes - 1
        low, high = 0, len(rates) - 1  # the largest rate at which the groups still fit in the parts
        while low < high:
            middle = (low + high + 1) // 2
            if self._room(links >= rates[middle], group.nodes) >= needed:
                low = middle
            else:
                high = middle - 1
        nic = float(rates[-1])  # all-to-all: no NIC is faster than the fastest link
        return 1.0 / float(rates[low]) if shares == 1 else max(1.0 / (shares * float(rates[low])), 1.0 / nic)

    @staticmethod
    def _room(links: BoolArray, nodes: int) -> int:
        parts = np.bincount(strongly_connected(links))
        return int((parts // nodes * nodes).sum())

    def pipeline_s(self, rows: IntArray, asked: Messages) -> float:
        """See :class:`NetworkModel`."""
        before, after = slot_boundaries(asked.num_stages, asked.stage_devices, self.domain_size, wraps=asked.wraps)
        one_way = asked.sent_bytes / self._usable + self._latency_s
        hop = float((one_way + one_way.T).min()) if len(one_way) > 1 else asked.inside_s
        hops = np.where(before == after, asked.inside_s, hop)
        return float(slowest_pipeline_s(hops[None], asked)[0])
