"""Local search for rank mappings: annealing of a few chains at once, started from constructed and random layouts.

Each step draws one move in every chain from a neighbourhood evaluated whole (``rank_mapping_moves``; NumPy works on all
candidates of all chains at once, which pays for the interpreter), on the smooth energy of :class:`MappingStates`, and
remembers the best true objective. From time to time the worst chains restart from the best ones. Work is counted in
steps, never in seconds, so that one seed gives one answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.moves import available_moves
from meshplan.planner.rank_mapping.objective import LinkCosts, best_rings
from meshplan.planner.rank_mapping.states import MappingStates

# Chosen on generated instances of all families of tests/benchmarks/rank_mapping_families.py.
# Share of the steps done → chains: many at first, because no small move changes which island holds which stage; then
# only the best, whose longer search is worth more.
CHAINS = ((0.0, 32), (0.1, 16), (0.2, 8))
CHAIN_NODES = 2048  # of all chains together: large jobs need their steps more than company
LEAST_CHAIN_SHARE = 0.25  # so that at least one chain starts from each constructed layout
NORM_DOUBLINGS = (5, 6)  # p = 32, then 64: smooth first, close to the maximum later
START_TEMPERATURE = 8e-3  # of the best energy at the start; islands need it to come to the right stages
END_TEMPERATURE = 5e-4  # below it nothing moves any more
TEMPERATURE_SPREAD = 2.0  # between the warmest and the coldest chain
COLDER_BEYOND_NODES, COLDER_POWER = 64, 1.5  # one move changes the energy of a larger job less
NUM_RESAMPLINGS = 40
RESAMPLED_FRACTION = 0.25

# Small jobs need few steps and have an exact search besides. A step costs about as much as (STEP_OVERHEAD_NODES + n)
# nodes, which keeps 32 and 64 nodes within seconds; LARGE_STEPS_PER_NODE of 1,024 nodes stay within a minute.
STEPS_PER_NODE_POWER_4 = 1 / 64
STEP_OVERHEAD_NODES = 256
MAX_NODE_STEPS = 3_000_000
LARGE_STEPS_PER_NODE = 18
CLOCK_CHECK_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The best mapping of a search: [P, d] lines and rings, and its objective."""

    lines: IntArray
    rings: IntArray
    objective_s: float


def default_steps(num_nodes: int) -> int:
    """Steps of one search."""
    affordable = max(MAX_NODE_STEPS / (STEP_OVERHEAD_NODES + num_nodes), LARGE_STEPS_PER_NODE * num_nodes)
    return int(min(STEPS_PER_NODE_POWER_4 * num_nodes**4, affordable))


def _affordable(chains: int, num_nodes: int) -> int:
    return max(int(LEAST_CHAIN_SHARE * chains), min(chains, CHAIN_NODES // num_nodes))


def identity_lines(costs: LinkCosts) -> IntArray:
    """[P, d] default layout: node(r, q) = q·d + r."""
    return np.arange(costs.num_nodes, dtype=np.int64).reshape(costs.num_stages, costs.num_pipelines)


def neighbourly_order(costs: LinkCosts) -> IntArray:
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


def starting_lines(costs: LinkCosts, num_chains: int, rng: np.random.Generator) -> IntArray:
    """[K, P, d]: half constructed (neighbours share a stage, or a pipeline; by index and by links), half random."""
    stages, pipelines, nodes = costs.num_stages, costs.num_pipelines, costs.num_nodes
    orders = (neighbourly_order(costs), np.arange(nodes))
    layouts = [order.reshape(stages, pipelines) for order in orders]
    layouts += [order.reshape(pipelines, stages).T for order in orders]
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
        steps: moves looked for in every chain.
        ring_scale_s: a ring time near the best one (see :class:`MappingStates`).
        deadline_s: value of ``time.monotonic()`` after which to stop; None for the whole work.
        on_improvement: told the best objective at every resampling that improved it.
    """
    rng = np.random.default_rng(seed)
    chains = {int(share * steps): _affordable(count, costs.num_nodes) for share, count in CHAINS}
    lines = starting_lines(costs, chains[0], rng)
    states = MappingStates(costs, lines, lines, ring_scale_s=ring_scale_s)
    best = _Best(states)
    shares = available_moves(costs)
    moves = list(shares)
    kinds = rng.choice(len(moves), size=steps, p=list(shares.values())) if moves else np.zeros(0, dtype=np.int64)
    told = float(best.values_s.min())
    phase = -(-steps // len(NORM_DOUBLINGS))
    resample_every = max(1, steps // NUM_RESAMPLINGS)
    scale_s = 0.0
    start_temperature = START_TEMPERATURE * min(1.0, (COLDER_BEYOND_NODES / costs.num_nodes) ** COLDER_POWER)
    for step, kind in enumerate(kinds):
        if step % phase == 0:
            states.set_exponent(NORM_DOUBLINGS[step // phase])
            scale_s = scale_s or float(states.energy_s.min())
        if step and step % resample_every == 0:
            _resample(states)
            if on_improvement is not None and best.values_s.min() < told:
                told = float(best.values_s.min())
                on_improvement(told)
        if chains.get(step, states.num_chains) < states.num_chains:
            states.keep_chains(np.argsort(states.energy_s, kind="stable")[: chains[step]])
        if step in chains or step % resample_every == 0:
            warmth = _warmth(states)
        if deadline_s is not None and step % CLOCK_CHECK_STEPS == 0 and time.monotonic() > deadline_s:
            break
        cooling = (END_TEMPERATURE / START_TEMPERATURE) ** (step / steps)
        moves[kind](states, scale_s * start_temperature * cooling * warmth, rng)
        best.see(states)
    return best.found(costs)


class _Best:
    """The best mapping that each chain saw, and of ended chains those that are among the K best.

    [K] seconds, [K, n] lines and rings.
    """

    def __init__(self, states: MappingStates) -> None:
        self.values_s, self.lines, self.rings = states.objective_s.copy(), states.lines.copy(), states.rings.copy()

    def see(self, states: MappingStates) -> None:
        if states.num_chains < len(self.values_s):
            kept = np.argsort(self.values_s, kind="stable")[: states.num_chains]
            self.values_s, self.lines, self.rings = self.values_s[kept], self.lines[kept], self.rings[kept]
        better = np.flatnonzero(states.objective_s < self.values_s)
        if better.size:
            self.values_s[better] = states.objective_s[better]
            self.lines[better], self.rings[better] = states.lines[better], states.rings[better]

    def found(self, costs: LinkCosts) -> Found:
        """The best of all, each with the best order of its rings where that is affordable."""
        shape = (costs.num_stages, costs.num_pipelines)
        lines = [nodes.reshape(shape) for nodes in self.lines]
        rings = [best_rings(costs.ring_s, nodes.reshape(shape)) for nodes in self.rings]
        values = [costs.objective_s(*mapping) for mapping in zip(lines, rings, strict=True)]
        winner = int(np.argmin(values))
        return Found(lines=lines[winner], rings=rings[winner], objective_s=values[winner])


def _warmth(states: MappingStates) -> FloatArray:
    """[K] factors of the temperature: the better a chain, the colder. It settles while the others go on looking."""
    spread = TEMPERATURE_SPREAD ** np.linspace(-0.5, 0.5, states.num_chains)
    return np.asarray(spread[states.energy_s.argsort(kind="stable").argsort(kind="stable")])


def _resample(states: MappingStates) -> None:
    order = np.argsort(states.energy_s, kind="stable")
    count = math.ceil(RESAMPLED_FRACTION * states.num_chains)
    states.copy_chains(order[-count:], order[:count])
