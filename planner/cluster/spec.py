"""The hardware part of a spec: catalog node types, or devices and links described in the spec, and the price."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from meshplan.planner.cluster.links_spec import ExcludeSpec, LinksSpec
from meshplan.planner.core.reading.spec_fields import Bytes, BytesPerS, Dollars, SpecModel, Whole
from meshplan.planner.core.reading.words import Patterned

# Of a cluster: short, and of signs that stay themselves in a file name and on a command line.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[
    str,
    Patterned(
        NAME,
        "at most 64 letters, digits, dots, hyphens and underscores without spaces, the first a letter or a digit, "
        "such as my-cluster",
    ),
]


class NodesSpec(SpecModel):
    """Nodes of one type of the catalog."""

    type: str = Field(description="node type of the catalog, such as dgx-h100", min_length=1)
    count: Annotated[int, Whole(), Field(description="how many")]
    devices: Annotated[int, Whole()] | None = Field(
        default=None,
        description="devices of each that may be used, where not all may; a node is paid as a whole, of a rack the "
        "hosts in use",
    )


class DevicesSpec(SpecModel):
    """Devices described here, for node types that the catalog does not have."""

    type: str = Field(description="device of the catalog, such as h100-sxm-80gb", min_length=1)
    per_node: Annotated[int, Whole(most=1024), Field(description="devices in one host")]
    nodes: Annotated[int, Whole(), Field(description="hosts")]


class ClusterSpec(SpecModel):
    """The cluster: catalog node types, or devices and links described here."""

    name: Name | None = Field(
        default=None, description="what you call it: your own runs count for plans with the same name and node type"
    )
    nodes: Annotated[list[NodesSpec], Field(min_length=1, max_length=64)] | None = None
    devices: DevicesSpec | None = None
    links: LinksSpec | None = None
    profile: str | None = Field(
        default=None, min_length=1, description="measured links of this cluster: the NAME of meshplan profile links"
    )
    exclude: ExcludeSpec | None = Field(default=None, description="nodes and devices that must not be used")
    spare_nodes: Annotated[int, Whole(least=0)] = Field(
        default=0, description="nodes to leave free; the rank mapping chooses them"
    )
    host_memory: Bytes | None = Field(default=None, description="memory of one host, such as '2 TiB'")
    host_memory_bandwidth: BytesPerS | None = Field(
        default=None, description="peak of one host's memory, all sockets together, such as '614 GB/s' (serving)"
    )
    host_processor: str | None = Field(
        default=None, min_length=1, description="processor of the hosts, such as xeon-gold-6454s (serving)"
    )
    host_sockets: Annotated[int, Whole(most=16)] | None = Field(
        default=None, description="processors of one host that hold weights; default 1 (serving)"
    )
    drive: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="NVMe drives of the hosts, such as samsung-990-pro: how fast they are read (serving)"
    )
    drives_per_host: Annotated[int, Whole(most=64)] | None = Field(
        default=None, description="drives that one host reads side by side; default 1 (serving)"
    )
    usd_per_hour_per_node: Dollars | None = Field(default=None, description="your price; overrides the catalog's")

    @model_validator(mode="after")
    def _one_form(self) -> ClusterSpec:
        if (self.nodes is None) == (self.devices is None):
            raise ValueError("give either 'nodes' (catalog node types) or 'devices' with 'links', not both")
        for node in self.nodes or ():
            first = next(one for one in self.nodes or () if one.type == node.type)
            if node.devices != first.devices:
                raise ValueError(f"nodes of {node.type} all have the same number of 'devices' that may be used")
        links = self.links
        if self.devices is not None:
            if self.devices.per_node > 1 and (links is None or links.intra_node is None):
                raise ValueError("'devices' needs 'links': {intra_node: {bandwidth: 450 GB/s, latency: 3 us}, …}")
            if self.devices.nodes > 1 and (links is None or links.inter_node is None):
                raise ValueError(f"{self.devices.nodes} nodes need links.inter_node")
        of_host = (self.host_memory_bandwidth, self.host_processor, self.host_sockets)
        if self.host_memory is None and any(part is not None for part in of_host):
            raise ValueError("host_processor, host_sockets and host_memory_bandwidth describe host_memory: give it too")
        if self.drives_per_host is not None and self.drive is None:
            raise ValueError("drives_per_host counts drives: name them with drive, such as samsung-990-pro")
        if self.profile is not None and links is not None and links.describes_unevenness:
            raise ValueError("give either 'profile' (measured links) or islands, degraded links and a topology")
        return self


class PriceSpec(SpecModel):
    """Which price of a node type holds: the newest that matches, on-demand first."""

    provider: str | None = None
    region: str | None = None
    terms: str | None = None
