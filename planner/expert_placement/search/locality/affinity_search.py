"""Search among swaps for little traffic at a given balancedness: several chains, and all even or odd layers, at once.

Traffic couples neighbouring layers only, so while the odd layers are fixed every even layer can be improved
independently, and vice versa. In a layer, one device offers its slots; each swap with a slot elsewhere is worth

    Δsame + (μ / L) (P(t) − P(t′)),    P(t) = (1/κ) log Σ_d exp(κ t_d),

Δsame = what the swap adds to the share of transitions that stay on their device, t = device times in units of the ideal
time, P = a smooth maximum over the devices. The swap with the largest worth plus Gumbel noise is carried out,
which samples swaps with probability ∝ exp(worth / temperature). Each chain steers its own price μ: up while it is below
the floor of balancedness, down while it is above. The best placement at or above the floor is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.problem.objectives import balance_of_time

# e to this power is still a number: a device that would take thousands of times the ideal time is no choice anyway.
MOST_EXPONENT = 700.0
# What a swap that empties the busiest device leaves of the sum of powers rounds to 0, which has no log.
LEAST_SHARE = math.exp(-MOST_EXPONENT)
FORBIDDEN = -1e9
# Share of transitions that one unit of balancedness is worth to begin with. The price moves slowly, so a floor near the
# best balance needs a high first price; the next is tried where the one before did not reach the floor.
FIRST_PRICES = (1.0, 3.0, 9.0)
PRICE_STEP = 0.06  # relative change of the price after each sweep
SHARPNESS = (60.0, 250.0)  # κ, first and last
# First and last temperature, in shares of the transitions that one slot carries on average.
TEMPERATURE = (0.35, 0.004)


@dataclass(slots=True, kw_only=True, eq=False)
class Chains:
    """B placements under way.

    Args:
        slots: [B, L, G, s] expert in each slot.
        sizes: [L, E] load / replicas over the ideal time of the layer.
        counts: [L, E] replicas.
        transitions: [L − 1, E, E], summing to 1.
        speed: [G].
    """

    slots: IntArray
    sizes: FloatArray
    counts: IntArray
    transitions: FloatArray
    speed: FloatArray

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, L, G, s."""
        chains, layers, devices, per_device = self.slots.shape
        return chains, layers, devices, per_device

    def times(self) -> FloatArray:
        """[B, L, G] time of each device."""
        layer = np.arange(self.shape[1])[None, :, None, None]
        times: FloatArray = self.sizes[layer, self.slots].sum(axis=3) / self.speed
        return times

    def same(self) -> FloatArray:
        """[B] share of transitions that stay on their device."""
        num_chains, num_layers, num_devices, _ = self.shape
        if num_layers == 1:
            return np.ones(num_chains)
        total = np.zeros(num_chains)
        chain, device = np.ogrid[:num_chains, :num_devices]
        for layer in range(num_layers - 1):
            slots = self.slots[:, layer]
            gain = self.to_next(layer)[chain[..., None], slots, device[..., None]]
            total += (gain / self.counts[layer][slots]).sum(axis=(1, 2))
        return total

    def to_next(self, layer: int) -> FloatArray:
        """[B, E, G] transitions from each expert to the shares of experts on each device in the layer after."""
        table = self.transitions[layer] / self.counts[layer + 1]
        gathered: FloatArray = table[:, self.slots[:, layer + 1]].sum(axis=3)
        return gathered.transpose(1, 0, 2)

    def from_last(self, layer: int) -> FloatArray:
        """[B, E, G] transitions to each expert from the shares of experts on each device in the layer before."""
        table = (self.transitions[layer - 1] / self.counts[layer - 1][:, None]).T
        gathered: FloatArray = table[:, self.slots[:, layer - 1]].sum(axis=3)
        return gathered.transpose(1, 0, 2)

    def gains(self, layer: int, *, look_ahead: bool = True) -> FloatArray:
        """[B, E, G] what a copy of each expert adds on each device of a layer, the other layers held still.

        Args:
            layer: the layer.
            look_ahead: count the layer after, too.
        """
        num_chains, num_layers, num_devices, _ = self.shape
        gain = np.zeros((num_chains, self.sizes.shape[1], num_devices))
        if layer > 0:
            gain += self.from_last(layer)
        if look_ahead and layer < num_layers - 1:
            gain += self.to_next(layer)
        gain /= self.counts[layer][None, :, None]
        return gain


