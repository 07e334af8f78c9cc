"""Links of a cluster in a spec: two figures for a uniform cluster, and fields for what differs.

Every bandwidth is per device and direction, unless the field is called ``total``. Node numbers count from 0.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from meshplan.planner.core.reading.spec_fields import MAX_DEVICES, BytesPerS, Count, Latency, SpecModel, Whole

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def _read_nodes(value: object) -> object:
    """``"0-3, 6"``, ``[0, 1]`` or ``5`` as a list of numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, str):
        return value
    nodes: list[int] = []
    for part in value.split(","):
        found = _RANGE.fullmatch(part)
        if not found:
            raise ValueError(f"{part.strip()!r} is no node number and no range such as '0-7'")
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < MAX_DEVICES:
            raise ValueError(f"the range {part.strip()!r} is empty or too long")
        nodes += range(first, last + 1)
    return nodes


def _no_doubles(nodes: list[int]) -> list[int]:
    twice = sorted({node for node in nodes if nodes.count(node) > 1}) if len(set(nodes)) != len(nodes) else []
    if twice:
        raise ValueError(f"node {twice[0]} appears twice")
    return nodes


Nodes = Annotated[
    list[Annotated[int, Whole(least=0)]],
    Field(min_length=1),
    BeforeValidator(_read_nodes),
    AfterValidator(_no_doubles),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}
    ),
]


class LinkSpec(SpecModel):
    """One kind of link, per device and direction."""

    bandwidth: BytesPerS = Field(description="such as '450 GB/s' or '400 Gb/s'")
    latency: Latency = Field(description="such as '5 us'")

    @model_validator(mode="before")
    @classmethod
    def _both_are_said(cls, said: Any) -> Any:
        """A bandwidth alone, as a datasheet gives it, is told what goes with it."""
        if isinstance(said, str):
            raise ValueError(f"write {{bandwidth: {said}, latency: 5 us}}, with your latency")
        return said


class IslandSpec(SpecModel):
    """Nodes with a network of their own."""

    nodes: Nodes = Field(description="such as '0-7' or [0, 1]")
    bandwidth: BytesPerS | None = Field(default=None, description="inside the island; inter_node where left out")
    latency: Latency | None = None


class BetweenIslandsSpec(SpecModel):
    """Links from one island to another, or between any two."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, populate_by_name=True)

    sender: Annotated[int, Whole(least=0)] | None = Field(
        default=None, alias="from", description="number of the island; all where left out"
    )
    receiver: Annotated[int, Whole(least=0)] | None = Field(default=None, alias="to")
    bandwidth: BytesPerS | None = Field(default=None, description="most that one device gets")
    total: BytesPerS | None = Field(default=None, description="rate of the whole link, shared by all traffic on it")
    latency: Latency | None = None

    @model_validator(mode="after")
    def _some_rate(self) -> BetweenIslandsSpec:
        if self.bandwidth is None and self.total is None:
            raise ValueError("give bandwidth (of one device) or total (of the whole link)")
        if (self.sender is None) != (self.receiver is None):
            raise ValueError("give both 'from' and 'to', or neither for every pair of islands")
        return self


class DegradedSpec(SpecModel):
    """Links that are slower than the rest, in one direction; list both directions where both are."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, populate_by_name=True)

    senders: Nodes = Field(alias="from", description="node number, range or list")
    receivers: Nodes = Field(alias="to", description="node number, range or list")
    bandwidth: BytesPerS
    latency: Latency | None = None


class BetweenTypesSpec(SpecModel):
    """The network between nodes of two types, each way."""

    types: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=2)] = Field(
        description="the two node types, such as [dgx-a100-40gb, aws-p3dn-24xlarge]"
    )
    bandwidth: BytesPerS = Field(description="of one device on either side, such as '10 Gb/s'")
    latency: Latency = Field(description="such as '50 us'")


class WanSpec(SpecModel):
    """A wide-area link between two sites."""

    total: BytesPerS = Field(description="rate of the whole link, such as '100 Gb/s'")
    latency: Latency


