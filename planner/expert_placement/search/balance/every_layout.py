"""The proof for small layers under several load cases, or on unequal devices: every layout, then one for each layer.

A *layout* puts s different experts on each of the G devices so that every expert is somewhere: E!/s!^G of them without
copies, about G! times fewer where devices are alike. Up to :data:`MOST_LAYOUTS` of a layer are looked at; more are left
to the portfolio.

*Notation.* b_k(l, n) balancedness of layer l under layout n in case k; L layers, K cases.

*Objective.* max over layouts n_1 … n_L of min_k Σ_l b_k(l, n_l) / L. With one case layers are independent.

*Bound.* Weights λ ≥ 0 on the cases with Σ λ = 1 (Lagrange): min_k Σ_l b_k ≤ Σ_l max_n Σ_k λ_k · b_k(l, n); single
cases are the weights that are all on one. The best λ is looked for by multiplicative updates.

*Search.* Layer by layer, the sums over the first layers; a sum is left out where another one is no worse in any case,
or where the bound on the layers to come does not lift it above the best known. With more than :data:`MOST_SUMS` of
them the least promising are dropped, and their bound counts: the proof then leaves a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb, factorial

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.expert_placement.problem.objectives import balance_of_time

MOST_LAYOUTS = 20_000
MOST_SUMS, MOST_OPTIONS = 512, 2048
PASSES = 3
# Seconds of all layouts of all layers, worked out at once at most: what bounds the memory.
MOST_NUMBERS = 1 << 24
# Updates of the weights on the cases, and their first step; it falls with the square root of their number.
UPDATES, FIRST_STEP = 100, 4.0
# Gains below this are rounding of sums over layers.
LEAST_GAIN = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestLayouts:
    """What the layouts of small layers can reach.

    Args:
        slots: [L, G, s] the best placement that was found.
        bound: no placement has a better objective.
    """

    slots: IntArray
    bound: float


def layouts(num_experts: int, per_device: int, num_devices: int, *, alike: bool) -> IntArray | None:
    """[N, G, s] every layout; of alike devices one order alone. None where there are more than :data:`MOST_LAYOUTS`."""
    count = num_layouts(num_experts, per_device, num_devices)
    if count > MOST_LAYOUTS * (factorial(num_devices) if alike else 1):
        return None
    options = list(combinations(range(num_experts), per_device))
    found = list(islice(_layouts(options, num_experts, num_devices, alike=alike), MOST_LAYOUTS + 1))
    return np.array(found, dtype=np.int64) if len(found) <= MOST_LAYOUTS else None


def num_layouts(num_experts: int, per_device: int, num_devices: int) -> int:
    """Layouts of devices that are told apart: G sets of s experts with every expert in one, by inclusion–exclusion.

    >>> num_layouts(6, 2, 3)
    90
    """
    without = range(num_experts - per_device + 1)
    return sum((-1) ** j * comb(num_experts, j) * comb(num_experts - j, per_device) ** num_devices for j in without)


def _layouts(
    options: list[tuple[int, ...]], num_experts: int, num_devices: int, *, alike: bool
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Layouts, by depth-first search: experts that lie nowhere yet must find room on the devices that are left."""
    masks = [sum(1 << expert for expert in option) for option in options]
    per_device, everyone = len(options[0]), (1 << num_experts) - 1

    def fill(chosen: tuple[int, ...], placed: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if len(chosen) == num_devices:
            yield tuple(options[index] for index in chosen)
            return
        room = (num_devices - len(chosen) - 1) * per_device
        lowest = (~placed & everyone & -(~placed & everyone)).bit_length() - 1
        for index in range(chosen[-1] if alike and chosen else 0, len(options)):
            if alike and 0 <= lowest < options[index][0]:
                return  # options ascend: no later one has the lowest expert that lies nowhere
            now = placed | masks[index]
            if (everyone & ~now).bit_count() <= room:
                yield from fill((*chosen, index), now)

    yield from fill((), 0)


def layout_balances(found: IntArray, cases: FloatArray, speed: FloatArray, budget: Budget) -> FloatArray:
    """[K, L, N] balancedness of every layer under every layout.

    Args:
        found: [N, G, s] layouts.
        cases: [K, L, E] loads in units of the ideal time.
        speed: [G].
        budget: asked before every layer of every case.

    Raises:
        OutOfBudgetError: it is spent.
    """
    num_experts = cases.shape[2]
    held = np.zeros((*found.shape[:2], num_experts))
    np.put_along_axis(held, found, 1.0, axis=2)
    pieces = held / held.sum(axis=1, keepdims=True) / speed[:, None]
    times = np.empty((*cases.shape[:2], len(found)))
    for case, layer in np.ndindex(times.shape[:2]):
        budget.check()
        times[case, layer] = (pieces @ cases[case, layer]).max(axis=1)
    return np.asarray(balance_of_time(times))


def best_layouts(
    cases: FloatArray, num_redundant: int, speed: FloatArray, *, averages: bool, budget: Budget
) -> BestLayouts | None:
    """The placement of all layers that serves the cases best; None where layers are not small, or no pass ended.

    Args:
        cases: [K, L, E] loads in units of the ideal time.
        num_redundant: spare slots of a layer.
        speed: [G].
        averages: the mean over the cases counts, not the smallest.
        budget: once it is spent, or after Ctrl-C, what the passes before have found is the answer.
    """
    num_layers, num_experts = cases.shape[1:]
    per_device = (num_experts + num_redundant) // speed.size
    found = layouts(num_experts, per_device, speed.size, alike=bool((speed == speed[0]).all()))
    if found is None or len(found) * cases.shape[0] * num_layers > MOST_NUMBERS:
        return None
    chosen, bound, reached = np.zeros(num_layers, dtype=np.int64), np.inf, -1.0
    with budget.keeping():
        balances = layout_balances(found, cases, speed, budget)
        values = np.moveaxis(balances.mean(axis=0, keepdims=True) if averages else balances, 0, 2)  # [L, N, K]
        for _ in range(PASSES):  # what one pass finds lets the next one leave out more
            better, least = best_sums(values, reached, budget)
            bound = min(bound, least)
            if better is None:
                break
            chosen, reached = better, float(_sum_of(values, better).min())
    return None if reached < 0.0 else BestLayouts(slots=found[chosen], bound=bound / num_layers)


def best_sums(values: FloatArray, known: float, budget: Budget) -> tuple[IntArray | None, float]:
    """One option of each row so that the smallest of K sums is largest.

    Args:
        values: [L, N, K].
        known: a sum that is reached already.
        budget: asked before every row.

    Returns:
        [L] options that reach more than ``known``, None where there are none; and what no options can exceed.

    Raises:
        OutOfBudgetError: it is spent.
    """
    weights = np.concatenate([np.eye(values.shape[2]), _weights(values)[None]])  # [W, K]
    priced = values @ weights.T
    first = priced[..., -1].argmax(axis=1)
    if (reached := float(_sum_of(values, first).min())) > known + LEAST_GAIN * len(values):
        better, bound = best_sums(values, reached, budget)
        return (first if better is None else better), bound
    # What the rows from l on add at most, under each of the weights, [L + 1, W].
    most = priced.max(axis=1)
    to_come = np.concatenate([np.cumsum(most[::-1], axis=0)[::-1], np.zeros((1, len(weights)))])
    rows, dropped, least_gain = [], known, LEAST_GAIN * len(values)
    for own, at_most in zip(values, (priced + (to_come[0] - most)[:, None]).min(axis=2), strict=True):
        budget.check()
        of_use, cut = _promising(at_most, known + least_gain, MOST_OPTIONS)
        dropped = max(dropped, cut)
        rows.append(of_use[_undominated(own[of_use])])
    sums, taken = np.zeros((1, values.shape[2])), np.zeros((1, 0), dtype=np.int64)
    for index, own in enumerate(rows):
        budget.check()
        sums = (sums[:, None] + values[index, own]).reshape(-1, values.shape[2])
        taken = np.concatenate([np.repeat(taken, len(own), axis=0), np.tile(own, len(taken))[:, None]], axis=1)
        reach = (sums @ weights.T + to_come[index + 1]).min(axis=1)
        kept, cut = _promising(reach, known + least_gain, MOST_SUMS)
        dropped = max(dropped, cut)
        kept = kept[_undominated(sums[kept])]
        sums, taken = sums[kept], taken[kept]
    reached = sums.min(axis=1)
    if not len(reached):
        return None, min(dropped, float(to_come[0].min()))
    best = int(np.argmax(reached))
    return taken[best], min(max(dropped, float(reached[best])), float(to_come[0].min()))


def _promising(reach: FloatArray, known: float, most: int) -> tuple[IntArray, float]:
    """Which of some options may lift what is known, the ``most`` best; and what the others of these reach at most."""
    kept = np.flatnonzero(reach > known)
    kept = kept[np.argsort(-reach[kept], kind="stable")]
    return kept[:most], float(reach[kept[most:]].max(initial=-np.inf))


def _sum_of(values: FloatArray, options: IntArray) -> FloatArray:
    """[K] sums of one option of each row."""
    return np.asarray(values[np.arange(len(values)), options].sum(axis=0))


def _weights(values: FloatArray) -> FloatArray:
    """[K] weights on the cases under which the bound is least, as far as a number of updates finds them."""
    rows = np.arange(len(values))
    weights = np.full(values.shape[2], 1.0 / values.shape[2])
    least, best = np.inf, weights
    for update in range(1, UPDATES + 1):
        priced = values @ weights
        if (total := float(priced.max(axis=1).sum())) < least:
            least, best = total, weights
        reached = values[rows, priced.argmax(axis=1)].mean(axis=0)
        weights = weights * np.exp(-FIRST_STEP / np.sqrt(update) * (reached - reached.mean()))
        weights = weights / weights.sum()
    return best


def _undominated(vectors: FloatArray) -> BoolArray:
    """[N] vectors than which no other one is as good in every entry; of equal ones the first."""
    kept, left = np.zeros(len(vectors), dtype=bool), np.argsort(-vectors.sum(axis=1), kind="stable")
    while len(left):
        lead, left = left[0], left[1:]
        kept[lead] = True
        left = left[(vectors[left] > vectors[lead]).any(axis=1)]
    return kept
