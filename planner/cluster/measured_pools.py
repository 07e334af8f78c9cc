"""Pools whose links were measured: one profile over the nodes of all types, in the order of ``cluster.nodes``.

Inside a pool and between two of them the slowest measured link counts, as on one node type. With one endpoint per host
the devices of a host share its link; two pools of unlike hosts have the share of the host with more devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.catalogs.measurements.types import ClusterProfile
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.measured_links import (
    has_endpoint_per_device,
    host_names,
    host_of,
    slowest_between,
    slowest_link,
)
from meshplan.planner.cluster.pools import PoolLinks


def pools_profile_problems(machines: Sequence[Machine], profile: ClusterProfile) -> list[Problem]:
    """Why the profile does not describe the pools together; empty when it does."""
    hosts, wanted = len(host_names(profile)), sum(_num_hosts(machine) for machine in machines)
    if hosts != wanted:
        message = f"the profile {profile.name!r} has {hosts} hosts, the cluster {wanted}; profile it again"
        return [Problem(path="cluster.profile", message=message)]
    if not any(host_of(link.source) != host_of(link.target) for link in profile.links):
        message = f"the profile {profile.name!r} measured no link between hosts"
        return [Problem(path="cluster.profile", message=message)]
    return []


def measured_pools(
    machines: Sequence[Machine], names: Sequence[str], profile: ClusterProfile
) -> tuple[tuple[Machine, ...], PoolLinks]:
    """Each pool on its slowest measured link, and the slowest between every two.

    Args:
        machines: the pools with the catalog's links; their hosts stand one pool after the other in the profile.
        names: node type of each.
        profile: one of these pools together (see :func:`pools_profile_problems`).
    """
    hosts_per_node = [machine.domain_size // machine.devices_per_host for machine in machines]
    pool_of: list[int] = []
    node_of: list[int] = []
    for pool, machine in enumerate(machines):
        first = len(pool_of)
        pool_of += [pool] * (machine.num_devices // machine.domain_size)
        node_of += [first + host // hosts_per_node[pool] for host in range(_num_hosts(machine))]
    places = dict(zip(host_names(profile), node_of, strict=True))
    rates, latencies, _ = slowest_between(profile, places, len(pool_of))
    devices = np.array([1 if has_endpoint_per_device(profile) else one.devices_per_host for one in machines])
    owner = np.array(pool_of)

    def between(first: int, second: int) -> tuple[float, float]:
        """Slowest rate of a device, and the largest latency, either way; ∞ and 0 where there is no link."""
        ways = [np.ix_(owner == one, owner == other) for one, other in ((first, second), (second, first))]
        rate = min(float(rates[way].min()) for way in ways) / float(max(devices[first], devices[second]))
        return rate, max(float(latencies[way].max()) for way in ways)

    count = len(machines)
    pairs = [[between(first, second) for second in range(count)] for first in range(count)]
    figures = np.array(pairs)
    on_links = tuple(_on_link(machine, *pairs[pool][pool]) for pool, machine in enumerate(machines))
    rates, later = figures[:, :, 0], figures[:, :, 1]
    np.fill_diagonal(rates, np.inf)
    np.fill_diagonal(later, 0.0)
    source = f"profile {profile.name} of {profile.measured_at}: {slowest_link(profile)}"
    sources = {(names[one], names[other]): source for one in range(count) for other in range(one + 1, count)}
    return on_links, PoolLinks(names=tuple(names), bytes_per_s=rates, latency_s=later, sources=sources)


def _on_link(machine: Machine, bytes_per_s: float, latency_s: float) -> Machine:
    """A pool on its slowest measured link; a pool of one node has none inside, and those to others are measured."""
    if not np.isfinite(bytes_per_s):
        return replace(machine, link_level=EvidenceLevel.MEASURED)
    return replace(
        machine,
        scale_out_bytes_per_s=bytes_per_s,
        scale_out_latency_s=latency_s,
        link_level=EvidenceLevel.MEASURED,
    )


def _num_hosts(machine: Machine) -> int:
    return machine.num_devices // machine.devices_per_host
