"""What moving one request's KV cache from a prefill to a decode worker takes, by what moves it.

A cache of S bytes over the NIC shares of n devices takes

    start + S/(n·rate)

*NIXL* (UCX): the rate that other large messages attain, and the start of a write into a remote device's memory.
*Mooncake*: its transfer engine cuts what it sends into slices of 64 KiB by default, with which it attained 37 of the
50 GB/s of a bonded NIC (kvcache-ai/Mooncake, issue 1668); and each *piece*, keys or values of a layer, costs the time
of its own request (vllm-project/vllm, pull request 53825, 2 × H200: 4,563 pieces of 16 KiB took 5.2 ms where 70 of
whole pages took 2.1). Assumptions: the blocks of a layer lie in a row, and pieces of several devices go side by side.

None of it is fitted to transfers of served requests. The four that are published (Mooncake, vllm-v1-pd-performance.md)
are judged by tests/benchmarks/cache_transfer.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.exchange.collectives import NETWORK_SHARE, Exchange
from meshplan.planner.serving.problem.config import KvConnector

MOONCAKE_SHARE = 37 / 50  # of a NIC's nominal rate
MOONCAKE_PIECE_S = (5.2e-3 - 2.1e-3) / (4563 - 70)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTransfer:
    """One end of a transfer.

    Args:
        connector: what moves the cache.
        machine: the worker's devices and links.
    """

    connector: KvConnector
    machine: Machine

    @property
    def bytes_per_s(self) -> float:
        """Rate of one device's share of the link between workers; inside a node that of its own links."""
        attained = Exchange(machine=self.machine).transfer_bytes_per_s
        if self.connector is KvConnector.NIXL or not self.machine.is_joined:
            return attained
        # Of a measured link as of a nominal one: less than other large messages attain in the same ratio.
        return attained * MOONCAKE_SHARE / NETWORK_SHARE

    def start_s(self, shape: ModelShape) -> float:
        """What a transfer takes beyond its bytes, s."""
        start = Exchange(machine=self.machine).transfer_latency_s
        if self.connector is KvConnector.NIXL:
            return start
        # Keys and values lie apart; a latent is one tensor a layer.
        return start + shape.num_attention_layers * (1 if shape.latent is not None else 2) * MOONCAKE_PIECE_S
