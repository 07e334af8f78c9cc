"""The moves of the local search: incremental energies equal those of states built afresh, and undo undoes."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.planner.solvers.rank_mapping_objective import LinkCosts
from meshplan.planner.solvers.rank_mapping_states import MappingStates

CHAINS = 5


def random_costs(rng: np.random.Generator, stages: int, pipelines: int) -> LinkCosts:
    nodes = stages * pipelines
    hop, ring = rng.random((nodes, nodes)), rng.random((nodes, nodes))
    hop = hop + hop.T
    np.fill_diagonal(hop, 0.0)
    np.fill_diagonal(ring, 0.0)
    return LinkCosts(num_stages=stages, num_pipelines=pipelines, hop_s=hop, ring_s=ring)


def random_states(rng: np.random.Generator, costs: LinkCosts) -> MappingStates:
    shape = (costs.num_stages, costs.num_pipelines)
    lines = np.stack([rng.permutation(costs.num_nodes).reshape(shape) for _ in range(CHAINS)])
    states = MappingStates(costs, lines, rng.permuted(lines, axis=2), ring_scale_s=0.5)
    states.set_exponent(3)
    return states


def propose(rng: np.random.Generator, states: MappingStates) -> np.ndarray:
    size, stages = states.pipelines, states.stages
    kind = rng.integers(3)
    if kind == 0:
        cells = np.array([rng.choice(stages, 2, replace=False) for _ in range(CHAINS)]) * size
        cells += rng.integers(0, size, (CHAINS, 2))
        first, second = (states.lines[states.chain, cells[:, side]] for side in (0, 1))
        return states.exchange_nodes(first, second)
    if kind == 1 and size > 1:
        first = rng.integers(0, size, CHAINS)
        start = rng.integers(0, stages, CHAINS)
        return states.exchange_segments(first, (first + 1) % size, start, start + 1 + rng.integers(0, stages, CHAINS))
    return states.exchange_ring_runs(
        rng.integers(0, stages, CHAINS), np.sort(rng.integers(0, size + 1, (3, CHAINS)), axis=0)
    )


@pytest.mark.parametrize("shape", [(2, 4), (4, 3), (3, 2), (5, 1), (2, 9)])
def test_incremental_energies_equal_fresh_ones(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape)
    costs = random_costs(rng, *shape)
    states = random_states(rng, costs)
    grid = (CHAINS, *shape)
    for _ in range(120):
        before = states.energy_s
        proposed = propose(rng, states)
        accepted = rng.random(CHAINS) < 0.5
        states.settle(accepted)
        np.testing.assert_allclose(states.energy_s, np.where(accepted, proposed, before), rtol=1e-12)
        lines, rings = states.lines.reshape(grid), states.rings.reshape(grid)
        fresh = MappingStates(costs, lines, rings, ring_scale_s=0.5)
        fresh.set_exponent(3)
        np.testing.assert_allclose(states.energy_s, fresh.energy_s, rtol=1e-12)
        np.testing.assert_array_equal(states.line_cell, fresh.line_cell)
        np.testing.assert_array_equal(states.ring_cell, fresh.ring_cell)
        np.testing.assert_array_equal(np.sort(lines, axis=2), np.sort(rings, axis=2))
        expected = [costs.objective_s(lines[chain], rings[chain]) for chain in range(CHAINS)]
        np.testing.assert_allclose(states.objective_s(), expected, rtol=1e-12)


def test_copied_chains_are_equal_and_independent() -> None:
    rng = np.random.default_rng(1)
    states = random_states(rng, random_costs(rng, 3, 4))
    states.copy_chains(np.array([0, 1]), np.array([4, 3]))
    np.testing.assert_array_equal(states.lines[0], states.lines[4])
    propose(rng, states)
    states.settle(np.arange(CHAINS) == 0)
    assert sorted(states.lines[4]) == list(range(12))


def test_the_promising_partner_is_mostly_among_the_best() -> None:
    """The first-order choice is no worse than the median of all candidates in nine of ten chains or more."""
    rng = np.random.default_rng(2)
    costs = random_costs(rng, 4, 4)
    good = 0
    for _ in range(40):
        states = random_states(rng, costs)
        first = states.lines[:, 0]
        candidates = np.stack([rng.permutation(row[4:])[:8] for row in states.lines])
        chosen = states.most_promising(first, candidates)
        energies = []
        for second in [*candidates.T, chosen]:
            energies.append(states.exchange_nodes(first, second))
            states.settle(np.zeros(CHAINS, dtype=bool))
        good += int((energies[-1] <= np.median(energies[:-1], axis=0)).sum())
    assert good >= 0.9 * 40 * CHAINS
