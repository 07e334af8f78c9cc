"""A mapping in a plan: rank table, step compared with rank order and random mappings, and the critical links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.network.orders import Orders, slowest_pipeline_s
from meshplan.planner.cluster.network.rank_layout import ALL_TO_ALL, NEIGHBOURS, RING, slot_boundaries
from meshplan.planner.cluster.network.slot_links import Group, group_of, slot_links
from meshplan.planner.core.solution import relative_gap
from meshplan.planner.training.problem.frameworks.legality import head_exchange
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.mapping.placement import UNIFORM, Placement, placed_problem, usable_order

if TYPE_CHECKING:
    from meshplan.planner.training.search.mapping.placement_model import PlacementModel

PIPELINE = "pipeline"


def requested_order(problem: TrainingProblem, mapping: str | tuple[int, ...]) -> tuple[int, ...] | None:
    """The mapping given in a spec; None where it asks for the best one, or the network is uniform."""
    network = problem.machine.network
    if network is None or mapping == "best":
        return None
    first = () if isinstance(mapping, str) else mapping
    return (*first, *(node for node in usable_order(network) if node not in first))


def placed(problem: TrainingProblem, placement: Placement | None) -> TrainingProblem:
    """The problem with its network priced under a mapping."""
    if placement is None or placement.method == UNIFORM:
        return problem
    return placed_problem(problem, placement.order)


def rank_table(machine: Machine, config: TrainingConfig, order: tuple[int, ...] | None) -> tuple[tuple[int, int], ...]:
    """(host, device on the host) of each rank: ranks fill nodes in the mapping's order, hosts of a node in theirs.

    Args:
        machine: devices a node and a host.
        config: ranks, tensor parallelism fastest, pipeline slowest.
        order: node of each slot; None for rank order.
    """
    per_host, per_node = machine.devices_per_host, machine.domain_size
    if order is None:
        return tuple(divmod(rank, per_host) for rank in range(config.world_size))
    return tuple(
        divmod(order[rank // per_node] * per_node + rank % per_node, per_host) for rank in range(config.world_size)
    )


def mapping_document(
    problem: TrainingProblem, config: TrainingConfig, placement: Placement, hosts: tuple[str, ...]
) -> dict[str, Any]:
    """The ``mapping`` of a plan; seconds are those of an optimizer step with these degrees.

    ``identity_s`` is rank order over the usable nodes, ``random_mean_s`` the mean of random mappings, ``bound_s`` a
    step that no mapping of these degrees beats, ``gain`` the share of the rank-order step that the mapping saves.
    """
    # start-up: most plans have no mapping
    from meshplan.planner.training.search.mapping.placement_model import PlacementModel
    from meshplan.planner.training.search.mapping.rank_placement import random_mean_s

    network = problem.machine.network
    if network is None:
        raise ValueError("a mapping needs a network")
    model = PlacementModel(problem, config)
    used = placement.order[: model.num_slots]
    uniform = placement.method == UNIFORM
    identity = placement.step_s
    random = placement.step_s
    if not uniform:
        identity = float(model.steps_s(np.array([usable_order(network)], dtype=np.int64))[0])
        random = random_mean_s(model)
    sender, receiver = network.slowest() if len(network.usable) > 1 else (0, 0)
    return {
        "method": placement.method,
        "objective_s": placement.step_s,
        "identity_s": identity,
        "random_mean_s": random,
        "bound_s": placement.bound_s,
        "gap": relative_gap(placement.step_s, placement.bound_s),
        "gain": 1.0 - placement.step_s / identity,
        "nodes": list(used),
        "spare_nodes": sorted(set(network.usable) - set(used)),
        "excluded_nodes": sorted(set(range(network.num_nodes)) - set(network.usable)),
        "node_names": list(network.names),
        **({"hosts": list(hosts)} if hosts else {}),
        "source": network.source,
        "slowest_link": {
            "nodes": [sender, receiver],
            "bytes_per_s_per_device": float(network.bytes_per_s[sender, receiver]) if sender != receiver else None,
        },
        "critical": [] if uniform else critical_links(model, placement),
    }


def group_names(problem: TrainingProblem, config: TrainingConfig) -> dict[Group, str]:
    """Names of the kinds of groups that cross nodes."""
    shard, tensor, context = config.data_parallel_shard, config.tensor_parallel, config.context_parallel
    expert, expert_tensor = config.expert_parallel, config.expert_tensor_parallel
    copies = config.data_parallel // shard
    heads = head_exchange(config)
    shapes = (
        (RING, tensor, 1, "tensor-parallel"),
        (NEIGHBOURS, context, tensor, "context-parallel"),
        (RING, context, tensor, "context-parallel"),
        (ALL_TO_ALL, heads, tensor, "context-parallel heads"),
        (NEIGHBOURS, context // heads, tensor * heads, "context-parallel ring"),
        (RING, copies, tensor * context * shard, "replica"),
        (RING, shard * context, tensor, "data-parallel"),
        (RING, config.data_parallel * context, tensor, "data-parallel"),
        (ALL_TO_ALL, expert, expert_tensor, "expert-parallel"),
        (RING, max(config.expert_data_parallel // copies, 1), expert * expert_tensor, "expert data-parallel"),
        (RING, config.expert_data_parallel, expert * expert_tensor, "expert data-parallel"),
    )
    names: dict[Group, str] = {}
    for kind, size, stride, name in shapes:
        group = group_of(
            kind,
            size=size,
            stride=stride,
            world_size=config.world_size,
            domain_size=problem.machine.domain_size,
        )
        if group is not None:
            names.setdefault(group, name)
    return names


def critical_links(model: PlacementModel, placement: Placement) -> list[dict[str, Any]]:
    """The critical link of each kind of group, and the slowest pipeline with its slowest boundary."""
    names = group_names(model.problem, model.config)
    orders = np.array([placement.order[: model.num_slots]], dtype=np.int64)
    view = Orders(network=model.network, orders=orders, domain_size=model.domain_size)
    rows: list[dict[str, Any]] = []
    for group in model.groups:
        links = slot_links(group)
        senders, receivers = orders[0][links.senders], orders[0][links.receivers]
        worst = int(np.argmax(view.links_s_per_byte(group)[0]))
        each = links.leaving if group.kind == ALL_TO_ALL else links.shares
        rows.append(
            {
                "what": names.get(group, group.kind),
                "nodes": [int(senders[worst]), int(receivers[worst])],
                "bytes_per_s_per_device": float(each[worst]) / float(view.seconds_per_byte(group)[0]),
            }
        )
    if model.messages is not None and model.num_slots > 1:
        rows.append(_slowest_pipeline(model, view, orders[0]))
    return rows


def _slowest_pipeline(model: PlacementModel, view: Orders, order: Any) -> dict[str, Any]:
    asked = model.messages
    if asked is None:
        raise ValueError("one stage has no pipeline")
    hops = model.hops_s(view)[0]
    times = [float(slowest_pipeline_s(hops[None, :, [column]], asked)[0]) for column in range(hops.shape[1])]
    pipeline = int(np.argmax(times))
    boundary = int(hops[:, pipeline].argmax())
    before, after = slot_boundaries(asked.num_stages, asked.stage_devices, model.domain_size, wraps=asked.wraps)
    nodes = order[[*before[:, pipeline], after[-1, pipeline]]]
    return {
        "what": PIPELINE,
        "nodes": [int(order[before[boundary, pipeline]]), int(order[after[boundary, pipeline]])],
        "boundary": [boundary, (boundary + 1) % asked.num_stages],
        "seconds_per_micro_batch": float(hops[boundary, pipeline]),
        "path": [int(node) for node in nodes],
    }
