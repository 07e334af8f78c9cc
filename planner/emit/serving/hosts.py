"""Where the workers of a serving plan run: hosts and devices of each, from the rank table or packed in order.

Engines that span hosts want the same number of devices on each of them. A worker that fits on one host never spans
two; a larger one takes hosts of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.emit.hosts import check_hostname, check_places
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.serving.problem.config import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNode:
    """The share of one host in a worker.

    Args:
        host: host number.
        devices: device numbers on it, in rank order.
    """

    host: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One engine instance.

    Args:
        index: from 0 over all pools.
        pool: number of its pool.
        nodes: hosts in rank order; the first is the head.
    """

    index: int
    pool: int
    nodes: tuple[WorkerNode, ...]


def nodes_per_worker(request: ServingRequest, pool: Pool, *, target: str) -> int:
    """Hosts that one worker of ``pool`` spans.

    Raises:
        CannotExpressError: its devices cannot be split evenly.
        EmitError: nothing is known of the hosts.
    """
    per_host = _per_host(request, pool)
    size = pool.layout.num_devices
    nodes = -(-size // per_host)
    if size % nodes:
        raise CannotExpressError(
            target,
            f"a worker of {size} devices on hosts of {per_host}: it cannot be split evenly over {nodes} hosts",
            f"workers of {size // nodes * nodes} devices",
        )
    return nodes


def _per_host(request: ServingRequest, pool: Pool) -> int:
    """Devices of a host, or parts of them."""
    return request.host_type(pool.node_type).devices_per_host * (1 if pool.share is None else pool.share.instances)


def place(request: ServingRequest, *, target: str) -> tuple[Worker, ...]:
    """Every worker with its hosts and devices.

    Raises:
        CannotExpressError: a worker is not split evenly over its hosts, or returns to one.
        EmitError: the rank table is of another size or uses a device twice; a host has no name or a bad one.
    """
    table = request.plan.rank_table
    workers = tuple(_packed(request, target) if table is None else _from_table(request, table, target))
    if not request.hosts:
        workers = _counted_from_zero(workers)
    for name in request.hosts:
        check_hostname(name)
    used = 1 + max(node.host for worker in workers for node in worker.nodes)
    if request.hosts and len(request.hosts) < used:
        raise EmitError(f"the plan uses {used} hosts, but {len(request.hosts)} host names were given")
    return workers


def _packed(request: ServingRequest, target: str) -> Iterator[Worker]:
    """Workers in order, each on the host with room that was opened last for its node type."""
    next_host, index = 0, 0
    open_hosts: dict[str, tuple[int, int]] = {}  # node type → (host, devices taken)
    for number, pool in enumerate(request.config.pools):
        per_host = _per_host(request, pool)
        nodes = nodes_per_worker(request, pool, target=target)
        share = pool.layout.num_devices // nodes
        for _ in range(pool.num_workers):
            host, taken = open_hosts.get(pool.node_type, (0, per_host))
            if nodes > 1 or taken + share > per_host:
                host, taken, next_host = next_host, 0, next_host + nodes
            places = tuple(
                WorkerNode(host=host + node, devices=tuple(range(taken, taken + share))) for node in range(nodes)
            )
            if nodes == 1:
                open_hosts[pool.node_type] = (host, taken + share)
            yield Worker(index=index, pool=number, nodes=places)
            index += 1


def _from_table(request: ServingRequest, table: tuple[tuple[int, int], ...], target: str) -> Iterator[Worker]:
    config = request.config
    ranks_of = sum(pool.num_ranks for pool in config.pools)
    if len(table) != ranks_of:
        raise EmitError(f"the rank table has {len(table)} ranks, the configuration {ranks_of}")
    check_places(table)
    first, index = 0, 0
    for number, pool in enumerate(config.pools):
        for _ in range(pool.num_workers):
            ranks = table[first : first + pool.layout.num_devices]
            nodes = tuple(
                WorkerNode(host=host, devices=tuple(device for _, device in run))
                for host, run in groupby(ranks, key=lambda place: place[0])
            )
            _check_nodes(index, nodes, target)
            yield Worker(index=index, pool=number, nodes=nodes)
            first, index = first + pool.layout.num_devices, index + 1


def _counted_from_zero(workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
    """The same hosts in the same order without gaps: hosts of the cluster that the plan leaves idle have no number."""
    number = {host: index for index, host in enumerate(sorted({n.host for worker in workers for n in worker.nodes}))}
    return tuple(
        replace(worker, nodes=tuple(replace(node, host=number[node.host]) for node in worker.nodes))
        for worker in workers
    )


def _check_nodes(index: int, nodes: tuple[WorkerNode, ...], target: str) -> None:
    shares = {len(node.devices) for node in nodes}
    if len(shares) > 1 or len({node.host for node in nodes}) < len(nodes):
        split = ", ".join(f"{len(node.devices)} on host {node.host}" for node in nodes)
        raise CannotExpressError(
            target,
            f"worker {index} split unevenly over its hosts or returning to one ({split})",
            "the same plan with each worker's ranks host by host, as many on each",
        )
