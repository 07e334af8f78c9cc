"""Pools on measured links against a count over single links."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, EvidenceLevel, NodeGroup
from meshplan.catalogs.measurements.types import ClusterProfile, MeasuredLink, Spread
from meshplan.planner.cluster.machine import Machine, machine_of
from meshplan.planner.cluster.measured_pools import measured_pools, pools_profile_problems

NAMES, COUNTS = ("dgx-h100", "aws-p3dn-24xlarge", "dgx-h200"), (2, 3, 1)
HOSTS = tuple(f"host-{number}" for number in range(sum(COUNTS)))
POOL = tuple(pool for pool, count in enumerate(COUNTS) for _ in range(count))


def machines(catalog: Catalog) -> list[Machine]:
    return [
        machine_of(Cluster(name="lab", groups=(NodeGroup(node=catalog.node_type(name), count=count),)))
        for name, count in zip(NAMES, COUNTS, strict=True)
    ]


def profiled(draw: random.Random) -> ClusterProfile:
    def some(low: float, high: float) -> Spread:
        value = draw.uniform(low, high)
        return Spread(value=value, low=value, high=value, n=1)

    links = tuple(
        MeasuredLink(
            source=one, target=other, rail="eth0", bandwidth_bytes_per_s=some(1e9, 9e9), latency_s=some(1e-6, 9e-6)
        )
        for one, other in itertools.permutations(HOSTS, 2)
    )
    return ClusterProfile(name="lab", run_id="1", measured_at="2026-11-25", endpoints=HOSTS, links=links)


@pytest.mark.parametrize("seed", range(3))
def test_the_slowest_link_of_every_two_pools_counts(catalog: Catalog, seed: int) -> None:
    profile = profiled(random.Random(seed))
    pools, between = measured_pools(machines(catalog), NAMES, profile)
    rate: dict[tuple[int, int], float] = {}
    late: dict[tuple[int, int], float] = {}
    for link in profile.links:  # every host has eight devices, which share it
        first, second = sorted((POOL[HOSTS.index(link.source)], POOL[HOSTS.index(link.target)]))
        rate[first, second] = min(rate.get((first, second), 1e99), link.bandwidth_bytes_per_s.value / 8)
        late[first, second] = max(late.get((first, second), 0.0), link.latency_s.value)
    for first, second in itertools.combinations(range(3), 2):
        assert between.bytes_per_s[first, second] == between.bytes_per_s[second, first] == rate[first, second]
        assert between.latency_s[first, second] == between.latency_s[second, first] == late[first, second]
    for pool in (0, 1):
        assert pools[pool].scale_out_bytes_per_s == rate[pool, pool]
        assert pools[pool].scale_out_latency_s == late[pool, pool]
    # A single node has no link inside that anybody measured; those to the others are measured.
    assert pools[2] == replace(machines(catalog)[2], link_level=EvidenceLevel.MEASURED)


def test_a_profile_of_fewer_hosts_is_refused(catalog: Catalog) -> None:
    profile = replace(profiled(random.Random(0)), endpoints=HOSTS[:-1])
    (problem,) = pools_profile_problems(machines(catalog), profile)
    assert "has 5 hosts, the cluster 6" in problem.message