class TopologySpec(SpecModel):
    """A network by its topology.

    - ``rail-optimized``, ``fat-tree``: ``nodes_per_leaf`` nodes at the full rate; further nodes over a spine that has
      1/``oversubscription`` of what the leaf's nodes could send.
    - ``rail-only``: as rail-optimized without a spine (arXiv:2307.12169); more than ``nodes_per_leaf`` nodes cannot
      reach each other.
    - ``nvlink-domains``: ``nodes_per_domain`` nodes share the intra-node links (18 hosts of an NVL72).
    - ``torus``: ``shape``; a message over h hops has 1/h of a link, because all nodes send.
    - ``pcie-only``: one NIC a node, shared by its devices; ``inter_node`` is the NIC.
    - ``two-data-centers``: the first ``nodes_in_first`` nodes and the others, a ``wan`` between them.
    """

    kind: Literal["rail-optimized", "rail-only", "fat-tree", "nvlink-domains", "torus", "pcie-only", "two-data-centers"]
    nodes_per_leaf: Count | None = None
    oversubscription: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] | None = None
    nodes_per_domain: Count | None = None
    shape: Annotated[list[Count], Field(min_length=1, max_length=6)] | None = None
    nodes_in_first: Count | None = None
    wan: WanSpec | None = None

    @model_validator(mode="after")
    def _its_own_fields(self) -> TopologySpec:
        required, optional = TOPOLOGY_FIELDS[self.kind]
        given = {name for name, value in self if value is not None} - {"kind"}
        missing, stray = set(required) - given, given - set(required) - set(optional)
        if missing:
            raise ValueError(f"{self.kind} needs {', '.join(sorted(missing))}")
        if stray:
            raise ValueError(f"{self.kind} has no {', '.join(sorted(stray))}")
        return self


# Kind of topology → fields that it needs, fields that it may have.
TOPOLOGY_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rail-optimized": (("nodes_per_leaf",), ("oversubscription",)),
    "rail-only": (("nodes_per_leaf",), ()),
    "fat-tree": (("nodes_per_leaf",), ("oversubscription",)),
    "nvlink-domains": (("nodes_per_domain",), ()),
    "torus": (("shape",), ()),
    "pcie-only": ((), ()),
    "two-data-centers": (("nodes_in_first", "wan"), ()),
}


Lines = Annotated[
    list[BetweenIslandsSpec],
    Field(min_length=1, max_length=4096),
    BeforeValidator(lambda value: [value] if isinstance(value, dict) else value),
]


class LinksSpec(SpecModel):
    """The links of a cluster: the default ones, and those that differ."""

    intra_node: LinkSpec | None = None
    inter_node: LinkSpec | None = None
    topology: TopologySpec | None = None
    islands: Annotated[list[IslandSpec], Field(min_length=2, max_length=1024)] | None = None
    between_islands: Lines | None = Field(default=None, description="one for all pairs of islands, or a list")
    degraded: Annotated[list[DegradedSpec], Field(min_length=1, max_length=4096)] | None = None
    between_types: Annotated[list[BetweenTypesSpec], Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="networks between node types; the slower NIC of two types on one network if left out"
    )

    @model_validator(mode="after")
    def _islands_are_joined(self) -> LinksSpec:
        if (self.islands is None) != (self.between_islands is None):
            raise ValueError("'islands' and 'between_islands' go together: without links an island is out of reach")
        seen: dict[int, int] = {}
        for number, island in enumerate(self.islands or []):
            for node in island.nodes:
                if node in seen:
                    raise ValueError(f"node {node} is in island {seen[node]} and in island {number}")
                seen[node] = number
        return self

    @property
    def describes_unevenness(self) -> bool:
        """Whether the links are more than the two default ones."""
        return any(value is not None for value in (self.topology, self.islands, self.degraded))


class ExcludedDeviceSpec(SpecModel):
    """A device that must not be used; its whole node is excluded, because the devices of a node work together."""

    node: Annotated[int, Whole(least=0)]
    device: Annotated[int, Whole(least=0)]


class ExcludeSpec(SpecModel):
    """Nodes and devices that must not be used."""

    nodes: Nodes | None = None
    devices: Annotated[list[ExcludedDeviceSpec], Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _no_device_twice(self) -> ExcludeSpec:
        places = [(item.node, item.device) for item in self.devices or []]
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice:
            raise ValueError(f"device {twice[1]} of node {twice[0]} appears twice")
        return self
