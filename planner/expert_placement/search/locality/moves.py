"""What a change of placement costs: bytes moved, and seconds on the links.

An expert that a device lacks is fetched from a device that holds it at present: one of its node if there is one, else
over the network; of several holders the one that has sent least. All devices send and receive at once (full duplex),
so the change takes as long as the busiest direction of the busiest device:

    seconds = max over devices and directions of  near bytes / link bandwidth + far bytes / network bandwidth

An expert that no device holds comes from the checkpoint; it counts as moved, not as traffic between devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import IntArray
from meshplan.planner.expert_placement.problem.objectives import residency


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationCost:
    """The price of a change of placement.

    Args:
        moved_experts: (layer, device, expert) that were not there before.
        moved_bytes: their weights.
        across_nodes_bytes: the part of these that comes from another node.
        from_checkpoint: moved experts that no device held.
        seconds: duration of the transfer as scheduled; None where no bandwidth is known.
        bound_s: no schedule is faster: the busiest receiver at its fastest link; None where no bandwidth is known.
    """

    moved_experts: int
    moved_bytes: float
    across_nodes_bytes: float
    from_checkpoint: int
    seconds: float | None
    bound_s: float | None


def migration_cost(
    placement: IntArray,
    current: IntArray,
    *,
    num_experts: int,
    num_devices: int,
    devices_per_node: int,
    expert_bytes: float,
    link_bandwidth_bytes_per_s: float | None,
    network_bandwidth_bytes_per_s: float | None = None,
) -> MigrationCost:
    """Schedule the change from ``current`` to ``placement``.

    Args:
        placement: [L, S] new map.
        current: [L, S] present map.
        num_experts: experts per layer.
        num_devices: G.
        devices_per_node: devices that share the fast links.
        expert_bytes: weights of one expert in one layer.
        link_bandwidth_bytes_per_s: bandwidth of one device to the others of its node, each direction; None where
            unknown.
        network_bandwidth_bytes_per_s: bandwidth of one device to other nodes; as fast as the links where None.
    """
    before = residency(current, num_experts, num_devices)
    needed = residency(placement, num_experts, num_devices) & ~before
    node = np.arange(num_devices) // devices_per_node
    near, far = np.zeros((2, 2, num_devices))  # experts: [received, sent] by each device
    from_checkpoint = 0
    for layer, receiver, expert in np.argwhere(needed).tolist():
        holders = np.flatnonzero(before[layer, :, expert])
        if not holders.size:
            from_checkpoint += 1
            continue
        neighbours = holders[node[holders] == node[receiver]]
        transfers = near if neighbours.size else far
        senders = neighbours if neighbours.size else holders
        sender = int(senders[transfers[1, senders].argmin()])
        transfers[0, receiver] += 1
        transfers[1, sender] += 1
    seconds = bound = None
    if link_bandwidth_bytes_per_s is not None:
        network = network_bandwidth_bytes_per_s or link_bandwidth_bytes_per_s
        times = expert_bytes * (near / link_bandwidth_bytes_per_s + far / network)
        seconds = float(times.max())
        received = (near + far)[0].max()
        bound = float(expert_bytes * received / max(network, link_bandwidth_bytes_per_s))
    return MigrationCost(
        moved_experts=int(needed.sum()),
        moved_bytes=float(expert_bytes * needed.sum()),
        across_nodes_bytes=float(expert_bytes * far[0].sum()),
        from_checkpoint=from_checkpoint,
        seconds=seconds,
        bound_s=bound,
    )
