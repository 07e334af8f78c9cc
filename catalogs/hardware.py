"""Devices, links, node types and clusters: frozen facts in SI units, as the planner sees them.

A device is a row of the catalog, never a class of its own. Where a number came from is kept with it
(:class:`Evidence`), so that an estimate can say how much of it rests on datasheets.

Vocabulary: a *host* is one machine with one operating system (what a launcher starts on); the *scale-up domain* is
the set of devices joined by NVLink, xGMI, ICI or PCIe. A DGX H100 is one host and one domain of 8 devices; a
GB200 NVL72 is one domain of 72 devices made of 18 hosts with 4 devices each. Bandwidths are per direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class EvidenceLevel(Enum):
    """How well a number is known, best first."""

    MEASURED = "measured here"
    IMPORTED = "measured elsewhere"
    FITTED = "fitted to published measurements"
    DATASHEET = "datasheet"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where one number comes from.

    Args:
        level: how well it is known.
        source: citation (URL, or paper with section).
        date: day of the measurement or of the reading of the page, ISO 8601.
        num_samples: how many measurements stand behind it, 0 for a datasheet.
        low: lower end of the measured spread, same unit as the value; None where unknown.
        high: upper end of the measured spread.
    """

    level: EvidenceLevel
    source: str
    date: str
    num_samples: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Args:
        slug: catalog name, such as ``h100-sxm-80gb``.
        name: as the vendor writes it.
        vendor: ``nvidia``, ``amd``, ``intel``, ``google`` …
        architecture: generation, such as ``hopper``; calibration constants are kept per framework and generation.
        memory_bytes: device memory, nominal, bytes.
        usable_memory_bytes: what the driver reports as allocatable, bytes.
        memory_bandwidth_bytes_per_s: peak of the device memory, bytes/s.
        peak_flops_per_s: dense peak by dtype (``bf16``, ``fp8`` …), FLOP/s, without sparsity.
        tdp_w: board power limit, watt; None where no source gives it.
        eager_launch_s: time in which its host runs one ``torch.nn.Linear`` forward, s; None where nobody measured it.
        gemm_curves: dtype → (rate FLOP/s, operand bandwidth bytes/s, saturation length), fitted to measured matrix
            products; empty where none were measured. See :mod:`meshplan.planner.training.estimator.compute`.
        operator_scales: class of operators (:data:`meshplan.catalogs.efficiency.OPERATOR_CLASSES`) → measured time over
            the time that the shipped surfaces predict; a class without a measurement is absent and counts as 1.
        evidence: field name (``peak_flops_per_s.bf16``) → where the number comes from.
    """

    slug: str
    name: str
    vendor: str
    architecture: str
    memory_bytes: int
    usable_memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    tdp_w: float | None = None
    eager_launch_s: float | None = None
    gemm_curves: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    operator_scales: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, Evidence] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A kind of connection between two devices or hosts, alpha–beta model: time = latency + bytes / bandwidth.

    Args:
        slug: catalog name, such as ``nvlink4`` or ``infiniband-ndr``.
        name: as the vendor writes it.
        technology: ``nvlink``, ``xgmi``, ``pcie``, ``infiniband``, ``roce``, ``ethernet``, ``efa``, ``ici`` …
        bandwidth_bytes_per_s: per direction; for scale-up links of one device, for network links of one NIC.
        latency_s: time of a small message between two devices.
        evidence: field name → where the number comes from.
    """

    slug: str
    name: str
    technology: str
    bandwidth_bytes_per_s: float
    latency_s: float
    evidence: Mapping[str, Evidence] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one node of a type costs.

    Args:
        usd_per_hour: for the whole node, USD/h.
        provider: who rents it out, such as ``aws``; ``owned`` for an amortised estimate.
        region: as the provider names it; ``any`` where the price does not depend on it.
        terms: ``on-demand``, ``spot``, ``reserved-1y`` …
        date: day on which the price was read, ISO 8601.
        source: citation.
    """

    usd_per_hour: float
    provider: str
    region: str
    terms: str
    date: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """What one rents or racks: hosts with devices that share a scale-up domain.

    Args:
        slug: catalog name, such as ``dgx-h100``.
        name: as sold.
        device: the accelerator; all devices of a node type are alike.
        num_hosts: hosts in one node (1, but 18 for an NVL72 rack).
        devices_per_host: devices in each host.
        scale_up_link: joins the devices of one node.
        scale_out_link: one NIC of the compute network; None when the node has no network for jobs.
        nics_per_host: number of such NICs in each host.
        host_memory_bytes: memory of each host, bytes; None where unknown.
        pair_links: [device][device] links between each pair of devices of the node, of which ``scale_up_link`` is all
            that one device has; empty where a switch joins them.
        prices: known prices, any order; empty when nobody rents it out.
        evidence: field name → where the number comes from.
    """

    slug: str
    name: str
    device: Device
    num_hosts: int
    devices_per_host: int
    scale_up_link: Link
    scale_out_link: Link | None
    nics_per_host: int
    host_memory_bytes: int | None
    pair_links: tuple[tuple[int, ...], ...] = ()
    prices: tuple[Price, ...] = ()
    evidence: Mapping[str, Evidence] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """Devices in one node, which is one scale-up domain."""
        return self.num_hosts * self.devices_per_host

    @property
    def scale_out_bytes_per_s_per_device(self) -> float:
        """Network bandwidth of a device's fair share of its host's NICs, bytes/s per direction."""
        if self.scale_out_link is None:
            return 0.0
        return self.nics_per_host * self.scale_out_link.bandwidth_bytes_per_s / self.devices_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """``count`` nodes of one type."""

    node: NodeType
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The accelerators that a plan may use: groups of nodes, in the order in which hosts are numbered.

    Planning over several device types in one job comes later; until then the training planner refuses a cluster
    whose groups differ.
    """

    name: str
    groups: tuple[NodeGroup, ...]

    @property
    def num_devices(self) -> int:
        """Devices in all groups."""
        return sum(group.node.num_devices * group.count for group in self.groups)

    @property
    def num_hosts(self) -> int:
        """Hosts in all groups."""
        return sum(group.node.num_hosts * group.count for group in self.groups)
