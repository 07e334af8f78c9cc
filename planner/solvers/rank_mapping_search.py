"""Local search for rank mappings: annealing of many chains at once, started from constructed and random layouts.

Each step proposes one small move in every chain (NumPy works on all chains at once, which pays for the interpreter),
accepts by the Metropolis rule on the smooth energy of :class:`MappingStates`, and remembers the best true objective.
From time to time the worst chains restart from the best ones. Work is counted in steps, never in seconds, so that
one seed gives one answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshplan.planner.solvers.rank_mapping_objective import NUM_NODES_WITH_ONE_RING, Floats, Ints, LinkCosts
from meshplan.planner.solvers.rank_mapping_states import MappingStates

# Chosen on random, island and degraded-link matrices of 16 to 64 nodes (tests/benchmarks/rank_mapping.py).
CHAIN_NODES = 2048  # nodes of all chains together, so that a step of a large job costs little more than a small one's
MIN_CHAINS, MAX_CHAINS = 12, 32
NORM_DOUBLINGS = (5, 6)  # p = 32, then 64: smooth first, close to the maximum later
START_TEMPERATURE = 1e-2  # of the best energy at the start: accepts what loses about a percent
END_TEMPERATURE = 2e-4
COLDER_BEYOND_NODES = 64  # one move changes the energy of a larger job less
NUM_RESAMPLINGS = 40
RESAMPLED_FRACTION = 0.25
CRITICAL_PIPELINE_SHARE = 1 / 3  # of node exchanges that start in the slowest pipeline; as many at the slowest link
NUM_CANDIDATES = 8  # partners looked at for one node exchange
MOVE_SHARES = (0.5, 0.25, 0.25)  # node exchange, segment exchange, ring runs

# Small jobs need steps in proportion to n³; the cap keeps 64 nodes within seconds and 1,024 nodes within a minute.
STEPS_PER_NODE_CUBED = 0.6
MAX_STEPS = 16_000
MAX_STEPS_PER_NODE = 16
CLOCK_CHECK_STEPS = 64

COIN = 0.5
SLOWEST_LINK_SHARE = 0.6  # of ring moves that cut at the slowest link
NEAR_CUT_PLACES = 3  # how far from that cut the next one mostly lies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The best mapping of a search: [P, d] lines and rings, and its objective."""

    lines: Ints
    rings: Ints
    objective_s: float


def default_steps(num_nodes: int) -> int:
    """Steps of one search."""
    return int(min(STEPS_PER_NODE_CUBED * num_nodes**3, MAX_STEPS + MAX_STEPS_PER_NODE * num_nodes))


