"""How long collectives take: alpha–beta per link, hierarchical over scale-up domains.

A group has ``size`` members with stride ``stride`` in ranks. In the rank order tensor, context, expert, data, pipeline
(tensor fastest) the tensor-parallel group has stride 1, the context-parallel group stride t, and so on. Which links it
uses is the layout's (:mod:`~meshplan.planner.cluster.network.rank_layout`), what they carry the network's
(:mod:`~meshplan.planner.cluster.network.network_model`): the slowest group of a kind decides.

- A group inside one domain runs at β = scale-up bandwidth; where no switch joins the devices of a domain, at the share
  of it that the links between the members have (:mod:`~meshplan.planner.cluster.mesh`), as do messages.
- A group over several domains is limited by the network: its members in a domain drive their NICs together,
  β = min(c·network share, scale-up bandwidth), c the members on the domain that holds fewest.
- all-gather, reduce-scatter of S bytes: (g−1)/g·S/β + ⌈log₂ g⌉·α; all-reduce: twice that (ring volume, tree depth;
  Thakur et al. 2005, doi:10.1177/1094342005051521).
- all-to-all of P bytes sent by each member: the share that leaves the domain goes through the member's own NIC, the
  rest over the scale-up links; the slower of the two decides.
- a ring in which every member sends to the next by itself: the slower of the two kinds of links.

Where no network joins the nodes, what crosses them takes for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.catalogs.constants.training import Calibration, Constant
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.network.network_model import EqualLinks, NetworkModel
from meshplan.planner.cluster.network.rank_layout import (
    ALL_TO_ALL,
    NEIGHBOURS,
    RING,
    Degrees,
    fewest_on_a_slot,
    most_on_a_slot,
)
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.exchange.token_copies import TokenCopies

# Part of an overlapped collective that stays exposed: its first and last bucket.
UNHIDDEN_SHARE = 0.05
# What NCCL takes for one hop of a ring, inside a scale-up domain and over the network: ``hwLat`` of NVLink and NET,
# ring, Simple protocol, in its src/graph/tuning.cc of 2024 and 2025.
RING_HOP_S, NETWORK_RING_HOP_S = 3.4e-6, 14e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationModel:
    """Prices collectives on a machine.

    Args:
        machine: its links and domain size.
        calibration: link efficiencies.
        world_size: devices in use, [n]; None: all of the machine.
        degrees: of the candidates, [n], for network models that ask for them; None: unknown.
    """

    machine: Machine
    calibration: Calibration
    world_size: IntArray | None = None
    degrees: Degrees | None = None

    @property
    def scale_up_bytes_per_s(self) -> FloatArray:
        """Attained bandwidth of a scale-up link."""
        return np.asarray(self.machine.scale_up_bytes_per_s * self.calibration.time.scale_up_efficiency)

    @property
    def pair_bytes_per_s(self) -> FloatArray:
        """Attained bandwidth between any two devices of a domain, the worst joined ones where no switch is between."""
        share = 1.0 if self.machine.mesh is None else self.machine.mesh.least_pair_share
        return np.asarray(share * self.scale_up_bytes_per_s)

    @property
    def network_efficiency(self) -> Constant:
        """Attained over nominal bandwidth; 1 for measured links."""
        return 1.0 if self.machine.link_level is EvidenceLevel.MEASURED else self.calibration.time.network_efficiency

    @property
    def _ranks(self) -> IntArray:
        return np.asarray(self.machine.num_devices) if self.world_size is None else self.world_size

    @property
    def _network(self) -> NetworkModel:
        machine = self.machine
        if machine.network_model is not None and self.degrees is not None:
            return machine.network_model.of(self.degrees)
        return machine.network_model or EqualLinks(
            bytes_per_s=machine.scale_out_bytes_per_s,
            link_latency_s=machine.scale_out_latency_s,
            domain_size=machine.domain_size,
        )

    def _across(self, kind: str, size: IntArray, stride: IntArray) -> tuple[FloatArray, FloatArray]:
        """Seconds over the network for each byte of the slowest group that crosses domains, and its latency, [n]."""
        spacing, latency = self._network.across(kind, size, stride, self._ranks)
        return spacing / self.network_efficiency, latency

    def fewest(self, size: IntArray, stride: IntArray) -> IntArray:
        """Members on the domain that holds fewest, of the groups that cross domains, [n]; ``size`` where none does."""
        return fewest_on_a_slot(size, stride, self._ranks, self.machine.domain_size)

    def crosses(self, size: IntArray, stride: IntArray) -> BoolArray:
        """Whether any such group crosses domains, [n]."""
        return np.asarray(self.fewest(size, stride) < size)

    def _tree_s(self, size: IntArray, crosses: BoolArray, latency_s: FloatArray) -> FloatArray:
        """⌈log₂ g⌉ hops of the slowest link in the group, [n]."""
        hop = np.where(crosses, latency_s, self.machine.scale_up_latency_s)
        return np.ceil(np.log2(np.maximum(size, 1))) * hop

    def ring(self, size: IntArray, stride: IntArray) -> Ring:
        """Groups that run several collectives: their links are looked up once."""
        return Ring(links=self, size=size, stride=stride)

    def gather_s(self, total_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
        """See :meth:`Ring.gather_s`."""
        return self.ring(size, stride).gather_s(total_bytes)

    def ring_latency_s(self, size: IntArray, stride: IntArray) -> FloatArray:
        """See :meth:`Ring.latency_s`."""
        return self.ring(size, stride).latency_s()

    def all_reduce_s(self, total_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
        """See :meth:`Ring.all_reduce_s`."""
        return self.ring(size, stride).all_reduce_s(total_bytes)

    def all_to_all_s(
        self, sent_bytes: FloatArray, size: IntArray, stride: IntArray, *, copies: TokenCopies | None = None
    ) -> FloatArray:
        """Every member sends ``sent_bytes`` in equal parts to all members (its own part stays), [n].

        Args:
            sent_bytes: bytes that one member sends, its own part included [n].
            size: members [n].
            stride: distance between members in ranks [n].
            copies: where a token may go, for dispatchers that send one copy to each member that it visits, and over the
                network one to each domain; of domains as many as if all held as few members as the one with fewest.
                None: every copy is sent.
        """
        issued = (size > 1) & (sent_bytes > 0.0)
        if not np.any(issued):
            return np.zeros(np.shape(issued))
        spacing, latency = self._across(ALL_TO_ALL, size, stride)
        leaving = sent_bytes * spacing
        if copies is not None:
            domains = np.maximum(size / self.fewest(size, stride), 1.0)
            leaving = leaving * copies.share_sent(domains)
        beside = most_on_a_slot(size, stride, self.machine.domain_size) - 1
        near = sent_bytes * beside / size / self.scale_up_bytes_per_s
        if self.machine.mesh is not None:
            near = near / self.machine.mesh.all_to_all_share(size, stride, self._ranks)
        if copies is not None:
            near = near * copies.share_sent(size)
        return np.where(issued, np.maximum(near, leaving) + self._tree_s(size, spacing > 0.0, latency), 0.0)

    def ring_step_s(self, sent_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
        """Every member sends to the next one of its ring; the slowest link decides, [n]."""
        spacing, latency = self._across(NEIGHBOURS, size, stride)
        far = np.where(spacing > 0.0, sent_bytes * spacing + latency, 0.0)
        near = sent_bytes / self.scale_up_bytes_per_s
        if self.machine.mesh is not None:
            near = near / self.machine.mesh.neighbour_share(size, stride, self._ranks)
        near = near + self.machine.scale_up_latency_s
        return np.where(most_on_a_slot(size, stride, self.machine.domain_size) > 1, np.maximum(near, far), far)

    def ends_s(self, total_bytes: FloatArray, pipeline_devices: IntArray) -> FloatArray:
        """All-reduce of ``total_bytes`` over the two ends of each pipeline, [n]: half of it there and back.

        Ends lie on one domain where all the stages do. Between domains they have the machine's network, whatever the
        rank mapping.

        Args:
            total_bytes: on each of two devices [n].
            pipeline_devices: devices of all stages [n].
        """
        machine, half = self.machine, total_bytes / 2.0
        near = half / self.pair_bytes_per_s + machine.scale_up_latency_s
        spacing = 1.0 / machine.scale_out_bytes_per_s if machine.scale_out_bytes_per_s else np.inf
        far = half / self.network_efficiency * spacing + machine.scale_out_latency_s
        return np.asarray(2.0 * np.where(pipeline_devices > machine.domain_size, far, near))

    def pipeline_s(
        self, sent_bytes: FloatArray, num_stages: int, stage_devices: IntArray, waits: FloatArray, *, wraps: bool
    ) -> FloatArray:
        """Messages of the slowest pipeline, [n]; see :mod:`~meshplan.planner.cluster.network.network_model`.

        Args:
            sent_bytes: bytes that one device sends over a boundary, one way [n].
            num_stages: pipeline stages.
            stage_devices: devices of one stage [n].
            waits: micro-batches after the first that wait for the slowest stage's exchanges [n].
            wraps: the last stage sends to the first one.
        """
        near = sent_bytes / self.scale_up_bytes_per_s
        if self.machine.mesh is not None:
            near = near / self.machine.mesh.boundary_share(stage_devices)
        inside = 2.0 * (near + self.machine.scale_up_latency_s)
        sent = sent_bytes / self.network_efficiency
        # A fit prices one candidate under many constants.
        sent, stage_devices, inside, waits = np.broadcast_arrays(sent, stage_devices, inside, waits)
        return self._network.pipelines_s(sent, num_stages, stage_devices, inside, waits, wraps=wraps)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Groups whose members pass data on in a ring.

    Args:
        links: prices what they send.
        size: members [n].
        stride: distance between members in ranks [n].
    """

    links: CommunicationModel
    size: IntArray
    stride: IntArray

    @cached_property
    def _across(self) -> tuple[FloatArray, FloatArray]:
        """Seconds over the network for each byte, and latency, [n] each."""
        return self.links._across(RING, self.size, self.stride)

    @cached_property
    def _spacing(self) -> FloatArray:
        """Seconds for each byte over the slowest link, [n]."""
        machine = self.links.machine
        near = 1.0 / self.links.scale_up_bytes_per_s
        if machine.mesh is not None:
            near = near / machine.mesh.ring_share(self.size, self.stride, self.links._ranks)
        return np.asarray(np.maximum(self._across[0], near))

    def gather_s(self, total_bytes: FloatArray) -> FloatArray:
        """All-gather to, or reduce-scatter from, ``total_bytes`` on each member, [n]; nothing to send takes no time."""
        size = self.size
        issued = (size > 1) & (total_bytes > 0.0)
        if not np.any(issued):  # every other call of a search: dense models have no experts, most plans no copies
            return np.zeros(np.shape(issued))
        spacing, latency = self._across
        ring = (size - 1) / size * total_bytes * self._spacing
        return np.where(issued, ring + self.links._tree_s(size, spacing > 0.0, latency), 0.0)

    def latency_s(self) -> FloatArray:
        """What an all-gather or reduce-scatter takes beyond its bytes, [n]: every byte passes g − 1 hops of the ring.

        d − 1 of the hops are over the network where the group lies on d domains. NCCL knows no tree for the two
        collectives, so that small ones of many ranks take (d − 1)·14 µs + (g − d)·3.4 µs whatever they carry.
        """
        size = self.size
        domains = np.maximum(size / self.links.fewest(size, self.stride), 1.0)
        return np.where(size > 1, (domains - 1.0) * NETWORK_RING_HOP_S + (size - domains) * RING_HOP_S, 0.0)

    def all_reduce_s(self, total_bytes: FloatArray) -> FloatArray:
        """All-reduce of ``total_bytes`` on each member, as reduce-scatter and all-gather, [n]."""
        return 2.0 * self.gather_s(total_bytes)

    def broadcasts_s(self, total_bytes: FloatArray) -> FloatArray:
        """Every member broadcasts its part of ``total_bytes`` to all others, one after the other, [n].

        The bytes of an all-gather, but each of the g broadcasts passes a chain of g − 1 hops, one of them for each
        further domain over the network (NCCL's ring broadcast): g·((d − 1)·α_network + (g − d)·α_scale-up) in all.
        """
        size, (spacing, latency) = self.size, self._across
        domains = np.where(spacing > 0.0, np.maximum(size / self.links.fewest(size, self.stride), 1.0), 1.0)
        chain = (domains - 1.0) * latency + (size - domains) * self.links.machine.scale_up_latency_s
        return np.where((size > 1) & (total_bytes > 0.0), self.gather_s(total_bytes) + size * chain, 0.0)
