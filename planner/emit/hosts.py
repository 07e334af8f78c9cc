"""From (host, device) of each rank to what torchrun takes: node ranks, processes and device orders.

torchrun with a static rendezvous gives rank = processes on the hosts before + local rank, in the order of the explicit
``--node-rank``; local rank i runs on the i-th device of ``CUDA_VISIBLE_DEVICES``. So a rank table can be expressed
when each host's ranks are consecutive; hosts may come in any order, hold different numbers of ranks and list their
devices in any order. Anything else needs one task a rank (Slurm with an arbitrary distribution, an MPI rankfile).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.catalogs.hardware import Device

_HOSTNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlacement:
    """The processes of one host.

    Args:
        node_rank: torchrun's ``--node-rank``.
        host: host number in the rank table.
        hostname: its name; empty where no names were given.
        first_rank: global rank of its local rank 0.
        devices: device of each local rank.
    """

    node_rank: int
    host: int
    hostname: str
    first_rank: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPool:
    """Hosts of one node type, in a job on several.

    Args:
        node_type: the catalog's name.
        device: its accelerator.
        devices_per_host: devices of each, used or not.
        hosts: their numbers in the rank table, ascending.
    """

    node_type: str
    device: Device
    devices_per_host: int
    hosts: tuple[int, ...]


def runs_by_type(
    placements: Sequence[HostPlacement], pools: Sequence[HostPool]
) -> tuple[tuple[HostPool, tuple[HostPlacement, ...]], ...]:
    """Hosts with consecutive node ranks and of one type, in the order of the ranks.

    Args:
        placements: by node rank.
        pools: one of them has each host; empty for hosts of one type, which are no run then.
    """
    if not pools:
        return ()
    pool_of = {host: pool for pool in pools for host in pool.hosts}
    runs = groupby(placements, key=lambda placement: pool_of[placement.host].node_type)
    return tuple((pool_of[hosts[0].host], hosts) for hosts in (tuple(run) for _, run in runs))


def host_placements(
    rank_table: Sequence[tuple[int, int]], hosts: Sequence[str], *, target: str
) -> tuple[HostPlacement, ...]:
    """Hosts in the order of their node ranks.

    Args:
        rank_table: (host, device) of each rank.
        hosts: host names by host number; empty for none.
        target: emit target, for messages.

    Raises:
        CannotExpressError: a host's ranks are not consecutive.
        EmitError: a device holds two ranks, or a host has no name, or one that is no host name.
    """
    check_places(rank_table)
    runs: list[tuple[int, int, list[int]]] = []
    for rank, (host, device) in enumerate(rank_table):
        if not runs or runs[-1][0] != host:
            runs.append((host, rank, []))
        runs[-1][2].append(device)
    _refuse_scattered(runs, target)
    if hosts:
        unnamed = sorted(host for host, _, _ in runs if host >= len(hosts))
        if unnamed:
            raise EmitError(
                f"the plan uses host {unnamed[-1]}, but only {len(hosts)} host names were given; "
                f"name the hosts 0 to {unnamed[-1]}"
            )
        for host, _, _ in runs:
            check_hostname(hosts[host])
    return tuple(
        HostPlacement(
            node_rank=node_rank,
            host=host,
            hostname=hosts[host] if hosts else "",
            first_rank=first_rank,
            devices=tuple(devices),
        )
        for node_rank, (host, first_rank, devices) in enumerate(runs)
    )


def check_hostname(name: str) -> None:
    """Stop where ``name`` is none.

    Raises:
        EmitError: it is none.
    """
    if not _HOSTNAME.fullmatch(name):
        raise EmitError(
            f"{name!r} is no host name; use letters, digits, dots, dashes and colons, beginning with a letter or digit"
        )


def check_places(rank_table: Sequence[tuple[int, int]]) -> None:
    """Stop where a device holds two ranks.

    Raises:
        EmitError: it does.
    """
    if len(set(rank_table)) != len(rank_table):
        twice = next(place for place in rank_table if list(rank_table).count(place) > 1)
        raise EmitError(f"the rank table uses device {twice[1]} of host {twice[0]} more than once")


def is_contiguous(rank_table: Sequence[tuple[int, int]]) -> bool:
    """Whether the ranks of each host are consecutive."""
    runs = 1 + sum(before[0] != after[0] for before, after in pairwise(rank_table))
    return runs == len({host for host, _ in rank_table})


def _refuse_scattered(runs: Sequence[tuple[int, int, list[int]]], target: str) -> None:
    seen: dict[int, int] = {}
    for host, first_rank, devices in runs:
        if host in seen:
            raise CannotExpressError(
                target,
                f"a rank table that returns to a host: host {host} holds rank {seen[host]} and again rank "
                f"{first_rank}, with other hosts in between",
                "the same plan with the ranks of each host consecutive (plan with the mapping 'identity'), or a "
                "launcher with one task a rank",
            )
        seen[host] = first_rank + len(devices) - 1


def refuse_types(pools: Sequence[HostPool], *, target: str, why: str) -> None:
    """Stop where a job has hosts of several types and the target describes one kind of host.

    Args:
        pools: of the job; empty for one type.
        target: emit target, for messages.
        why: what the target has for all hosts alike.

    Raises:
        CannotExpressError: several types.
    """
    if pools:
        types = " and ".join(pool.node_type for pool in pools)
        raise CannotExpressError(
            target,
            f"hosts of several types ({types}): {why}",
            "target slurm (a heterogeneous job) or jobset (one replicated Job for each type), with the same framework; "
            "or the best plan on one node type, which plan shows beside this one",
        )


def refuse_named_hosts(hosts: Sequence[str], mapping: Mapping[str, Any] | None, *, target: str) -> None:
    """Stop where ranks belong to certain hosts and the target cannot send a rank to one of them.

    Args:
        hosts: host names; empty for none.
        mapping: the plan's rank mapping, if it has one.
        target: emit target, for messages.

    Raises:
        CannotExpressError: the hosts have names, or the mapping is not simply the first ones in order.
    """
    nodes = [] if mapping is None else list(mapping["nodes"])
    if nodes != list(range(len(nodes))):
        raise CannotExpressError(
            target,
            f"a rank mapping: the first ranks belong on node {nodes[0]}, and this target takes any host",
            "the target slurm, jobset or torchrun, or the same question with 'mapping: identity' and no excluded nodes",
        )
    if hosts:
        raise CannotExpressError(
            target, f"ranks pinned to named hosts ({hosts[0]} …)", "the target jobset or slurm, or a plan without names"
        )


# One script per host is a convenience; past this many a launcher fills in the node rank (pdsh, Slurm, a job set).
MAX_HOST_SCRIPTS = 64