def default_chains(num_nodes: int) -> int:
    """Chains of one search."""
    return max(MIN_CHAINS, min(MAX_CHAINS, CHAIN_NODES // num_nodes))


def identity_lines(costs: LinkCosts) -> Ints:
    """[P, d] default layout: node(r, q) = q·d + r."""
    return np.arange(costs.num_nodes, dtype=np.int64).reshape(costs.num_stages, costs.num_pipelines)


def neighbourly_order(costs: LinkCosts) -> Ints:
    """[n] nodes such that well connected ones stand together: leaves of the single-linkage tree of the links."""
    closeness = np.maximum(costs.ring_s, costs.ring_s.T) if costs.num_pipelines > 1 else costs.hop_s
    left, right = np.triu_indices(costs.num_nodes, k=1)
    groups = {node: [node] for node in range(costs.num_nodes)}
    group_of = list(range(costs.num_nodes))
    for link in np.argsort(closeness[left, right], kind="stable"):
        large, small = group_of[left[link]], group_of[right[link]]
        if large == small:
            continue
        if len(groups[large]) < len(groups[small]):
            large, small = small, large
        moved = groups.pop(small)
        groups[large] += moved
        for node in moved:
            group_of[node] = large
        if len(groups) == 1:
            break
    return np.array(next(iter(groups.values())), dtype=np.int64)


def starting_lines(costs: LinkCosts, num_chains: int, rng: np.random.Generator) -> Ints:
    """[K, P, d]: half constructed (neighbours share a stage, or a pipeline; by index and by links), half random."""
    stages, pipelines, nodes = costs.num_stages, costs.num_pipelines, costs.num_nodes
    orders = (np.arange(nodes), neighbourly_order(costs))
    layouts = [
        layout for order in orders for layout in (order.reshape(stages, pipelines), order.reshape(pipelines, stages).T)
    ]
    # Which island is the first stage matters and no small move changes it: every copy has its own order of stages.
    constructed = [
        layouts[chain % len(layouts)][rng.permutation(stages) if chain >= len(layouts) else np.arange(stages)]
        for chain in range(num_chains // 2)
    ]
    random = [rng.permutation(nodes).reshape(stages, pipelines) for _ in range(num_chains - len(constructed))]
    return np.stack([*constructed, *random])


def anneal(
    costs: LinkCosts,
    *,
    seed: int,
    steps: int,
    ring_scale_s: float,
    deadline_s: float | None = None,
    on_improvement: Callable[[float], None] | None = None,
) -> Found:
    """The best mapping found in ``steps`` steps.

    Args:
        costs: of the links.
        seed: of the pseudo-random choices.
        steps: moves proposed in every chain.
        ring_scale_s: a ring time near the best one (see :class:`MappingStates`).
        deadline_s: value of ``time.monotonic()`` after which to stop; None for the whole work.
        on_improvement: told the best objective at every resampling that improved it.
    """
    rng = np.random.default_rng(seed)
    num_chains = default_chains(costs.num_nodes)
    lines = starting_lines(costs, num_chains, rng)
    states = MappingStates(costs, lines, lines, ring_scale_s=ring_scale_s)
    moves = _available_moves(costs)
    best, best_lines, best_rings = states.objective_s(), states.lines.copy(), states.rings.copy()
    if moves is None:
        steps = 0
    kinds = rng.choice(len(MOVE_SHARES), size=steps, p=moves) if steps else np.zeros(0, dtype=np.int64)
    told = float(best.min())
    phase = -(-steps // len(NORM_DOUBLINGS)) if steps else 1
    resample_every = max(1, steps // NUM_RESAMPLINGS)
    scale_s = 0.0
    start_temperature = START_TEMPERATURE * min(1.0, COLDER_BEYOND_NODES / costs.num_nodes)
    for step in range(steps):
        if step % phase == 0:
            states.set_exponent(NORM_DOUBLINGS[step // phase])
            scale_s = scale_s or float(states.energy_s.min())
        if step and step % resample_every == 0:
            _resample(states)
            if on_improvement is not None and best.min() < told:
                told = float(best.min())
                on_improvement(told)
        if deadline_s is not None and step % CLOCK_CHECK_STEPS == 0 and time.monotonic() > deadline_s:
            break
        cooling = (END_TEMPERATURE / START_TEMPERATURE) ** (step / steps)
        slack = scale_s * start_temperature * cooling * rng.exponential(size=num_chains)
        limit = states.energy_s + slack
        states.settle(_PROPOSALS[kinds[step]](states, rng) <= limit)
        objective = states.objective_s()
        better = np.flatnonzero(objective < best)
        if better.size:
            best[better] = objective[better]
            best_lines[better], best_rings[better] = states.lines[better], states.rings[better]
    winner = int(best.argmin())
    shape = (costs.num_stages, costs.num_pipelines)
    found_lines, found_rings = best_lines[winner].reshape(shape), best_rings[winner].reshape(shape)
    return Found(lines=found_lines, rings=found_rings, objective_s=costs.objective_s(found_lines, found_rings))


def _available_moves(costs: LinkCosts) -> list[float] | None:
    """Shares of the kinds of move that can change anything here; None when none can."""
    lines, rings = costs.num_stages > 1, costs.num_pipelines > NUM_NODES_WITH_ONE_RING
    possible = (lines, lines and costs.num_pipelines > 1, rings)
    shares = [share if able else 0.0 for share, able in zip(MOVE_SHARES, possible, strict=True)]
    total = sum(shares)
    return [share / total for share in shares] if total else None


def _resample(states: MappingStates) -> None:
    order = np.argsort(states.energy_s, kind="stable")
    count = int(RESAMPLED_FRACTION * states.num_chains)
    states.copy_chains(order[-count:], order[:count])


def _index(uniform: Floats, size: int) -> Ints:
    """Uniform numbers in [0, 1) → whole numbers 0 … size − 1."""
    return (uniform * size).astype(np.int64)


def _propose_node_exchange(states: MappingStates, rng: np.random.Generator) -> Floats:
    """A node of the slowest pipeline, of the slowest link, or any, against any node of another stage."""
    uniform = rng.random((5, states.num_chains))
    pick = uniform[0, 0]
    if pick < CRITICAL_PIPELINE_SHARE:
        cell = _index(uniform[1], states.stages) * states.pipelines + states.slowest_pipeline()
        first = states.lines[states.chain, cell]
    elif pick < 2 * CRITICAL_PIPELINE_SHARE:
        sender = states.slowest_ring_cell()
        place = sender % states.pipelines
        receiver = sender - place + (place + 1) % states.pipelines
        first = states.rings[states.chain, np.where(uniform[1] < COIN, sender, receiver)]
    else:
        first = _index(uniform[1], states.num_nodes)
    stage = states.line_cell[states.chain, first] // states.pipelines
    candidates = _candidates(states, first, stage, rng)
    second = states.most_promising(first, candidates) if states.pipelines > 1 else candidates[:, 0]
    return states.exchange_nodes(first, second)


def _candidates(states: MappingStates, first: Ints, stage: Ints, rng: np.random.Generator) -> Ints:
    """[K, m] nodes of other stages: half any, half near a neighbour that ``first`` has in its pipeline or ring."""
    size, half = states.pipelines, NUM_CANDIDATES // 2
    uniform = rng.random((2, states.num_chains, NUM_CANDIDATES))
    other_stage = (stage[:, None] + 1 + _index(uniform[0], states.stages - 1)) % states.stages
    candidates = states.lines[states.chain[:, None], other_stage * size + _index(uniform[1], size)]
    coins = rng.random((2, states.num_chains))
    if coins[0, 0] < COIN:
        step = np.where((coins[1] < COIN) & (stage > 0) | (stage == states.stages - 1), -size, size)
        anchor = states.lines[states.chain, states.line_cell[states.chain, first] + step]
        near = states.near_by_hop
    else:
        cell = states.ring_cell[states.chain, first]
        anchor = states.rings[states.chain, cell - cell % size + (cell - 1) % size]
        near = states.near_by_ring
    close = near[anchor[:, None], _index(rng.random((states.num_chains, half)), near.shape[1])]
    same_stage = states.line_cell[states.chain[:, None], close] // size == stage[:, None]
    candidates[:, :half] = np.where(same_stage, candidates[:, :half], close)
    return np.asarray(candidates)


def _propose_segment_exchange(states: MappingStates, rng: np.random.Generator) -> Floats:
    """The slowest pipeline, or any, against any other: a tail or a single stage."""
    uniform = rng.random((5, states.num_chains))
    first = states.slowest_pipeline() if uniform[0, 0] < COIN else _index(uniform[1], states.pipelines)
    second = (first + 1 + _index(uniform[2], states.pipelines - 1)) % states.pipelines
    start = _index(uniform[3], states.stages)
    return states.exchange_segments(first, second, start, np.where(uniform[4] < COIN, states.stages, start + 1))


def _propose_ring_runs(states: MappingStates, rng: np.random.Generator) -> Floats:
    """Two neighbouring runs of one ring; mostly with the slowest link as one of the cuts and a short run beside it."""
    uniform = rng.random((5, states.num_chains))
    size = states.pipelines
    cuts = _index(uniform[1:4], size + 1)
    stage = _index(uniform[4], states.stages)
    if uniform[0, 0] < SLOWEST_LINK_SHARE:
        cell = states.slowest_ring_cell()
        stage, cut = cell // size, cell % size + 1
        near = (cut + 1 + _index(uniform[2], NEAR_CUT_PLACES)) % (size + 1)
        cuts = np.stack([cut, np.where(uniform[1] < COIN, near, cuts[1]), cuts[2]])
    return states.exchange_ring_runs(stage, np.sort(cuts, axis=0))


_PROPOSALS = (_propose_node_exchange, _propose_segment_exchange, _propose_ring_runs)
