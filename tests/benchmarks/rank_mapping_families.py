"""Generated rank-mapping instances: the families of link matrices that clusters show, any size, any seed.

Bandwidths are typical values (InfiniBand HDR 25 GB/s, NDR 46 GB/s, 10 Gb/s Ethernet 1.25 GB/s) with independent noise
for each direction; nodes are shuffled, so that rank order knows nothing of the islands.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.rank_mapping.problem import RankMappingProblem

Floats = NDArray[np.float64]

HDR, NDR, ETHERNET = 25e9, 46e9, 1.25e9  # bytes/s
WAN_LATENCY_S = 0.01
PIPELINE_MESSAGE_BYTES, GRADIENT_BYTES = 41_943_040.0, 3.4e9  # gradients of all stages together

# (family, P, d): what the benchmark solves.
SHAPES = (
    ("random 30 %", 4, 8),
    ("random 20 %", 8, 8),
    ("random 15 %", 8, 4),
    ("random 30 %", 4, 16),
    ("islands", 3, 8),
    ("uneven islands", 4, 8),
    ("pods", 4, 16),
    ("rails", 4, 4),
    ("random 15 %", 4, 4),
    ("random 30 %", 8, 2),
    ("pods", 3, 5),
    ("islands", 4, 4),
    ("two sites", 5, 3),
    ("slow uplink", 8, 4),
    ("slow node", 4, 4),
    ("two sites", 4, 8),
)


def problem(family: str, stages: int, pipelines: int, seed: int) -> RankMappingProblem:
    """One instance of a family of :data:`SHAPES`."""
    nodes = stages * pipelines
    rng = np.random.default_rng([seed, stages, pipelines, *family.encode()])
    bandwidth = _FAMILIES[family](rng, nodes)
    latency = (
        np.where(bandwidth < 2 * ETHERNET, WAN_LATENCY_S, 0.0) if family == "two sites" else np.zeros_like(bandwidth)
    )
    np.fill_diagonal(bandwidth, 1.0)
    np.fill_diagonal(latency, 0.0)
    return RankMappingProblem(
        name=f"{family}, {nodes} nodes, P = {stages}, d = {pipelines}, seed {seed}",
        num_nodes=nodes,
        pipeline_parallel=stages,
        data_parallel_nodes=pipelines,
        pipeline_message_bytes=PIPELINE_MESSAGE_BYTES,
        data_parallel_message_bytes=GRADIENT_BYTES / stages,
        num_microbatches_exposed=8.0,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency,
    )


def _noise(rng: np.random.Generator, nodes: int, variation: float) -> Floats:
    return np.clip(rng.normal(1.0, variation, (nodes, nodes)), 0.2, 1.8)


def _random(variation: float) -> Callable[[np.random.Generator, int], Floats]:
    return lambda rng, nodes: HDR * _noise(rng, nodes, variation)


def _groups(shares: tuple[float, ...], inside: float, across: float, variation: float) -> Callable[..., Floats]:
    """Nodes in groups of these shares of all, one bandwidth inside and one across."""

    def matrix(rng: np.random.Generator, nodes: int) -> Floats:
        ends = np.rint(np.cumsum(shares) * nodes)
        group = rng.permutation(np.searchsorted(ends, np.arange(nodes), side="right"))
        return np.where(group[:, None] == group, inside, across) * _noise(rng, nodes, variation)

    return matrix


def _one_slow(share: float, *, both_ways: bool) -> Callable[..., Floats]:
    """One node sends (and receives) at a share of the rate."""

    def matrix(rng: np.random.Generator, nodes: int) -> Floats:
        bandwidth = HDR * _noise(rng, nodes, 0.03)
        slow = rng.integers(nodes)
        bandwidth[slow] *= share
        if both_ways:
            bandwidth[:, slow] *= share
        return bandwidth

    return matrix


_FAMILIES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "random 30 %": _random(0.30),
    "random 20 %": _random(0.20),
    "random 15 %": _random(0.15),
    "islands": _groups((1 / 3, 1 / 3, 1 / 3), HDR, ETHERNET, 0.06),
    "uneven islands": _groups((3 / 8, 3 / 8, 1 / 4), HDR, ETHERNET, 0.06),
    "pods": _groups((1 / 4,) * 4, NDR, NDR / 3, 0.08),
    "rails": _groups((1 / 4,) * 4, NDR, NDR / 2, 0.02),
    "slow uplink": _one_slow(1 / 3, both_ways=False),
    "slow node": _one_slow(1 / 8, both_ways=True),
    "two sites": _groups((1 / 2, 1 / 2), HDR, ETHERNET, 0.03),
}
