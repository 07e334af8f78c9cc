"""Fewer devices per token: experts that the same tokens choose are put on one device, down to a floor of balance.

DeepEP's dispatch sends a token once to every device that holds one of its experts, so what counts is the number of
*distinct* devices, not where the token was in the layer before. Layers are independent here.

*Surrogate objective.* Σ over pairs of experts on one device of n_ef / (c_e c_f), n_ef = tokens that choose both, c =
copies: every pair that shares a device saves about one visit for each of its tokens. A swap of slots i (device a) and j
(device b) gains

    A(e_i, b) − A(e_i, a) + A(e_j, a) − A(e_j, b) − 2 n_ij,      A(e, d) = Σ over slots f on d of n_ef / (c_e c_f)

*Search.* In each layer the best swap that keeps both devices within the layer's limit, while one gains. A layer's
change is kept only where its tokens visit fewer devices under the true measure.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.advice.advice import distinct_devices_per_token
from meshplan.planner.expert_placement.problem.objectives import LEAST_GAIN, layer_balancedness, replica_counts

ROUNDING = 1e-12


def fewer_visits(
    placement: IntArray, token_experts: IntArray, load: FloatArray, device_speed: FloatArray, floor: float
) -> IntArray:
    """[L, S] a placement whose tokens visit fewer devices.

    Args:
        placement: [L, S] balanced map to start from.
        token_experts: [L, tokens, top_k] expert ids; −1 where a layer lacks the token.
        load: [L, E].
        device_speed: [G].
        floor: least balancedness of each layer; a layer that starts below it may not get worse.
    """
    num_experts, num_devices = load.shape[1], device_speed.size
    counts = replica_counts(placement, num_experts)
    balance = layer_balancedness(load, placement, device_speed)
    ideal = load.sum(axis=1) / device_speed.sum()
    limit = ideal / np.minimum(np.maximum(floor, ROUNDING), balance) * (1.0 + ROUNDING)
    found = placement.copy()
    for layer in range(placement.shape[0]):
        weight = together(token_experts[layer], num_experts) / np.outer(counts[layer], counts[layer])
        slots = placement[layer].reshape(num_devices, -1).copy()
        swap_greedily(slots, weight, load[layer] / counts[layer], device_speed, float(limit[layer]))
        found[layer] = slots.ravel()
    shape = {"num_experts": num_experts, "num_devices": num_devices}
    before = distinct_devices_per_token(token_experts, placement, **shape)
    after = distinct_devices_per_token(token_experts, found, **shape)
    worse = after >= before
    found[worse] = placement[worse]
    return found


def together(token_experts: IntArray, num_experts: int) -> FloatArray:
    """[E, E] tokens that choose both of two experts, 0 on the diagonal."""
    chosen = np.zeros((token_experts.shape[0], num_experts))
    token, choice = np.nonzero(token_experts >= 0)
    chosen[token, token_experts[token, choice]] = 1.0
    pairs: FloatArray = chosen.T @ chosen
    np.fill_diagonal(pairs, 0.0)
    return pairs


def swap_greedily(
    slots: IntArray, weight: FloatArray, piece: FloatArray, device_speed: FloatArray, limit: float
) -> None:
    """Best legal swaps of one layer, in place.

    Args:
        slots: [G, s] expert in each slot.
        weight: [E, E] visits saved by two experts on one device.
        piece: [E] load / replicas.
        device_speed: [G].
        limit: time that no device may exceed.
    """
    num_devices, per_device = slots.shape
    home = np.repeat(np.arange(num_devices), per_device)
    speed = device_speed[home]
    least = LEAST_GAIN * max(float(weight.max(initial=0.0)), LEAST_GAIN)
    flat = slots.reshape(-1)
    to_device = weight[:, slots].sum(axis=2)  # [E, G]
    for _ in range(flat.size):  # at most as many swaps as slots: later ones gain next to nothing
        pull = to_device[flat]  # [S, G]
        leave = pull[:, home] - pull[np.arange(flat.size), home][:, None]  # slot i to the device of slot j
        gain = leave + leave.T - 2.0 * weight[np.ix_(flat, flat)]
        size = piece[flat]
        time = (size.reshape(num_devices, -1).sum(axis=1) / device_speed)[home]
        after = time[:, None] + (size[None, :] - size[:, None]) / speed[:, None]
        held = (slots[:, :, None] == flat).any(axis=1)[home]  # [i, j]: the device of slot i holds the expert of slot j
        illegal = (home[:, None] == home) | held | held.T | (np.maximum(after, after.T) > limit)
        gain[illegal] = -np.inf
        one, two = divmod(int(gain.argmax()), flat.size)
        if gain[one, two] <= least:
            return
        change = weight[:, flat[two]] - weight[:, flat[one]]
        to_device[:, home[one]] += change
        to_device[:, home[two]] -= change
        flat[one], flat[two] = flat[two], flat[one]
