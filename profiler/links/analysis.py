"""What the measured matrix says: classes of links, slow hosts, degraded links, asymmetries.

Model: a host's network interface has one speed, and a link runs at the slower of its two ends. A host's speed is
estimated by the second best of its links (the best may be a lucky one), so a host with one bad link keeps its speed
and the link is named, while a host whose links are all slow is named itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.measurements.types import MeasuredLink
from meshplan.catalogs.units import format_bandwidth

# A link this far under the slower of its ends is degraded; measured rates of sound links scatter by a few percent
# (Pipette's InfiniBand matrices: coefficient of variation 3 to 4 %, asymmetry up to 17 %).
DEGRADED_BELOW = 0.75
ASYMMETRIC_ABOVE = 1.25
SLOW_HOST_BELOW = 0.75
# Two speeds closer than this belong to one class.
CLASS_GAP = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """Links of about one speed.

    Args:
        name: ``class-1`` is the fastest.
        bandwidth_bytes_per_s: median of the class.
        links: directed pairs of endpoints.
    """

    name: str
    bandwidth_bytes_per_s: float
    links: tuple[tuple[str, str], ...]


def link_classes(links: Sequence[MeasuredLink]) -> list[LinkClass]:
    """Group links by speed: a gap of more than :data:`CLASS_GAP` between neighbours starts another class."""
    ordered = sorted(links, key=lambda link: -link.bandwidth_bytes_per_s.value)
    groups: list[list[MeasuredLink]] = []
    for link in ordered:
        rate = link.bandwidth_bytes_per_s.value
        if groups and groups[-1][-1].bandwidth_bytes_per_s.value / rate <= CLASS_GAP:
            groups[-1].append(link)
        else:
            groups.append([link])
    return [
        LinkClass(
            name=f"class-{number}",
            bandwidth_bytes_per_s=float(np.median([link.bandwidth_bytes_per_s.value for link in group])),
            links=tuple((link.source, link.target) for link in group),
        )
        for number, group in enumerate(groups, start=1)
    ]


def findings(links: Sequence[MeasuredLink]) -> list[str]:
    """Anomalies as sentences, worst first: degraded links, asymmetric pairs, slow hosts; each rail on its own."""
    found: list[str] = []
    for rail in dict.fromkeys(link.rail for link in links):
        rates = {(link.source, link.target): link.bandwidth_bytes_per_s.value for link in links if link.rail == rail}
        suffix = "" if rail == "default" else f" on rail {rail}"
        found += [text + suffix for text in (*_degraded(rates), *_asymmetric(rates), *_slow_hosts(rates))]
    return found


def host_speeds(rates: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Endpoint → the speed of its network interface, bytes/s."""
    speeds = {}
    for host in dict.fromkeys(end for pair in rates for end in pair):
        mine = sorted((rate for pair, rate in rates.items() if host in pair), reverse=True)
        # Two directions of one link are one link: the second best *link* is at least third.
        speeds[host] = mine[min(2, len(mine) - 1)]
    return speeds


def _degraded(rates: Mapping[tuple[str, str], float]) -> list[str]:
    speeds = host_speeds(rates)
    rows = []
    for (source, target), rate in rates.items():
        expected = min(speeds[source], speeds[target])
        if rate < DEGRADED_BELOW * expected:
            rows.append((rate / expected, source, target, rate, expected))
    return [
        f"slow link {source} -> {target}: {format_bandwidth(rate)}, {share:.0%} of the {format_bandwidth(expected)} "
        "that both ends reach elsewhere"
        for share, source, target, rate, expected in sorted(rows)
    ]


def _asymmetric(rates: Mapping[tuple[str, str], float]) -> list[str]:
    rows = []
    for (source, target), rate in rates.items():
        back = rates.get((target, source))
        if back is not None and rate > ASYMMETRIC_ABOVE * back:
            rows.append((rate / back, source, target, rate, back))
    return [
        f"asymmetric {source} / {target}: {format_bandwidth(rate)} there, {format_bandwidth(back)} back"
        for _, source, target, rate, back in sorted(rows, reverse=True)
    ]


def _slow_hosts(rates: Mapping[tuple[str, str], float]) -> list[str]:
    speeds = host_speeds(rates)
    if not speeds:
        return []
    best = max(speeds.values())
    return [
        f"slow host {host}: {format_bandwidth(speed)} on its best links, the fastest host has {format_bandwidth(best)}"
        for host, speed in sorted(speeds.items(), key=lambda item: item[1])
        if speed < SLOW_HOST_BELOW * best
    ]
