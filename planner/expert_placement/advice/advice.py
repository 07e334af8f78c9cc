"""What to know of a placement before it is rolled out.

Balance against the number of redundant slots; balance of single batches, which sample the mean load; regret of a
placement for several scenarios; number of devices that a token visits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.constants import INTERVAL_ENDS
from meshplan.planner.expert_placement.problem.objectives import (
    Objective,
    balancedness,
    replica_counts,
)
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.balance.nodes import group_devices
from meshplan.planner.expert_placement.search.solve import solve

NUM_SAMPLES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyPoint:
    """One number of redundant slots and what it brings.

    Args:
        num_redundant_experts: spare slots of a layer, over all devices.
        balancedness: balancedness of the best placement found (the smallest over the scenarios for ``robust``).
        bound: no placement with so many slots can be more balanced.
        extra_bytes_per_device: weights of the spare slots, over all layers.
        expert_time_ratio: time of the expert layers over that with the fewest slots looked at; below 1 is faster.
    """

    num_redundant_experts: int
    balancedness: float
    bound: float
    extra_bytes_per_device: float
    expert_time_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBalance:
    """Balancedness of single batches.

    Args:
        mean: over the sampled batches.
        low: 5 % of the batches are less balanced.
        high: 5 % of the batches are more balanced.
        at_the_mean_load: balancedness under the mean load.
    """

    mean: float
    low: float
    high: float
    at_the_mean_load: float


def redundancy_curve(
    problem: ExpertPlacementProblem, redundant: Iterable[int], *, bytes_per_expert: float, seed: int = 0
) -> list[RedundancyPoint]:
    """Balance and memory against the number of redundant slots.

    Args:
        problem: its number of redundant slots, present placement and traffic are not used.
        redundant: numbers of spare slots of a layer; those that do not divide evenly over the devices are left out.
        bytes_per_expert: weights of one expert in one layer.
        seed: random seed of the solver.
    """
    experts, devices = problem.num_experts, problem.num_devices
    points: list[RedundancyPoint] = []
    first = 0.0
    for spare in sorted(set(redundant)):
        if spare < 0 or (experts + spare) % devices or (experts + spare) // devices > experts:
            continue
        objective = Objective.ROBUST if problem.objective is Objective.ROBUST else Objective.BALANCE
        solution = solve(
            replace(problem, num_redundant_experts=spare, objective=objective, current=None, transitions=None),
            seed=seed,
        )
        reached = solution.objective or 0.0
        first = first or reached
        points.append(
            RedundancyPoint(
                num_redundant_experts=spare,
                balancedness=reached,
                bound=solution.bound or 1.0,
                extra_bytes_per_device=bytes_per_expert * problem.num_layers * spare / devices,
                expert_time_ratio=first / reached if reached else 1.0,
            )
        )
    return points


def sampled_balance(
    problem: ExpertPlacementProblem,
    placement: IntArray,
    *,
    tokens_per_batch: int,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> SampledBalance:
    """Balancedness when each batch draws its own tokens.

    The busiest device of a small batch is busier than that of the mean load, whatever the placement: a batch of n
    tokens sends load_e ± √load_e to an expert.

    Args:
        problem: its load gives the popularity of the experts.
        placement: [L, S] map.
        tokens_per_batch: tokens that all devices together route in one step of one layer.
        num_samples: batches to draw.
        seed: random seed of the draws.

    Assumes:
        The experts of different tokens are independent, and so are the top_k of one token; the copies of an expert
        share a batch evenly.
    """
    if tokens_per_batch < 1 or num_samples < 1:
        raise SpecError.at("tokens_per_batch", "give at least one token and one sample")
    rng = np.random.default_rng(seed)
    total = problem.load.sum(axis=1, keepdims=True)
    share = np.divide(problem.load, total, out=np.full_like(problem.load, 1.0 / problem.num_experts), where=total > 0)
    draws = rng.multinomial(tokens_per_batch * problem.top_k, share, size=(num_samples, problem.num_layers))
    values = [balancedness(batch.astype(np.float64), placement, problem.device_speed) for batch in draws]
    return SampledBalance(
        mean=float(np.mean(values)),
        low=float(np.quantile(values, INTERVAL_ENDS[0])),
        high=float(np.quantile(values, INTERVAL_ENDS[1])),
        at_the_mean_load=balancedness(problem.load, placement, problem.device_speed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """What one scenario gives up to a placement that serves all of them.

    Args:
        name: name of the scenario.
        balancedness: with the common placement.
        alone: with a placement for this scenario only.
        regret: alone − balancedness.
    """

    name: str
    balancedness: float
    alone: float
    regret: float


def regrets(problem: ExpertPlacementProblem, placement: IntArray, *, seed: int = 0) -> list[Regret]:
    """The regret of every load case under a [L, S] map; nothing for a single case."""
    rows = []
    for index, case in enumerate(problem.load_cases if len(problem.load_cases) > 1 else ()):
        alone = replace(problem, objective=Objective.BALANCE, load=case, scenarios=None, current=None, transitions=None)
        reached = balancedness(case, placement, problem.device_speed)
        best = max(solve(alone, seed=seed).objective or 0.0, reached)
        name = problem.scenario_names[index] if problem.scenario_names else f"scenario {index}"
        rows.append(Regret(name=name, balancedness=reached, alone=best, regret=best - reached))
    return rows


def distinct_devices_per_token(
    token_experts: IntArray, placement: IntArray, *, num_experts: int, num_devices: int, devices_per_group: int = 1
) -> FloatArray:
    """[L] mean number of devices (or nodes) that a token is sent to in each layer.

    DeepEP's dispatch sends one copy of a token to each device, however many of its experts lie there. A token uses copy
    number (token index mod copies) of an expert, so tokens spread over the copies.

    Args:
        token_experts: [L, tokens, top_k] expert ids; −1 where a layer lacks the token.
        placement: [L, S] map.
        num_experts: experts of a layer.
        num_devices: devices.
        devices_per_group: 1 counts devices; the devices of a node count nodes.

    Raises:
        SpecError: ids out of range, or another number of layers than the placement has.
    """
    visits = _visits(token_experts, placement, num_experts, num_devices, devices_per_group)
    means = np.zeros(placement.shape[0])
    for layer, (visited, experts) in enumerate(zip(visits, token_experts, strict=True)):
        routed = (experts >= 0).any(axis=1)
        means[layer] = visited[routed].sum(axis=1).mean() if routed.any() else 0.0
    return means


def covisits(token_experts: IntArray, placement: IntArray, *, num_experts: int, num_devices: int) -> FloatArray:
    """[L, G, G] tokens that are sent to both of two devices in a layer; arguments as above."""
    layers = [
        visited.T.astype(np.float64) @ visited
        for visited in _visits(token_experts, placement, num_experts, num_devices, 1)
    ]
    return np.stack(layers)


def share_nodes_by_trace(
    token_experts: IntArray, placement: IntArray, *, num_experts: int, num_devices: int, devices_per_node: int
) -> IntArray:
    """[L, S] the same placement, the devices of each layer renamed so that tokens visit few nodes.

    Renaming costs no balance; devices that the same tokens visit come to share a node. It pays where a token is sent
    once to each node and spread there (DeepEP); traffic from layer to layer is not considered.
    """
    together = covisits(token_experts, placement, num_experts=num_experts, num_devices=num_devices)
    by_device = placement.reshape(placement.shape[0], num_devices, -1)
    renamed = [slots[group_devices(pairs, devices_per_node)] for slots, pairs in zip(by_device, together, strict=True)]
    return np.stack(renamed).reshape(placement.shape)


def _visits(
    token_experts: IntArray, placement: IntArray, num_experts: int, num_devices: int, devices_per_group: int
) -> Iterator[NDArray[np.bool_]]:
    """[tokens, groups of devices] for each layer: which of them each token is sent to."""
    if token_experts.shape[0] != placement.shape[0] or token_experts.max(initial=-1) >= num_experts:
        message = f"expected {placement.shape[0]} layers and ids below {num_experts}"
        raise SpecError.at("token_experts", message)
    counts = replica_counts(placement, num_experts)
    device = np.arange(placement.shape[1]) // (placement.shape[1] // num_devices) // devices_per_group
    order = np.argsort(placement, axis=1, kind="stable")
    first = np.cumsum(counts, axis=1) - counts  # where the copies of an expert begin in that order
    for layer, experts in enumerate(token_experts):
        present = experts >= 0
        known = np.where(present, experts, 0)
        copy = np.arange(experts.shape[0])[:, None] % counts[layer][known]
        target = device[order[layer][first[layer][known] + copy]]
        visited = np.zeros((experts.shape[0], int(device[-1]) + 1), dtype=bool)
        token, choice = np.nonzero(present)
        visited[token, target[token, choice]] = True
        yield visited
