"""Many rank mappings on one network: the links that groups of ranks and pipelines get under each.

See :mod:`~meshplan.planner.cluster.network.network_model` for what each kind of group waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.network.rank_layout import ALL_TO_ALL, slot_boundaries
from meshplan.planner.cluster.network.slot_links import Group, slot_links
from meshplan.planner.core.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """Where the boundaries of pipelines lie.

    Args:
        num_stages: P.
        stage_devices: devices of one stage.
        wraps: the last stage sends to the first one (several chunks per stage).
    """

    num_stages: int
    stage_devices: int
    wraps: bool

    def with_messages(self, sent_bytes: float, inside_s: float, waits: float) -> Messages:
        """The messages of one configuration over these boundaries."""
        return Messages(
            sent_bytes=float(sent_bytes),
            num_stages=self.num_stages,
            stage_devices=self.stage_devices,
            inside_s=float(inside_s),
            waits=float(waits),
            wraps=self.wraps,
        )


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

    @property
    def layout(self) -> PipelineLayout:
        """Where the boundaries lie."""
        return PipelineLayout(num_stages=self.num_stages, stage_devices=self.stage_devices, wraps=self.wraps)


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

    def links_s_per_byte(self, group: Group) -> FloatArray:
        """[k, links] seconds for each byte of the groups over each link by itself."""
        links = slot_links(group)
        network = self.network
        spacing = network.seconds_per_byte if group.kind == ALL_TO_ALL else network.ring_s_per_byte
        return np.asarray(spacing[self.orders[:, links.senders], self.orders[:, links.receivers]] * links.shares)

    def seconds_per_byte(self, group: Group) -> FloatArray:
        """[k] inverse rate of the slowest such group, per byte that passes a ring or that a device sends in total."""
        links = slot_links(group)
        if not len(links.senders):
            return np.zeros(len(self.orders))
        worst = self.links_s_per_byte(group).max(axis=1)
        if group.kind == ALL_TO_ALL:
            nics = self.network.nic_s_per_byte[self.orders[:, links.senders]] * links.leaving
            worst = np.maximum(worst, nics.max(axis=1))
        return np.maximum(worst, self._trunks_s_per_byte(group).max(axis=1, initial=0.0))

    def latency_s(self, group: Group) -> FloatArray:
        """[k] largest latency of a link in such a group."""
        links = slot_links(group)
        latency = self.network.latency_s[self.orders[:, links.senders], self.orders[:, links.receivers]]
        return np.asarray(latency.max(axis=1, initial=0.0))

    def _trunks_s_per_byte(self, group: Group) -> FloatArray:
        """[k, trunks] seconds for each byte of the groups over a trunk that all of them share, in the worse direction.

        A trunk's capacity is per device of a node, so that the whole of it is D times as much.
        """
        links = slot_links(group)
        sources, targets = self.orders[:, links.senders], self.orders[:, links.receivers]
        columns = [
            np.maximum(
                (links.volume * (trunk.senders[sources] & trunk.receivers[targets])).sum(axis=1),
                (links.volume * (trunk.senders[targets] & trunk.receivers[sources])).sum(axis=1),
            )
            / (self.domain_size * trunk.bytes_per_s)
            for trunk in self.network.trunks
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self.orders), 0))

    def hops_s(self, asked: Messages) -> FloatArray:
        """[k, P − 1 (P with wraps), r] round trip over each stage boundary of each pipeline."""
        before, after = slot_boundaries(asked.num_stages, asked.stage_devices, self.domain_size, wraps=asked.wraps)
        alike = asked.stage_devices / before.shape[1]
        first, second = self.orders[:, before], self.orders[:, after]
        there = self._boundary_s_per_byte(first, second, alike)
        back = self._boundary_s_per_byte(second, first, alike)
        latency = self.network.latency_s[first, second] + self.network.latency_s[second, first]
        return np.where(before == after, asked.inside_s, asked.sent_bytes * (there + back) + latency)

    def pipeline_waits(self, asked: PipelineLayout) -> FloatArray:
        """[k, 6] what pipelines wait for under the one mapping of this view, each distinct (pipeline, stage) once.

        Bytes over the network (seconds for each), latency (s) and boundaries inside a node, of all boundaries that the
        pipeline fills over; then the same three of the boundaries beside the stage.
        """
        before, after = slot_boundaries(asked.num_stages, asked.stage_devices, self.domain_size, wraps=asked.wraps)
        alike = asked.stage_devices / before.shape[1]
        first, second = self.orders[:1, before], self.orders[:1, after]
        both = self._boundary_s_per_byte(first, second, alike) + self._boundary_s_per_byte(second, first, alike)
        latency = self.network.latency_s[first, second] + self.network.latency_s[second, first]
        inside = before == after
        hops = np.stack([np.where(inside, 0.0, both[0]), np.where(inside, 0.0, latency[0]), 1.0 * inside])
        fill = hops[:, : asked.num_stages - 1].sum(axis=1)[:, None]
        beside = _beside(hops, wraps=asked.wraps)
        both_parts = np.concatenate([np.broadcast_to(fill, beside.shape), beside])
        return np.unique(both_parts.reshape(6, -1).T, axis=0)

    def _boundary_s_per_byte(self, first: IntArray, second: IntArray, alike: float) -> FloatArray:
        """[k, P − 1, r] inverse rate over each boundary; pipelines cross it at the same time and share its trunks.

        Args:
            first: nodes of the senders [k, P − 1, r].
            second: nodes of the receivers [k, P − 1, r].
            alike: pipelines that each of the r stands for.
        """
        spacing = self.network.seconds_per_byte[first, second]
        for trunk in self.network.trunks:
            crosses = trunk.senders[first] & trunk.receivers[second] & (first != second)
            shared = crosses.sum(axis=2, keepdims=True) * alike / (self.domain_size * trunk.bytes_per_s)
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
    exchanges = _beside(hops_s, wraps=asked.wraps)
    fill = hops_s[..., : asked.num_stages - 1, :].sum(axis=-2)
    return np.asarray((fill + asked.waits * exchanges.max(axis=-2) / 2.0).max(axis=-1))


def waits_s(pipelines: FloatArray, sent_bytes: FloatArray, inside_s: FloatArray, waits: FloatArray) -> FloatArray:
    """[n] message time of the slowest pipeline, of many sizes of messages at once.

    Args:
        pipelines: [k, 6], see :meth:`Orders.pipeline_waits`.
        sent_bytes: bytes that one device sends over a boundary, one way, [n].
        inside_s: round trip over a boundary inside a node, [n].
        waits: micro-batches after the first one, w, [n].
    """
    fill, beside = pipelines[:, :3, None], pipelines[:, 3:, None]
    each = fill + waits / 2.0 * beside
    return np.asarray((each[:, 0] * sent_bytes + each[:, 1] + each[:, 2] * inside_s).max(axis=0))


def _beside(hops: FloatArray, *, wraps: bool) -> FloatArray:
    """[…, P, r] sum over the boundaries before and after each stage, from [… P − 1 (P with wraps), r]."""
    if wraps:
        return np.asarray(hops + np.roll(hops, 1, axis=-2))
    none = np.zeros_like(hops[..., :1, :])
    return np.concatenate([none, hops], axis=-2) + np.concatenate([hops, none], axis=-2)
