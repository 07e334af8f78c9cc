"""A network whose links differ: the directed bandwidth between nodes, and what several links share.

A *node* here is a scale-up domain, which is what a rank mapping moves: its devices stay together, and everything
between two nodes goes over the network. Rates are a device's share of the link, bytes/s, as in
:class:`~meshplan.planner.cluster.machine.Machine`.
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
    """A capacity that all traffic from some nodes to others shares: a leaf switch's uplinks, a line between sites.

    Args:
        name: in words.
        senders: [n] whether the node sends over it.
        receivers: [n] whether the node receives over it.
        bytes_per_s: per device of a node, so that n links in use at once leave each of them bytes_per_s/n.
    """

    name: str
    senders: BoolArray
    receivers: BoolArray
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Directed links between the nodes of a cluster.

    Args:
        names: of the nodes, for people.
        bytes_per_s: [n, n] a device's share, row = sender; the diagonal is ∞ and means nothing.
        latency_s: [n, n] s; the diagonal is 0.
        usable: nodes that may hold ranks, ascending.
        trunks: capacities that links share.
        source: what the links rest on, in words.
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
        """[n, n] of each directed link."""
        return np.asarray(1.0 / self.bytes_per_s)

    @cached_property
    def ring_s_per_byte(self) -> FloatArray:
        """[n, n] of each link in its slower direction."""
        return np.maximum(self.seconds_per_byte, self.seconds_per_byte.T)

    @cached_property
    def nic_s_per_byte(self) -> FloatArray:
        """[n] of each node's fastest link, sending or receiving: what its NIC can do."""
        spacing = self.seconds_per_byte + np.diag(np.full(self.num_nodes, np.inf))
        return np.asarray(np.maximum(spacing.min(axis=1), spacing.min(axis=0)))

    @property
    def between_usable(self) -> FloatArray:
        """Rates of the links between different usable nodes, in one row."""
        chosen = self.bytes_per_s[np.ix_(self.usable, self.usable)]
        return np.asarray(chosen[~np.eye(len(chosen), dtype=bool)])

    @property
    def is_uniform(self) -> bool:
        """Whether all usable links are alike, within :data:`UNIFORM_TOLERANCE`, and none of them share anything."""
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
    """[n] label of the strongly connected part of each node, labels in the order of each part's lowest node."""
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
