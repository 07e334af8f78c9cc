"""Least traffic of small layers at a floor of balancedness: every layout of a layer, and a path through the layers.

*Notation.* n a layout of a layer (:mod:`..balance.every_layout`, devices told apart); b(l, n) its balancedness;
stay(l, n, n′) share of all transitions that keep their device from layer l under n to layer l + 1 under n′; φ the
floor; L layers.

*Objective.* max over n_1 … n_L of Σ_l stay(l, n_l, n_l+1) with Σ_l b(l, n_l) / L ≥ φ. Copies are free here: the swaps
of :mod:`.affinity` keep the number of copies of each expert.

*Bound.* For a price λ ≥ 0 of balance (Lagrange) D(λ) = max over all paths of Σ stay + λ·(Σ b / L − φ) is above every
placement that meets the floor; a dynamic program over layers finds it. The price is bisected: with a higher one the
path is more balanced. Where the path of λ = 0 meets the floor it is the optimum.

*Search.* Of the paths found on the way those count that meet the floor; the best is improved one layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.budget import Budget, OutOfBudgetError
from meshplan.planner.expert_placement.problem.objectives import LEAST_GAIN, device_shares
from meshplan.planner.expert_placement.search.balance.every_layout import layout_balances, layouts, num_layouts

# Layouts of a layer, and shares of pairs of them over all layers (doubles: 64 MB), up to which paths are looked at.
MOST_LAYOUTS, MOST_PAIRS = 1_000, 8_000_000
# Share of transitions that all of the balance is worth at first; doublings until the floor is met, halvings then.
FIRST_PRICE, DOUBLINGS, HALVINGS = 1e-3, 30, 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestPath:
    """What small layers can reach.

    Args:
        slots: [L, G, s] the least traffic found at the floor; None where no placement meets it.
        bound: none that meets it has a smaller share of transitions that change device.
    """

    slots: IntArray | None
    bound: float


def best_path(
    load: FloatArray, transitions: FloatArray, spare: int, speed: FloatArray, floor: float, budget: Budget
) -> BestPath | None:
    """The best path; None where layers are not small, or there is no time.

    Args:
        load: [L, E] in units of the ideal time.
        transitions: [L − 1, E, E] tokens.
        spare: redundant slots of a layer.
        speed: [G].
        floor: φ.
        budget: asked between the layers.
    """
    num_layers, num_experts = load.shape
    per_device = (num_experts + spare) // speed.size
    count, total = num_layouts(num_experts, per_device, speed.size), float(transitions.sum())
    if total <= 0.0 or count > MOST_LAYOUTS or count * count * (num_layers - 1) > MOST_PAIRS:
        return None
    found = layouts(num_experts, per_device, speed.size, alike=False)
    if found is None:
        return None
    try:
        balance = layout_balances(found, load[None], speed, budget)[0] / num_layers
    except OutOfBudgetError:
        return None
    if balance.max(axis=1).sum() < floor:
        return BestPath(slots=None, bound=0.0)
    shares = device_shares(found.reshape(len(found), -1), num_experts, speed.size).transpose(0, 2, 1)  # [N, G, E]
    ends = shares.reshape(len(found), -1).T
    stays = np.stack([(shares @ layer).reshape(len(found), -1) @ ends for layer in transitions / total])
    path, most = _priced_paths(stays, balance, floor, budget)
    return BestPath(slots=found[path], bound=max(0.0, 1.0 - most))


def _priced_paths(stays: FloatArray, balance: FloatArray, floor: float, budget: Budget) -> tuple[IntArray, float]:
    """The best path that meets the floor, and what none exceeds: [L − 1, N, N] stays, [L, N] balance over L."""
    best: IntArray = balance.argmax(axis=1)  # the most balanced one meets any floor that can be met
    reached, most = _stay_of(stays, best), np.inf
    low, high, price = 0.0, np.inf, 0.0
    for _ in range(DOUBLINGS + HALVINGS):
        path, value = _path_at(stays, balance, price)
        most = min(most, value - price * floor)
        meets = _balance_of(balance, path) >= floor
        if meets and (kept := _stay_of(stays, path)) > reached:
            best, reached = path, kept
        if (meets and price == 0.0) or budget.stopped:
            break
        low, high = (low, price) if meets else (price, high)
        price = 0.5 * (low + high) if np.isfinite(high) else max(2.0 * low, FIRST_PRICE)
    return _improved(stays, balance, floor, best), most


def _path_at(stays: FloatArray, balance: FloatArray, price: float) -> tuple[IntArray, float]:
    """The path of the largest Σ stay + λ·Σ b / L, and that sum."""
    value = price * balance[0]
    came_from = np.zeros(balance.shape, dtype=np.int64)
    for layer, stay in enumerate(stays, start=1):
        sums = value[:, None] + stay
        came_from[layer] = sums.argmax(axis=0)
        value = sums.max(axis=0) + price * balance[layer]
    path = np.zeros(len(balance), dtype=np.int64)
    path[-1] = value.argmax()
    for layer in range(len(balance) - 1, 0, -1):
        path[layer - 1] = came_from[layer, path[layer]]
    return path, float(value.max())


def _improved(stays: FloatArray, balance: FloatArray, floor: float, path: IntArray) -> IntArray:
    """The path with single layers changed while that keeps more transitions and the floor."""
    path = path.copy()
    improved = True
    while improved:
        improved = False
        for layer in range(len(path)):
            kept = np.zeros(balance.shape[1])
            kept += stays[layer - 1, path[layer - 1]] if layer else 0.0
            kept += stays[layer, :, path[layer + 1]] if layer + 1 < len(path) else 0.0
            room = _balance_of(balance, path) - balance[layer, path[layer]] + balance[layer]
            kept[room < floor] = -np.inf
            other = int(kept.argmax())
            if kept[other] > kept[path[layer]] + LEAST_GAIN:
                path[layer], improved = other, True
    return path


def _stay_of(stays: FloatArray, path: IntArray) -> float:
    return float(stays[np.arange(len(stays)), path[:-1], path[1:]].sum())


def _balance_of(balance: FloatArray, path: IntArray) -> float:
    return float(balance[np.arange(len(balance)), path].sum())
