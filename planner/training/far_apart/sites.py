"""Which sites a spec describes, what each of them is asked, and the links between them.

A site is an island of ``cluster.links.islands``, or one of two data centers. Its question is that of a cluster of its
nodes alone, with its share of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.planner.cluster.network.network import Network
from meshplan.planner.core.problems import Problems
from meshplan.planner.training.far_apart.exchange import Ring
from meshplan.planner.training.problem.spec import TrainingSpec

# All orders of so many sites in a ring are tried; of more, the order of the spec is taken.
MOST_ORDERED_SITES = 8
# Limits over all sites, which a site by itself is not asked to keep.
OVER_ALL_SITES = ("min_devices", "max_devices", "max_usd_per_hour", "max_usd_per_run", "max_run_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Nodes that a fast network joins.

    Args:
        name: for people.
        nodes: numbers of the nodes that may be used, ascending.
        island: number in ``links.islands``; None of two data centers.
    """

    name: str
    nodes: tuple[int, ...]
    island: int | None


def find_sites(spec: TrainingSpec, network: Network | None, problems: Problems) -> tuple[Site, ...]:
    """The sites that a spec describes.

    Args:
        spec: the question.
        network: its links, with the nodes that may be used.
        problems: what is missing is added here.
    """
    links = spec.cluster.links
    usable = frozenset(() if network is None else network.usable)
    groups: list[tuple[str, list[int], int | None]] = []
    if links is not None and links.islands is not None:
        groups = [(f"site {place}", island.nodes, place) for place, island in enumerate(links.islands)]
    elif links is not None and links.topology is not None and links.topology.kind == "two-data-centers":
        first = links.topology.nodes_in_first or 0
        count = 0 if network is None else network.num_nodes
        groups = [("site 0", list(range(first)), None), ("site 1", list(range(first, count)), None)]
    if not groups:
        problems.say(
            "far_apart",
            "needs sites: cluster.links.islands: [{nodes: 0-7}, {nodes: 8-15}] with between_islands: {total: 10 Gb/s, "
            "latency: 30 ms}, or the topology two-data-centers",
        )
        return ()
    sites = [Site(name=name, nodes=tuple(sorted(usable & set(nodes))), island=at) for name, nodes, at in groups]
    for site in sites:
        if not site.nodes:
            problems.say("cluster.exclude", f"{site.name} has no node left: drop its island, or exclude fewer")
    return tuple(sites)


def site_document(
    document: Mapping[str, Any], site: Site, batch: int, headroom_bytes: float | None = None
) -> dict[str, Any]:
    """The question that a site answers alone.

    Args:
        document: the whole question, validated.
        site: whose nodes are kept.
        batch: sequences of a step.
        headroom_bytes: device memory to leave free; None for what the question says.
    """
    cluster = {key: value for key, value in document["cluster"].items() if key not in ("exclude", "spare_nodes")}
    if "devices" in cluster:
        cluster["devices"] = {**cluster["devices"], "nodes": len(site.nodes)}
    else:
        cluster["nodes"] = [{**cluster["nodes"][0], "count": len(site.nodes)}]
    links = dict(cluster.get("links") or {})
    own = {} if site.island is None else links["islands"][site.island]
    inside = {key: own[key] for key in ("bandwidth", "latency") if own.get(key) is not None}
    if inside:
        links["inter_node"] = {**(links.get("inter_node") or {}), **inside}
    kept = {key: value for key, value in links.items() if key in ("intra_node", "inter_node")}
    cluster = {key: value for key, value in cluster.items() if key != "links"} | ({"links": kept} if kept else {})
    workload = {key: value for key, value in document["workload"].items() if key != "global_batch_tokens"}
    limits = {key: value for key, value in (document.get("constraints") or {}).items() if key not in OVER_ALL_SITES}
    if headroom_bytes is not None:
        limits["memory_headroom"] = f"{headroom_bytes:.0f} B"
    asked = {key: value for key, value in document.items() if key not in ("far_apart", "mapping", "objective")}
    return {
        **asked,
        "cluster": cluster,
        "workload": {**workload, "global_batch_size": batch},
        "constraints": limits,
    }


def ring_of(sites: tuple[Site, ...], network: Network, domain_size: int) -> Ring:
    """The ring over all sites whose slowest link is fastest.

    A link carries what all devices of the smaller site send at once, as far as what joins the sites takes it.

    Args:
        sites: at least two.
        network: links between nodes; rates of one device.
        domain_size: devices of a node.
    """
    count = len(sites)
    rate, latency = np.full((count, count), np.inf), np.zeros((count, count))
    for a, b in itertools.permutations(range(count), 2):
        ends = np.ix_(sites[a].nodes, sites[b].nodes)
        devices = domain_size * min(len(sites[a].nodes), len(sites[b].nodes))
        rate[a, b] = devices * network.bytes_per_s[ends].min()
        latency[a, b] = network.latency_s[ends].max()
        for trunk in network.trunks:
            if trunk.senders[list(sites[a].nodes)].any() and trunk.receivers[list(sites[b].nodes)].any():
                rate[a, b] = min(rate[a, b], domain_size * trunk.bytes_per_s)
    both, far = np.minimum(rate, rate.T), np.maximum(latency, latency.T)

    def slowest(order: tuple[int, ...]) -> tuple[float, float]:
        pairs = list(zip(order, (*order[1:], order[0]), strict=True))
        return min(float(both[pair]) for pair in pairs), -max(float(far[pair]) for pair in pairs)

    rest = tuple(range(1, count))
    orders = itertools.permutations(rest) if count <= MOST_ORDERED_SITES else [rest]
    bytes_per_s, latency_s = max(slowest((0, *order)) for order in orders)
    return Ring(num_sites=count, bytes_per_s=bytes_per_s, latency_s=-latency_s)
