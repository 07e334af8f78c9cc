"""Few moves in small layers: every layout of a layer, and a knapsack over the layers that is exact.

*Notation.* b(l, m) the best balancedness of layer l among its layouts that move m experts; M the most that may move.

*Objective.* max Σ_l b(l, m_l) / L with Σ_l m_l ≤ M: by a dynamic program over layers and moves, so that the answer is
the optimum. Where nothing may move it is the present placement, however large the layers are.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.budget import Budget, OutOfBudgetError
from meshplan.planner.expert_placement.problem.objectives import duplicates_on_device, residency
from meshplan.planner.expert_placement.search.balance.every_layout import layout_balances, layouts

# Sums of the dynamic program: layers × moves × moves of one layer.
MOST_SUMS = 50_000_000


def best_moves(current: IntArray, load: FloatArray, speed: FloatArray, budget: int, time: Budget) -> IntArray | None:
    """[L, G, s] the most balanced placement within a budget of moves; None where layers are not small.

    Args:
        current: [L, G, s] the present placement.
        load: [L, E] in units of the ideal time.
        speed: [G].
        budget: M.
        time: asked between the layers.
    """
    (num_layers, num_devices, per_device), num_experts = current.shape, load.shape[1]
    if budget == 0:
        legal = duplicates_on_device(current.reshape(num_layers, -1), num_devices) == 0
        return current if legal else None
    slots = num_devices * per_device
    budget = min(budget, num_layers * slots)
    found = layouts(num_experts, per_device, num_devices, alike=False)
    if found is None or num_layers * budget * slots > MOST_SUMS:
        return None
    try:
        balance = layout_balances(found, load[None], speed, time)[0]
    except OutOfBudgetError:
        return None
    lies = residency(found.reshape(len(found), -1), num_experts, num_devices)
    had = residency(current.reshape(num_layers, -1), num_experts, num_devices)
    sums = np.full((num_layers + 1, budget + 1), -np.inf)
    sums[0, 0] = 0.0
    chosen = np.zeros((num_layers, budget + 1, 2), dtype=np.int64)  # layout, and its moves
    for layer in range(num_layers):
        moves = (lies & ~had[layer]).sum(axis=(1, 2))
        for moved in np.unique(moves[moves <= budget]).tolist():
            of_so_many = np.flatnonzero(moves == moved)
            best = of_so_many[balance[layer, of_so_many].argmax()]
            reached = sums[layer, : budget + 1 - moved] + balance[layer, best]
            better = np.flatnonzero(reached > sums[layer + 1, moved:]) + moved
            sums[layer + 1, better] = reached[better - moved]
            chosen[layer, better] = (best, moved)
    left = int(sums[-1].argmax())
    if not np.isfinite(sums[-1, left]):
        return None
    placement = np.empty_like(current)
    for layer in reversed(range(num_layers)):
        best, moved = chosen[layer, left]
        placement[layer], left = found[best], left - int(moved)
    return placement
