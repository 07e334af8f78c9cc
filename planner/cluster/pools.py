"""Pools: the nodes of one type in a cluster of several, and the networks between them.

A pool is a uniform :class:`~meshplan.planner.cluster.machine.Machine`; what differs is between pools. Two pools on one
kind of network (InfiniBand, Ethernet …) reach each other at the rate of the slower NIC, unless the spec says otherwise
(``links.between_types``); between different kinds of network there is no link that anybody could know.

Assumes: switches between pools of one network take what the slower side can send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.hardware import NodeType
from meshplan.planner.cluster.links_spec import LinksSpec
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.problems import Problems

PATH = "cluster.links.between_types"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolLinks:
    """Networks between pools, the same in both directions.

    Args:
        names: node type of each pool.
        bytes_per_s: [pools, pools] of one device, ∞ on the diagonal.
        latency_s: [pools, pools] of a message, s.
        sources: (name, name) → where the figures come from.
    """

    names: tuple[str, ...]
    bytes_per_s: FloatArray
    latency_s: FloatArray
    sources: Mapping[tuple[str, str], str]


def pool_links(nodes: Sequence[NodeType], links: LinksSpec | None, problems: Problems) -> PoolLinks:
    """The network between every two node types, as the spec states it or as their NICs allow.

    Args:
        nodes: the node type of each pool.
        links: of the spec.
        problems: told of stated links that belong to no pool, and of pools that nothing joins.
    """
    names = tuple(node.slug for node in nodes)
    rates, latencies = np.full((len(nodes), len(nodes)), np.inf), np.zeros((len(nodes), len(nodes)))
    stated = _stated(names, links, problems)
    sources: dict[tuple[str, str], str] = {}
    for first in range(len(nodes)):
        for second in range(first + 1, len(nodes)):
            pair = frozenset((names[first], names[second]))
            if pair in stated:
                rate, latency = stated[pair]
                source = "the spec"
            elif (reason := _apart(nodes[first], nodes[second])) is not None:
                problems.say(PATH, reason)
                continue
            else:
                rate, latency = _slower(nodes[first], nodes[second])
                source = "the slower NIC of the two"
            rates[first, second] = rates[second, first] = rate
            latencies[first, second] = latencies[second, first] = latency
            sources[names[first], names[second]] = source
    return PoolLinks(names=names, bytes_per_s=rates, latency_s=latencies, sources=sources)


def _stated(
    names: Sequence[str], links: LinksSpec | None, problems: Problems
) -> dict[frozenset[str], tuple[float, float]]:
    """Unordered pair of node types → bandwidth and latency, of those that the spec states."""
    found: dict[frozenset[str], tuple[float, float]] = {}
    for index, item in enumerate(() if links is None else links.between_types or ()):
        path = f"{PATH}[{index}].types"
        unknown = [name for name in item.types if name not in names]
        if unknown:
            problems.say(path, f"{unknown[0]} is not in cluster.nodes ({', '.join(names)})")
        elif len(set(item.types)) == 1:
            problems.say(path, f"twice {item.types[0]}: links inside a type are links.inter_node")
        elif frozenset(item.types) in found:
            problems.say(path, f"{' and '.join(item.types)} are joined twice")
        found[frozenset(item.types)] = (item.bandwidth, item.latency)
    return found


def _apart(first: NodeType, second: NodeType) -> str | None:
    """Why no link between two node types is known; None where one is."""
    fix = f"say {PATH}: [{{types: [{first.slug}, {second.slug}], bandwidth: 10 Gb/s, latency: 50 us}}], as yours are"
    for node in (first, second):
        if node.scale_out_link is None:
            return f"{node.slug} has no network in the catalog: {fix}"
    one, other = (node.scale_out_link.technology for node in (first, second) if node.scale_out_link is not None)
    if one != other:
        return f"{first.slug} is on {one}, {second.slug} on {other}; what joins them is not known: {fix}"
    return None


def _slower(first: NodeType, second: NodeType) -> tuple[float, float]:
    """Bandwidth of the slower and latency of the later of two networks, for each device."""
    links = [node.scale_out_link for node in (first, second) if node.scale_out_link is not None]
    rate = min(first.scale_out_bytes_per_s_per_device, second.scale_out_bytes_per_s_per_device)
    return rate, max(link.latency_s for link in links)
