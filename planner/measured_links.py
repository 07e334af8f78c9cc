"""A machine whose network was measured: the slowest directed link of a cluster profile replaces the vendor's figure.

A collective is as fast as its slowest link, so a homogeneous estimate takes the slowest; which rank should sit where on
uneven links is the question of ``rank-mapping``.
"""

from __future__ import annotations

from dataclasses import replace

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.catalogs.measured import ClusterProfile
from meshplan.catalogs.units import format_bandwidth
from meshplan.planner.problems.machine import Machine


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


def with_measured_links(machine: Machine, profile: ClusterProfile) -> Machine:
    """The machine with the network of the profile.

    A link between hosts (one endpoint a host) is shared by the host's devices; one between devices is each one's own.

    Args:
        machine: from the catalog.
        profile: fits the machine (see :func:`profile_problems`).
    """
    between = [link for link in profile.links if host_of(link.source) != host_of(link.target)]
    if not between:
        return machine
    per_pair: dict[tuple[str, str], float] = {}
    for link in between:  # several rails add up
        key = (link.source, link.target)
        per_pair[key] = per_pair.get(key, 0.0) + link.bandwidth_bytes_per_s.value
    shared_by = 1 if any("/" in endpoint for endpoint in profile.endpoints) else machine.devices_per_host
    return replace(
        machine,
        scale_out_bytes_per_s=min(per_pair.values()) / shared_by,
        scale_out_latency_s=max(link.latency_s.value for link in between),
        link_level=EvidenceLevel.MEASURED,
    )


def slowest_link(profile: ClusterProfile) -> str:
    """The link that decides, in words."""
    between = [link for link in profile.links if host_of(link.source) != host_of(link.target)]
    slowest = min(between, key=lambda link: link.bandwidth_bytes_per_s.value)
    rate = format_bandwidth(slowest.bandwidth_bytes_per_s.value)
    return f"{slowest.source} → {slowest.target} at {rate}, the slowest of {len(between)} measured links"
