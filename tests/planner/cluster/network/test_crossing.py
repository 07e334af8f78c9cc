"""Bounds of layouts that cross a cut, against every mapping; which way each mapping crosses is found rank by rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, MOE, configured, machine_with, problem_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshplan.planner.cluster.network.crossing import CrossingLinks, Cut, Way, slow_cut
from meshplan.planner.cluster.network.network import Network, Trunk
from meshplan.planner.cluster.network.network_model import BestLinks
from meshplan.planner.training.estimator.priced import candidates_of, price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.bounds.crossing_bounds import LeastSteps
from meshplan.planner.training.search.mapping.placement_model import PlacementModel

DOMAIN = 4


def sites(sizes: tuple[int, ...], seed: int, *, with_trunks: bool) -> tuple[Network, np.ndarray]:
    """Fast links inside sites, slow ones between them, and the site of each node; nodes in random order."""
    rng = np.random.default_rng(seed)
    site = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    nodes = len(site)
    inside = site[:, None] == site
    rates = np.where(inside, rng.uniform(20e9, 30e9, (nodes, nodes)), rng.uniform(0.5e9, 2e9, (nodes, nodes)))
    latency = np.where(inside, 5e-6, rng.uniform(1e-4, 3e-2, (nodes, nodes)))
    np.fill_diagonal(rates, np.inf)
    np.fill_diagonal(latency, 0.0)
    trunks = tuple(
        Trunk(name=f"{i} → {j}", senders=site == i, receivers=site == j, bytes_per_s=rng.uniform(0.1e9, 1e9))
        for i, j in itertools.permutations(range(len(sizes)), 2)
        if with_trunks and rng.random() < 0.8
    )
    names = tuple(f"n{i}" for i in range(nodes))
    usable = tuple(range(nodes))
    network = Network(names=names, bytes_per_s=rates, latency_s=latency, usable=usable, trunks=trunks)
    return network, site


def is_whole(part_of_rank: list[int], size: int) -> bool:
    """Whether all blocks of so many ranks lie in one part each."""
    blocks = (part_of_rank[start : start + size] for start in range(0, len(part_of_rank), size))
    return all(len(set(block)) == 1 for block in blocks)


def ways_of(config: TrainingConfig, part_of_rank: list[int]) -> set[Way]:
    """How a layout crosses, rank by rank: every case of which some stage is an example; none if it lies in one part."""
    if len(set(part_of_rank)) == 1:
        return set()
    stage = config.world_size // config.pipeline_parallel
    crosses = any(a != b for a, b in zip(part_of_rank, part_of_rank[stage:], strict=False))
    tensor = config.tensor_parallel
    shard = tensor * config.context_parallel * config.data_parallel_shard
    if not is_whole(part_of_rank, tensor):
        return {Way.TENSOR}
    stages = [part_of_rank[start : start + stage] for start in range(0, len(part_of_rank), stage)]
    split = [own for own in stages if not is_whole(own, shard)]
    if split:
        alike = {all(own[start : start + shard] == own[:shard] for start in range(0, stage, shard)) for own in split}
        if crosses:
            names = {True: Way.SHARDS_AND_PIPELINES, False: Way.SHARDS_AND_COPIES_AND_PIPELINES}
        else:
            names = {True: Way.SHARDS, False: Way.SHARDS_AND_COPIES}
        return {names[one] for one in alike}
    if not is_whole(part_of_rank, stage):
        return {Way.COPIES_AND_PIPELINES if crosses else Way.COPIES}
    return {Way.STAGES}


def bounds_of(problem: TrainingProblem, cut: Cut, config: TrainingConfig) -> dict[Way, float]:
    """The bound of each way that is possible."""
    best = BestLinks(network=cut.network, domain_size=DOMAIN)
    found = {}
    for way in Way:
        model = CrossingLinks(cut=cut, way=way, best=best)
        degrees = candidates_of(problem, config).degrees
        if model.is_possible(degrees)[0]:
            assert model.is_possible(degrees, any_sharding=True)[0]
            crossing = replace(problem, machine=replace(problem.machine, network_model=model))
            found[way] = price(crossing, config).step_s
    return found


# Sites, then degrees of tensor, context, data and pipeline parallelism on more nodes than the largest has.
LAYOUTS = [
    (sizes, degrees)
    for sizes in [(2, 2), (3, 1), (2, 2, 1), (3, 2)]
    for degrees in itertools.product([1, 2, 4, 8], [1, 2], [1, 2, 3, 4, 6, 8], [1, 2, 3, 4])
    if max(sizes) * DOMAIN < np.prod(degrees) <= sum(sizes) * DOMAIN
]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([DENSE, MOE]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 10_000),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
    st.booleans(),
)
# All stages are split because no pipeline crosses: not twice as many because one stage cannot be split alone.
@example(DENSE, ((2, 2), (2, 1, 4, 2)), 0, 0, False, True)
def test_no_mapping_beats_the_bound_of_its_way(shape, layout, seed, zero, in_groups, with_trunks) -> None:
    sizes, (t, c, d, p) = layout
    network, site = sites(sizes, seed, with_trunks=with_trunks)
    world = t * c * d * p
    machine = machine_with(len(site) * DOMAIN, domain_size=DOMAIN, network=network)
    problem = problem_of(shape, num_devices=len(site) * DOMAIN, machine=machine, global_batch_size=24)
    shard = {"data_parallel_shard": 2} if in_groups and zero and d % 2 == 0 else {}
    config = configured(
        problem, tensor_parallel=t, context_parallel=c, data_parallel=d, pipeline_parallel=p, zero_stage=zero, **shard
    )
    cut = slow_cut(network, DOMAIN)
    assert cut is not None
    assert len(set(zip(cut.parts.tolist(), site.tolist(), strict=True))) == len(sizes)
    bounds = bounds_of(problem, cut, config)
    orders = np.array(list(itertools.permutations(range(len(site)), -(-world // DOMAIN))))
    steps = PlacementModel(problem, config).steps_s(orders)
    assert steps.min() >= LeastSteps(problem, network).of(config) * (1.0 - 1e-9)
    best = BestLinks(network=network, domain_size=DOMAIN)
    anywhere = price(replace(problem, machine=replace(machine, network_model=best)), config).step_s
    for order, step in zip(orders.tolist(), steps.tolist(), strict=True):
        ways = ways_of(config, [int(site[order[rank // DOMAIN]]) for rank in range(world)])
        assert ways
        for way in ways:
            assert way in bounds
            assert step >= bounds[way] * (1.0 - 1e-9)
            assert bounds[way] >= anywhere * (1.0 - 1e-9)


def test_the_bound_of_a_trunk_is_attained() -> None:
    """Data parallelism over two sites: what crosses is the ring of every tensor rank, once each way."""
    network, site = sites((2, 2), 3, with_trunks=False)
    trunks = tuple(Trunk(name="line", senders=site == i, receivers=site == 1 - i, bytes_per_s=0.05e9) for i in range(2))
    even = np.where(site[:, None] == site, 25e9, 0.05e9)
    np.fill_diagonal(even, np.inf)
    network = replace(network, bytes_per_s=even, latency_s=np.full((4, 4), 1e-5), trunks=trunks)
    machine = machine_with(16, domain_size=DOMAIN, network=network)
    problem = problem_of(num_devices=16, machine=machine)
    for choices in ({"data_parallel": 16}, {"data_parallel": 8, "pipeline_parallel": 2, "zero_stage": 0}):
        config = configured(problem, **choices)
        cut = slow_cut(network, DOMAIN)
        assert cut is not None
        steps = PlacementModel(problem, config).steps_s(np.array(list(itertools.permutations(range(4)))))
        assert min(bounds_of(problem, cut, config).values()) == pytest.approx(float(steps.min()), rel=0.01)


def test_a_network_without_a_slow_cut_has_none() -> None:
    even = np.full((4, 4), 25e9)
    np.fill_diagonal(even, np.inf)
    network = Network(names=("a", "b", "c", "d"), bytes_per_s=even, latency_s=np.zeros((4, 4)), usable=(0, 1, 2, 3))
    assert slow_cut(network, DOMAIN) is None
    leaf = np.array([True, True, False, False])
    up = Trunk(name="up", senders=leaf, receivers=~leaf, bytes_per_s=10e9)
    cut = slow_cut(replace(network, trunks=(up,)), DOMAIN)
    assert cut is not None
    assert cut.parts.tolist() == [0, 0, 1, 1]
