"""Rank placement on uneven links: the best assignment of one configuration's ranks to nodes.

*Notation.* Slot i holds D consecutive ranks; a mapping π assigns slot i to a usable node π(i). x_g(π) is the inverse
rate of the slowest group of kind g, y(π) the message time of the slowest pipeline.

*Objective.* min over π of the step T(x(π), y(π)) of the estimator.

*Constraints.* π is one-to-one; nodes without a slot are spare. Ranks of a node stay consecutive, because launchers can
express nothing else; so a mapping moves nodes, not single devices.

*Method.* Enumeration of all mappings up to :data:`MAX_EXHAUSTIVE`; else annealing of several chains on a smooth
surrogate of the step, from constructed starts (rank order, single-linkage order, each along stages and along
pipelines), unless one of these takes no longer than the bound. The estimator prices the best mapping of every chain.

*Bound.* The step with every kind of group at the best rate that any mapping can give it. With one kind of ring and a
pipeline over all nodes also the joint bound of :mod:`~meshplan.planner.rank_mapping.bound`, with ring times
φ(1/bandwidth) and hops (1 + w/P)·h, because the P stages' exchanges sum to Σ h.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.network.rank_layout import RING
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.rank_mapping.annealing import Best, anneal, metropolis
from meshplan.planner.rank_mapping.bound import lower_bound
from meshplan.planner.rank_mapping.objective import LinkCosts
from meshplan.planner.rank_mapping.search import NUM_RANDOM_MAPPINGS, RANDOM_SEED, single_linkage_order
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.mapping.placement import (
    ANNEALING,
    CONSTRUCTED,
    EXHAUSTIVE,
    RANK_ORDER,
    Placement,
    usable_order,
)
from meshplan.planner.training.search.mapping.placement_model import Energy, PlacementModel

MAX_EXHAUSTIVE = 50_000  # 8! = 40,320
NUM_CHAINS = 12
# Annealing steps for every candidate, and for the best ones at the end. Counted, so that a seed gives one answer.
QUICK_STEPS, FULL_STEPS = 400, 6_000
START_TEMPERATURE, END_TEMPERATURE = 0.02, 2e-4  # of the first energy
NUM_RESAMPLINGS, NUM_RESAMPLED = 10, 3
COIN = 0.5
# Steps this close, relatively, are equal: the rounding of sums.
EQUAL = 1e-12

Proposal = Callable[[PlacementModel, int, int, np.random.Generator], IntArray]


@lru_cache(maxsize=8)  # every candidate of a search asks for it
def linked_order(network: Network) -> tuple[int, ...]:
    """Usable nodes in an order that keeps well connected ones together."""
    usable = np.array(network.usable)
    return tuple(usable[single_linkage_order(network.ring_s_per_byte[np.ix_(usable, usable)])].tolist())


def place(
    problem: TrainingProblem,
    config: TrainingConfig,
    *,
    seed: int,
    steps: int = FULL_STEPS,
    start: tuple[int, ...] | None = None,
    budget: Budget | None = None,
) -> Placement:
    """The best mapping found for one configuration.

    Args:
        problem: a problem whose machine has a network.
        config: the configuration.
        seed: seed of the search.
        steps: annealing steps of every chain.
        start: a further mapping to start from.
        budget: once it is spent the search stops.
    """
    model = PlacementModel(problem, config)
    usable = np.array(model.network.usable, dtype=np.int64)
    first = usable[None] if start is None else np.array([usable, start], dtype=np.int64)
    if not model.moves or len(usable) == 1:
        step = float(model.steps_s(usable[None])[0])
        return Placement(order=tuple(usable.tolist()), step_s=step, bound_s=step, method=RANK_ORDER)
    if math.perm(len(usable), model.num_slots) <= MAX_EXHAUSTIVE:
        used = np.array(list(itertools.permutations(usable.tolist(), model.num_slots)), dtype=np.int64)
        values = model.steps_s(used)
        best = int(np.flatnonzero(values <= values.min() * (1.0 + EQUAL))[0])
        order = (*used[best].tolist(), *sorted(set(usable.tolist()) - set(used[best].tolist())))
        return Placement(order=order, step_s=float(values[best]), bound_s=float(values[best]), method=EXHAUSTIVE)
    orders = np.concatenate([first, starting_orders(model)])
    least, values = model.least_step_s(), model.steps_s(orders)
    is_proven = bool(values.min() <= least * (1.0 + EQUAL))
    if not is_proven:
        orders = np.concatenate([orders, annealed_orders(model, orders, seed=seed, steps=steps, budget=budget)])
        values = model.steps_s(orders)
    best = int(np.flatnonzero(values <= values.min() * (1.0 + EQUAL))[0])
    step = float(values[best])
    bound = step if is_proven else min(step, max(least, joint_bound_s(model)))
    method = RANK_ORDER if best == 0 else CONSTRUCTED if is_proven else ANNEALING
    return Placement(order=tuple(orders[best].tolist()), step_s=step, bound_s=bound, method=method)


def starting_orders(model: PlacementModel) -> IntArray:
    """[k, usable] constructed mappings: nodes by number and by links, consecutive ones along stages or pipelines."""
    slots, stages = model.num_slots, model.config.pipeline_parallel
    orders = []
    for nodes in (usable_order(model.network), linked_order(model.network), _by_quality(model.network)):
        used, spare = list(nodes[:slots]), list(nodes[slots:])
        orders.append([*used, *spare])
        for columns in {stages, max(1, slots // stages)} - {1}:
            if slots % columns == 0:
                turned = np.array(used).reshape(-1, columns).T.ravel().tolist()
                orders.append([*turned, *spare])
    return np.array(orders, dtype=np.int64)


def _by_quality(network: Network) -> tuple[int, ...]:
    """Linked order with the worst connected nodes last, so that they are the spare ones."""
    usable = np.array(network.usable)
    rates = network.bytes_per_s[np.ix_(usable, usable)] + np.diag(np.full(len(usable), np.nan))
    quality = np.nanmedian(np.minimum(rates, rates.T), axis=1)
    rank = {int(node): value for node, value in zip(usable, quality, strict=True)}
    return tuple(sorted(linked_order(network), key=lambda node: -rank[node]))


def random_mean_s(model: PlacementModel) -> float:
    """Mean step over random mappings; the same ones for every seed."""
    rng = np.random.default_rng(RANDOM_SEED)
    usable = np.array(model.network.usable, dtype=np.int64)
    return float(model.steps_s(rng.permuted(np.tile(usable, (NUM_RANDOM_MAPPINGS, 1)), axis=1)).mean())


def joint_bound_s(model: PlacementModel) -> float:
    """Joint bound of rings and pipelines for configurations with one kind of ring and a pipeline; else 0."""
    stages, slots, asked = model.config.pipeline_parallel, model.num_slots, model.messages
    usable = np.array(model.network.usable)
    if asked is None or stages == 1 or len(model.groups) != 1 or slots != len(usable) or slots % stages:
        return 0.0
    group = model.groups[0]
    if group.kind != RING or slots * model.domain_size != group.size * group.stride * stages:
        return 0.0
    rails = model.domain_size // group.stride  # members of a ring on a node
    if rails * group.stride != model.domain_size:
        return 0.0
    inner = np.ix_(usable, usable)
    spacing, latency = 1.0 / model.network.bytes_per_s[inner], model.network.latency_s[inner]
    base = float(model.priced(np.zeros((1, model.num_numbers)))[0])
    distinct, which = np.unique(np.maximum(spacing, spacing.T), return_inverse=True)
    rows = np.zeros((len(distinct), model.num_numbers))
    rows[:, 0] = distinct / rails
    ring = model.priced(rows) - base
    one_way = asked.sent_bytes * spacing + latency
    hops = (1.0 + asked.waits / stages) * (one_way + one_way.T)
    ring_s = np.maximum(ring[which.ravel()].reshape(spacing.shape), 0.0)
    np.fill_diagonal(ring_s, 0.0)
    np.fill_diagonal(hops, 0.0)
    return (
        base
        + lower_bound(LinkCosts(num_stages=stages, num_pipelines=slots // stages, hop_s=hops, ring_s=ring_s)).total_s
    )


def annealed_orders(
    model: PlacementModel, starts: IntArray, *, seed: int, steps: int, budget: Budget | None
) -> IntArray:
    """[chains, usable] best mapping of every chain.

    A step proposes one move in every chain: exchange two nodes, move one, reverse a run, exchange two stages, or
    exchange parts of two pipelines.
    """
    rng = np.random.default_rng(seed)
    ranked = starts[np.argsort(model.steps_s(starts), kind="stable")]
    num_random = NUM_CHAINS // 4
    random = rng.permuted(np.tile(ranked[0], (num_random, 1)), axis=1)
    orders = np.concatenate([ranked[np.arange(NUM_CHAINS - num_random) % len(ranked)], random])
    chains = _Chains(model, orders, model.tabulate(ranked[0]), resample_every=max(1, steps // NUM_RESAMPLINGS))
    least = float(chains.energy_s.min())
    scale = least - model.least_step_s()
    scale = scale if scale > 0.0 else least * END_TEMPERATURE
    proposals = _proposals(model)
    moves = (partial(_move, proposals[int(rng.integers(len(proposals)))]) for _ in itertools.count())
    best = anneal(
        chains,
        moves,
        rng,
        steps=steps,
        start_s=scale * START_TEMPERATURE,
        ratio=END_TEMPERATURE / START_TEMPERATURE,
        budget=budget,
    )
    return best.solutions[0]


class _Chains:
    """Mappings that are annealed together, as permutations of the usable nodes."""

    def __init__(self, model: PlacementModel, orders: IntArray, energy: Energy, *, resample_every: int) -> None:
        self.model, self.orders, self.energy = model, orders, energy
        self.objective_s, self.energy_s = energy(orders)
        self.temperature_factor = np.ones(len(orders))
        self._resample_every = resample_every

    @property
    def solutions(self) -> tuple[IntArray, ...]:
        """The orders."""
        return (self.orders,)

    def prepare(self, step: int, best: Best) -> None:
        """Periodically restart the worst chains from the best mappings seen."""
        if not step or step % self._resample_every:
            return
        worst, good = np.argsort(self.energy_s)[-NUM_RESAMPLED:], np.argsort(best.objective_s)[:NUM_RESAMPLED]
        self.orders[worst] = best.solutions[0][good]
        self.energy_s[worst] = self.energy(self.orders[worst])[1]
        self.objective_s[worst] = np.inf  # compared again after the chain's next accepted move


def _move(propose: Proposal, chains: _Chains, temperature_s: FloatArray, rng: np.random.Generator) -> None:
    """One proposal in every chain, accepted or rejected."""
    positions = propose(chains.model, len(chains.orders), chains.orders.shape[1], rng)
    proposed = np.take_along_axis(chains.orders, positions, axis=1)
    objective_s, energy_s = chains.energy(proposed)
    accepted = metropolis(chains.energy_s, energy_s, temperature_s, rng)
    for now, new in (
        (chains.orders, proposed),
        (chains.energy_s, energy_s),
        (chains.objective_s, objective_s),
    ):
        now[accepted] = new[accepted]


# --- proposals: [chains, nodes] positions to read the old mapping from ---------------------------------------------


def _positions(chains: int, nodes: int) -> IntArray:
    return np.tile(np.arange(nodes, dtype=np.int64), (chains, 1))


def _exchange(model: PlacementModel, chains: int, nodes: int, rng: np.random.Generator) -> IntArray:
    """Exchange a slot with any other, or with a spare node."""
    source, rows = _positions(chains, nodes), np.arange(chains)
    first, second = rng.integers(model.num_slots, size=chains), rng.integers(nodes, size=chains)
    source[rows, first], source[rows, second] = second, first
    return source


def _two_cuts(slots: int, chains: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    cuts = np.sort(rng.integers(slots, size=(2, chains)), axis=0)
    return cuts[0][:, None], cuts[1][:, None]


def _reverse(model: PlacementModel, chains: int, nodes: int, rng: np.random.Generator) -> IntArray:
    """Reverse a run of slots."""
    source = _positions(chains, nodes)
    low, high = _two_cuts(model.num_slots, chains, rng)
    return np.where((source >= low) & (source <= high), low + high - source, source)


def _shift(model: PlacementModel, chains: int, nodes: int, rng: np.random.Generator) -> IntArray:
    """Move one node to the other end of a run; the others shift by one."""
    source = _positions(chains, nodes)
    low, high = _two_cuts(model.num_slots, chains, rng)
    inside = (source >= low) & (source <= high)
    if rng.random() < COIN:
        return np.where(inside, np.where(source == high, low, source + 1), source)
    return np.where(inside, np.where(source == low, high, source - 1), source)


def _stages(model: PlacementModel, chains: int, nodes: int, rng: np.random.Generator) -> IntArray:
    """Exchange two whole stages."""
    stages, source = model.config.pipeline_parallel, _positions(chains, nodes)
    size = model.num_slots // stages
    first, second = rng.integers(stages, size=(2, chains, 1))
    stage = source // size
    moved = np.where(stage == first, source + (second - first) * size, source)
    return np.where(stage == second, source + (first - second) * size, moved)


def _pipelines(model: PlacementModel, chains: int, nodes: int, rng: np.random.Generator) -> IntArray:
    """Exchange two pipelines from some stage on."""
    stages, source = model.config.pipeline_parallel, _positions(chains, nodes)
    size = model.num_slots // stages
    first, second = rng.integers(size, size=(2, chains, 1))
    place = source % size
    later = (source < model.num_slots) & (source // size >= rng.integers(stages, size=(chains, 1)))
    moved = np.where(later & (place == first), source + second - first, source)
    return np.where(later & (place == second), source + first - second, moved)


def _proposals(model: PlacementModel) -> list[Proposal]:
    proposals: list[Proposal] = [_exchange, _exchange, _reverse, _shift]
    stages, slots = model.config.pipeline_parallel, model.num_slots
    if stages > 1 and slots % stages == 0:
        proposals += [_stages] + ([_pipelines] if slots > stages else [])
    return proposals
