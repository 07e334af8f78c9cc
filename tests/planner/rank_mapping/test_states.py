"""The neighbourhoods of the local search: a candidate's energy is that of the mapping it leads to, built afresh."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.planner.rank_mapping.annealing import heat_bath
from meshplan.planner.rank_mapping.moves import available_moves
from meshplan.planner.rank_mapping.objective import LinkCosts
from meshplan.planner.rank_mapping.states import MappingStates

CHAINS = 3
SHAPES = [(2, 4), (4, 3), (3, 2), (5, 1), (2, 9), (1, 5)]


def random_costs(rng: np.random.Generator, stages: int, pipelines: int) -> LinkCosts:
    nodes = stages * pipelines
    hop, ring = rng.random((nodes, nodes)), rng.random((nodes, nodes)) * (pipelines > 1)
    hop = hop + hop.T
    np.fill_diagonal(hop, 0.0)
    np.fill_diagonal(ring, 0.0)
    return LinkCosts(num_stages=stages, num_pipelines=pipelines, hop_s=hop, ring_s=ring)


def states_of(costs: LinkCosts, lines: np.ndarray, rings: np.ndarray) -> MappingStates:
    grid = (-1, costs.num_stages, costs.num_pipelines)
    states = MappingStates(costs, lines.reshape(grid), rings.reshape(grid), ring_scale_s=0.5)
    states.set_exponent(4)
    return states


def random_states(rng: np.random.Generator, costs: LinkCosts) -> MappingStates:
    shape = (costs.num_stages, costs.num_pipelines)
    lines = np.stack([rng.permutation(costs.num_nodes).reshape(shape) for _ in range(CHAINS)])
    return states_of(costs, lines, rng.permuted(lines, axis=2))


def check_sums(costs: LinkCosts, states: MappingStates) -> None:
    """What the states say of themselves after a move is what new ones would say."""
    grid = (CHAINS, costs.num_stages, costs.num_pipelines)
    lines, rings = states.lines.reshape(grid), states.rings.reshape(grid)
    np.testing.assert_array_equal(np.sort(lines, axis=2), np.sort(rings, axis=2))
    fresh = states_of(costs, lines, rings)
    for name in ("energy_s", "objective_s", "line_cell", "ring_cell", "pipeline_s", "link_power"):
        np.testing.assert_allclose(getattr(states, name), getattr(fresh, name), rtol=1e-12)
    expected = [costs.objective_s(lines[chain], rings[chain]) for chain in range(CHAINS)]
    np.testing.assert_allclose(states.objective_s, expected, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("everybody", [True, False])
def test_the_energy_of_an_exchange_is_that_of_the_mapping_after_it(shape: tuple[int, int], *, everybody: bool) -> None:
    """Any two nodes: of different stages, of one stage, of one pipeline, neighbours in it."""
    rng = np.random.default_rng([*shape, everybody])
    costs = random_costs(rng, *shape)
    states = random_states(rng, costs)
    first = rng.integers(0, costs.num_nodes, (CHAINS, 4))
    second = np.arange(costs.num_nodes) if everybody else rng.permutation(costs.num_nodes)[1:]
    energies = states.exchange_energies_s(first, second)
    for start in range(4):
        for partner, node in enumerate(second):
            same = first[:, start] == node
            assert np.isinf(energies[same, start, partner]).all()
            moved = states_of(costs, states.lines, states.rings)
            chains = np.flatnonzero(~same)
            moved.exchange(chains, first[chains, start], np.full(len(chains), node))
            check_sums(costs, moved)
            np.testing.assert_allclose(energies[chains, start, partner], moved.energy_s[chains], rtol=1e-9)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if min(shape) > 1])
def test_the_energy_of_exchanged_segments_is_that_of_the_mapping_after_it(shape: tuple[int, int]) -> None:
    stages, pipelines = shape
    rng = np.random.default_rng(shape)
    costs = random_costs(rng, *shape)
    states = random_states(rng, costs)
    first = rng.integers(0, pipelines, (CHAINS, 20))
    second = (first + 1 + rng.integers(0, pipelines - 1, first.shape)) % pipelines
    start = rng.integers(0, stages, first.shape)
    stop = start + 1 + rng.integers(0, stages - start)
    energies = states.segment_energies_s(first, second, start, stop)
    for candidate in range(20):
        moved = states_of(costs, states.lines, states.rings)
        moved.exchange_segments(np.arange(CHAINS), *(part[:, candidate] for part in (first, second, start, stop)))
        check_sums(costs, moved)
        np.testing.assert_array_equal(moved.rings, states.rings)
        np.testing.assert_allclose(energies[:, candidate], moved.energy_s, rtol=1e-9)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1])
def test_exchanged_ring_runs(shape: tuple[int, int]) -> None:
    stages, pipelines = shape
    rng = np.random.default_rng(shape)
    costs = random_costs(rng, *shape)
    states = random_states(rng, costs)
    stage = rng.integers(0, stages, (CHAINS, 30))
    cuts = np.sort(rng.integers(0, pipelines + 1, (3, CHAINS, 30)), axis=0)
    energies = states.ring_run_energies_s(stage, cuts)
    for candidate in range(30):
        moved = states_of(costs, states.lines, states.rings)
        moved.exchange_ring_runs(np.arange(CHAINS), stage[:, candidate], cuts[:, :, candidate])
        check_sums(costs, moved)
        np.testing.assert_array_equal(moved.lines, states.lines)
        np.testing.assert_allclose(energies[:, candidate], moved.energy_s, rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_move_keeps_mappings_valid_and_sums_right(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape)
    costs = random_costs(rng, *shape)
    states = random_states(rng, costs)
    for move in available_moves(costs):
        for temperature in (0.0, 0.1, 10.0):
            move(states, np.full(CHAINS, temperature), rng)
            check_sums(costs, states)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_temperature_no_move_raises_the_energy(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape)
    costs = random_costs(rng, *shape)
    states = random_states(rng, costs)
    for move in list(available_moves(costs)) * 20:
        before = states.energy_s.copy()
        move(states, np.zeros(CHAINS), rng)
        assert (states.energy_s <= before * (1 + 1e-12)).all()


def test_candidates_are_drawn_by_their_boltzmann_weights() -> None:
    """20,000 draws of three candidates and of staying; four standard deviations of a share are 0.014."""
    draws, temperature = 20_000, 0.5
    energies, staying = np.array([1.0, 1.4, 2.0]), 1.2
    weights = np.exp(-np.array([staying, *energies]) / temperature)
    chains, taken = heat_bath(
        np.full(draws, staying), np.tile(energies, (draws, 1)), np.full(draws, temperature), np.random.default_rng(0)
    )
    counts = np.array([draws - len(chains), *np.bincount(taken, minlength=3)])
    np.testing.assert_allclose(counts / draws, weights / weights.sum(), atol=0.014)


def test_copied_chains_are_equal_and_independent() -> None:
    rng = np.random.default_rng(1)
    costs = random_costs(rng, 3, 4)
    states = random_states(rng, costs)
    states.copy_chains(np.array([0]), np.array([2]))
    check_sums(costs, states)
    kept = states.lines[2].copy()
    np.testing.assert_array_equal(states.lines[0], kept)
    states.exchange(np.array([0]), kept[:1], kept[5:6])
    np.testing.assert_array_equal(states.lines[2], kept)
    check_sums(costs, states)


def test_kept_chains_stay_as_they_are() -> None:
    rng = np.random.default_rng(3)
    costs = random_costs(rng, 3, 4)
    states = random_states(rng, costs)
    lines, energies = states.lines.copy(), states.energy_s.copy()
    states.keep_chains(np.array([2, 0]))
    np.testing.assert_array_equal(states.lines, lines[[2, 0]])
    np.testing.assert_allclose(states.energy_s, energies[[2, 0]], rtol=1e-12)
