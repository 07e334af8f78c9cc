"""Two slots per device: the pairing of the pieces is solved exactly, so that only the replica counts are searched.

Given the counts, sort the 2G pieces and put the largest with the smallest, the second largest with the second smallest,
and so on. No other pairing has a less busy busiest device (exchange argument: in any pairing let the largest piece swap
its partner for the smallest piece; neither pair is then busier than the busier of the two was). So the time of a layer
is a function of its counts alone, one sort each, and annealing over the counts needs no placements:

* move: one copy of an expert becomes a copy of another;
* energy: (1/κ) log Σ_d exp(κ (t_d − 1)), a smooth maximum of the device times, which also depends on the second.

The rule may pair two copies of one expert in the middle of the order; these are separated afterwards.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

SLOTS_PER_DEVICE = 2
SHARPNESS = 100.0  # κ
TEMPERATURE = (3e-4, 3e-5)  # first and last, in ideal times
MOST_STEPS = 1000
# Temperature factors of further chains, run where effort is left: in small layers one move changes much.
TEMPERATURE_FACTORS = (1.0, 8.0, 30.0, 100.0, 300.0)
SORT_WORK = 6.0  # one slot of one trial costs as much as this many exchanges of ``exchange.py``


def folded_times(load: FloatArray, counts: IntArray) -> FloatArray:
    """[B, G] times of the devices when the largest piece meets the smallest one, and so on; not in device order."""
    flat = np.repeat((load / counts).ravel(), counts.ravel()).reshape(load.shape[0], -1)
    flat.sort(axis=1)
    half = flat.shape[1] // SLOTS_PER_DEVICE
    folded: FloatArray = flat[:, :half] + flat[:, ::-1][:, :half]
    return folded


def fold(load: FloatArray, counts: IntArray) -> IntArray:
    """[B, G, 2] the placement of :func:`folded_times`, with copies of one expert separated."""
    piece = load / counts
    order = np.argsort(piece, axis=1, kind="stable")
    repeated = np.repeat(order.ravel(), np.take_along_axis(counts, order, axis=1).ravel()).reshape(load.shape[0], -1)
    half = repeated.shape[1] // SLOTS_PER_DEVICE
    slots = np.stack([repeated[:, :half], repeated[:, ::-1][:, :half]], axis=2)
    for row in np.flatnonzero((slots[..., 0] == slots[..., 1]).any(axis=1)):
        separate_copies(slots[row], piece[row])
    return slots


def separate_copies(slots: IntArray, piece: FloatArray) -> None:
    """Swap one of two equal experts on a device with another device where the busier of the two gains least; in place.

    Args:
        slots: [G, 2] of one layer.
        piece: [E] load / replicas.
    """
    for device in np.flatnonzero(slots[:, 0] == slots[:, 1]):
        expert = slots[device, 0]
        if slots[device, 1] != expert:
            continue
        others = np.flatnonzero((slots != expert).all(axis=1))
        if not others.size:
            return
        # Whichever of its two experts the other device gives, the busier device then has the larger of them.
        partner = others[piece[slots[others]].max(axis=1).argmin()]
        slots[device, 1], slots[partner, 0] = slots[partner, 0], expert


def search_counts(
    load: FloatArray, counts: IntArray, goal: FloatArray, work: float, rng: np.random.Generator
) -> tuple[IntArray, float]:
    """Counts whose fold is less busy.

    Args:
        load: [B, E], normalised: a perfectly balanced device takes 1.
        counts: [B, E] where to start.
        goal: [B] time at which a row is good enough.
        work: exchanges that the search may cost.
        rng: random numbers.

    Returns:
        [B, E] best counts seen, and the work spent.
    """
    num_layers, num_experts = load.shape
    num_devices = int(counts[0].sum()) // SLOTS_PER_DEVICE
    work_of_step = num_layers * SORT_WORK * SLOTS_PER_DEVICE * num_devices
    num_chains = int(np.clip(work / (work_of_step * MOST_STEPS), 1, len(TEMPERATURE_FACTORS)))
    num_steps = int(min(work / (work_of_step * num_chains), MOST_STEPS))
    layer, factor = np.repeat(np.arange(num_layers), num_chains), np.tile(TEMPERATURE_FACTORS[:num_chains], num_layers)
    now = counts[layer]
    best, times = counts.copy(), folded_times(load[layer], now)
    best_time, energy = times.max(axis=1)[::num_chains].copy(), _energy(times)
    for step in range(num_steps):
        temperature = TEMPERATURE[0] * (TEMPERATURE[1] / TEMPERATURE[0]) ** (step / num_steps)
        chain = np.flatnonzero((best_time > goal)[layer])
        if not chain.size:
            break
        trial, row = now[chain], np.arange(chain.size)
        loser = (rng.random(trial.shape) * (trial > 1)).argmax(axis=1)
        winner = rng.integers(num_experts, size=chain.size)
        legal = (winner != loser) & (trial[row, winner] < num_devices) & (trial[row, loser] > 1)
        trial[row[legal], loser[legal]] -= 1
        trial[row[legal], winner[legal]] += 1
        times = folded_times(load[layer[chain]], trial)
        after, busiest = _energy(times), times.max(axis=1)
        worse = (after - energy[chain]) / (temperature * factor[chain])
        taken = rng.random(chain.size) < np.exp(np.minimum(0.0, -worse))
        now[chain[taken]], energy[chain[taken]] = trial[taken], after[taken]
        for better in np.flatnonzero(busiest < best_time[layer[chain]]):
            where = layer[chain[better]]
            if busiest[better] < best_time[where]:
                best[where], best_time[where] = trial[better], busiest[better]
    return best, num_steps * num_chains * work_of_step


def _energy(times: FloatArray) -> FloatArray:
    """[B] smooth maximum of the device times; shifted by the maximum, so that no exponential overflows."""
    busiest = times.max(axis=1)
    energy: FloatArray = busiest + np.log(np.exp(SHARPNESS * (times - busiest[:, None])).sum(axis=1)) / SHARPNESS
    return energy
