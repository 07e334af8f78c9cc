"""Least traffic between devices at a given balancedness.

1. Layer by layer, alternately forward and backward, the slots of one layer are reassigned exactly while its neighbours
   stay (``assignment.py``); from several random starts, so that hidden groups of experts are found. This alone is the
   objective of ExFlow (arXiv:2401.08383), and it may leave devices far from equally busy.
2. The devices of the most balanced placement are renamed layer by layer along the traffic, which leaves the balance.
3. If the best of 1 is below the floor of balancedness, swaps trade traffic for balance (``affinity_search.py``).

The best of all that meets the floor is the answer.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.problem.objectives import LEAST_GAIN, balance_of_time
from meshplan.planner.expert_placement.search.balance.balance import Effort
from meshplan.planner.expert_placement.search.locality.affinity_search import (
    FIRST_PRICES,
    Chains,
    anneal,
)
from meshplan.planner.expert_placement.search.locality.assignment import assign_greedily, reassign

# Starts of the alternating assignment: fewest and most, and slots over all layers and starts. Hidden groups of two or
# three experts are easily missed from a single start, and in small problems many starts are cheap.
NUM_STARTS = (4, 64)
SLOTS_OF_ALL_STARTS = 6000
MOST_ROUND_TRIPS = 10
SWEEPS = (8, 60)  # of the search among swaps: fewest and most, by the effort left
# One swap looked at costs as much as this many exchanges of a pair of devices.
SWAP_WORK = 12.0


def traffic_bound(transitions: FloatArray, slots_per_device: int) -> float:
    """Lower bound on the cross-device fraction.

    The tokens of expert e can stay on their device only for the s experts that lie there in the next layer, at best the
    s most frequent ones; and the tokens that come to expert f only for the s on its device in the layer before.
    """
    total = float(transitions.sum())
    if total == 0.0:
        return 0.0
    s = min(slots_per_device, transitions.shape[1])
    largest_next = -np.partition(-transitions, s - 1, axis=2)[:, :, :s]
    largest_before = -np.partition(-transitions, s - 1, axis=1)[:, :s, :]
    most = np.minimum(largest_next.sum(axis=(1, 2)), largest_before.sum(axis=(1, 2)))
    return max(0.0, 1.0 - float(most.sum()) / total)


def place_for_affinity(
    balanced: IntArray,
    counts: IntArray,
    load: FloatArray,
    transitions: FloatArray,
    speed: FloatArray,
    floor: float,
    effort: Effort,
    seed: int,
) -> tuple[IntArray | None, str]:
    """The placement and which step found it; None when no step reached the floor.

    Args:
        balanced: [L, G, s] the most balanced placement known.
        counts: [L, E] its replicas, which all steps keep.
        load: [L, E], normalised.
        transitions: [L − 1, E, E].
        speed: [G].
        floor: least mean balancedness.
        effort: what to spend.
        seed: random seed of the starts and of the search.
    """
    rng = np.random.default_rng(seed)
    total = float(transitions.sum())
    share = transitions / total if total > 0 else transitions

    def chains_of(slots: IntArray) -> Chains:
        return Chains(slots=slots, sizes=load / counts, counts=counts, transitions=share, speed=speed)

    renamed = rename_along_traffic(chains_of(balanced[None].copy()))
    candidates = [(renamed[0], "balanced, devices renamed")]
    least = traffic_bound(transitions, balanced.shape[2])
    # One start first: where it meets the bound (clear groups of experts), more starts cannot find anything better.
    for start in np.split(shuffled_starts(renamed[0], rng), [1]):
        if not start.size:
            continue
        chains = chains_of(start)
        alternate(chains, effort)
        candidates += [(slots, "alternating assignment") for slots in chains.slots]
        if 1.0 - chains.same().max() <= least + LEAST_GAIN:
            break
    pool = chains_of(np.stack([slots for slots, _ in candidates]))
    same, balance = pool.same(), balance_of_time(pool.times().max(axis=-1)).mean(axis=1)
    lead = int(same.argmax())
    best = int(np.where(balance >= floor, same, -1.0).argmax())
    found = candidates[best] if balance[best] >= floor else (None, "none")
    if best == lead and found[0] is not None:
        return found
    for price in FIRST_PRICES:
        chains = chains_of(pool.slots[lead : lead + 1].copy())
        slots, reached = anneal(chains, floor, sweeps_for(chains, effort), price, rng)
        if slots is not None:
            return (slots, "swaps at a price of balance") if found[0] is None or reached > same[best] else found
    return found


def sweeps_for(chains: Chains, effort: Effort) -> int:
    """Sweeps that the effort left allows."""
    num_slots = chains.shape[2] * chains.shape[3]
    one = chains.shape[1] * num_slots * num_slots * SWAP_WORK
    return int(np.clip(effort.work / one, *SWEEPS))


def shuffled_starts(balanced: IntArray, rng: np.random.Generator) -> IntArray:
    """[N, L, G, s] the placement itself, then ones that permute its experts at random in every layer.

    With copies a random permutation could put two of one expert together, so then only the placement itself is used.
    """
    num_layers = balanced.shape[0]
    flat = balanced.reshape(num_layers, -1)
    if any(np.unique(row).size < row.size for row in flat):
        return balanced[None].copy()
    num_starts = int(np.clip(SLOTS_OF_ALL_STARTS // flat.size, *NUM_STARTS))
    shuffled = [rng.permuted(flat, axis=1).reshape(balanced.shape) for _ in range(num_starts - 1)]
    return np.stack([balanced, *shuffled])


def rename_along_traffic(chains: Chains) -> IntArray:
    """[B, L, G, s] the same groups of experts, each on the device that keeps most traffic; speeds must be equal."""
    slots = chains.slots
    if not np.all(chains.speed == chains.speed[0]):
        return slots
    num_chains, num_layers, num_devices, _ = chains.shape
    for layer in range(1, num_layers):
        gain = chains.gains(layer, look_ahead=False)
        group_gain = gain[np.arange(num_chains)[:, None, None], slots[:, layer]].sum(axis=2)  # [B, group, device]
        content = np.tile(np.arange(num_devices), (num_chains, 1))[:, :, None]
        reassign(content, group_gain)
        slots[:, layer] = slots[np.arange(num_chains)[:, None], layer, content[:, :, 0]]
    return slots


def alternate(chains: Chains, effort: Effort) -> None:
    """Reassign layer after layer, alternately forward and backward, until no layer gains; in place."""
    num_layers = chains.shape[1]
    reached = chains.same()
    for trip in range(MOST_ROUND_TRIPS):
        forward = range(1, num_layers)
        for layer in forward if trip == 0 else [*range(num_layers - 2, -1, -1), *forward]:
            # The first trip starts from nothing: the layer ahead is still random and would only blur the choice.
            gain = chains.gains(layer, look_ahead=trip > 0)
            slots = np.ascontiguousarray(chains.slots[:, layer])
            if trip == 0 and slots[0].size == gain.shape[1]:
                slots = assign_greedily(gain, slots.shape[2])
            reassign(slots, gain)
            chains.slots[:, layer] = slots
            if effort.exhausted:
                return
        same = chains.same()
        if trip and np.all(same <= reached * (1.0 + LEAST_GAIN)):
            return
        reached = same
