"""Workers on nodes: which node and devices each takes, how many nodes that touches, and what they cost.

A worker that fits a node (a scale-up domain) never spans two; a larger one takes nodes of its own. Workers are placed
largest first on the first node with room (first-fit decreasing), which leaves no gap where sizes divide one another and
the node, as powers of two do. Nodes are rented whole: a node of which a plan uses one device costs all of it, unless
the question has but a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.problem.config import Pool

# (devices of a worker, number of such workers).
Group = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Devices of one worker.

    Args:
        node: first node of its type, from 0.
        first: first device on it.
    """

    node: int
    first: int


def place_workers(groups: Sequence[Group], domain_size: int) -> list[list[Place]]:
    """A place for every worker of every group on nodes of one type, however many that takes.

    >>> [place.node for place in place_workers([(2, 1), (8, 1), (4, 1)], 8)[2]]
    [1]
    """
    places: list[list[Place]] = [[] for _ in groups]
    free: list[int] = []  # devices left on each node, taken from the front
    first_open = 0
    for index in sorted(range(len(groups)), key=lambda i: -groups[i][0]):
        size, count = groups[index]
        for _ in range(count):
            if size >= domain_size:
                nodes = -(-size // domain_size)
                places[index].append(Place(node=len(free), first=0))
                free += [0] * nodes
                continue
            while first_open < len(free) and not free[first_open]:
                first_open += 1
            node = next((n for n in range(first_open, len(free)) if free[n] >= size), len(free))
            if node == len(free):
                free.append(domain_size)
            places[index].append(Place(node=node, first=domain_size - free[node]))
            free[node] -= size
    return places


def taken_up(size: int, domain_size: int) -> int:
    """Devices of a node that a worker takes from others: the least part of it that divides it, or whole nodes.

    What is left beside three of eight devices is no place for a worker of four. Shared NVSwitch partitions have 1, 2, 4
    or 8 GPUs (NVIDIA Fabric Manager User Guide, "Shared NVSwitch virtualization model"), and so have cloud instances.

    >>> taken_up(3, 8), taken_up(7, 8), taken_up(4, 8), taken_up(12, 8), taken_up(5, 72)
    (4, 8, 4, 16, 6)
    """
    if size >= domain_size:
        return -(-size // domain_size) * domain_size
    return next(part for part in range(size, domain_size + 1) if domain_size % part == 0)


def devices_taken(groups: Sequence[Group], machine: Machine, *, whole_nodes: bool) -> int:
    """Devices of one node type that workers take, whole ones where they are cut: all of their nodes, or the parts of
    these that divide them.
    """
    nodes = min(nodes_needed(groups, machine.domain_size) * machine.domain_size, machine.num_devices)
    parts = sum(taken_up(size, machine.domain_size) * count for size, count in groups)
    return -(-(nodes if whole_nodes else min(parts, nodes)) // machine.instances_per_device)


def nodes_needed(groups: Sequence[Group], domain_size: int) -> int:
    """Nodes that the workers touch.

    >>> nodes_needed([(4, 3)], 8), nodes_needed([(16, 1), (2, 1)], 8), nodes_needed([(6, 2)], 8)
    (2, 3, 2)
    """
    large = sum(count * -(-size // domain_size) for size, count in groups if size >= domain_size)
    small = [(size, count) for size, count in groups if size < domain_size and count]
    if len(small) == 1:  # every node takes as many as fit
        size, count = small[0]
        return large + -(-count // (domain_size // size))
    if all(domain_size % size == 0 and size & (size - 1) == 0 for size, _ in small):  # no gap is left
        return large + -(-sum(size * count for size, count in small) // domain_size)
    placed = place_workers(small, domain_size)
    return large + 1 + max(place.node for group in placed for place in group)


def by_node_type(workers: Iterable[tuple[str, int, int]]) -> dict[str, list[Group]]:
    """Node type → groups, from (node type, devices of a worker, workers)."""
    groups: dict[str, list[Group]] = {}
    for node_type, size, count in workers:
        groups.setdefault(node_type, []).append((size, count))
    return groups


def num_nodes(machine: Machine) -> int:
    """Nodes of a machine."""
    return -(-machine.num_devices // machine.domain_size)


def fit_nodes(groups: Mapping[str, Sequence[Group]], machines: Mapping[str, Machine]) -> bool:
    """Whether the node types have the devices, and the nodes that leave no worker cut in two."""
    return all(
        sum(size * count for size, count in found) <= machines[name].num_devices
        and nodes_needed(found, machines[name].domain_size) <= num_nodes(machines[name])
        for name, found in groups.items()
    )


def usd_per_hour(
    groups: Mapping[str, Sequence[Group]],
    machines: Mapping[str, Machine],
    *,
    by_device: bool = False,
    most: int | None = None,
) -> float | None:
    """Price of the nodes that the workers touch, USD/h; None where a node type has no price.

    Args:
        groups: node type → workers on it.
        machines: node type → devices and price.
        by_device: single devices can be rented, at their share of the node's price.
        most: devices that the question has, whole ones: of a node of which it has a part it pays that part, as a
            training plan does; None: all of the machines.
    """
    usd = 0.0
    for name, found in groups.items():
        machine = machines[name]
        each = machine.usd_per_hour_per_device
        if each is None:
            return None
        parts, instances = sum(size * count for size, count in found), machine.instances_per_device
        devices = -(-parts // instances) * instances  # no part of a device is rented
        have = machine.num_devices if most is None else min(machine.num_devices, most * instances)
        whole = nodes_needed(found, machine.domain_size) * machine.domain_size
        usd += each * (devices if by_device else min(whole, have) if have < machine.domain_size else whole)
    return usd


def pools_by_node_type(pools: Iterable[Pool]) -> dict[str, list[Group]]:
    """Node type → groups of the pools on it, in their order."""
    return by_node_type((name, size, pool.num_workers) for pool in pools for name, size in pool.sides)
