"""A TorchTitan plan that keeps four copies of the states on four hosts, and one over two far-apart sites."""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import estimate_plan, make_plan

_SHARDED = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "zero_stage": 3,
    "micro_batch_size": 1,
    "activation_recompute": "full",
}


def replicated(catalog: Catalog) -> Plan:
    """Four copies, each over the eight devices of a host."""
    document: dict[str, Any] = {
        "kind": "training",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 4}]},
        "workload": {"sequence_length": 4096, "global_batch_size": 128},
        "constraints": {"target": "torchtitan"},
        "fixed": {**_SHARDED, "data_parallel": 32, "data_parallel_shard": 8},
    }
    return estimate_plan(document, catalog)


def far_apart(catalog: Catalog) -> Plan:
    """Two sites of four devices over 1 Gb/s, by Streaming DiLoCo with quantised gradients."""
    links: dict[str, Any] = {
        "intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"},
        "inter_node": {"bandwidth": "50 GB/s", "latency": "5 us"},
        "islands": [{"nodes": "0"}, {"nodes": "1"}],
        "between_islands": {"total": "1 Gb/s", "latency": "30 ms"},
    }
    devices = {"type": "h200-sxm-141gb", "per_node": 4, "nodes": 2}
    document = {
        "kind": "training",
        "model": "llama-3.1-8b",
        "cluster": {"devices": devices, "links": links, "host_memory": "1 TiB"},
        "workload": {"sequence_length": 4096, "global_batch_size": 32},
        "constraints": {"target": "torchtitan"},
        "fixed": {**_SHARDED, "data_parallel_shard": 4},
        "far_apart": {"way": "streaming-diloco", "outer_gradient_bits": [8], "sync_steps": 30, "fragments": 3},
    }
    return make_plan(document, catalog)
