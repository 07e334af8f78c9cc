"""The network that a spec describes: the directed matrix between nodes and the capacities that links share.

Later steps override earlier ones: default link, topology, islands and the links between them, degraded links, excluded
nodes. Everything that does not match the cluster is reported.
"""

from __future__ import annotations

import math

import numpy as np

from meshplan.catalogs.errors import Problem
from meshplan.planner.cluster.links_spec import BetweenIslandsSpec, DegradedSpec, IslandSpec, TopologySpec
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.network.network import Network, Trunk, strongly_connected
from meshplan.planner.cluster.spec import ClusterSpec
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

# A wrong description is often wrong everywhere: report the first few errors, count the rest.
MAX_NAMED = 8
_PATH = "cluster.links"


def described_network(spec: ClusterSpec, machine: Machine, problems: list[Problem]) -> Network | None:
    """The network that a spec describes; None for a uniform network without excluded or spare nodes.

    Args:
        spec: the cluster part of the spec.
        machine: the same cluster with the default links.
        problems: errors are added here.
    """
    links = spec.links
    uneven = links is not None and links.describes_unevenness
    if not uneven and spec.exclude is None and not spec.spare_nodes:
        return None
    draft = _Draft(machine, problems)
    if links is not None and links.topology is not None:
        draft.apply_topology(links.topology)
    if links is not None and links.islands is not None:
        draft.apply_islands(links.islands, links.between_islands or [])
    if links is not None:
        draft.degrade(links.degraded or [])
    usable = usable_nodes(spec, machine, draft.num_nodes, problems)
    draft.check(usable)
    return Network(
        names=tuple(f"node {number}" for number in range(draft.num_nodes)),
        bytes_per_s=draft.rates,
        latency_s=draft.latencies,
        usable=usable,
        trunks=tuple(draft.trunks),
        source="links as described in the spec" if uneven else "links of the node type",
    )


def usable_nodes(spec: ClusterSpec, machine: Machine, count: int, problems: list[Problem]) -> tuple[int, ...]:
    """Nodes that may hold ranks, ascending, of ``count``."""
    out = set()
    exclude = spec.exclude
    for node in [] if exclude is None else exclude.nodes or []:
        if node >= count:
            problems.append(Problem(path="cluster.exclude.nodes", message=_no_node(node, count)))
        out.add(node)
    for index, item in enumerate([] if exclude is None else exclude.devices or []):
        path = f"cluster.exclude.devices[{index}]"
        if item.node >= count:
            problems.append(Problem(path=path, message=_no_node(item.node, count)))
        elif item.device >= machine.domain_size:
            message = f"there is no device {item.device}: node {item.node} has {machine.domain_size}, from 0"
            problems.append(Problem(path=path, message=message))
        out.add(item.node)
    usable = tuple(node for node in range(count) if node not in out)
    if len(usable) <= spec.spare_nodes:
        path = "cluster.spare_nodes" if spec.spare_nodes else "cluster.exclude"
        message = f"of {count} nodes {count - len(usable)} are excluded and {spec.spare_nodes} spare: none is left"
        problems.append(Problem(path=path, message=message))
    return usable or (0,)


def _no_node(node: int, count: int) -> str:
    return f"there is no node {node}: the cluster has {count}, from 0"


