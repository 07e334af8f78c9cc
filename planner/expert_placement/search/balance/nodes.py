"""Placement over nodes: which devices share a node, and groups of experts that must lie on one node.

* :func:`group_devices`: renaming devices in the same way in all layers changes neither balance nor traffic between
  devices, but decides how much of that traffic stays inside a node. Greedy filling, then the best swap of two devices
  while one gains.
* :func:`place_groups`: node-limited routing sends a token to few *groups* of experts, which helps only where a group
  lies on one node. So groups are packed on nodes first, then the experts of every node on its devices; all nodes of
  all layers are rows of one array. This is EPLB's hierarchical policy with searches in place of its greedy rules.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.search.balance.balance import Effort, balance, normalised
from meshplan.planner.expert_placement.search.balance.bounds import time_bound

GROUP_SHARE = 0.2  # of the effort for packing the groups on nodes
LEAST_GAIN = 1e-12


def group_devices(traffic: FloatArray, devices_per_node: int) -> IntArray:
    """[G] a permutation of the devices that keeps much traffic inside nodes.

    Args:
        traffic: [G, G] between devices, any unit.
        devices_per_node: positions 0 … m − 1 of the permutation are the first node, and so on.
    """
    num_devices = traffic.shape[0]
    weight = traffic + traffic.T
    np.fill_diagonal(weight, 0.0)
    greedy = _fill_nodes(weight, devices_per_node)
    candidates = [_improve(weight, order, devices_per_node) for order in (np.arange(num_devices), greedy)]
    return max(candidates, key=lambda order: inside_nodes(weight, order, devices_per_node))


def inside_nodes(weight: FloatArray, order: IntArray, devices_per_node: int) -> float:
    """Weight between devices of one node."""
    node = np.arange(order.size) // devices_per_node
    return float(weight[np.ix_(order, order)][node[:, None] == node[None, :]].sum())


def _fill_nodes(weight: FloatArray, devices_per_node: int) -> IntArray:
    """Fill node after node: the free device with most weight to the node, the first one with most weight at all."""
    free = np.ones(weight.shape[0], dtype=bool)
    order = np.zeros(weight.shape[0], dtype=np.int64)
    pull = weight.sum(axis=1)
    for place in range(order.size):
        if place % devices_per_node == 0:
            pull = weight[:, free].sum(axis=1)
        device = int(np.where(free, pull, -1.0).argmax())
        pull = weight[device] if place % devices_per_node == 0 else pull + weight[device]
        order[place] = device
        free[device] = False
    return order


def _improve(weight: FloatArray, order: IntArray, devices_per_node: int) -> IntArray:
    """Swap two devices of different nodes while the best swap gains."""
    order = order.copy()
    num_devices = order.size
    node = np.arange(num_devices) // devices_per_node
    member = (node[:, None] == np.arange(node[-1] + 1)[None, :]).astype(np.float64)
    least = LEAST_GAIN * max(float(weight.sum()), LEAST_GAIN)
    for _ in range(num_devices * num_devices):
        local = weight[np.ix_(order, order)]
        to_node = local @ member  # [place, node]
        other = to_node[:, node]  # [a, b] weight of place a to the node of place b
        own = to_node[np.arange(num_devices), node]
        gain = other + other.T - own[:, None] - own[None, :] - 2.0 * local
        gain[node[:, None] == node[None, :]] = -np.inf
        one, two = divmod(int(gain.argmax()), num_devices)
        if gain[one, two] <= least:
            break
        order[[one, two]] = order[[two, one]]
    return order


def rename_devices_everywhere(slots: IntArray, order: IntArray) -> IntArray:
    """[L, G, s] with device ``order[i]``'s content on device i in every layer."""
    return np.ascontiguousarray(slots[:, order])


def place_groups(
    load: FloatArray, num_redundant: int, num_devices: int, num_nodes: int, num_groups: int, effort: Effort, seed: int
) -> tuple[IntArray, FloatArray]:
    """The most balanced placement found in which every group of experts lies on one node.

    Args:
        load: [L, E], normalised; equal speeds.
        num_redundant: spare slots of a layer, the same number on every node.
        num_devices: G, the same number on every node.
        num_nodes: N.
        num_groups: runs of E / groups experts.
        effort: what to spend.
        seed: random seed.

    Returns:
        [L, G, s] placement, and [L] time that no such placement can beat.
    """
    num_layers, num_experts = load.shape
    by_group = load.reshape(num_layers, num_groups, -1).sum(axis=2)
    speed = np.ones(num_nodes)
    share = normalised(by_group, speed)
    group_bound = time_bound(share, 0, speed)
    nodes = balance(share[None], 0, speed, group_bound, effort.part(GROUP_SHARE), seed).slots  # [L, N, groups / N]

    size = num_experts // num_groups
    members = (nodes[..., None] * size + np.arange(size)).reshape(num_layers * num_nodes, -1)  # experts of each node
    layer = np.repeat(np.arange(num_layers), num_nodes)
    local_load = load[layer[:, None], members]
    local_speed = np.ones(num_devices // num_nodes)
    local = normalised(local_load, local_speed)
    spare = num_redundant // num_nodes
    found = balance(local[None], spare, local_speed, time_bound(local, spare, local_speed), effort, seed)
    slots = np.take_along_axis(members, found.slots.reshape(members.shape[0], -1), axis=1)
    bound = np.maximum(group_bound, time_bound(load, num_redundant, np.ones(num_devices)))
    return slots.reshape(num_layers, num_devices, -1), bound
