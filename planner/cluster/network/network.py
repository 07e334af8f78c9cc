"""An uneven network: the directed bandwidth and latency between nodes, and capacities that several links share.

A *node* here is a scale-up domain, which a rank mapping moves as a whole; everything between two nodes goes over the
network. Bandwidths are per device, bytes/s, as in :class:`~meshplan.planner.cluster.machine.Machine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

# Links this close to each other count as equal. Assumed: repeated runs of the link profiler on one quiet network differ
# by a few per cent, so a finer difference is no reason to move a rank.
UNIFORM_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trunk:
    """A capacity shared by all traffic from some nodes to others: the uplinks of a leaf switch, a link between sites.

    Args:
        name: name for messages.
        senders: [n] whether the node sends over it.
        receivers: [n] whether the node receives over it.
        bytes_per_s: capacity per device of a node: k links in use at once get bytes_per_s/k each.
    """

    name: str
    senders: BoolArray
    receivers: BoolArray
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Directed links between the nodes of a cluster.

    Args:
        names: node names for messages.
        bytes_per_s: [n, n] bandwidth per device, row = sender; the diagonal is ∞ and not used.
        latency_s: [n, n] latency, s; the diagonal is 0.
        usable: nodes that may hold ranks, ascending.
        trunks: capacities that links share.
        source: where the figures come from, as text.
    """

    names: tuple[str, ...]
    bytes_per_s: FloatArray
    latency_s: FloatArray
    usable: tuple[int, ...]
    trunks: tuple[Trunk, ...] = ()
    source: str = ""

    @property
    def num_nodes(self) -> int:
        """Nodes, usable or not."""
        return len(self.names)

    @cached_property
    def seconds_per_byte(self) -> FloatArray:
        """[n, n] inverse bandwidth of each directed link."""
        return np.asarray(1.0 / self.bytes_per_s)

    @cached_property
    def ring_s_per_byte(self) -> FloatArray:
        """[n, n] inverse bandwidth of each link in its slower direction."""
        return np.maximum(self.seconds_per_byte, self.seconds_per_byte.T)

    @cached_property
    def nic_s_per_byte(self) -> FloatArray:
        """[n] inverse bandwidth of each node's NIC: its fastest link, in the slower of sending and receiving."""
        spacing = self.seconds_per_byte + np.diag(np.full(self.num_nodes, np.inf))
        return np.asarray(np.maximum(spacing.min(axis=1), spacing.min(axis=0)))

    @property
    def between_usable(self) -> FloatArray:
        """Bandwidths of the links between different usable nodes, flattened."""
        chosen = self.bytes_per_s[np.ix_(self.usable, self.usable)]
        return np.asarray(chosen[~np.eye(len(chosen), dtype=bool)])

    @property
    def is_uniform(self) -> bool:
        """Whether all usable links are equal within :data:`UNIFORM_TOLERANCE` and share no capacity."""
        rates = self.between_usable
        return not self.trunks and (
            not rates.size or float(rates.max()) <= (1 + UNIFORM_TOLERANCE) * float(rates.min())
        )

    def slowest(self) -> tuple[int, int]:
        """The slowest directed link between usable nodes."""
        rates = self.bytes_per_s[np.ix_(self.usable, self.usable)]
        sender, receiver = np.unravel_index(int(rates.argmin()), rates.shape)
        return self.usable[int(sender)], self.usable[int(receiver)]


def strongly_connected(links: BoolArray) -> IntArray:
    """[n] strongly connected component of each node, numbered in the order of their lowest nodes.

    Searches ask this of dense matrices at hundreds of bandwidth thresholds. NumPy's breadth-first search takes 2 ms
    for 1,024 nodes; building a networkx graph of half a million links takes 1 s. Tests hold the two together.
    """
    labels = np.full(len(links), -1, dtype=np.int64)
    label = 0
    for start in range(len(links)):
        if labels[start] < 0:
            labels[reached_from(links, start) & reached_from(links.T, start)] = label
            label += 1
    return labels


def reached_from(links: BoolArray, start: int) -> BoolArray:
    """[n] whether a path over ``links`` ([n, n], from row to column) leads from ``start`` to each node."""
    reached = np.zeros(len(links), dtype=bool)
    reached[start] = True
    fresh = reached.copy()
    while fresh.any():
        fresh = links[fresh].any(axis=0) & ~reached
        reached |= fresh
    return reached