def anneal(
    chains: Chains, floor: float, num_sweeps: int, first_price: float, rng: np.random.Generator
) -> tuple[IntArray | None, float]:
    """Search for the placement with most transitions on their device at mean balancedness >= ``floor``.

    Args:
        chains: where to start; changed.
        floor: least mean balancedness over the layers.
        num_sweeps: visits of each device of each layer.
        first_price: one of :data:`FIRST_PRICES`.
        rng: random numbers.

    Returns:
        [L, G, s] best placement at or above the floor, or None; and its share of transitions that stay.
    """
    num_chains, num_layers, num_devices, _ = chains.shape
    best: IntArray | None = None
    best_same = -1.0
    price = np.full(num_chains, first_price)
    parities = [np.arange(start, num_layers, 2) for start in range(min(2, num_layers))]
    unit = 1.0 / max(1, chains.slots[0].size)
    for sweep in range(num_sweeps):
        progress = sweep / max(1, num_sweeps - 1)
        temperature = unit * TEMPERATURE[0] * (TEMPERATURE[1] / TEMPERATURE[0]) ** progress
        sharpness = SHARPNESS[0] * (SHARPNESS[1] / SHARPNESS[0]) ** progress
        offset = int(rng.integers(num_devices))
        for layers in parities:
            gain = np.stack([chains.gains(int(layer)) for layer in layers], axis=1)  # [B, n, E, G]
            for device in range(num_devices):
                visit(chains, layers, gain, (device + offset) % num_devices, price, sharpness, temperature, rng)
        balance = balance_of_time(chains.times().max(axis=-1)).mean(axis=1)
        legal = balance >= floor
        same = np.where(legal, chains.same(), -1.0)
        lead = int(same.argmax())
        if same[lead] > best_same:
            best, best_same = chains.slots[lead].copy(), float(same[lead])
        price *= np.where(legal, 1.0 - PRICE_STEP, 1.0 + PRICE_STEP)
    return best, best_same


def visit(
    chains: Chains,
    layers: IntArray,
    gain: FloatArray,
    device: int,
    price: FloatArray,
    sharpness: float,
    temperature: float,
    rng: np.random.Generator,
) -> None:
    """Let one device of each of ``layers`` make one swap, in all chains."""
    num_chains, num_layers, num_devices, per_device = chains.shape
    num_slots = num_devices * per_device
    chain, layer = np.ogrid[:num_chains, : layers.size]
    slots = chains.slots[:, layers].reshape(num_chains, layers.size, num_slots)
    home = np.arange(num_slots) // per_device
    mine = slots[:, :, device * per_device : (device + 1) * per_device]

    worth_mine = gain[chain[..., None], layer[..., None], mine]  # [B, n, s, G]
    leave = worth_mine - worth_mine[..., device, None]
    worth_theirs = gain[chain[..., None], layer[..., None], slots]  # [B, n, S, G]
    arrive = worth_theirs[..., device] - np.take_along_axis(worth_theirs, home[None, None, :, None], axis=3)[..., 0]
    worth = leave[..., home] + arrive[:, :, None, :]  # [B, n, s, S]

    size = chains.sizes[layers[None, :, None], slots]
    grows = size[:, :, None, :] - size[:, :, device * per_device : (device + 1) * per_device, None]
    times = size.reshape(num_chains, layers.size, num_devices, per_device).sum(axis=3) / chains.speed
    weight = np.exp(sharpness * (times - times.max(axis=2, keepdims=True)))
    peak = times.max(axis=2)[..., None, None]
    total = weight.sum(axis=2)[..., None, None]
    after = total - weight[:, :, device, None, None] - weight[:, :, None, home]
    here = times[:, :, device, None, None] + grows / chains.speed[device] - peak
    there = times[:, :, None, home] - grows / chains.speed[home] - peak
    after = after + np.exp(np.minimum(sharpness * here, MOST_EXPONENT))
    after += np.exp(np.minimum(sharpness * there, MOST_EXPONENT))
    lighter = np.maximum(after / total, LEAST_SHARE)
    worth -= (price / num_layers / sharpness)[:, None, None, None] * np.log(lighter)

    worth[..., home == device] = FORBIDDEN
    if num_slots > chains.sizes.shape[1]:
        worth[would_duplicate(slots, mine, device, home)] = FORBIDDEN
    flat = worth.reshape(num_chains, layers.size, -1)
    flat += temperature * rng.gumbel(size=flat.shape)
    pick = flat.argmax(axis=2)
    stay = temperature * rng.gumbel(size=pick.shape)
    go_chain, go_layer = np.nonzero(np.take_along_axis(flat, pick[..., None], axis=2)[..., 0] > stay)
    place, other = np.divmod(pick[go_chain, go_layer], num_slots)
    target = chains.slots.reshape(num_chains, chains.shape[1], num_slots)
    where = layers[go_layer]
    own = device * per_device + place
    target[go_chain, where, own], target[go_chain, where, other] = (
        target[go_chain, where, other],
        target[go_chain, where, own],
    )


def would_duplicate(slots: IntArray, mine: IntArray, device: int, home: IntArray) -> NDArray[np.bool_]:
    """[B, n, s, S] whether swapping a slot of ``device`` with another would put two copies of an expert together."""
    by_device = slots.reshape(*slots.shape[:2], home[-1] + 1, -1)
    held = (by_device[:, :, None] == mine[..., None, None]).any(axis=4)  # [B, n, s, G] my expert is there already
    here = (slots[..., None] == mine[:, :, None, :]).any(axis=3)  # [B, n, S] their expert is here already
    duplicate: NDArray[np.bool_] = held[..., home] | here[:, :, None, :]
    return duplicate
