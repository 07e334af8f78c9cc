"""Collectives of one inference iteration: measured curves inside a node where they exist, α–β models elsewhere.

Which links a group or a boundary between stages uses is the layout's of a worker that starts on a node
(:mod:`~meshplan.planner.cluster.network.rank_layout`), as in training.

- all-reduce of S bytes over g devices: the device's measured NCCL curve inside a node; across nodes the slower of that
  and of the ring over the network, 2·(g−1)/g·S/c on each NIC, with c devices of the group on the node that holds
  fewest.
- A curve was measured on links of one rate. On links that are r times slower, r times fewer bytes take as long; a
  longer latency is added for each hop. So the links of the machine count whatever was measured, and slower links are
  never faster.
- Where no switch joins the devices of a node, a group has the share of a device's links that lie between its members
  (:mod:`~meshplan.planner.cluster.mesh`).
- expert exchange of a layer: each attention data-parallel rank sends its tokens to the devices of the chosen experts
  and receives the results. Engines use all-to-all (dispatch in the activations' bytes, combine in 16 bits; a token goes
  to a domain once) or all-gather and reduce-scatter; the cheaper is priced. One that *gathers* has no all-to-all: every
  device receives all tokens, and the results are reduced and scattered, by NCCL's measured curves inside a node.

Training prices the same collectives by a rate that is fitted to whole steps, in which they share the device with
matrix products; here they run alone and small messages matter, so that the measured curve is better. For messages of
256 MiB and more both agree within the bounds that the tests state.

Where no network joins the nodes, what crosses them takes for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.catalogs.surfaces.collectives import CollectiveCurve, collective_curve
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.network.network_model import EqualLinks
from meshplan.planner.cluster.network.rank_layout import group_span, most_on_a_slot
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
# Collectives over PCIe were measured on this device; the L40S host of the source is implausibly slow (20 ms for 16 MB
# over 8 devices), so all PCIe nodes use these measurements.
PCIE_DEVICE, PCIE = "rtx-pro-6000", "pcie"
# Device → rate (bytes/s per direction) and latency (s) of the links on which its curves were measured: those of its
# nodes in the catalog. The catalog's PCIe links are up to 8 µs long; no more than that is added to the PCIe curves.
MEASURED_LINKS = {
    "a100-sxm-80gb": (300e9, 9e-6),
    "h100-sxm-80gb": (450e9, 5.3e-6),
    "h200-sxm-141gb": (450e9, 5.3e-6),
    "b200-sxm-180gb": (900e9, 8.8e-6),
    "b300": (900e9, 8.8e-6),
    "gb200": (900e9, 8.8e-6),
    "gb300": (900e9, 8.8e-6),
    PCIE_DEVICE: (63e9, 8e-6),
}
# Kernel launch and synchronisation of a collective, in addition to the link's latency.
COLLECTIVE_S = 8e-6
# From the call to the end of a small write into a remote device's memory, beyond the wire: 160 to 192 µs for 8 to 128
# KiB over one NIC of 400 Gb/s (torchcomms, comms/torchcomms/transport/benchmarks/README.md, reference run).
TRANSFER_START_S = 160e-6


@lru_cache(maxsize=1024)
def _continued(large: CollectiveCurve, small: CollectiveCurve, group: int) -> CollectiveCurve:
    """A larger group than was measured: each doubling adds what the last measured doubling added.

    Assumes a switch between all devices of the domain.
    """
    sizes = np.union1d(large.sizes_bytes, small.sizes_bytes)
    step = np.maximum(large.time_s(sizes) - small.time_s(sizes), 0.0)
    times = np.maximum.accumulate(large.time_s(sizes) + np.log2(group / large.num_devices) * step)
    return replace(large, num_devices=group, sizes_bytes=tuple(sizes.tolist()), times_s=tuple(times.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Collective times on a machine.

    Args:
        machine: links and domain size.
        engine: whose all-reduce kernels are priced; NCCL's where they were not measured.
        custom_all_reduce: False prices NCCL's.
        world_size: devices of the worker, whose first starts on a node; 0: those of the group asked for.
    """

    machine: Machine
    engine: str = ""
    custom_all_reduce: bool = True
    world_size: int = 0

    @property
    def scale_up_bytes_per_s(self) -> float:
        """Attained rate of one device inside a domain."""
        return SCALE_UP_SHARE * self.machine.scale_up_bytes_per_s

    @property
    def network_bytes_per_s(self) -> float:
        """Attained rate of one device's share of the network; measured links attain what was measured."""
        share = 1.0 if self.machine.link_level is EvidenceLevel.MEASURED else NETWORK_SHARE
        return share * self.machine.scale_out_bytes_per_s

    @property
    def network_s_per_byte(self) -> float:
        """The inverse of :attr:`network_bytes_per_s`; infinite where no network joins the nodes."""
        return 1.0 / self.network_bytes_per_s if self.machine.is_joined else float("inf")

    def level(self, group: int) -> EvidenceLevel:
        """How well an all-reduce over ``group`` neighbours is known."""
        inside = self._nodes(group) == 1 and self._all_reduce_curve(group) is not None
        return EvidenceLevel.FITTED if inside else self.machine.link_level

    def _span(self, group: int) -> tuple[int, int]:
        """Fewest of the group's devices on a node where it crosses nodes (else all), and the most nodes of a group."""
        return group_span(group, 1, max(self.world_size, group), self.machine.domain_size)

    def fewest_on_a_node(self, group: int) -> int:
        """Fewest of the group's devices on a node where it crosses nodes, else all."""
        return self._span(group)[0]

    def _nodes(self, group: int) -> int:
        return self._span(group)[1]

    def _most(self, group: int) -> int:
        return int(most_on_a_slot(np.asarray(group), np.asarray(1), self.machine.domain_size))

    def all_reduce_s(self, size_bytes: FloatArray, group: int) -> FloatArray:
        """All-reduce of ``size_bytes`` on each of ``group`` neighbouring devices."""
        if group <= 1:
            return np.zeros_like(size_bytes)
        local = self._inside_s(size_bytes, self._most(group))
        fewest, nodes = self._span(group)
        if nodes == 1:
            return local
        across = 2.0 * (group - 1) / group * size_bytes / fewest * self.network_s_per_byte
        hops = 2.0 * np.ceil(np.log2(nodes)) * self.machine.scale_out_latency_s
        return np.maximum(local, across) + hops + COLLECTIVE_S

    @property
    def _measured_as(self) -> tuple[str, ...]:
        """Devices whose curves hold for this one, the best first."""
        if self.machine.scale_up_technology == PCIE:
            return (PCIE_DEVICE,)
        own = self.machine.device.slug
        return (own, *([_SAME_LINKS[own]] if own in _SAME_LINKS else []))

    def _all_reduce_curve(self, group: int) -> CollectiveCurve | None:
        """The engine's kernel if it was measured, else NCCL's; on this device, else on one with the same links."""
        libraries = [self.engine] if self.engine and self.custom_all_reduce else []
        return self._curve("all_reduce", group, *libraries, "nccl")

    def _curve(self, collective: str, group: int, *libraries: str) -> CollectiveCurve | None:
        """The first library's curve that was measured on this device or on one with the same links."""
        keys = ((slug, collective, group, library) for library in libraries for slug in self._measured_as)
        return next((curve for key in keys if (curve := collective_curve(*key)) is not None), None)

    def _inside_s(self, size_bytes: FloatArray, group: int) -> FloatArray:
        if group <= 1:
            return np.zeros_like(size_bytes)
        curve = self._all_reduce_curve(group) or self._extended_curve(group)
        hops = 2.0 * np.ceil(np.log2(group))
        if curve is None or curve.device not in MEASURED_LINKS:
            ring = 2.0 * (group - 1) / group * size_bytes / (self._ring_share(group) * self.scale_up_bytes_per_s)
            return COLLECTIVE_S + hops * self.machine.scale_up_latency_s + ring
        return self._by_curve_s(curve, size_bytes, hops)

    def _by_curve_s(self, curve: CollectiveCurve, size_bytes: FloatArray, hops: float) -> FloatArray:
        """A measured collective on this machine's links, which each of its hops passes."""
        rate, latency_s = MEASURED_LINKS[curve.device]
        longer = hops * max(self.machine.scale_up_latency_s - latency_s, 0.0)
        return curve.time_s(size_bytes * rate / self.machine.scale_up_bytes_per_s) + longer

    def _ring_share(self, group: int) -> float:
        """Share of a device's links that a ring of ``group`` neighbours can use; 1 where a switch joins the devices."""
        if self.machine.mesh is None:
            return 1.0
        world = np.array(max(self.world_size, group))
        return float(self.machine.mesh.ring_share(np.array(group), np.array(1), world))

    def _extended_curve(self, group: int) -> CollectiveCurve | None:
        """A group size that was not measured; None where fewer than two smaller groups were measured."""
        size = 2 ** ((group - 1).bit_length() - 1)
        while size >= 4:  # noqa: PLR2004  (its half is a group, too)
            large, small = self._all_reduce_curve(size), self._all_reduce_curve(size // 2)
            if large is not None and small is not None:
                return _continued(large, small, group)
            size //= 2
        return None

    def experts_s(
        self,
        rank_tokens: FloatArray,
        *,
        group: int,
        ranks: int,
        hidden: int,
        top_k: int,
        activation_bytes: float,
        gathers: bool = False,
        near: FloatArray | float = 1.0,
        far: FloatArray | float = 1.0,
    ) -> FloatArray:
        """Dispatch to, and combine from, experts spread over ``group`` devices.

        Args:
            rank_tokens: tokens of the busiest attention data-parallel rank.
            group: devices that hold experts together.
            ranks: attention data-parallel ranks among them, which bring tokens of their own.
            hidden: size of a token's state.
            top_k: experts that a token visits.
            activation_bytes: of one dispatched element.
            gathers: the engine has no all-to-all; what devices take then does not depend on the routing.
            near: tokens that the fullest device takes from its node, over those of even routing.
            far: tokens that a NIC of the fullest node takes, over those of even routing.
        """
        if group <= 1:
            return np.zeros_like(rank_tokens)
        fewest, nodes = self._span(group)
        most = self._most(group)
        row = hidden * (activation_bytes + BYTES_16_BIT)
        copies = inside_copies(top_k, group)
        nearby = near * rank_tokens * copies * row * (most - 1) / group / self.scale_up_bytes_per_s
        latency = 2.0 * (COLLECTIVE_S + (self.machine.scale_out_latency_s if nodes > 1 else 0.0))
        if self.machine.mesh is not None:
            world = np.array(max(self.world_size, group))
            nearby = nearby / self.machine.mesh.all_to_all_share(np.array(group), np.array(1), world)
        to_all, slowest = latency + nearby, 1.0 / (self._ring_share(group) * self.scale_up_bytes_per_s)
        if nodes > 1:
            domains = group / fewest  # as if every node held as few of them as the one with fewest
            far_copies = domains * (1.0 - (1.0 - 1.0 / domains) ** top_k)
            across = far * rank_tokens * far_copies * row * (domains - 1) / domains * self.network_s_per_byte
            to_all, slowest = latency + np.maximum(nearby, across), max(slowest, self.network_s_per_byte / fewest)
        gathered = latency + 2.0 * (group - 1) / group * ranks * rank_tokens * hidden * BYTES_16_BIT * slowest
        if not gathers:
            return np.minimum(to_all, gathered)
        measured = self._gathered_s(ranks * rank_tokens * hidden, group, activation_bytes) if nodes == 1 else None
        return np.broadcast_to(gathered if measured is None else measured, to_all.shape)

    def _gathered_s(self, elements: FloatArray, group: int, element_bytes: float) -> FloatArray | None:
        """All-gather of so many elements and reduce-scatter of their results; None where either was not measured."""
        gather, scatter = (self._curve(name, group, "nccl") for name in ("all_gather", "reduce_scatter"))
        if gather is None or scatter is None or not {gather.device, scatter.device} <= MEASURED_LINKS.keys():
            return None
        hops = float(np.ceil(np.log2(group)))
        there = self._by_curve_s(gather, elements * element_bytes, hops)
        return there + self._by_curve_s(scatter, elements * BYTES_16_BIT, hops)

    def pipeline_s(self, size_bytes: FloatArray, num_stages: int, stage_devices: int) -> FloatArray:
        """One batch's messages over all boundaries between stages, of the pipeline with the slowest ones."""
        if num_stages <= 1:
            return np.zeros_like(size_bytes)
        near = size_bytes / self.scale_up_bytes_per_s
        if self.machine.mesh is not None:
            near = near / self.machine.mesh.boundary_share(np.array(stage_devices))
        inside_s = self.machine.scale_up_latency_s + near
        links = EqualLinks(
            bytes_per_s=self.network_bytes_per_s,
            link_latency_s=self.machine.scale_out_latency_s,
            domain_size=self.machine.domain_size,
        )
        sent = np.ravel(size_bytes)
        devices, waits = np.full(len(sent), stage_devices), np.zeros(len(sent))
        there_and_back = links.pipelines_s(sent, num_stages, devices, 2.0 * np.ravel(inside_s), waits, wraps=False)
        return (num_stages - 1) * COLLECTIVE_S + there_and_back.reshape(np.shape(size_bytes)) / 2.0

    @property
    def transfer_bytes_per_s(self) -> float:
        """Attained rate of one device's share of the link between workers; scale-up links where there is no network."""
        return self.network_bytes_per_s if self.machine.is_joined else self.scale_up_bytes_per_s

    @property
    def transfer_latency_s(self) -> float:
        """What sending a KV cache takes beyond its bytes, s."""
        return self.machine.scale_out_latency_s + TRANSFER_START_S

    def transfer_s(self, size_bytes: float, *, devices: int) -> float:
        """Time to send the KV cache of one request to another worker over the NIC shares of ``devices`` devices, s."""
        return self.transfer_latency_s + size_bytes / (devices * self.transfer_bytes_per_s)


def inside_copies(top_k: int, group: int) -> float:
    """Expected number of devices that hold the k experts of a token: group·(1 − (1 − 1/group)^k)."""
    return float(group * (1.0 - (1.0 - 1.0 / group) ** top_k))