class _Draft:
    """The matrices under construction."""

    def __init__(self, machine: Machine, problems: list[Problem]) -> None:
        self.machine, self.problems = machine, problems
        self.num_nodes = machine.num_devices // machine.domain_size
        shape = (self.num_nodes, self.num_nodes)
        self.rates = np.full(shape, machine.scale_out_bytes_per_s)
        self.latencies = np.full(shape, machine.scale_out_latency_s)
        self.trunks: list[Trunk] = []
        self._reset_diagonal()

    def say(self, path: str, message: str) -> None:
        self.problems.append(Problem(path=f"{_PATH}.{path}", message=message))

    def _reset_diagonal(self) -> None:
        np.fill_diagonal(self.rates, np.inf)
        np.fill_diagonal(self.latencies, 0.0)

    # --- topologies -----------------------------------------------------------------------------------------------

    def apply_topology(self, spec: TopologySpec) -> None:
        numbers = np.arange(self.num_nodes)
        if spec.kind in ("rail-optimized", "fat-tree", "rail-only"):
            self._leaves(numbers // (spec.nodes_per_leaf or 1), spec)
        elif spec.kind == "nvlink-domains":
            domain = numbers // (spec.nodes_per_domain or 1)
            inside = domain[:, None] == domain
            self.rates[inside] = self.machine.scale_up_bytes_per_s
            self.latencies[inside] = self.machine.scale_up_latency_s
        elif spec.kind == "torus":
            self._torus(spec.shape or [])
        elif spec.kind == "pcie-only":
            self.rates /= self.machine.domain_size
        elif spec.wan is not None:
            self._two_sites(spec.nodes_in_first or 0, spec.wan.total, spec.wan.latency)
        self._reset_diagonal()

    def _leaves(self, leaf: IntArray, spec: TopologySpec) -> None:
        num_leaves = int(leaf.max()) + 1
        if spec.kind == "rail-only" and num_leaves > 1:
            self.say(
                "topology.nodes_per_leaf",
                f"rail-only has no spine: {self.num_nodes} nodes in groups of {spec.nodes_per_leaf} are {num_leaves} "
                "clusters that cannot reach each other; plan one of them, or give 'rail-optimized'",
            )
        over = spec.oversubscription or 1.0
        if over == 1.0:
            return  # each node of a leaf can send at its full rate at the same time
        rate = self.machine.scale_out_bytes_per_s
        for number in range(num_leaves if num_leaves > 1 else 0):
            inside = leaf == number
            capacity = float(inside.sum()) * rate / over
            for way, senders, receivers in (("up", inside, ~inside), ("down", ~inside, inside)):
                name = f"leaf {number} {way}"
                self.trunks.append(Trunk(name=name, senders=senders, receivers=receivers, bytes_per_s=capacity))

    def _torus(self, shape: list[int]) -> None:
        if math.prod(shape) != self.num_nodes:
            size = " × ".join(map(str, shape))
            self.say("topology.shape", f"{size} = {math.prod(shape)} nodes, the cluster has {self.num_nodes}")
            return
        position = np.stack(np.unravel_index(np.arange(self.num_nodes), shape), axis=1)
        distance = np.abs(position[:, None] - position)
        hops = np.maximum(np.minimum(distance, np.array(shape) - distance).sum(axis=2), 1)
        self.rates, self.latencies = self.rates / hops, self.latencies * hops

    def _two_sites(self, in_first: int, total: float, latency: float) -> None:
        if not 0 < in_first < self.num_nodes:
            self.say("topology.nodes_in_first", f"{in_first} of {self.num_nodes} nodes leave the other site empty")
            return
        first = np.arange(self.num_nodes) < in_first
        for name, senders, receivers in (
            ("first → second site", first, ~first),
            ("second → first site", ~first, first),
        ):
            self._connect(name, senders, receivers, share=None, total=total, latency=latency)

    def _connect(
        self,
        name: str,
        senders: BoolArray,
        receivers: BoolArray,
        *,
        share: float | None,
        total: float | None,
        latency: float | None,
    ) -> None:
        """Set the links from some nodes to others: bandwidth per device, total rate of all of them, latency."""
        cross = np.outer(senders, receivers)
        per_device = math.inf if total is None else total / self.machine.domain_size
        if share is not None or total is not None:
            self.rates[cross] = min(share or self.machine.scale_out_bytes_per_s, per_device)
        if latency is not None:
            self.latencies[cross] = latency
        if total is not None:
            self.trunks.append(Trunk(name=name, senders=senders, receivers=receivers, bytes_per_s=per_device))

    # --- islands and single links ---------------------------------------------------------------------------------

    def _known(self, nodes: list[int], path: str) -> BoolArray:
        chosen = np.zeros(self.num_nodes, dtype=bool)
        unknown = [node for node in nodes if node >= self.num_nodes]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            self.say(path, f"{_no_node(unknown[0], self.num_nodes)}{more}")
        chosen[[node for node in nodes if node < self.num_nodes]] = True
        return chosen

    def apply_islands(self, islands: list[IslandSpec], lines: list[BetweenIslandsSpec]) -> None:
        members = [self._known(island.nodes, f"islands[{number}].nodes") for number, island in enumerate(islands)]
        homeless = np.flatnonzero(~np.logical_or.reduce(members)).tolist()
        if homeless:
            named = ", ".join(map(str, homeless[:MAX_NAMED])) + (" …" if len(homeless) > MAX_NAMED else "")
            self.say("islands", f"{len(homeless)} of {self.num_nodes} nodes are in no island: {named}")
        joined = np.zeros((len(islands), len(islands)), dtype=bool)
        for number, (island, inside) in enumerate(zip(islands, members, strict=True)):
            joined[number, number] = True
            block = np.outer(inside, inside)
            if island.bandwidth is not None:
                self.rates[block] = island.bandwidth
            if island.latency is not None:
                self.latencies[block] = island.latency
        for number, line in enumerate(lines):
            for sender, receiver in self._ends(line, number, len(islands)):
                joined[sender, receiver] = True
                self._connect(
                    f"island {sender} → {receiver}",
                    members[sender],
                    members[receiver],
                    share=line.bandwidth,
                    total=line.total,
                    latency=line.latency,
                )
        for sender, receiver in np.argwhere(~joined)[:MAX_NAMED].tolist():
            self.say("between_islands", f"there is no link from island {sender} to island {receiver}")
        self._reset_diagonal()

    def _ends(self, line: BetweenIslandsSpec, number: int, count: int) -> list[tuple[int, int]]:
        if line.sender is None or line.receiver is None:
            return [(a, b) for a in range(count) for b in range(count) if a != b]
        wrong = [end for end in (line.sender, line.receiver) if end >= count]
        if wrong:
            self.say(f"between_islands[{number}]", f"there is no island {wrong[0]}: {count} are given, from 0")
            return []
        return [(line.sender, line.receiver)]

    def degrade(self, links: list[DegradedSpec]) -> None:
        for number, link in enumerate(links):
            senders = self._known(link.senders, f"degraded[{number}].from")
            receivers = self._known(link.receivers, f"degraded[{number}].to")
            if link.senders == link.receivers and len(link.senders) == 1:
                self.say(f"degraded[{number}]", f"node {link.senders[0]} has no link to itself")
            block = np.outer(senders, receivers)
            self.rates[block] = link.bandwidth
            if link.latency is not None:
                self.latencies[block] = link.latency
        self._reset_diagonal()

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self, usable: tuple[int, ...]) -> None:
        check_links(self.rates, usable, tuple(f"node {n}" for n in range(self.num_nodes)), self.problems, path=_PATH)


def check_links(
    rates: FloatArray, usable: tuple[int, ...], names: tuple[str, ...], problems: list[Problem], *, path: str
) -> None:
    """Report links between usable nodes without bandwidth, and a network that is not strongly connected."""
    chosen = rates[np.ix_(usable, usable)]
    dead = np.argwhere(~(chosen > 0.0))
    for row, column in dead[:MAX_NAMED].tolist():
        message = (
            f"the link {names[usable[row]]} → {names[usable[column]]} has no bandwidth; measure it, or exclude a node"
        )
        problems.append(Problem(path=path, message=message))
    parts = strongly_connected(chosen > 0.0)
    if len(dead) > MAX_NAMED:
        problems.append(Problem(path=path, message=f"{len(dead) - MAX_NAMED} more links have no bandwidth"))
    if parts.max(initial=0) > 0:
        message = f"the network has {int(parts.max()) + 1} parts that cannot reach each other in both directions"
        problems.append(Problem(path=path, message=message))
