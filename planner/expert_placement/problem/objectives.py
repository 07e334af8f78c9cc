"""The objectives of an expert placement, as array functions.

Notation (all arrays are NumPy; L layers, E experts, G devices, S = E + redundant experts slots, s = S / G):

* slot i of a layer lies on device i // s; ``physical_to_logical_map[l, i]`` is the expert in it;
* the replicas of an expert share its load evenly; no device holds two replicas of one expert;
* time of device d in layer l: t_ld = (Σ over its slots of load_le / replicas_le) / speed_d;
* balancedness = mean over layers of (Σ_e load_le / Σ_d speed_d) / max_d t_ld; 1 is perfect;
  a layer without load counts 1;
* cross-device fraction = 1 − Σ_l Σ_ef T_lef Σ_d a_led a_(l+1)fd / Σ T, a_led = share of e's replicas that lie on d;
* moved experts = Σ over layers and devices of the experts on the device that were not there in ``current``.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import FloatArray, IntArray

# Gains below this, relative or in units of the ideal time of a layer, are rounding.
LEAST_GAIN = 1e-9


class Objective(Enum):
    """What is optimised: see the module docstring for the quantities."""

    BALANCE = "balance"  # most balancedness
    BALANCE_AFFINITY = "balance+affinity"  # least cross-device fraction at balancedness >= min_balancedness
    ROBUST = "robust"  # most of the smallest balancedness over the scenarios
    MIGRATE = "migrate"  # most balancedness with at most max_moved_experts moved


class RobustMeasure(Enum):
    """What ``robust`` makes of the balancedness of several scenarios."""

    WORST = "worst"  # the smallest
    AVERAGE = "average"  # the mean


def replica_counts(placement: IntArray, num_experts: int) -> IntArray:
    """[L, E] replicas of each expert in a [L, S] map."""
    num_layers = placement.shape[0]
    flat = placement + num_experts * np.arange(num_layers)[:, None]
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def device_time(load: FloatArray, placement: IntArray, device_speed: FloatArray) -> FloatArray:
    """[L, G] time of each device: its share of the load over its speed.

    Args:
        load: [L, E] tokens.
        placement: [L, S] map.
        device_speed: [G].
    """
    counts = np.maximum(replica_counts(placement, load.shape[1]), 1)
    piece = np.take_along_axis(load / counts, placement, axis=1)
    time: FloatArray = piece.reshape(load.shape[0], device_speed.size, -1).sum(axis=2) / device_speed
    return time


def balance_of_time(busiest: FloatArray) -> FloatArray:
    """[…] balancedness of layers from the time of their busiest device, in units of the ideal time; 1 without load."""
    return np.divide(1.0, busiest, out=np.ones_like(busiest), where=busiest > 0)


def layer_balancedness(load: FloatArray, placement: IntArray, device_speed: FloatArray) -> FloatArray:
    """[L] ideal time over the time of the busiest device; 1 for a layer without load."""
    busiest = device_time(load, placement, device_speed).max(axis=1)
    ideal = load.sum(axis=1) / device_speed.sum()
    balance: FloatArray = np.divide(ideal, busiest, out=np.ones_like(ideal), where=busiest > 0)
    return balance


def balancedness(load: FloatArray, placement: IntArray, device_speed: FloatArray) -> float:
    """Mean of :func:`layer_balancedness`."""
    return float(layer_balancedness(load, placement, device_speed).mean())


def device_shares(placement: IntArray, num_experts: int, num_devices: int) -> FloatArray:
    """[L, E, G] share of each expert's replicas that lie on each device (a of the module docstring)."""
    num_layers, num_slots = placement.shape
    device = np.arange(num_slots) // (num_slots // num_devices)
    shares = np.zeros((num_layers, num_experts, num_devices))
    np.add.at(shares, (np.arange(num_layers)[:, None], placement, device[None, :]), 1.0)
    shares /= np.maximum(shares.sum(axis=2, keepdims=True), 1.0)
    return shares


def cross_device_fraction(transitions: FloatArray, placement: IntArray, num_devices: int) -> float:
    """Share of layer-to-layer transitions that change device."""
    shares = device_shares(placement, transitions.shape[1], num_devices)
    total = float(transitions.sum())
    if total == 0.0:
        return 0.0
    return 1.0 - float(((transitions @ shares[1:]) * shares[:-1]).sum()) / total


def cross_node_fraction(transitions: FloatArray, placement: IntArray, num_devices: int, devices_per_node: int) -> float:
    """Share of layer-to-layer transitions that change node."""
    num_nodes = -(-num_devices // devices_per_node)
    shares = device_shares(placement, transitions.shape[1], num_devices)
    padded = np.zeros((*shares.shape[:2], num_nodes * devices_per_node))
    padded[:, :, :num_devices] = shares
    by_node = padded.reshape(*shares.shape[:2], num_nodes, devices_per_node).sum(axis=3)
    total = float(transitions.sum())
    return 1.0 - float(((transitions @ by_node[1:]) * by_node[:-1]).sum()) / total if total else 0.0


def device_traffic(transitions: FloatArray, placement: IntArray, num_devices: int) -> FloatArray:
    """[G, G] share of the transitions that go from each device to each; its trace is 1 − cross_device_fraction."""
    shares = device_shares(placement, transitions.shape[1], num_devices)
    matrix = np.einsum("led,lef,lfg->dg", shares[:-1], transitions, shares[1:], optimize=True)
    total = float(transitions.sum())
    share: FloatArray = matrix / total if total > 0 else np.zeros((num_devices, num_devices))
    return share


def residency(placement: IntArray, num_experts: int, num_devices: int) -> NDArray[np.bool_]:
    """[L, G, E] which expert lies on which device."""
    num_layers, num_slots = placement.shape
    here = np.zeros((num_layers, num_devices, num_experts), dtype=bool)
    device = np.arange(num_slots) // (num_slots // num_devices)
    here[np.arange(num_layers)[:, None], device[None, :], placement] = True
    return here


def moved_experts(placement: IntArray, current: IntArray, num_experts: int, num_devices: int) -> int:
    """Experts on a device that were not there before, over layers and devices."""
    before = residency(current, num_experts, num_devices)
    return int((residency(placement, num_experts, num_devices) & ~before).sum())


def duplicates_on_device(placement: IntArray, num_devices: int) -> int:
    """Replicas that share their device with another replica of the same expert; 0 in a legal placement."""
    by_device = np.sort(placement.reshape(placement.shape[0], num_devices, -1), axis=2)
    return int((by_device[..., 1:] == by_device[..., :-1]).sum())
