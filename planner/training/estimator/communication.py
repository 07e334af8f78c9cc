"""How long collectives take: alpha–beta per link, hierarchical over scale-up domains.

A group has ``size`` members with stride ``stride`` in ranks. In the rank order tensor, context, expert, data, pipeline
(tensor fastest) the tensor-parallel group has stride 1, the context-parallel group stride t, and so on. ``inside`` of
its members share a scale-up domain of D devices: inside = clip(⌊D/stride⌋, 1, size).

- A group inside one domain runs at β = scale-up bandwidth.
- A group over several domains is limited by the network: its members in a domain drive their NICs together,
  β = min(inside·network share, scale-up bandwidth).
- all-gather, reduce-scatter of S bytes: (g−1)/g·S/β + ⌈log₂ g⌉·α; all-reduce: twice that (ring volume, tree depth;
  Thakur et al. 2005, doi:10.1177/1094342005051521).
- all-to-all of P bytes sent by each member: the share that leaves the domain goes through the member's own NIC, the
  rest over the scale-up links; the slower of the two decides.

On a machine with a :class:`~meshplan.planner.cluster.network_model.NetworkModel` (uneven links) the network's rate and
latency are those of the slowest such group under the rank mapping.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.constants.training import Calibration, Constant
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.network_model import ALL_TO_ALL, RING, Messages
from meshplan.planner.core.arrays import FloatArray, IntArray

# Network rate of a machine without a network: so low that no plan that needs one is chosen.
NO_NETWORK_BYTES_PER_S = 1.0
# Part of an overlapped collective that stays exposed: its first and last bucket.
UNHIDDEN_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationModel:
    """Prices collectives on a machine.

    Args:
        machine: its links and domain size.
        calibration: link efficiencies.
        world_size: devices in use, [n]; needed for uneven links only.
    """

    machine: Machine
    calibration: Calibration
    world_size: IntArray | None = None

    @property
    def scale_up_bytes_per_s(self) -> FloatArray:
        """Attained bandwidth of a scale-up link."""
        return np.asarray(self.machine.scale_up_bytes_per_s * self.calibration.time.scale_up_efficiency)

    @property
    def network_bytes_per_s(self) -> FloatArray:
        """Attained network bandwidth of one device's share of the NICs."""
        return np.asarray((self.machine.scale_out_bytes_per_s or NO_NETWORK_BYTES_PER_S) * self.network_efficiency)

    @property
    def network_efficiency(self) -> Constant:
        """Attained over nominal bandwidth; 1 for measured links."""
        return 1.0 if self.machine.link_level is EvidenceLevel.MEASURED else self.calibration.time.network_efficiency

    def _network(self, kind: str, size: IntArray, stride: IntArray) -> tuple[FloatArray, FloatArray]:
        """Attained network bandwidth per device, and latency, for groups that cross domains, [n]."""
        if self.machine.network_model is None or self.world_size is None:
            return self.network_bytes_per_s, np.asarray(self.machine.scale_out_latency_s)
        size, stride = np.broadcast_arrays(size, stride)
        rate, latency = self.machine.network_model.rates(kind, size, stride, self.world_size)
        return rate * self.network_efficiency, latency

    def inside(self, size: IntArray, stride: IntArray) -> IntArray:
        """Members of a group that share a scale-up domain, [n]."""
        return np.clip(self.machine.domain_size // np.maximum(stride, 1), 1, size)

    def bandwidth_bytes_per_s(self, size: IntArray, stride: IntArray) -> FloatArray:
        """β of a ring over the group, per member and direction, [n]."""
        return self._ring_bytes_per_s(size, stride, self._network(RING, size, stride)[0])

    def _ring_bytes_per_s(self, size: IntArray, stride: IntArray, rate: FloatArray) -> FloatArray:
        inside = self.inside(size, stride)
        across = np.minimum(inside * rate, self.scale_up_bytes_per_s)
        return np.where(inside >= size, self.scale_up_bytes_per_s, across)

    def latency_s(self, size: IntArray, stride: IntArray) -> FloatArray:
        """⌈log₂ g⌉ hops of the slowest link in the group, [n]."""
        return self._tree_s(size, stride, self._network(RING, size, stride)[1])

    def _tree_s(self, size: IntArray, stride: IntArray, latency_s: FloatArray) -> FloatArray:
        inside = self.inside(size, stride)
        hop = np.where(inside >= size, self.machine.scale_up_latency_s, latency_s)
        return np.ceil(np.log2(np.maximum(size, 1))) * hop

    def gather_s(self, total_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
        """All-gather to, or reduce-scatter from, ``total_bytes`` on each member, [n]."""
        network = self._network(RING, size, stride)
        ring = (size - 1) / size * total_bytes / self._ring_bytes_per_s(size, stride, network[0])
        return np.where(size > 1, ring + self._tree_s(size, stride, network[1]), 0.0)

    def all_reduce_s(self, total_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
        """All-reduce of ``total_bytes`` on each member, as reduce-scatter and all-gather, [n]."""
        return 2.0 * self.gather_s(total_bytes, size, stride)

    def all_to_all_s(
        self, sent_bytes: FloatArray, size: IntArray, stride: IntArray, *, copies_per_token: float | None = None
    ) -> FloatArray:
        """Every member sends ``sent_bytes`` in equal parts to all members (its own part stays), [n].

        Args:
            sent_bytes: bytes that one member sends, its own part included [n].
            size: members [n].
            stride: distance between members in ranks [n].
            copies_per_token: experts k that a token visits, for dispatchers that send one copy per domain:
                domains·(1 − (1 − 1/domains)^k) of k copies cross the network. None: every copy crosses.
        """
        inside = self.inside(size, stride)
        leaving = sent_bytes * (size - inside) / size
        if copies_per_token is not None:
            domains = np.maximum(size / inside, 1.0)
            leaving = leaving * domains * (1.0 - (1.0 - 1.0 / domains) ** copies_per_token) / copies_per_token
        near = sent_bytes * (inside - 1) / size / self.scale_up_bytes_per_s
        rate, latency = self._network(ALL_TO_ALL, size, stride)
        return np.where(size > 1, np.maximum(near, leaving / rate) + self._tree_s(size, stride, latency), 0.0)

    def ring_step_s(self, sent_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
        """Every member sends to the next one of its ring; the slowest link decides, [n]."""
        if self.machine.network_model is None:
            return self.neighbour_s(sent_bytes, stride * (size - 1))
        rate, latency = self._network(RING, size, stride)
        far = sent_bytes / rate + latency
        near = sent_bytes / self.scale_up_bytes_per_s + self.machine.scale_up_latency_s
        return np.where(self.inside(size, stride) >= size, near, far)

    def neighbour_s(self, sent_bytes: FloatArray, stride: IntArray) -> FloatArray:
        """A message to the rank ``stride`` away (pipeline neighbour, ring step), [n]."""
        near = stride < self.machine.domain_size
        rate = np.where(near, self.scale_up_bytes_per_s, self.network_bytes_per_s)
        latency = np.where(near, self.machine.scale_up_latency_s, self.machine.scale_out_latency_s)
        return sent_bytes / rate + latency

    def pipeline_s(
        self, sent_bytes: FloatArray, num_stages: int, stage_devices: IntArray, waits: FloatArray, *, wraps: bool
    ) -> FloatArray:
        """Messages of the slowest pipeline over uneven links, [n]; see :class:`NetworkModel`.

        Args:
            sent_bytes: bytes that one device sends over a boundary, one way [n].
            num_stages: pipeline stages.
            stage_devices: devices of one stage [n].
            waits: micro-batches after the first that wait for the slowest stage's exchanges [n].
            wraps: the last stage sends to the first one.
        """
        network_model = self.machine.network_model
        if network_model is None:
            raise ValueError("only uneven links have pipelines that differ")
        inside = 2.0 * (sent_bytes / self.scale_up_bytes_per_s + self.machine.scale_up_latency_s)
        keys = np.stack([sent_bytes / self.network_efficiency, stage_devices, inside, waits], axis=1)
        distinct, which = np.unique(keys, axis=0, return_inverse=True)
        seconds = np.zeros(len(keys))
        for index, (sent, devices, inside_s, wait) in enumerate(distinct.tolist()):
            rows = np.flatnonzero(which.ravel() == index)
            asked = Messages(
                sent_bytes=sent,
                num_stages=num_stages,
                stage_devices=int(devices),
                inside_s=inside_s,
                waits=wait,
                wraps=wraps,
            )
            seconds[rows] = network_model.pipeline_s(rows, asked)
        return seconds
