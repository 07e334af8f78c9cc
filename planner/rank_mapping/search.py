"""Local search for rank mappings: annealing from constructed and random layouts.

Each step draws one move in every chain from a neighbourhood that is evaluated whole (:mod:`.moves`), on the smooth
energy of :class:`~meshplan.planner.rank_mapping.states.MappingStates`. From time to time the worst chains restart from
the best ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.rank_mapping.annealing import Best, anneal
from meshplan.planner.rank_mapping.moves import available_moves
from meshplan.planner.rank_mapping.objective import LinkCosts, best_rings
from meshplan.planner.rank_mapping.states import MappingStates

# Chosen on generated instances of all families of tests/benchmarks/rank_mapping_families.py.
# (Share of the steps done, chains): many at first, because no small move changes which island holds which stage; then
# only the best ones, whose search goes on.
CHAINS = ((0.0, 32), (0.1, 16), (0.2, 8))
CHAIN_NODES = 2048  # chains × nodes: for large jobs more steps are worth more than more chains
LEAST_CHAIN_SHARE = 0.25  # so that at least one chain starts from each constructed layout
NORM_DOUBLINGS = (5, 6)  # p = 32, then 64: smooth first, close to the maximum later
START_TEMPERATURE = 8e-3  # of the best energy at the start; islands need it to come to the right stages
END_TEMPERATURE = 5e-4  # below it nothing moves any more
TEMPERATURE_SPREAD = 2.0  # between the warmest and the coldest chain
COLDER_BEYOND_NODES, COLDER_POWER = 64, 1.5  # one move changes the energy of a larger job less
NUM_RANDOM_MAPPINGS = 200  # that answers are compared with
RANDOM_SEED = 20_240_528  # of these; the same for every seed of a search
NUM_RESAMPLINGS = 40
RESAMPLED_FRACTION = 0.25

# Small jobs need few steps and are also searched exactly. A step costs about as much as (STEP_OVERHEAD_NODES + n)
# nodes, which keeps 32 and 64 nodes within seconds; LARGE_STEPS_PER_NODE of 1,024 nodes stay within a minute.
STEPS_PER_NODE_POWER_4 = 1 / 64
STEP_OVERHEAD_NODES = 256
MAX_NODE_STEPS = 3_000_000
LARGE_STEPS_PER_NODE = 18


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


def single_linkage_order(closeness: FloatArray) -> IntArray:
    """[n] nodes in an order that keeps well connected ones together: leaves of the single-linkage tree of the links.

    Kruskal's algorithm joins groups of nodes in the order of their cheapest link; the smaller group is appended to the
    larger one.

    Args:
        closeness: [n, n] cost of each link, symmetric; the diagonal is not used.
    """
    import networkx as nx  # start-up: 0.2 s

    senders, receivers = np.triu_indices(len(closeness), k=1)
    links: nx.Graph[int] = nx.Graph()
    links.add_nodes_from(range(len(closeness)))
    links.add_weighted_edges_from(
        zip(senders.tolist(), receivers.tolist(), closeness[senders, receivers].tolist(), strict=True)
    )
    group_of = {node: [node] for node in links}
    for first, second in nx.minimum_spanning_edges(links, algorithm="kruskal", data=False):
        small, large = sorted((group_of[second], group_of[first]), key=len)
        large += small
        group_of.update(dict.fromkeys(small, large))
    return np.array(group_of[0], dtype=np.int64)


def starting_lines(costs: LinkCosts, num_chains: int, rng: np.random.Generator) -> IntArray:
    """[K, P, d]: half constructed (neighbours share a stage, or a pipeline; by index and by links), half random."""
    stages, pipelines, nodes = costs.num_stages, costs.num_pipelines, costs.num_nodes
    closeness = np.maximum(costs.ring_s, costs.ring_s.T) if pipelines > 1 else costs.hop_s
    orders = (single_linkage_order(closeness), np.arange(nodes))
    layouts = [order.reshape(stages, pipelines) for order in orders]
    layouts += [order.reshape(pipelines, stages).T for order in orders]
    # Which island is the first stage matters and no small move changes it: every copy has its own order of stages.
    constructed = [
        layouts[chain % len(layouts)][rng.permutation(stages) if chain >= len(layouts) else np.arange(stages)]
        for chain in range(num_chains // 2)
    ]
    random = [rng.permutation(nodes).reshape(stages, pipelines) for _ in range(num_chains - len(constructed))]
    return np.stack([*constructed, *random])


def search(
    costs: LinkCosts,
    *,
    seed: int,
    steps: int,
    ring_scale_s: float,
    budget: Budget | None = None,
    on_improvement: Callable[[float], None] | None = None,
) -> Found:
    """The best mapping found in ``steps`` steps.

    Args:
        costs: link costs.
        seed: seed of the pseudo-random choices.
        steps: moves looked for in every chain.
        ring_scale_s: a ring time near the best one (see :class:`MappingStates`).
        budget: once it is spent the search stops; None for the whole work.
        on_improvement: called with the best objective at every resampling that improved it.
    """
    rng = np.random.default_rng(seed)
    chains = _Chains(costs, rng, steps=steps, ring_scale_s=ring_scale_s, on_improvement=on_improvement)
    shares = available_moves(costs)
    moves = list(shares)
    kinds = rng.choice(len(moves), size=steps, p=list(shares.values())) if moves else ()
    colder = min(1.0, (COLDER_BEYOND_NODES / costs.num_nodes) ** COLDER_POWER)
    best = anneal(
        chains,
        (moves[kind] for kind in kinds),
        rng,
        steps=steps,
        start_s=float(chains.energy_s.min()) * (START_TEMPERATURE * colder),
        ratio=END_TEMPERATURE / START_TEMPERATURE,
        budget=budget,
    )
    return _with_best_rings(costs, best)


class _Chains(MappingStates):
    """The mappings of one search: fewer and fewer chains, on a norm that comes closer to the maximum."""

    def __init__(
        self,
        costs: LinkCosts,
        rng: np.random.Generator,
        *,
        steps: int,
        ring_scale_s: float,
        on_improvement: Callable[[float], None] | None,
    ) -> None:
        self._counts = {int(share * steps): _affordable(count, costs.num_nodes) for share, count in CHAINS}
        lines = starting_lines(costs, self._counts[0], rng)
        super().__init__(costs, lines, lines, ring_scale_s=ring_scale_s)
        self.set_exponent(NORM_DOUBLINGS[0])
        self._steps_per_norm = -(-steps // len(NORM_DOUBLINGS))
        self._steps_per_resampling = max(1, steps // NUM_RESAMPLINGS)
        self._on_improvement = on_improvement
        self._reported_s = float(self.objective_s.min())
        self.temperature_factor = np.ones(self.num_chains)

    def prepare(self, step: int, best: Best) -> None:
        """Sharpen the norm, restart the worst chains from the best, go on with fewer."""
        if step % self._steps_per_norm == 0:
            self.set_exponent(NORM_DOUBLINGS[step // self._steps_per_norm])
        resamples = step % self._steps_per_resampling == 0
        if step and resamples:
            self._resample()
            self._report(float(best.objective_s.min()))
        if self._counts.get(step, self.num_chains) < self.num_chains:
            self.keep_chains(np.argsort(self.energy_s, kind="stable")[: self._counts[step]])
        if resamples or step in self._counts:
            # The better a chain, the colder: it settles while the others go on looking.
            spread = TEMPERATURE_SPREAD ** np.linspace(-0.5, 0.5, self.num_chains)
            self.temperature_factor = spread[self.energy_s.argsort(kind="stable").argsort(kind="stable")]

    def _resample(self) -> None:
        order = np.argsort(self.energy_s, kind="stable")
        count = math.ceil(RESAMPLED_FRACTION * self.num_chains)
        self.copy_chains(order[-count:], order[:count])

    def _report(self, best_s: float) -> None:
        if self._on_improvement is not None and best_s < self._reported_s:
            self._reported_s = best_s
            self._on_improvement(best_s)


def _with_best_rings(costs: LinkCosts, best: Best) -> Found:
    """The best of all chains, each with the best order of its rings where that is affordable."""
    shape = (-1, costs.num_stages, costs.num_pipelines)
    lines, found_rings = (nodes.reshape(shape) for nodes in best.solutions)
    rings = [best_rings(costs.ring_s, nodes) for nodes in found_rings]
    values = [costs.objective_s(*mapping) for mapping in zip(lines, rings, strict=True)]
    winner = int(np.argmin(values))
    return Found(lines=lines[winner], rings=rings[winner], objective_s=values[winner])
