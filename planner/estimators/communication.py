"""How long collectives take: alpha–beta per link, hierarchical over scale-up domains.

A group has ``size`` members that lie ``stride`` ranks apart. In the rank order tensor, context, expert, data, pipeline
(tensor fastest) the tensor-parallel group has stride 1, the context-parallel group stride t, and so on. ``inside`` of
its members share a scale-up domain of D devices: inside = clip(⌊D/stride⌋, 1, size).

- A group inside one domain runs at β = scale-up bandwidth.
- A group over several domains is limited by the network: its members in a domain drive their NICs together,
  β = min(inside·network share, scale-up bandwidth).
- all-gather, reduce-scatter of S bytes: (g−1)/g·S/β + ⌈log₂ g⌉·α; all-reduce: twice that (ring volume, tree depth;
  Thakur et al. 2005, doi:10.1177/1094342005051521).
- all-to-all of P bytes sent by each member: the share that leaves the domain goes through the member's own NIC, the
  rest over the scale-up links; the slower of the two decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.calibration import Calibration
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.planner.estimators.candidates import FloatArray, IntArray
from meshplan.planner.problems.machine import Machine

# What a machine without a network gets where a plan would need one: slow enough never to be chosen.
NO_NETWORK_BYTES_PER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationModel:
    """Prices collectives on a machine.

    Args:
        machine: links and domain size.
        calibration: efficiencies of the links.
    """

    machine: Machine
    calibration: Calibration

    @property
    def scale_up_bytes_per_s(self) -> FloatArray:
        """Attained bandwidth of a scale-up link."""
        return np.asarray(self.machine.scale_up_bytes_per_s * self.calibration.time.scale_up_efficiency)

    @property
    def network_bytes_per_s(self) -> FloatArray:
        """Attained network bandwidth of one device's share of the NICs."""
        nominal = self.machine.scale_out_bytes_per_s or NO_NETWORK_BYTES_PER_S
        if self.machine.link_level is EvidenceLevel.MEASURED:
            return np.asarray(nominal)  # what was measured needs no efficiency
        return np.asarray(nominal * self.calibration.time.network_efficiency)

    def inside(self, size: IntArray, stride: IntArray) -> IntArray:
        """Members of a group that share a scale-up domain, [n]."""
        return np.clip(self.machine.domain_size // np.maximum(stride, 1), 1, size)

    def bandwidth_bytes_per_s(self, size: IntArray, stride: IntArray) -> FloatArray:
        """β of a ring over the group, per member and direction, [n]."""
        inside = self.inside(size, stride)
        across = np.minimum(inside * self.network_bytes_per_s, self.scale_up_bytes_per_s)
        return np.where(inside >= size, self.scale_up_bytes_per_s, across)

    def latency_s(self, size: IntArray, stride: IntArray) -> FloatArray:
        """⌈log₂ g⌉ hops of the slowest link in the group, [n]."""
        inside = self.inside(size, stride)
        hop = np.where(inside >= size, self.machine.scale_up_latency_s, self.machine.scale_out_latency_s)
        return np.ceil(np.log2(np.maximum(size, 1))) * hop

    def gather_s(self, total_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
        """All-gather to, or reduce-scatter from, ``total_bytes`` on each member, [n]."""
        ring = (size - 1) / size * total_bytes / self.bandwidth_bytes_per_s(size, stride)
        return np.where(size > 1, ring + self.latency_s(size, stride), 0.0)

    def all_reduce_s(self, total_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
        """Reduce-scatter and all-gather, [n]."""
        return 2.0 * self.gather_s(total_bytes, size, stride)

    def all_to_all_s(
        self, sent_bytes: FloatArray, size: IntArray, stride: IntArray, *, copies_per_token: float | None = None
    ) -> FloatArray:
        """Every member sends ``sent_bytes`` in equal parts to all members (its own part stays), [n].

        Args:
            sent_bytes: by one member, own part included, bytes [n].
            size: members [n].
            stride: distance of members in ranks [n].
            copies_per_token: experts k that a token visits, for dispatchers that send one copy per domain:
                domains·(1 − (1 − 1/domains)^k) of k copies cross the network. None: every copy crosses.
        """
        inside = self.inside(size, stride)
        leaving = sent_bytes * (size - inside) / size
        if copies_per_token is not None:
            domains = np.maximum(size / inside, 1.0)
            leaving = leaving * domains * (1.0 - (1.0 - 1.0 / domains) ** copies_per_token) / copies_per_token
        near = sent_bytes * (inside - 1) / size / self.scale_up_bytes_per_s
        far = leaving / self.network_bytes_per_s
        return np.where(size > 1, np.maximum(near, far) + self.latency_s(size, stride), 0.0)

    def neighbour_s(self, sent_bytes: FloatArray, stride: IntArray) -> FloatArray:
        """A message to the rank ``stride`` away (pipeline neighbour, ring step), [n]."""
        near = stride < self.machine.domain_size
        rate = np.where(near, self.scale_up_bytes_per_s, self.network_bytes_per_s)
        latency = np.where(near, self.machine.scale_up_latency_s, self.machine.scale_out_latency_s)
        return sent_bytes / rate + latency
