"""Collectives of one inference iteration: measured curves inside a node where they exist, α–β models elsewhere.

- all-reduce of S bytes over g devices: the device's measured NCCL curve inside a node; across domains a hierarchical
  ring, reduce-scatter and all-gather inside at the scale-up rate, S/g_inside per NIC between.
- expert exchange of a layer: each attention data-parallel rank sends its tokens to the devices of the chosen experts
  and receives the results. Engines use all-to-all (dispatch in the activations' bytes, combine in 16 bits; a token goes
  to a domain once) or all-gather and reduce-scatter; the cheaper is priced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.catalogs.surfaces.collectives import CollectiveCurve, collective_curve
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT

# Share of a link's nominal bandwidth attained by large collectives (NCCL 2.29.2 on 8 H100, published by aiconfigurator:
# bus bandwidth 445 of 450 GB/s for all-reduce with NVLS, 335 for all-gather, 315 for all-to-all).
SCALE_UP_SHARE = 0.75
# 46–49 of 50 GB/s per 400 Gb/s NIC (devices.json, inter_node_facts).
NETWORK_SHARE = 0.9
# Device → one with the same links whose collectives were measured, for groups in which its own were not: over 2 and 4
# devices the curves of GB200 and B200 are within 10 % of each other (aiconfigurator).
_SAME_LINKS = {"a100-sxm-40gb": "a100-sxm-80gb", "h100-sxm-96gb": "h100-sxm-80gb", "gb200": "b200-sxm-180gb"}
# Collectives over PCIe were measured on this device and link; the L40S host of the source is implausibly slow (20 ms
# for 16 MB over 8 devices), so all PCIe nodes use these measurements, scaled by the rate of their links.
PCIE_DEVICE, PCIE_BYTES_PER_S = "rtx-pro-6000", 63e9
# Kernel launch and synchronisation of a collective, in addition to the link's latency.
COLLECTIVE_S = 8e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Collective times on a machine.

    Args:
        machine: links and domain size.
        engine: whose all-reduce kernels are priced; NCCL's where they were not measured.
        custom_all_reduce: False prices NCCL's.
    """

    machine: Machine
    engine: str = ""
    custom_all_reduce: bool = True

    @property
    def scale_up_bytes_per_s(self) -> float:
        """Attained rate of one device inside a domain."""
        return SCALE_UP_SHARE * self.machine.scale_up_bytes_per_s

    @property
    def network_bytes_per_s(self) -> float:
        """Attained rate of one device's share of the network; tiny where there is none."""
        return max(NETWORK_SHARE * self.machine.scale_out_bytes_per_s, 1.0)

    def level(self, group: int) -> EvidenceLevel:
        """How well an all-reduce over ``group`` neighbours is known."""
        curve = self._all_reduce_curve(group)
        inside = group <= self.machine.domain_size and curve is not None
        return EvidenceLevel.FITTED if inside else self.machine.link_level

    def all_reduce_s(self, size_bytes: FloatArray, group: int) -> FloatArray:
        """All-reduce of ``size_bytes`` on each of ``group`` neighbouring devices."""
        if group <= 1:
            return np.zeros_like(size_bytes)
        inside = min(group, self.machine.domain_size)
        local = self._inside_s(size_bytes, inside)
        domains = -(-group // inside)
        if domains == 1:
            return local
        across = 2.0 * (domains - 1) / domains * size_bytes / inside / self.network_bytes_per_s
        hops = 2.0 * np.ceil(np.log2(domains)) * self.machine.scale_out_latency_s
        return local + across + hops + COLLECTIVE_S

    @property
    def _pcie_factor(self) -> float:
        """Factor from bytes over this PCIe link to bytes that take as long over the measured one; 1 without PCIe."""
        rate = self.machine.scale_up_bytes_per_s
        is_pcie = 0.0 < rate <= PCIE_BYTES_PER_S and self.machine.device.slug != PCIE_DEVICE
        return PCIE_BYTES_PER_S / rate if is_pcie else 1.0

    def _all_reduce_curve(self, group: int) -> CollectiveCurve | None:
        """The engine's kernel if it was measured, else NCCL's; on this device, else on one with the same links."""
        own = self.machine.device.slug
        slugs = (
            [PCIE_DEVICE] if self._pcie_factor != 1.0 else [own, *([_SAME_LINKS[own]] if own in _SAME_LINKS else [])]
        )
        libraries = [self.engine] if self.engine and self.custom_all_reduce else []
        for library in (*libraries, "nccl"):
            for slug in slugs:
                curve = collective_curve(slug, "all_reduce", group, library)
                if curve is not None:
                    return curve
        return None

    def _inside_s(self, size_bytes: FloatArray, group: int) -> FloatArray:
        if group <= 1:
            return np.zeros_like(size_bytes)
        curve = self._all_reduce_curve(group)
        if curve is not None:
            return curve.time_s(size_bytes * self._pcie_factor)
        extended = self._extended_s(size_bytes, group)
        if extended is not None:
            return extended
        ring = 2.0 * (group - 1) / group * size_bytes / self.scale_up_bytes_per_s
        return COLLECTIVE_S + 2.0 * np.ceil(np.log2(group)) * self.machine.scale_up_latency_s + ring

    def _extended_s(self, size_bytes: FloatArray, group: int) -> FloatArray | None:
        """A group size that was not measured, extrapolated: each doubling adds what the last measured doubling added.

        None where fewer than two smaller groups were measured. Assumes a switch between all devices of the domain.
        """
        size = 2 ** ((group - 1).bit_length() - 1)
        while size >= 4:  # noqa: PLR2004  (its half is a group, too)
            large, small = self._all_reduce_curve(size), self._all_reduce_curve(size // 2)
            if large is not None and small is not None:
                sent = size_bytes * self._pcie_factor
                step = np.maximum(large.time_s(sent) - small.time_s(sent), 0.0)
                return large.time_s(sent) + np.log2(group / size) * step
            size //= 2
        return None

    def experts_s(
        self, rank_tokens: FloatArray, *, group: int, ranks: int, hidden: int, top_k: int, activation_bytes: float
    ) -> FloatArray:
        """Dispatch to, and combine from, experts spread over ``group`` devices.

        Args:
            rank_tokens: tokens of the busiest attention data-parallel rank.
            group: devices that hold experts together.
            ranks: attention data-parallel ranks among them, which bring tokens of their own.
            hidden: size of a token's state.
            top_k: experts that a token visits.
            activation_bytes: of one dispatched element.
        """
        if group <= 1:
            return np.zeros_like(rank_tokens)
        inside = min(group, self.machine.domain_size)
        domains = -(-group // inside)
        row = hidden * (activation_bytes + BYTES_16_BIT)
        copies = inside_copies(top_k, group)
        near = rank_tokens * copies * row * (inside - 1) / group / self.scale_up_bytes_per_s
        far_copies = domains * (1.0 - (1.0 - 1.0 / domains) ** top_k)
        far = rank_tokens * far_copies * row * (domains - 1) / domains / self.network_bytes_per_s
        latency = 2.0 * (COLLECTIVE_S + (self.machine.scale_out_latency_s if domains > 1 else 0.0))
        to_all = latency + np.maximum(near, far)
        rate = (
            self.scale_up_bytes_per_s
            if domains == 1
            else min(self.scale_up_bytes_per_s, inside * self.network_bytes_per_s)
        )
        gathered = latency + 2.0 * (group - 1) / group * ranks * rank_tokens * hidden * BYTES_16_BIT / rate
        return np.minimum(to_all, gathered)

    def neighbour_s(self, size_bytes: FloatArray, distance: int) -> FloatArray:
        """A message to the device ``distance`` ranks away."""
        if distance < self.machine.domain_size:
            return COLLECTIVE_S + self.machine.scale_up_latency_s + size_bytes / self.scale_up_bytes_per_s
        return COLLECTIVE_S + self.machine.scale_out_latency_s + size_bytes / self.network_bytes_per_s

    @property
    def transfer_bytes_per_s(self) -> float:
        """Attained rate of one device's share of the link between workers; scale-up links where there is no network."""
        return self.network_bytes_per_s if self.machine.scale_out_bytes_per_s else self.scale_up_bytes_per_s

    def transfer_s(self, size_bytes: float, *, devices: int) -> float:
        """Time to send the KV cache of one request to another worker over the NIC shares of ``devices`` devices, s."""
        return self.machine.scale_out_latency_s + size_bytes / (devices * self.transfer_bytes_per_s)


def inside_copies(top_k: int, group: int) -> float:
    """Expected number of devices that hold the k experts of a token: group·(1 − (1 − 1/group)^k)."""
    return float(group * (1.0 - (1.0 - 1.0 / group) ** top_k))
