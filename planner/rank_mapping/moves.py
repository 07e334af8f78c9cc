"""Moves of the local search of rank mappings.

Each function evaluates many candidates of one kind in every mapping at once and makes at most one move in each. The
choice is a heat bath: candidate i of energy Eᵢ is taken with probability ∝ exp(−Eᵢ/T), and the mapping stays as it is
with the weight of one candidate. Where few candidates are good, this wastes less work than rejecting proposals one by
one. Half of the candidates start on the critical path: at a node of the slowest pipeline, at an end of the slowest ring
link, or with a cut at that link.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.annealing import heat_bath
from meshplan.planner.rank_mapping.objective import NUM_NODES_WITH_ONE_RING, LinkCosts
from meshplan.planner.rank_mapping.states import MappingStates

# Candidates of one step in one mapping. Chosen with tests/benchmarks/rank_mapping.py, as are the shares below.
MAX_STARTS = 4  # nodes for which partners are tried
MAX_PARTNERS, LEAST_PARTNERS = 64, 16
# Partners × nodes: a large job has good moves everywhere, and long rings that cost more to evaluate.
PARTNER_NODES = 16_384
NUM_SEGMENTS, NUM_RING_RUNS = 48, 48

# Of the steps, where all kinds of moves are possible; shares of those that are not go to the others.
NODES_SHARE, SEGMENTS_SHARE, RING_RUNS_SHARE = 0.6, 0.2, 0.2

COIN = 0.5
NEAR_CUT_PLACES = 3  # largest distance of the second cut from the slowest link, in half of the cases

Move = Callable[[MappingStates, FloatArray, np.random.Generator], None]


def available_moves(costs: LinkCosts) -> dict[Move, float]:
    """Kinds of move that can change the objective, each with its share of the steps; empty when none can."""
    lines, rings = costs.num_stages > 1, costs.num_pipelines > NUM_NODES_WITH_ONE_RING
    shares: dict[Move, float] = {}
    if lines:
        shares[exchange_nodes] = NODES_SHARE
        if costs.num_pipelines > 1:
            shares[exchange_segments] = SEGMENTS_SHARE
    if rings:
        shares[exchange_ring_runs] = RING_RUNS_SHARE
    total = sum(shares.values())
    return {move: share / total for move, share in shares.items()}


def exchange_nodes(states: MappingStates, temperature_s: FloatArray, rng: np.random.Generator) -> None:
    """Exchange some nodes, half of them critical, with all others (with a sample where there are many)."""
    chain, shape = np.arange(states.num_chains)[:, None], (states.num_chains, min(MAX_STARTS, states.num_nodes))
    first = _index(rng.random(shape), states.num_nodes)
    critical = shape[1] // 4
    stage = _index(rng.random((states.num_chains, critical)), states.stages)
    first[:, :critical] = states.lines[chain, stage * states.pipelines + states.pipeline_s.argmax(axis=1)[:, None]]
    if states.pipelines > 1:
        sender = states.link_power.argmax(axis=1)
        place = sender % states.pipelines
        first[:, critical] = states.rings[chain[:, 0], sender]
        first[:, critical + 1] = states.rings[chain[:, 0], sender - place + (place + 1) % states.pipelines]
    partners = max(LEAST_PARTNERS, min(MAX_PARTNERS, PARTNER_NODES // states.num_nodes))
    everybody = np.arange(states.num_nodes)
    second = everybody if len(everybody) <= partners else rng.choice(everybody, partners, replace=False)
    energies = states.exchange_energies_s(first, second).reshape(states.num_chains, -1)
    chains, taken = heat_bath(states.energy_s, energies, temperature_s, rng)
    if chains.size:
        states.exchange(chains, first[chains, taken // len(second)], second[taken % len(second)])


def exchange_segments(states: MappingStates, temperature_s: FloatArray, rng: np.random.Generator) -> None:
    """Exchange segments of two pipelines, in half of the cases of the slowest: tails, runs of stages, single stages."""
    shape = (states.num_chains, NUM_SEGMENTS)
    first = _index(rng.random(shape), states.pipelines)
    first[:, : NUM_SEGMENTS // 2] = states.pipeline_s.argmax(axis=1)[:, None]
    second = (first + 1 + _index(rng.random(shape), states.pipelines - 1)) % states.pipelines
    start = _index(rng.random(shape), states.stages)
    stop = start + 1 + _index(rng.random(shape), states.stages - start)
    stop[:, ::2] = states.stages
    energies = states.segment_energies_s(first, second, start, stop)
    chains, taken = heat_bath(states.energy_s, energies, temperature_s, rng)
    if chains.size:
        at = (chains, taken)
        states.exchange_segments(chains, first[at], second[at], start[at], stop[at])


def exchange_ring_runs(states: MappingStates, temperature_s: FloatArray, rng: np.random.Generator) -> None:
    """Exchange two neighbouring runs of a ring, in half of the cases cut at its slowest link; one is often short."""
    shape, size, half = (states.num_chains, NUM_RING_RUNS), states.pipelines, NUM_RING_RUNS // 2
    cuts = _index(rng.random((3, *shape)), size + 1)
    stage = _index(rng.random(shape), states.stages)
    cell = states.link_power.argmax(axis=1)[:, None]
    cut = cell % size + 1
    stage[:, :half], cuts[0, :, :half] = cell // size, cut
    near = (cut + 1 + _index(rng.random((states.num_chains, half)), NEAR_CUT_PLACES)) % (size + 1)
    cuts[1, :, :half:2] = near[:, ::2]
    cuts.sort(axis=0)
    energies = states.ring_run_energies_s(stage, cuts)
    chains, taken = heat_bath(states.energy_s, energies, temperature_s, rng)
    if chains.size:
        states.exchange_ring_runs(chains, stage[chains, taken], cuts[:, chains, taken])


def _index(uniform: FloatArray, size: IntArray | int) -> IntArray:
    """Uniform numbers in [0, 1) → whole numbers 0 … size − 1."""
    return np.asarray((uniform * size).astype(np.int64))
