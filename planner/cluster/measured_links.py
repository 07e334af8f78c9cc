"""A machine whose network was measured: a cluster profile replaces the datasheet's bandwidth.

A collective is as fast as its slowest link, so on a uniform network the estimate takes the slowest measured link. On
an uneven one the whole directed matrix becomes the machine's network, and the plan contains a rank mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.catalogs.units import format_bandwidth
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.core.arrays import FloatArray

if TYPE_CHECKING:
    from meshplan.catalogs.measurements.types import ClusterProfile


def host_of(endpoint: str) -> str:
    """The host of an endpoint: ``host`` or ``host/rank``.

    >>> host_of("node-1/3")
    'node-1'
    """
    return endpoint.split("/", 1)[0]


def profile_problems(machine: Machine, profile: ClusterProfile) -> list[Problem]:
    """Why the profile does not describe the cluster; empty when it does."""
    hosts = {host_of(endpoint) for endpoint in profile.endpoints}
    wanted = machine.num_devices // machine.devices_per_host
    if len(hosts) != wanted:
        message = f"the profile {profile.name!r} has {len(hosts)} hosts, the cluster {wanted}; profile it again"
        return [Problem(path="cluster.profile", message=message)]
    between = [link for link in profile.links if host_of(link.source) != host_of(link.target)]
    if wanted > 1 and not between:
        message = f"the profile {profile.name!r} measured no link between hosts"
        return [Problem(path="cluster.profile", message=message)]
    return []


def measured_network(machine: Machine, profile: ClusterProfile, usable: tuple[int, ...]) -> Network:
    """The profile's links between nodes, as bandwidth per device.

    With one endpoint per host the devices of the host share a link; with one endpoint per device each has its own. Two
    nodes with several links between them get the slowest of these, and a pair that a sampled profile left out gets the
    slowest link of all: both are conservative.

    Args:
        machine: the machine with the catalog's links.
        profile: a profile of this machine (see :func:`profile_problems`).
        usable: nodes that may hold ranks.
    """
    hosts = host_names(profile)
    hosts_per_node = machine.domain_size // machine.devices_per_host
    node_of = {host: number // hosts_per_node for number, host in enumerate(hosts)}
    shared_by = 1 if has_endpoint_per_device(profile) else machine.devices_per_host
    count = len(hosts) // hosts_per_node
    rates, latencies, unmeasured = slowest_between(profile, node_of, count)
    left_out = f", {unmeasured} pairs not measured (taken as the slowest)" if unmeasured else ""
    return Network(
        names=hosts if hosts_per_node == 1 else tuple(hosts[::hosts_per_node]),
        bytes_per_s=rates / shared_by,
        latency_s=latencies,
        usable=usable,
        source=f"profile {profile.name} of {profile.measured_at}{left_out}",
    )


def slowest_between(
    profile: ClusterProfile, place_of: Mapping[str, int], count: int
) -> tuple[FloatArray, FloatArray, int]:
    """The slowest link and the largest latency between places, in each direction.

    Args:
        profile: what was measured.
        place_of: host → its place, 0 … count − 1: a node.
        count: of places.

    Returns:
        rates: of one link, bytes/s, [from, to]; ∞ on the diagonal.
        latencies: s, [from, to].
        unmeasured: directed pairs that nobody measured; they have the slowest rate and the largest latency of all.
    """
    rates, latencies = np.full((count, count), np.inf), np.zeros((count, count))
    per_pair: dict[tuple[str, str], float] = {}
    for link in profile.links:  # the bandwidths of several rails add up
        pair = (link.source, link.target)
        per_pair[pair] = per_pair.get(pair, 0.0) + link.bandwidth_bytes_per_s.value
        sender, receiver = place_of[host_of(link.source)], place_of[host_of(link.target)]
        latencies[sender, receiver] = max(latencies[sender, receiver], link.latency_s.value)
    for (source, target), rate in per_pair.items():
        sender, receiver = place_of[host_of(source)], place_of[host_of(target)]
        rates[sender, receiver] = min(rates[sender, receiver], rate)
    np.fill_diagonal(latencies, 0.0)
    np.fill_diagonal(rates, np.inf)
    unmeasured = ~np.isfinite(rates) & ~np.eye(count, dtype=bool)
    rates[unmeasured], latencies[unmeasured] = rates.min(), latencies.max()
    return rates, latencies, int(unmeasured.sum())


def has_endpoint_per_device(profile: ClusterProfile) -> bool:
    """Whether each device was measured by itself, not the host for all of its devices."""
    return any("/" in endpoint for endpoint in profile.endpoints)


def host_names(profile: ClusterProfile) -> tuple[str, ...]:
    """Hosts in the order of their node numbers."""
    return tuple(dict.fromkeys(host_of(endpoint) for endpoint in profile.endpoints))


def with_network(machine: Machine, network: Network, *, spare_nodes: int, measured: bool) -> Machine:
    """The machine on this network; its default link is the slowest one between usable nodes.

    Args:
        machine: the machine with the default links.
        network: the links that replace them.
        spare_nodes: number of usable nodes to leave free.
        measured: whether the links were measured on this cluster.
    """
    rates = network.between_usable
    latency = network.latency_s[np.ix_(network.usable, network.usable)]
    return replace(
        machine,
        num_devices=max(1, len(network.usable) - spare_nodes) * machine.domain_size,
        scale_out_bytes_per_s=float(rates.min()) if rates.size else machine.scale_out_bytes_per_s,
        scale_out_latency_s=float(latency.max()) if rates.size else machine.scale_out_latency_s,
        link_level=EvidenceLevel.MEASURED if measured else machine.link_level,
        network=network,
    )


def slowest_link(profile: ClusterProfile) -> str:
    """The slowest measured link, as text."""
    between = [link for link in profile.links if host_of(link.source) != host_of(link.target)]
    slowest = min(between, key=lambda link: link.bandwidth_bytes_per_s.value)
    rate = format_bandwidth(slowest.bandwidth_bytes_per_s.value)
    return f"{slowest.source} → {slowest.target} at {rate}, the slowest of {len(between)} measured links"
