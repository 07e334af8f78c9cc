"""Rates of groups of ranks and of pipelines on the links of a cluster, uniform or not, under a rank mapping.

Ranks fill *slots* of D devices in order (tensor, context, expert and data parallelism fastest, pipeline slowest); a
mapping assigns slot i to node ``order[i]``. Which links a group uses is a matter of the layout
(:mod:`~meshplan.planner.cluster.network.rank_layout`). All groups of all stages run at the same time, and
the slowest one decides:

- ring: the least over all links of all rings of rails · rate, with the link's rate in its slower direction and as many
  rails as the slot with fewer members of the ring has; rings in the order of the ranks;
- neighbours: the slowest link of all rings, which one member uses by itself;
- all-to-all: the slowest NIC (a node's fastest link) with all that a member sends to other slots, or the slowest link
  with what goes to one slot;
- a trunk is shared by all traffic on it;
- pipeline: max over pipelines of Σ_q h_q + w·max_k (h_{k−1} + h_k)/2, h_q the round trip over stage boundary q: the
  pipeline fills once, then each of w further micro-batches waits for the slowest stage k, which exchanges with the
  stage before and the one after, an activation one way and a gradient the other way at once. With interleaved chunks
  the last stage also sends to the first one.

On equal links every mapping is the same, and closed forms price all candidates at once (:class:`EqualLinks`); tests
hold them to the walk over explicit links. Rates are inverse, seconds per byte: ∞ where no network joins the nodes.

Assumes: rings in rank order, but either way round (Gloo's ring sends to the rank before, NCCL's trees use both
directions), full-duplex NICs, one kind of collective at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshplan.planner.cluster.network.network import Network, strongly_connected
from meshplan.planner.cluster.network.orders import Messages, Orders, PipelineLayout, waits_s
from meshplan.planner.cluster.network.rank_layout import (
    ALL_TO_ALL,
    Degrees,
    crossing_pipelines,
    fewest_on_a_slot,
    network_share,
)
from meshplan.planner.cluster.network.slot_links import Group, group_of, slot_links
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

_BITS = 20
_MASK = (1 << _BITS) - 1


class NetworkModel:
    """Inverse rates and latencies that an estimator needs of the links, for a batch of candidates (rows).

    :class:`EqualLinks` prices uniform links, :class:`OneOrder` all rows under one mapping, :class:`GivenRates` has
    rates for each row, and :class:`BestLinks` has rates that no mapping can beat.
    """

    domain_size: int

    def of(self, degrees: Degrees) -> NetworkModel:
        """The same for rows with these degrees, where rates depend on more than a group's size and stride."""
        return self

    def is_possible(self, degrees: Degrees, *, any_sharding: bool = False) -> BoolArray:
        """Rows that the model speaks of, [n]; with ``any_sharding`` those that it may with some size of s."""
        return np.ones(len(degrees.tensor), dtype=bool)

    def slowest(self, group: Group, rows: IntArray) -> tuple[FloatArray | float, FloatArray | float]:
        """Inverse rate and hop latency of the slowest group of a kind, for the rows that have it."""
        raise NotImplementedError

    def pipeline_s(
        self, asked: PipelineLayout, sent_bytes: FloatArray, inside_s: FloatArray, waits: FloatArray
    ) -> FloatArray:
        """[n] messages of the slowest pipeline, for rows whose boundaries lie alike; see :meth:`pipelines_s`."""
        raise NotImplementedError

    def across(
        self, kind: str, size: IntArray, stride: IntArray, world_size: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """[n] seconds over the network for each byte of each row's groups, and their latency; 0 inside a node."""
        size, stride, world_size = np.broadcast_arrays(size, stride, world_size)
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
        return spacing, latency

    def pipelines_s(
        self,
        sent_bytes: FloatArray,
        num_stages: int,
        stage_devices: IntArray,
        inside_s: FloatArray,
        waits: FloatArray,
        *,
        wraps: bool,
    ) -> FloatArray:
        """[n] messages of each row's slowest pipeline; arguments as in :class:`Messages`, [n] each."""
        if len(stage_devices) and (stage_devices == stage_devices[0]).all():  # most batches of a search on equal links
            asked = PipelineLayout(num_stages=num_stages, stage_devices=int(stage_devices[0]), wraps=wraps)
            return self.pipeline_s(asked, sent_bytes, inside_s, waits)
        seconds = np.zeros(len(sent_bytes))
        for devices in sorted(set(stage_devices.tolist())):
            rows = np.flatnonzero(stage_devices == devices)
            asked = PipelineLayout(num_stages=num_stages, stage_devices=devices, wraps=wraps)
            seconds[rows] = self.pipeline_s(asked, sent_bytes[rows], inside_s[rows], waits[rows])
        return seconds

    def messages_of(self, asked: Messages) -> float:
        """Messages of the slowest pipeline of one configuration, s."""
        sent, inside, waits = (np.array([value]) for value in (asked.sent_bytes, asked.inside_s, asked.waits))
        return float(self.pipeline_s(asked.layout, sent, inside, waits)[0])


@dataclass(kw_only=True, eq=False)
class EqualLinks(NetworkModel):
    """Equal links between all nodes, in closed form.

    Args:
        bytes_per_s: of one device and direction; 0 where no network joins the nodes.
        link_latency_s: of a message between nodes.
        domain_size: devices of a node.
    """

    bytes_per_s: float
    link_latency_s: float
    domain_size: int

    @property
    def _seconds_per_byte(self) -> float:
        return 1.0 / self.bytes_per_s if self.bytes_per_s else float("inf")

    def across(
        self, kind: str, size: IntArray, stride: IntArray, world_size: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """See :class:`NetworkModel`."""
        fewest = fewest_on_a_slot(size, stride, world_size, self.domain_size)
        crosses = fewest < size
        share = np.where(crosses, network_share(kind, size, fewest), 1.0)
        return np.where(crosses, share * self._seconds_per_byte, 0.0), np.where(crosses, self.link_latency_s, 0.0)

    def pipelines_s(
        self,
        sent_bytes: FloatArray,
        num_stages: int,
        stage_devices: IntArray,
        inside_s: FloatArray,
        waits: FloatArray,
        *,
        wraps: bool,
    ) -> FloatArray:
        """See :class:`NetworkModel`."""
        shorter = np.minimum(stage_devices, self.domain_size)  # beyond a node all boundaries cross
        return super().pipelines_s(sent_bytes, num_stages, shorter, inside_s, waits, wraps=wraps)

    def pipeline_s(
        self, asked: PipelineLayout, sent_bytes: FloatArray, inside_s: FloatArray, waits: FloatArray
    ) -> FloatArray:
        """See :class:`NetworkModel`."""
        outside_s = 2.0 * (sent_bytes * self._seconds_per_byte + self.link_latency_s)
        return equal_hops_s(asked, self.domain_size, outside_s=outside_s, inside_s=inside_s, waits=waits)


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
    _pipelines: dict[PipelineLayout, FloatArray] = field(default_factory=dict)

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

    def pipeline_s(
        self, asked: PipelineLayout, sent_bytes: FloatArray, inside_s: FloatArray, waits: FloatArray
    ) -> FloatArray:
        """See :class:`NetworkModel`."""
        if asked not in self._pipelines:
            self._pipelines[asked] = self._orders.pipeline_waits(asked)
        return waits_s(self._pipelines[asked], sent_bytes, inside_s, waits)


@dataclass(kw_only=True, eq=False)
class GivenRates(NetworkModel):
    """Given rates for each row: how the step of one candidate, repeated in all rows, depends on them.

    Args:
        spacing: group → inverse rate, s/byte [n].
        latency: group → latency, s [n].
        messages_s: messages → those of the slowest pipeline, s [n].
        domain_size: devices of a node.
    """

    spacing: Mapping[Group, FloatArray]
    latency: Mapping[Group, FloatArray]
    messages_s: Mapping[Messages, FloatArray]
    domain_size: int

    def slowest(self, group: Group, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """See :class:`NetworkModel`."""
        return self.spacing[group][rows], self.latency[group][rows]

    def pipeline_s(
        self, asked: PipelineLayout, sent_bytes: FloatArray, inside_s: FloatArray, waits: FloatArray
    ) -> FloatArray:
        """See :class:`NetworkModel`."""
        return self.messages_s[asked.with_messages(sent_bytes[0], inside_s[0], waits[0])]


@dataclass(kw_only=True, eq=False)
class BestLinks(NetworkModel):
    """Rates that no mapping can beat.

    Slots that groups join lie, at the rate at which these run, inside one strongly connected component of the links
    with at least that rate: Σ ⌊component/k⌋ must be at least their number, with k slots in the smallest of them. A hop
    takes at least the cheapest pair of links.

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
        pairs = group.kind == ALL_TO_ALL
        rates_of = self._usable if pairs else np.minimum(self._usable, self._usable.T)
        rates = np.unique(rates_of[np.isfinite(rates_of)])
        links = slot_links(group)
        low, high = 0, len(rates) - 1  # the largest rate at which the groups still fit in the parts
        while low < high:
            middle = (low + high + 1) // 2
            if self._room(rates_of >= rates[middle], links.least_part) >= links.num_parts:
                low = middle
            else:
                high = middle - 1
        # Some link has no better rate than that; and no link, no NIC is faster than the fastest link.
        most = max(float(links.shares.max()), float(links.leaving.max()))
        return max(float(links.shares.min()) / float(rates[low]), most / float(rates[-1]))

    @staticmethod
    def _room(links: BoolArray, nodes: int) -> int:
        parts = np.bincount(strongly_connected(links))
        return int((parts // nodes).sum())

    def least_hop_s(self, sent_bytes: FloatArray, inside_s: FloatArray) -> FloatArray:
        """[n] round trip over the cheapest pair of links; inside a node where there is one only."""
        if len(self._usable) < 2:  # noqa: PLR2004  (one node has no links)
            return inside_s
        return np.minimum.reduce([sent_bytes * per_byte + latency for per_byte, latency in self._hops.tolist()])

    @cached_property
    def _hops(self) -> FloatArray:
        """[k, 2] seconds for each byte, and latency, there and back over the pairs of links that some size prefers."""
        spacing = 1.0 / self._usable
        pairs = np.stack([(spacing + spacing.T).ravel(), (self._latency_s + self._latency_s.T).ravel()], axis=1)
        pairs = np.unique(pairs[np.isfinite(pairs[:, 1])], axis=0)  # ascending by the first
        least_before = np.minimum.accumulate(np.append(np.inf, pairs[:-1, 1]))
        return np.asarray(pairs[pairs[:, 1] < least_before])

    def pipeline_s(
        self, asked: PipelineLayout, sent_bytes: FloatArray, inside_s: FloatArray, waits: FloatArray
    ) -> FloatArray:
        """See :class:`NetworkModel`."""
        outside_s = self.least_hop_s(sent_bytes, inside_s)
        return equal_hops_s(asked, self.domain_size, outside_s=outside_s, inside_s=inside_s, waits=waits)


def equal_hops_s(
    asked: PipelineLayout, domain_size: int, *, outside_s: FloatArray, inside_s: FloatArray, waits: FloatArray
) -> FloatArray:
    """[n] messages of the slowest pipeline where all boundaries between nodes take as long.

    Args:
        asked: where the boundaries lie.
        domain_size: devices of a node.
        outside_s: round trip over a boundary between nodes, [n].
        inside_s: the same inside a node, [n].
        waits: micro-batches after the first one, [n].
    """
    stages, devices = asked.num_stages, min(asked.stage_devices, domain_size)  # beyond a node all boundaries cross
    slowest = np.zeros(len(inside_s))
    for fill, far, near in crossing_pipelines(stages, devices, domain_size, wraps=asked.wraps).tolist():
        # 0 · ∞ is no number: what does not cross does not count.
        crossing = (fill + waits * far / 2.0) * outside_s if fill or far else 0.0
        slowest = np.maximum(slowest, crossing + (stages - 1 - fill + waits * near / 2.0) * inside_s)
    return slowest
