"""The machine: a homogeneous cluster as the estimators see it."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.hardware import Cluster, Device, EvidenceLevel, NodeType
from meshplan.planner.cluster.mesh import Mesh, mesh_of
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.network.network_model import NetworkModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A homogeneous cluster as the estimators see it.

    Args:
        device: the accelerator.
        num_devices: devices in the cluster.
        domain_size: devices in one scale-up domain.
        devices_per_host: devices under one operating system.
        scale_up_bytes_per_s: per device and direction, bytes/s.
        scale_up_latency_s: latency of a scale-up link, s.
        scale_out_bytes_per_s: network share of one device and direction, bytes/s; 0 without a network.
        scale_out_latency_s: latency of the network, s.
        scale_up_technology: ``nvlink``, ``pcie`` …; empty where unknown.
        link_level: how well the bandwidths are known.
        host_memory_bytes: memory of one host; None where unknown.
        nvme_bytes_per_s: rate of all NVMe devices of one host together, read or written; None where unknown.
        usd_per_hour_per_device: None where no price is known.
        network: the links between nodes where they differ or some nodes are excluded; None: uniform.
        network_model: rates of groups of ranks on that network under a rank mapping; None: ``scale_out_bytes_per_s``
            holds for every group.
        mesh: the links between pairs of devices of a domain; None where a switch joins them, so that any two devices
            have the whole of ``scale_up_bytes_per_s``.
    """

    device: Device
    num_devices: int
    domain_size: int
    devices_per_host: int
    scale_up_bytes_per_s: float
    scale_up_latency_s: float
    scale_out_bytes_per_s: float
    scale_out_latency_s: float
    scale_up_technology: str = ""
    link_level: EvidenceLevel = EvidenceLevel.DATASHEET
    host_memory_bytes: int | None = None
    nvme_bytes_per_s: float | None = None
    usd_per_hour_per_device: float | None = None
    network: Network | None = None
    network_model: NetworkModel | None = None
    mesh: Mesh | None = None

    @property
    def instances_per_device(self) -> int:
        """Parts into which every device is cut: more than one where devices are MIG instances."""
        return 1

    @property
    def is_joined(self) -> bool:
        """Whether a network joins the nodes."""
        return self.network is not None or self.scale_out_bytes_per_s > 0.0

    @property
    def joined_devices(self) -> int:
        """Most devices that links join: all, or one scale-up domain where no network joins these."""
        return self.num_devices if self.is_joined else min(self.domain_size, self.num_devices)

    @property
    def no_network(self) -> str:
        """What a plan over several nodes lacks where no network joins them."""
        return (
            f"no network is described between nodes of {self.domain_size} × {self.device.name}: say "
            "cluster.links.inter_node"
        )


def machine_of(cluster: Cluster, *, usd_per_hour_per_device: float | None = None) -> Machine:
    """The machine of a cluster whose groups are all of one node type (the caller has checked)."""
    node: NodeType = cluster.groups[0].node
    network = node.scale_out_link
    return Machine(
        device=node.device,
        num_devices=cluster.num_devices,
        domain_size=node.num_devices,
        devices_per_host=node.devices_per_host,
        scale_up_bytes_per_s=node.scale_up_link.bandwidth_bytes_per_s,
        scale_up_latency_s=node.scale_up_link.latency_s,
        scale_up_technology=node.scale_up_link.technology,
        scale_out_bytes_per_s=node.scale_out_bytes_per_s_per_device,
        scale_out_latency_s=0.0 if network is None else network.latency_s,
        host_memory_bytes=node.host_memory_bytes,
        usd_per_hour_per_device=usd_per_hour_per_device,
        mesh=mesh_of(node.pair_links, node.num_devices),
    )
