"""Mappings of one configuration: the best of all where these can be listed, never worse than rank order, bounded."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from core_cases import MOE, configured, machine_with, problem_of

from meshplan.planner.cluster.network.network import Network, strongly_connected
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.mapping.placement import (
    ANNEALING,
    CONSTRUCTED,
    EXHAUSTIVE,
    RANK_ORDER,
    placed_problem,
    usable_order,
)
from meshplan.planner.training.search.mapping.placement_model import PlacementModel
from meshplan.planner.training.search.mapping.rank_placement import place

FAST, SLOW = 50e9, 1e9


def network_of(rates: np.ndarray, usable: tuple[int, ...] | None = None) -> Network:
    rates = rates.astype(float)
    np.fill_diagonal(rates, np.inf)
    latencies = np.full(rates.shape, 5e-6)
    np.fill_diagonal(latencies, 0.0)
    return Network(
        names=tuple(f"n{i}" for i in range(len(rates))),
        bytes_per_s=rates,
        latency_s=latencies,
        usable=tuple(range(len(rates))) if usable is None else usable,
    )


def islands(nodes: int, *, alternating: bool = True) -> np.ndarray:
    """Two halves with fast links inside."""
    side = np.arange(nodes) % 2 if alternating else np.arange(nodes) * 2 // nodes
    return np.where(side[:, None] == side, FAST, SLOW)


def problem_on(network: Network, **fields: Any) -> TrainingProblem:
    nodes = network.num_nodes
    machine = replace(machine_with(8 * nodes), network=network)
    fields = {"num_devices": 8 * nodes, "global_batch_size": 8 * nodes, **fields}
    return problem_of(machine=machine, **fields)


def by_hand(problem: TrainingProblem, config: TrainingConfig) -> float:
    """The estimator under every mapping, one by one."""
    nodes = problem.machine.network.usable
    slots = -(-config.world_size // 8)
    orders = itertools.permutations(nodes, slots)
    return min(price(placed_problem(problem, order), config).step_s for order in orders)


@pytest.mark.parametrize(
    "choices",
    [
        {"tensor_parallel": 8, "pipeline_parallel": 2, "data_parallel": 2},
        {"pipeline_parallel": 2, "data_parallel": 16, "zero_stage": 0},
        {"data_parallel": 32, "zero_stage": 3, "data_parallel_shard": 8},
        {"tensor_parallel": 8, "context_parallel": 2, "pipeline_parallel": 2, "data_parallel": 1},
        {"tensor_parallel": 8, "pipeline_parallel": 2, "data_parallel": 1},  # two spare nodes
        {"tensor_parallel": 4, "pipeline_parallel": 6, "data_parallel": 1},  # stages smaller than nodes
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_of_all_mappings_is_the_one_by_hand(choices: dict[str, int], seed: int) -> None:
    rates = np.random.default_rng(seed).uniform(1e9, 50e9, (4, 4))
    problem = problem_on(network_of(rates), global_batch_size=32)
    config = configured(problem, **choices)
    found = place(problem, config, seed=0)
    assert found.method == EXHAUSTIVE
    assert found.step_s == found.bound_s == pytest.approx(by_hand(problem, config), rel=1e-12)
    assert price(placed_problem(problem, found.order), config).step_s == pytest.approx(found.step_s, rel=1e-12)
    assert sorted(found.order) == [0, 1, 2, 3]


@pytest.mark.parametrize("nodes", [12, 24])
def test_annealing_puts_islands_together(nodes: int) -> None:
    problem = problem_on(network_of(islands(nodes)))
    config = configured(problem, tensor_parallel=8, pipeline_parallel=2, data_parallel=nodes // 2, zero_stage=0)
    found = place(problem, config, seed=0)
    assert found.method == ANNEALING
    sides = [{node % 2 for node in found.order[start : start + nodes // 2]} for start in (0, nodes // 2)]
    assert sorted(map(sorted, sides)) == [[0], [1]]  # a stage is an island; only the pipeline crosses
    assert found.step_s <= found.bound_s * 1.01


def test_nothing_is_annealed_where_a_constructed_mapping_takes_no_longer_than_the_bound() -> None:
    """Half of the nodes are enough: those of one island, whose links are the best there are."""
    problem = problem_on(network_of(islands(16)))
    found = place(problem, configured(problem, tensor_parallel=8, data_parallel=8), seed=0)
    assert found.method == CONSTRUCTED
    assert found.step_s == found.bound_s
    assert len({node % 2 for node in found.order[:8]}) == 1


@pytest.mark.parametrize("seed", range(4))
def test_bound_and_rank_order_enclose_what_annealing_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = 12
    problem = problem_on(network_of(rng.uniform(1e9, 50e9, (nodes, nodes))), shape=MOE, global_batch_size=96)
    choices: tuple[dict[str, int], ...] = (
        {"tensor_parallel": 8, "pipeline_parallel": 4, "data_parallel": 3},
        {"tensor_parallel": 2, "data_parallel": 48, "expert_parallel": 8, "zero_stage": 2, "data_parallel_shard": 16},
        {"pipeline_parallel": 3, "data_parallel": 32, "zero_stage": 3, "data_parallel_shard": 32},
        {"tensor_parallel": 8, "data_parallel": 8, "zero_stage": 0},  # four spare nodes
    )
    config = configured(problem, **choices[seed])
    model = PlacementModel(problem, config)
    rank_order = float(model.steps_s(np.array([usable_order(model.network)]))[0])
    found = place(problem, config, seed=0, steps=500)
    assert found.bound_s <= found.step_s <= rank_order
    assert found == place(problem, config, seed=0, steps=500)
    assert price(placed_problem(problem, found.order), config).step_s == pytest.approx(found.step_s, rel=1e-12)


def test_one_node_has_nothing_to_map() -> None:
    problem = problem_on(network_of(islands(2)))
    config = configured(problem, tensor_parallel=8)
    assert place(problem, config, seed=0).order in ((0, 1), (1, 0))
    assert place(problem_on(network_of(islands(1))), config, seed=0).method == RANK_ORDER


def test_an_excluded_node_holds_no_rank() -> None:
    problem = problem_on(network_of(islands(6), usable=(0, 1, 3, 4)), global_batch_size=32)
    config = configured(problem, tensor_parallel=8, data_parallel=2)
    found = place(problem, config, seed=0)
    assert set(found.order) == {0, 1, 3, 4}
    assert found.order[0] % 2 == found.order[1] % 2


@pytest.mark.parametrize("density", [0.05, 0.2, 0.6])
def test_strongly_connected_parts_are_those_of_networkx(density: float) -> None:
    links = np.random.default_rng(7).random((24, 24)) < density
    labels = strongly_connected(links)
    parts = {frozenset(np.flatnonzero(labels == label).tolist()) for label in range(int(labels.max()) + 1)}
    graph = nx.from_numpy_array(links, create_using=nx.DiGraph)
    assert parts == set(map(frozenset, nx.strongly_connected_components(graph)))
    assert list(dict.fromkeys(labels.tolist())) == sorted(set(labels.tolist()))
